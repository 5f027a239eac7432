"""torch.distributed.pipelining: one stage a rank and two, alone, replicated and under FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dynadapt
from tests.live import jobs
from tests.live._pipeline import TIED, Pipeline
from tests.live.kinds._base import Job, kind

if TYPE_CHECKING:
    from tests.live.kinds._base import Recipe


class PipelineJob(Job):
    """Stages, the schedule that runs them, and an optimizer over this rank's parameters."""

    def __init__(self, pipeline: Pipeline, recipe: Recipe) -> None:
        self.pipeline = pipeline
        self.optimizer: Any = recipe(pipeline)
        state = dynadapt.TrainState(pipeline.schedule, self.optimizer, counters={}, tied=TIED)
        super().__init__(state, recipe)

    @property
    def module(self) -> Any:
        """The stages together."""
        return self.pipeline.modules

    def step(self, number: int) -> float:
        """The schedule, the tie, the optimizer."""
        loss = self.pipeline.run(jobs.tokens(number))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def evaluate(self) -> None:
        """The schedule without gradients."""
        self.pipeline.evaluate(jobs.tokens(99))

    def tensors(self) -> jobs.Tensors:
        """Every stage's, from all ranks of the pipeline; the tie's copies have to be equal."""
        own = jobs.torch_tensors(self.pipeline, self.optimizer, self.recipe.slots)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        found: jobs.Tensors = {}
        for part in everyone:
            for name, tensor in part.items():
                name = name.replace("head.", "embed.")
                assert torch.equal(found.setdefault(name, tensor), tensor), name
        return found


def _mesh(stages: int) -> Any:
    shape = (stages, dist.get_world_size() // stages)
    return init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))


@kind("pp", worlds=(2, 3, 4))
def _pp(model: jobs.Net, recipe: Recipe) -> Job:
    ranks = dist.get_world_size()
    schedule = "1F1B" if ranks == 2 else "GPipe"  # 1F1B wants a microbatch for each stage
    return PipelineJob(Pipeline(model, _mesh(ranks), schedule), recipe)


@kind("ppdp", worlds=(4,))
def _ppdp(model: jobs.Net, recipe: Recipe) -> Job:
    return PipelineJob(Pipeline(model, _mesh(2), "GPipe", "replicate"), recipe)


@kind("ppfsdp", worlds=(4,))
def _ppfsdp(model: jobs.Net, recipe: Recipe) -> Job:
    return PipelineJob(Pipeline(model, _mesh(2), "GPipe", "fully_shard"), recipe)


@kind("ppi", worlds=(2,))
def _ppi(model: jobs.Net, recipe: Recipe) -> Job:
    return PipelineJob(Pipeline(model, _mesh(2), "Interleaved1F1B"), recipe)


@kind("ppifsdp", worlds=(4,))
def _ppifsdp(model: jobs.Net, recipe: Recipe) -> Job:
    return PipelineJob(Pipeline(model, _mesh(2), "Interleaved1F1B", "fully_shard"), recipe)
