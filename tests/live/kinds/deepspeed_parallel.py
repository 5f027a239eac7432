"""DeepSpeed engines whose ranks have parts of the model: pipelines by layers, AutoTP by tensors."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dynadapt.vps.tensor_map import TensorMap, rename
from tests._deepspeed_gathers import gathered_below_3, joined_stages, joined_tensors
from tests.live import jobs
from tests.live.kinds._base import EngineJob, kind
from tests.live.kinds.deepspeed_zero import CONFIG, DTYPES

if TYPE_CHECKING:
    from tests.live.kinds._base import Job, Recipe


class First(nn.Module):
    """The first half of the model between its embedding and its head."""

    def __init__(self, net: jobs.Net) -> None:
        super().__init__()
        self.norm, self.up = net.norm, net.up

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedded tokens, and what the second half adds to them."""
        return x, torch.relu(self.up(self.norm(x)))


class Second(nn.Module):
    """The other half, and the buffers."""

    def __init__(self, net: jobs.Net) -> None:
        super().__init__()
        self.down, self.frozen = net.down, net.frozen
        self.register_buffer("scale", net.scale)
        self.register_buffer("table", net.table, persistent=False)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """What the head gets."""
        x, hidden = both
        return x + self.down(hidden) + self.frozen(x)


class Embed(nn.Module):
    """The embedding that is the head as well."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding."""
        return nn.functional.embedding(tokens, self.weight)


def _head(embed: Embed, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, embed.weight)


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(
        logits.float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )


class PipeJob(EngineJob):
    """A pipeline, whose layers have numbers for names."""

    tensor_map = TensorMap(
        (
            rename(r"re:^[12]\.(.*)$", r"\1"),
            rename("tied_modules.embed.weight", "embed.weight"),
        )
    )

    def step(self, number: int) -> float:
        """One batch through all stages."""
        from dynadapt.adapters.live.deepspeed_zero import put_in_force

        put_in_force(self.engine)
        batch = jobs.tokens(number)
        return float(self.engine.train_batch(itertools.repeat((batch, batch))))

    def evaluate(self) -> None:
        """An evaluation by all stages."""
        from dynadapt.adapters.live.deepspeed_zero import put_in_force

        put_in_force(self.engine)
        batch = jobs.tokens(99)
        self.engine.eval_batch(itertools.repeat((batch, batch)))

    def tensors(self) -> jobs.Tensors:
        """Each stage by DeepSpeed's gathers, then all stages."""
        group = self.engine.data_parallel_group
        found: jobs.Tensors = {}
        for (name, slot), full in joined_stages(gathered_below_3(self.engine, group)).items():
            layer, _, rest = name.partition(".")
            plain = rest if layer.isdigit() else "embed.weight"
            if slot != "compute":
                found[f"{plain}/{slot}"] = full.float()
        return found


#: DeepSpeed adds up ZeRO-1's norm group after group over all stages, and drops groups without members: where
#: a stage lacks one it waits for ever.
QUIET = {
    "zero_optimization": {
        "stage": 1,
        "reduce_bucket_size": 1000,
        "allgather_bucket_size": 1000,
        "compute_grad_norm": False,
    }
}


def pipeline(
    model: jobs.Net, recipe: Recipe, stages: int, name: str, *, quiet: bool = True
) -> EngineJob:
    """A pipeline of so many stages; not `quiet`, it takes ZeRO-1's norms as DeepSpeed does by itself."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    from dynadapt.adapters.live.deepspeed_zero import beside

    deepspeed.init_distributed("gloo")
    with beside():
        whole = PipelineModule(
            [
                TiedLayerSpec("embed", Embed, model.embed.weight),
                LayerSpec(First, model),
                LayerSpec(Second, model),
                TiedLayerSpec("embed", Embed, model.embed.weight, forward_fn=_head),
            ],
            num_stages=stages,
            loss_fn=_loss,
            partition_method="uniform",
        )
        config = {**CONFIG.get(name, {}), **(QUIET if quiet and name.startswith("zero1-") else {})}
        engine = jobs.deepspeed_engine(name, whole, recipe(whole), **config)
    return PipeJob(engine, recipe)


for _name, _stages, _worlds in (
    ("zero1-bf16", 2, (2, 4)),
    ("zero1-fp32", 2, (2, 4)),
    ("zero1-fp16", 2, (2, 4)),
    ("zero1acc-bf16", 2, (2, 4)),
    ("zero0-bf16", 2, (2, 4)),
    ("zero0-fp32", 2, (2, 4)),
    ("zero1-bf16", 4, (4,)),
    ("zero1-bf16", 3, (3,)),
    ("zero0-fp32", 3, (3,)),
):

    @kind(f"pipe{_stages}-{_name}", worlds=_worlds, dtype=DTYPES[_name.partition("-")[2]])
    def _pipe(model: jobs.Net, recipe: Recipe, stages: int = _stages, name: str = _name) -> Job:
        return pipeline(model, recipe, stages, name)


class AutoTpJob(EngineJob):
    """An engine whose linear layers AutoTP has cut."""

    def step(self, number: int) -> float:
        """One step of the engine."""
        from dynadapt.adapters.live.deepspeed_zero import put_in_force

        put_in_force(self.engine)
        return super().step(number)

    def evaluate(self) -> None:
        """A forward of the engine."""
        from dynadapt.adapters.live.deepspeed_zero import put_in_force

        put_in_force(self.engine)
        super().evaluate()

    def tensors(self) -> jobs.Tensors:
        """Parts over data-parallel ranks, then DeepSpeed's own gather of a layer."""
        own = gathered_below_3(self.engine, self.engine.data_parallel_group)
        return {
            f"{name}/{slot}": full.float()
            for (name, slot), full in joined_tensors(self.engine, own).items()
            if slot != "compute"
        }


#: Columns and rows that are cut; all else is whole on every rank.
PLAN: dict[str, Any] = {
    "layer_specs": [
        {"patterns": [r"^up\.weight$"], "partition_type": "column"},
        {"patterns": [r"^down\.weight$"], "partition_type": "row"},
    ]
}


def _autotp(model: jobs.Net, recipe: Recipe, size: int, name: str) -> Job:
    from dynadapt.adapters.live.deepspeed_zero import beside

    config = {"tensor_parallel": {"autotp_size": size, "partition_config": PLAN}}
    with beside():
        engine = jobs.deepspeed_engine(name, model, recipe(model), **config, **CONFIG.get(name, {}))
    return AutoTpJob(engine, recipe)


for _name, _size, _worlds in (
    ("zero1-bf16", 2, (2, 4)),
    ("zero1-fp32", 2, (2, 4)),
    ("zero1acc-bf16", 2, (2, 4)),
    ("zero2-bf16", 2, (2, 4)),
    ("zero2-fp16", 2, (2, 4)),
    ("zero0-fp32", 2, (2, 4)),
    ("zero1-bf16", 4, (4,)),
    ("zero2-bf16", 3, (3,)),
):

    @kind(f"autotp{_size}-{_name}", worlds=_worlds, dtype=DTYPES[_name.partition("-")[2]])
    def _tensors(model: jobs.Net, recipe: Recipe, size: int = _size, name: str = _name) -> Job:
        return _autotp(model, recipe, size, name)
