"""Faults of the frameworks themselves that the tests of migrations have to go around, each shown here."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.live import _oracle, _walk, jobs
from tests.live.kinds import RECIPES

if TYPE_CHECKING:
    from tests._ranks import Pool


def _scaled(rank: int, world: int, name: str) -> list[float]:
    """How far the first moments of an fp16 engine are from plain torch's, by the scale of its loss."""
    found = []
    for scale in (1, 16):
        model, recipe = jobs.net(), RECIPES["adamw"]
        fp16 = {"enabled": True, "loss_scale": scale}
        engine = jobs.deepspeed_engine(name, model, recipe(model), fp16=fp16)
        # DeepSpeed has made a step when it is built.
        expected, _ = _oracle.step(
            jobs.zero_tensors(engine), recipe, {}, taken=1, number=1, dtype=torch.float16
        )
        engine.backward(engine(jobs.tokens(1)))
        engine.step()
        found.append(_walk.gaps(expected, jobs.zero_tensors(engine))["exp_avg"])
    return found


@pytest.mark.parametrize("name", ["zero0-fp16", "zero0fused-fp16"])
def test_without_zero_a_loss_is_not_scaled_and_its_gradients_are_unscaled(
    ranks4: Pool, name: str
) -> None:
    """DeepSpeed 0.19.8: so the kinds of these engines have a loss scale of one."""
    right, off = ranks4.run(_scaled, name)[0]
    assert right < 1e-2
    assert off > 0.1


def _regathered(rank: int, world: int) -> dict[tuple[int, Any], str]:
    """FSDP2 by rows and by columns, gathered again after a reshard to fewer ranks and to all."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    found = {}
    for dim in (0, 1):
        for kept in (world // 2, True):
            model = nn.Linear(8, 8, bias=False)
            fully_shard(
                model, reshard_after_forward=kept, shard_placement_fn=lambda _, d=dim: Shard(d)
            )
            try:
                model(torch.ones(2, 8)).sum().backward()
                found[dim, kept] = "works"
            except Exception as error:
                found[dim, kept] = f"{type(error).__name__}: {error}"
    return found


def test_fsdp2_cannot_gather_columns_after_a_reshard_to_fewer_ranks(ranks4: Pool) -> None:
    """torch 2.13: so `fsdp2dim1` keeps rows where it reshards to half of the ranks."""
    for found in ranks4.run(_regathered):
        assert found.pop((1, 2)) == "IndexError: list index out of range"
        assert set(found.values()) == {"works"}


def _two_steps(rank: int, world: int, wrapped: bool) -> str:
    """A pipeline of one stage, whose module is DDP's or bare."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("pp", "dp"))
    module: nn.Module = nn.Linear(4, 4)
    if wrapped:
        group = mesh.get_group("dp")
        module = nn.parallel.DistributedDataParallel(module, process_group=group)
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    batch = torch.ones(4, 4)
    schedule.step(batch, target=batch)
    try:
        schedule.step(batch, target=batch)
    except RuntimeError as error:
        return str(error.__cause__)
    return ""


def test_ddp_in_a_stage_of_a_pipeline_fails_at_its_second_step(ranks2: Pool) -> None:
    """torch 2.13: DDP counts its parameters once a microbatch; so replicated stages are `replicate`'s."""
    assert set(ranks2.run(_two_steps, False)) == {""}
    for cause in ranks2.run(_two_steps, True):
        assert "rebuilt params size" in cause


def _norms(rank: int, world: int, recipe: str, quiet: bool) -> str:
    """A step of a pipeline whose last stage has no member of the second param group, or of one group."""
    from tests.live.kinds.deepspeed_parallel import pipeline

    job = pipeline(jobs.net(0), RECIPES[recipe], 2, "zero1-bf16", quiet=quiet)
    for group in list(dist.distributed_c10d._world.pg_map):
        if dist.get_world_size(group) > 1:
            backend: Any = group._get_backend(torch.device("cpu"))
            backend._set_default_timeout(timedelta(seconds=2))
    try:
        job.step(0)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("recipe", "quiet", "says"),
    [("adamw", False, "Timed out waiting 2000ms"), ("adamw", True, ""), ("even", False, "")],
)
def test_zero1_waits_for_a_norm_of_a_group_that_a_stage_lacks(
    ranks2: Pool, recipe: str, quiet: bool, says: str
) -> None:
    """DeepSpeed 0.19.8: so the kinds of pipelines turn `compute_grad_norm` off."""
    for found in ranks2.run(_norms, recipe, quiet):
        assert found == says or (says and says in found)
