"""Small models in every torch layout, and the checks that run on their ranks."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from dynadapt.adapters.live.torch_module import TorchModuleAdapter
from dynadapt.protocols import Described, TrainState
from dynadapt.vps.keys import Key

if TYPE_CHECKING:
    from dynadapt.vps.box import Box

VOCAB, WIDTH = 24, 8

Full = dict[Key, torch.Tensor]


class Block(nn.Module):
    """Two linears that tensor parallelism can cut, and a norm that it copies."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """An odd `inner` is a dim that no rank count divides, and brings one smaller than them all."""

    def __init__(self, inner: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(inner), Block(inner)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.row = nn.Parameter(torch.randn(1, WIDTH)) if inner % 2 else None
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.frozen = nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.register_buffer("shift", torch.randn(WIDTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale + self.shift
        if self.row is not None:
            x = x + self.row
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.frozen.sum(0))


#: Layout -> inner width. 10 over TP 2 leaves 5 rows, which FSDP2 cuts into 3 and 2.
LAYOUTS = {
    "ddp": 16,
    "fsdp": 13,
    "fsdp_bf16": 13,
    "hsdp": 13,
    "tp": 16,
    "tp_fsdp": 10,
    "tp_hsdp": 10,
    "tp_replicate": 16,
}


def build(layout: str, seed: int) -> Net | DistributedDataParallel:
    """A model of random weights in a layout."""
    torch.manual_seed(seed)
    world = dist.get_world_size()
    net = Net(LAYOUTS[layout])
    if layout == "ddp":
        return DistributedDataParallel(net, find_unused_parameters=True)
    if layout.startswith("fsdp"):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
        bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        return shard(net, mesh, MixedPrecisionPolicy(**bf16 if layout == "fsdp_bf16" else {}))
    if layout == "hsdp":
        names = ("dp_replicate", "dp_shard")
        return shard(net, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names))
    if layout == "tp":
        return cut(net, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    if layout == "tp_hsdp":
        names = ("dp_replicate", "dp_shard", "tp")
        mesh = init_device_mesh("cpu", (1, world // 2, 2), mesh_dim_names=names)
        return shard(cut(net, mesh["tp"]), mesh["dp_replicate", "dp_shard"])
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    cut(net, mesh["tp"])
    if layout == "tp_fsdp":
        return shard(net, mesh["dp"])
    for block in net.blocks:
        replicate(block, mesh=mesh["dp"])
    return replicate(net, mesh=mesh["dp"])


def cut(net: Net, mesh: Any) -> Net:
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(net, mesh, plan)


def shard(net: Net, mesh: Any, policy: MixedPrecisionPolicy | None = None) -> Net:
    policy = policy or MixedPrecisionPolicy()
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


def state_of(model: nn.Module, **more: Any) -> TrainState:
    """AdamW in two groups, one of them empty after a filter, and a schedule."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0, "lr": 2e-2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), **more)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return TrainState(model, optimizer, scheduler)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank trains on the same data, so every layout does the same steps."""
    made = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (6, 5), generator=made)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens, labels = batch(step)
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def train(state: TrainState, first: int, steps: int) -> list[float]:
    """Train; the losses."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(state.model, step)
        loss.backward()
        state.optimizer.step()
        if state.scheduler is not None:
            state.scheduler.step()
        state.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def evaluate(model: nn.Module, step: int = 99) -> float:
    with torch.no_grad():
        return loss_of(model, step).item()


# --- rows -------------------------------------------------------------------------------------


def views(described: Described) -> list[tuple[Key, Box, torch.Tensor]]:
    """Each row with the view of its buffer that it means."""
    found = []
    for row in described.rows:
        flat = described.buffers[row.buffer].tensor()
        assert flat.dim() == 1
        assert flat.numel() == described.buffers[row.buffer].numel
        found.append((row.key, row.box, flat.as_strided(row.box.shape, row.strides, row.offset)))
    return found


def part_of(box: Box, whole: torch.Tensor) -> torch.Tensor:
    return whole[tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))]


def assemble(described: Described) -> Full:
    """The whole tensors, put together from all ranks' rows; replicas have to be equal."""
    own = [(key, box, view.clone()) for key, box, view in views(described)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    shapes = {spec.key: spec for spec in described.specs if spec.presence == "present"}
    whole = {key: torch.zeros(spec.shape) for key, spec in shapes.items()}
    seen = {key: torch.zeros(spec.shape, dtype=torch.bool) for key, spec in shapes.items()}
    for key, box, value in (item for rank in gathered for item in rank):
        known = part_of(box, seen[key])
        assert torch.equal(part_of(box, whole[key])[known], value.float()[known]), key
        part_of(box, whole[key])[...] = value
        known[...] = True
    for key, mask in seen.items():
        assert bool(mask.all()), f"{key} is not covered"
    return whole


def write(described: Described, values: Full) -> None:
    """Put values into every row of a target."""
    for key, box, view in views(described):
        if key in values:
            view.copy_(part_of(box, values[key]))


# --- checks -----------------------------------------------------------------------------------


def optimizer_oracle(model: nn.Module, optimizer: Any) -> Full:
    options = StateDictOptions(full_state_dict=True)
    found = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    return {
        Key(name.removeprefix("module."), slot): value
        for name, entry in found.items()
        for slot, value in entry.items()
        if slot != "step"
    }


def model_oracle(model: nn.Module) -> Full:
    options = StateDictOptions(full_state_dict=True)
    found = get_model_state_dict(model, options=options)
    buffers = {name.removeprefix("module.") for name, _ in model.named_buffers()}
    return {
        Key(name.removeprefix("module."), "buffer" if name in buffers else "param"): value
        for name, value in found.items()
    }


def describes_what_the_framework_says(rank: int, world: int, layout: str) -> dict[str, int]:
    """Rows of all ranks, assembled, against torch's own state dicts; training goes on unchanged."""
    adapter = TorchModuleAdapter()
    state, twin = (state_of(build(layout, seed=3)) for _ in range(2))
    train(state, 0, 3)
    train(twin, 0, 3)
    evaluate(state.model)
    adapter.quiesce(state)
    described = adapter.describe(state)
    whole = assemble(described)
    expected = {**optimizer_oracle(state.model, state.optimizer), **model_oracle(state.model)}
    transient = Key("shift", "buffer")
    assert torch.equal(
        whole.pop(transient), dict(state.model.named_buffers())[_raw(layout, "shift")]
    )
    assert whole.keys() == expected.keys(), whole.keys() ^ expected.keys()
    for key, value in expected.items():
        assert torch.equal(whole[key], value.float()), key
    never = {str(s.key) for s in described.specs if s.presence == "none"}
    assert never == {"unused/exp_avg", "unused/exp_avg_sq"}, never
    assert {n["step"] for n in described.scalars.values()} == {3}
    assert "unused" not in described.scalars
    assert "frozen" not in described.scalars
    assert train(state, 3, 3) == train(twin, 3, 3)
    return dict(described.coordinate)


def _raw(layout: str, name: str) -> str:
    return f"module.{name}" if layout == "ddp" else name


def goes_on_like_a_loaded_twin(rank: int, world: int, layout: str) -> list[float]:
    """A target filled from one process's state, against one that torch's own loaders filled."""
    torch.manual_seed(5)
    reference = state_of(Net(LAYOUTS[layout]))
    train(reference, 0, 3)
    adapter = TorchModuleAdapter()
    adapter.quiesce(reference)
    source = adapter.describe(reference)
    values: Full = {key: view.clone() for key, _, view in views(source)}
    twin = state_of(build(layout, seed=6))
    load_the_ordinary_way(twin, reference)
    losses = _fill_and_compare(layout, source, values, twin)
    expected = train(reference, 3, 4)
    tolerance = 3e-2 if layout == "fsdp_bf16" else 1e-5
    assert all(abs(a - b) < tolerance for a, b in zip(losses, expected, strict=True))
    return losses


def goes_on_like_a_twin_that_never_stopped(rank: int, world: int, layout: str) -> list[float]:
    """The same for layouts that torch's loaders decline: the twin is the source itself."""
    adapter = TorchModuleAdapter()
    twin = state_of(build(layout, seed=5))
    train(twin, 0, 3)
    adapter.quiesce(twin)
    source = adapter.describe(twin)
    return _fill_and_compare(layout, source, assemble(source), twin)


def _fill_and_compare(
    layout: str, source: Described, values: Full, twin: TrainState
) -> list[float]:
    """Fill another model through its rows, after an eval forward; both have to go on alike."""
    adapter = TorchModuleAdapter()
    target = state_of(build(layout, seed=7))
    evaluate(target.model)
    adapter.quiesce(target)
    prepared = adapter.prepare(target, source.specs)
    assert prepared.allocated > 0
    write(prepared, values)
    aux = {item.path: item for item in source.aux}
    outcomes = adapter.finish(target, source.specs, source.scalars, aux, lambda: None)
    kinds = {outcome.path: outcome.kind for outcome in outcomes}
    assert kinds["scheduler"] == kinds["param_groups[1]"] == kinds["scalars/step"] == "exact"
    assert evaluate(target.model) == evaluate(twin.model)
    losses = train(target, 3, 4)
    assert losses == train(twin, 3, 4)
    adapter.quiesce(target)
    adapter.quiesce(twin)
    both = [views(adapter.describe(state)) for state in (target, twin)]
    assert all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(*both, strict=True))
    return losses


def load_the_ordinary_way(twin: TrainState, reference: TrainState) -> None:
    options = StateDictOptions(full_state_dict=True)
    # Copies: the helpers hand out the tensors themselves, and the twin would step the reference's.
    model = deepcopy(get_model_state_dict(reference.model, options=options))
    optimizer = deepcopy(
        get_optimizer_state_dict(reference.model, reference.optimizer, options=options)
    )
    set_model_state_dict(twin.model, model, options=options)
    lenient = StateDictOptions(full_state_dict=True, strict=False)  # one parameter has no state
    set_optimizer_state_dict(twin.model, twin.optimizer, optimizer, options=lenient)
    twin.scheduler.load_state_dict(reference.scheduler.state_dict())
    with torch.no_grad():
        for name, buffer in twin.model.named_buffers():
            if name.endswith("shift"):
                local = buffer._local_tensor if isinstance(buffer, DTensor) else buffer
                local.copy_(reference.model.shift)
    # The helper invents zero state for a parameter that no step ever touched.
    for name, parameter in twin.model.named_parameters():
        if name.endswith("unused"):
            twin.optimizer.state.pop(parameter, None)
