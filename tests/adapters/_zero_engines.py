"""Real DeepSpeed engines, and full tensors put together from what each rank described.

Imports torch and DeepSpeed inside functions: only the ranks need them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from numpy.typing import NDArray

    from dynadapt.protocols import Described
    from dynadapt.vps.layout import Row

Rows = list[tuple[str, str, "Row", "NDArray[Any]"]]


@dataclass(frozen=True)
class Setup:
    """How to build an engine. `groups`: `one`, `decay` (biases apart), `reversed` or
    `partial`, which leaves out what a forward uses.

    `fused`: DeepSpeed takes the optimizer for its own fused Adam.
    """

    dtype: str = "bfloat16"
    optimizer: str = "AdamW"
    groups: str = "decay"
    seed: int = 0
    frozen: bool = False
    tied: bool = True
    accumulate: int = 1
    clip: float = 0.0
    hidden: int = 5
    scheduler: bool = False
    empty: bool = False
    fused: bool = False
    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    hyper: Mapping[str, Any] = field(default_factory=dict)


VOCABULARY, SAMPLES = 7, 3


@dataclass
class Counter:
    """A user's object with a state."""

    value: int

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.value = state["value"]


def model_of(setup: Setup) -> torch.nn.Module:
    """A tied model with odd sizes, buffers of both kinds and a parameter that is never touched."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(setup.hidden, 11)
            self.down = nn.Linear(11, setup.hidden)
            self.norm = nn.LayerNorm(setup.hidden)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x + self.down(torch.tanh(self.up(x))) * self.scale)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, setup.hidden)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(setup.hidden, VOCABULARY, bias=False)
            self.unused = nn.Linear(3, 2)
            if setup.empty:
                self.none = nn.Parameter(torch.zeros(0, 3))
            if setup.tied:
                self.head.weight = self.embed.weight
            self.register_buffer("count", torch.tensor([3, 4]))
            self.register_buffer("mask", torch.arange(4.0), persistent=False)

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            logits = self.head(x).float()
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(setup.seed)
    model = Model()
    if setup.frozen:
        model.blocks[0].up.weight.requires_grad = False
        model.blocks[1].norm.bias.requires_grad = False
    return model


def groups_of(setup: Setup, model: torch.nn.Module) -> list[dict[str, Any]]:
    """The param groups of a model."""
    named = list(dict.fromkeys(model.parameters()))
    matrices = [p for p in named if p.ndim > 1]
    vectors = [p for p in named if p.ndim < 2]
    groups: dict[str, list[dict[str, Any]]] = {
        "one": [{"params": named}],
        "partial": [{"params": [p for p in named if p is not model.blocks[1].down.weight]}],
        "decay": [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}],
        "reversed": [
            {"params": vectors[::-1], "lr": 0.02},
            {"params": matrices[::-1], "weight_decay": 0.1},
        ],
    }
    return groups[setup.groups]


def _optimizer(setup: Setup, model: torch.nn.Module) -> Any:
    import torch

    groups = groups_of(setup, model)
    hyper = {"lr": 0.01, **setup.hyper}
    if setup.optimizer == "FusedAdam":
        from deepspeed.ops.adam import FusedAdam

        return FusedAdam(groups, **hyper)
    if setup.optimizer == "DeepSpeedCPUAdam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, **hyper)
    return getattr(torch.optim, setup.optimizer)(groups, **hyper)


def engine_of(setup: Setup) -> Any:
    """A DeepSpeed engine with a fresh ZeRO-3 optimizer (or the stage in `setup.zero`)."""
    import os

    import deepspeed
    import torch

    from tests import _ranks

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if setup.dtype == "float16":
        _ranks.allow_fp16()
    # DeepSpeed numbers parameters and modules for the whole process, engines are told apart by them.
    model = model_of(setup)
    optimizer = _optimizer(setup, model)
    scheduler = None
    if setup.scheduler:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    precision = {
        "bfloat16": {"bf16": {"enabled": True}},
        "float16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}},
        "float32": {},
    }[setup.dtype]
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": setup.accumulate,
        "gradient_clipping": setup.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 1000,
            "stage3_param_persistence_threshold": 0,
            **setup.zero,
        },
        **precision,
        **setup.config,
    }
    with _ranks.taken_for_fused(type(optimizer) if setup.fused else None):
        return deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
        )[0]


def batch(step: int, same: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's tokens and labels of one micro-step; `same`: equal on all ranks."""
    import torch
    import torch.distributed as dist

    rank = 0 if same else dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (SAMPLES, 4)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    return tokens, torch.randint(VOCABULARY, shape, generator=generator)


def train(engine: Any, first: int, count: int, same: bool = False) -> list[float]:
    """`count` micro-steps from number `first`; their losses on this rank."""
    losses = []
    for step in range(first, first + count):
        loss = engine(*batch(step, same))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def evaluate(engine: Any, step: int = 500, same: bool = False) -> float:
    """An eval forward, which leaves weights gathered."""
    import torch

    engine.eval()
    with torch.no_grad():
        loss = engine(*batch(step, same)).item()
    engine.train()
    return float(loss)


def rows_of(described: Described) -> Rows:
    """Copies of all that a rank describes: (name, slot, row, values), for pickling to the parent."""
    import torch

    tensors = {name: buffer.tensor() for name, buffer in described.buffers.items()}
    found = []
    for row in described.rows:
        view = torch.as_strided(tensors[row.buffer], row.box.shape, row.strides, row.offset)
        found.append((row.key.name, row.key.slot, row, _numpy(view)))
    return found


def write_rows(described: Described, full: Mapping[tuple[str, str], NDArray[Any]]) -> None:
    """Fill all described rows of keys that are moved from full logical tensors."""
    import torch

    moved = {spec.key for spec in described.specs if spec.moves}
    tensors = {name: buffer.tensor() for name, buffer in described.buffers.items()}
    for row in described.rows:
        if row.key not in moved:
            continue
        view = torch.as_strided(tensors[row.buffer], row.box.shape, row.strides, row.offset)
        cut = tuple(slice(lo, hi) for lo, hi in zip(row.box.lo, row.box.hi, strict=True))
        view.copy_(_torch(full[row.key.name, row.key.slot][cut], view.dtype))


def assemble(ranks: Iterable[Rows], specs: Iterable[Any]) -> dict[tuple[str, str], NDArray[Any]]:
    """Full logical tensors from the rows of all ranks; every element from exactly one value.

    Fails where ranks that hold the same element disagree, and where nobody holds one. bfloat16 comes
    as float32, which is exact.
    """
    full: dict[tuple[str, str], NDArray[Any]] = {}
    known: dict[tuple[str, str], NDArray[np.bool_]] = {}
    shapes = {tuple(spec.key): spec.shape for spec in specs if spec.presence == "present"}
    for rows in ranks:
        for name, slot, row, values in rows:
            key = (name, slot)
            if key not in full:
                full[key] = np.zeros(shapes[key], values.dtype)
                known[key] = np.zeros(shapes[key], bool)
            cut = tuple(slice(lo, hi) for lo, hi in zip(row.box.lo, row.box.hi, strict=True))
            seen = known[key][cut]
            np.testing.assert_array_equal(full[key][cut][seen], values[seen], f"{name}/{slot}")
            full[key][cut] = values
            known[key][cut] = True
    for key, shape in shapes.items():
        if 0 in shape:
            assert key not in full
            full[key] = np.zeros(shape, np.float32)
        else:
            assert known[key].all(), f"{key}: not all elements are described"
    return full


def everyone(value: Any) -> list[Any]:
    """Each rank's value, on every rank."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def full_state(described: Described) -> dict[tuple[str, str], NDArray[Any]]:
    """`assemble` over the ranks of the default group, on every rank."""
    return assemble(everyone(rows_of(described)), described.specs)


def _numpy(tensor: torch.Tensor) -> NDArray[Any]:
    import torch

    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return wide.contiguous().numpy().copy()


def _torch(values: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    import torch

    found = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    assert torch.equal(found.to(torch.float64), torch.from_numpy(values.astype(np.float64)))
    return found


def gathered(engine: Any) -> dict[tuple[str, str], NDArray[Any]]:
    """All of an engine's state as DeepSpeed itself gathers it; a collective."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from tests._deepspeed_gathers import gathered_below_3

    found: dict[tuple[str, str], NDArray[Any]] = {}
    for name, buffer in engine.module.named_buffers():
        found[name, "buffer"] = _numpy(buffer)
    if engine.zero_optimization_stage() < 3:
        return found | {key: _numpy(full) for key, full in gathered_below_3(engine).items()}
    optimizer = engine.optimizer
    optimized = {id(param) for group in optimizer.fp16_groups for param in group}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            low = _numpy(param.detach())
        if id(param) not in optimized:
            found[name, "param"] = low
            continue
        index = optimizer.grad_position[optimizer.get_param_id(param)][0]
        flat = optimizer.fp32_partitioned_groups_flat[index]
        found[name, "param"] = _numpy(safe_get_full_fp32_param(param).view(param.ds_shape))
        if flat.data_ptr() != optimizer.fp16_partitioned_groups_flat[index].data_ptr():
            found[name, "compute"] = low
        for label, value in optimizer.optimizer.state.get(flat, {}).items():
            if getattr(value, "ndim", 0):
                full = safe_get_full_optimizer_state(param, label)
                found[name, label] = _numpy(full.view(param.ds_shape))
    return found
