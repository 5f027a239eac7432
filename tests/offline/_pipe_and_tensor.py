"""A DeepSpeed pipeline whose blocks two ranks share, cut by hand as in Megatron-DeepSpeed; and it whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from tests._deepspeed_gathers import gathered_below_3
from tests.adapters import _pipe_engines as pipe

if TYPE_CHECKING:
    from collections.abc import Mapping

WIDTHS = (8, 4, 6, 2)
NAMES = (
    "tied_modules.embed.weight",
    *(
        f"{layer}.{name}"
        for layer in range(1, 1 + len(WIDTHS))
        for name in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight")
    ),
)
STEPS = 2

CUTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
"""The dims that the ranks of a pair share."""

PATTERNS: Mapping[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "parameter_with_row_parallelism_patterns": [r".*\.down\.weight"],
    "vocabulary_parameter_patterns": [],
    "tp_replicated_parameter_patterns": [r".*norm.*", r"tied_modules.*"],
}

_pair: list[Any] = []


class _Shared(torch.autograd.Function):
    """The same on both ranks, whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad, group=_pair[-1])
        return grad


class _Summed(torch.autograd.Function):
    """The sum of both ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=_pair[-1])
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class Block(nn.Module):
    """Whole (`ways` 1), or one of two parts."""

    def __init__(self, hidden: int, ways: int) -> None:
        super().__init__()
        self.ways = ways
        self.norm = nn.LayerNorm(pipe.WIDTH)
        self.up = nn.Linear(pipe.WIDTH, hidden // ways)
        self.down = nn.Linear(hidden // ways, pipe.WIDTH, bias=False)
        for param in (self.up.weight, self.up.bias, self.down.weight):
            param.model_parallel = ways > 1  # type: ignore[attr-defined]  # as DeepSpeed's norm asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.norm(x)
        if self.ways > 1:
            own = _Shared.apply(own)
        out = self.down(torch.tanh(self.up(own)))
        return x + (_Summed.apply(out) if self.ways > 1 else out)


class Whole(nn.Module):
    """The model in one piece, under the names that the pipeline gives."""

    def __init__(self) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({"embed": pipe.Embed()})
        for number, hidden in enumerate(WIDTHS):
            self.add_module(str(1 + number), Block(hidden, 1))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        embed = self.tied_modules["embed"]
        x = embed(tokens)
        for number in range(len(WIDTHS)):
            x = self.get_submodule(str(1 + number))(x)
        return pipe.loss_of(pipe.head(embed, x), labels)  # type: ignore[arg-type]


def _pipeline(rank: int) -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    _pair[:] = [[dist.new_group(pair) for pair in ([0, 1], [2, 3])][rank // 2]]
    first, last = (
        TiedLayerSpec("embed", pipe.Embed),
        TiedLayerSpec("embed", pipe.Embed, forward_fn=pipe.head),
    )
    torch.manual_seed(0)
    model = PipelineModule(
        [first, *(LayerSpec(Block, hidden, 2) for hidden in WIDTHS), last],
        loss_fn=pipe.loss_of,
        partition_method="uniform",
        topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1),
    )
    torch.manual_seed(0)
    whole = dict(Whole().named_parameters())
    with torch.no_grad():
        for name, param in model.named_parameters():
            dim = CUTS.get(name.partition(".")[2])
            full = whole[name]
            param.copy_(full if dim is None else full.chunk(2, dim)[rank % 2])
    model.universal_checkpoint_info = PATTERNS  # as Megatron-DeepSpeed says it
    return model


def _engine(model: nn.Module, stage: int, dtype: str, **config: Any) -> Any:
    import deepspeed

    config = {  # which does not say that gradients are clipped, by DeepSpeed's default at 1
        "train_micro_batch_size_per_gpu": pipe.SAMPLES,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        **pipe.PRECISIONS[dtype],
        **config,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )[0]


def saved(rank: int, world: int, folder: str, stage: int, dtype: str) -> dict[Any, torch.Tensor]:
    """Two steps, then saved: all tensors whole, by DeepSpeed's gathers and the layers' own cuts."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    engine = _engine(_pipeline(rank), stage, dtype)
    for step in range(STEPS):
        engine.train_batch(pipe.batches(2 * step, 0))
    engine.save_checkpoint(folder, tag="t")
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, gathered_below_3(engine, engine.data_parallel_group))
    found = {}
    for one, two in (parts[:2], parts[2:]):
        for (name, slot), full in one.items():
            dim = CUTS.get(name.partition(".")[2])
            if dim is None:
                assert torch.equal(full, two[name, slot])
            found[name, slot] = full if dim is None else torch.cat([full, two[name, slot]], dim)
    return found


def loaded(
    rank: int, world: int, folder: str, stage: int, dtype: str, universal: bool
) -> dict[str, Any]:
    """The whole model, loaded by DeepSpeed, and what it does in two more steps."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(5)
    engine = _engine(Whole(), stage, dtype, checkpoint={"load_universal": universal})
    path, _ = engine.load_checkpoint(folder, load_module_strict=not universal)
    assert path is not None
    losses = [pipe.train(engine, step) for step in (STEPS, STEPS + 1)]
    return {"losses": losses, "held": gathered_below_3(engine, engine.data_parallel_group)}
