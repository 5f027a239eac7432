"""Small real jobs for the tests of whole migrations: a tied model as ZeRO-3, as TP x DP, as plain."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dynadapt.vps.keys import canonical_name
from tests import _ranks
from tests._deepspeed_gathers import gathered_below_3

Tensors = dict[str, torch.Tensor]

VOCAB, WIDTH, HIDDEN = 12, 8, 20


class Net(nn.Module):
    """Tied embedding and head, a frozen part, odd sizes, a 1-D group, a buffer of each kind."""

    def __init__(self, hidden: int = HIDDEN, extra: bool = False, integers: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        kind = torch.int64 if integers else torch.float32
        self.register_buffer("scale", torch.full((3,), 2, dtype=kind))
        self.register_buffer("table", torch.arange(5, dtype=torch.float32), persistent=False)
        if extra:
            self.extra = nn.Linear(3, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Next-token loss of a (batch, length) tensor."""
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.norm(x)))) + self.frozen(x)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def net(seed: int = 0, **kwargs: Any) -> Net:
    """A `Net` with the weights of a seed."""
    torch.manual_seed(seed)
    return Net(**kwargs)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices, none for vectors; by name, since FSDP1 shows every tensor as a vector."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    vectors = [name for name, _ in named if "norm" in name or name.endswith("bias")]
    return [
        {"params": [p for name, p in named if name not in vectors], "weight_decay": 0.1},
        {"params": [p for name, p in named if name in vectors], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    """AdamW over the two groups."""
    return torch.optim.AdamW(groups(model), lr=lr, betas=(0.9, 0.95))


def even(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    """AdamW with one decay for all: a flat parameter has no other."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def tokens(step: int, rank: int = 0, rows: int = 2) -> torch.Tensor:
    """A batch that is a function of step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCAB, (rows, 7), generator=generator)


#: With torch's own linear: DeepSpeed's rounds otherwise, and no other engine of a job would have it.
SMALL_3 = {
    "sub_group_size": 100,
    "stage3_param_persistence_threshold": 10,
    "memory_efficient_linear": False,
}

#: What engines differ in, by the first half of a kind: stage, its options, and the rest of the config.
ENGINES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero0": (0, {}, {}),
    "zero0fused": (0, {}, {}),
    "zero1": (1, {}, {}),
    "zero1rr": (1, {"round_robin_gradients": True, "contiguous_gradients": False}, {}),
    "zero1acc": (1, {}, {"data_types": {"grad_accum_dtype": "fp32"}}),  # with bf16: BF16_Optimizer
    "zero2": (2, {}, {}),
    "zero2rr": (2, {"round_robin_gradients": True}, {}),
    "zero2off": (2, {"offload_optimizer": {"device": "cpu"}}, {}),
    "zero3": (3, SMALL_3, {}),
    "zero3off": (3, {**SMALL_3, "offload_optimizer": {"device": "cpu"}}, {}),
    "zero3offp": (
        3,
        {
            **SMALL_3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu", "buffer_size": 1000},
        },
        {},
    ),
}

PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "fp32": {},
}


def deepspeed_engine(kind: str, model: nn.Module, optimizer: Any = None, **config: Any) -> Any:
    """A real engine of a kind such as "zero1rr-bf16"."""
    import deepspeed

    from dynadapt.adapters.live.deepspeed_zero import beside

    name, _, dtype = kind.partition("-")
    if dtype == "fp16":
        _ranks.allow_fp16()
    stage, options, more = ENGINES[name]
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 1000,
            "allgather_bucket_size": 1000,
            **options,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **PRECISIONS[dtype],
        **more,
    }
    fused = torch.optim.AdamW if name == "zero0fused" else None
    with beside(), _ranks.taken_for_fused(fused):
        return deepspeed.initialize(
            model=model,
            optimizer=optimizer or adamw(model),
            config={**settings, **config},
            dist_init_required=False,
        )[0]


def zero3(model: nn.Module, optimizer: Any = None, **config: Any) -> Any:
    """A real ZeRO-3 engine in bf16 with small sub-groups."""
    return deepspeed_engine("zero3-bf16", model, optimizer, **config)


def step(engine: Any, number: int) -> float:
    """One step of an engine on this rank's batch; this rank's loss."""
    loss = engine(tokens(number, dist.get_rank()))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def tensor_parallel(model: nn.Module, tp: int = 2) -> tuple[nn.Module, torch.optim.AdamW, Any]:
    """TP `tp` x replicated DP: `up` by columns, `down` by rows, the embedding by vocabulary."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    parallelize(model, mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    replicate(model, mesh=mesh["dp"], mp_policy=policy)
    return model, adamw(model), mesh


def parallelize(model: nn.Module, mesh: Any) -> None:
    """Tensor parallelism over a 1-D mesh, with the tie that torch cuts made again."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    rules = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, rules)
    model.head.weight = model.embed.weight


def fsdp1(
    model: nn.Module,
    strategy: str = "FULL_SHARD",
    *,
    orig_params: bool = True,
    units: tuple[str, ...] = ("up", "frozen"),
    **options: Any,
) -> Any:
    """FullyShardedDataParallel in units: what is frozen has its own, as flats without it need."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    options |= {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": orig_params,
        "device_id": torch.device("cpu"),
    }
    if "HYBRID" in strategy:
        shape, names = (2, dist.get_world_size() // 2), ("replicate", "shard")
        options["device_mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for unit in units:
        inner = FullyShardedDataParallel(model.get_submodule(unit), **options)
        path, _, leaf = unit.rpartition(".")
        model.get_submodule(path).register_module(leaf, inner)
    return FullyShardedDataParallel(model, **options)


def fsdp1_tensors(
    model: Any, optimizer: Any, slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
) -> Tensors:
    """Every parameter and optimizer state of an FSDP1 model, by its own gathers."""
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    found: Tensors = {}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for raw, param in model.named_parameters():
            found[f"{canonical_name(raw)}/param"] = param.detach().float().clone()
    # With the default, to offload, all slots of a CPU model are the one buffer of the last gather.
    config = FullOptimStateDictConfig(offload_to_cpu=False)
    kind = StateDictType.FULL_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(model, kind, optim_state_dict_config=config):
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    for name, state in states.items():
        found |= {f"{name}/{slot}": state[slot].clone() for slot in slots if slot in state}
    return found


def zero_tensors(engine: Any, slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")) -> Tensors:
    """Every master and optimizer state of an engine, by DeepSpeed's own gathers where they are right."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() < 3:
        every = gathered_below_3(engine).items()
        return {f"{name}/{slot}": full.float() for (name, slot), full in every if slot != "compute"}
    found: Tensors = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            with deepspeed.zero.GatheredParameters([param]):
                found[f"{name}/param"] = param.detach().float().clone()
            continue
        found[f"{name}/param"] = safe_get_full_fp32_param(param).clone()
        for slot in slots:
            found[f"{name}/{slot}"] = safe_get_full_optimizer_state(param, slot).clone()
    return found


def torch_tensors(
    model: nn.Module, optimizer: Any, slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
) -> Tensors:
    """The same of a plain or DTensor model, by DTensor's own gather."""
    found: Tensors = {}
    for raw, param in model.named_parameters():
        name = canonical_name(raw)
        found[f"{name}/param"] = _full(param.detach()).float()
        for slot in slots:
            if slot in optimizer.state.get(param, {}):
                found[f"{name}/{slot}"] = _full(optimizer.state[param][slot])
    return found


def _full(tensor: torch.Tensor) -> torch.Tensor:
    gather = getattr(tensor, "full_tensor", None)
    full: torch.Tensor = gather() if gather is not None else tensor
    return full.clone()


def differing(a: Tensors, b: Tensors) -> list[str]:
    """Names whose bits differ; both must have the same names."""
    assert sorted(a) == sorted(b)
    return [n for n in a if not torch.equal(a[n].view(torch.int32), b[n].view(torch.int32))]
