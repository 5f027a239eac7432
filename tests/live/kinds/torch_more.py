"""FSDP2 by other dims, and wrappers around a model: compiled, recomputed, in either order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from tests.live.kinds._base import Job, TorchJob, kind

if TYPE_CHECKING:
    from tests.live import jobs
    from tests.live.kinds._base import Recipe


@kind("fsdp2dim1", worlds=(2, 4))
def _other_dim(model: jobs.Net, recipe: Recipe) -> Job:
    """Matrices are cut by columns but for one; one module stays out, and is whole on every rank."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    apart = set(model.frozen.parameters())

    def where(param: nn.Parameter) -> Any:
        return Shard(param.ndim - 1)

    half = dist.get_world_size() // 2 if dist.get_world_size() > 2 else True
    # torch 2.13 cannot gather columns back after a reshard to fewer ranks than all.
    fully_shard(model.down, reshard_after_forward=half)
    fully_shard(model, shard_placement_fn=where, ignored_params=apart)
    return TorchJob(model, recipe(model), recipe)


def _recomputed(module: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped: nn.Module = checkpoint_wrapper(module)
    return wrapped


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


@kind("ddpcompiled")
def _ddp_over_compile(model: jobs.Net, recipe: Recipe) -> Job:
    """Layers recomputed within and around a compiled one, all compiled, then DDP."""
    model.up = _recomputed(_compiled(model.up))
    model.down = _compiled(_recomputed(model.down))
    wrapped = nn.parallel.DistributedDataParallel(_compiled(model))
    return TorchJob(wrapped, recipe(wrapped), recipe)


@kind("compiledddp")
def _compile_over_ddp(model: jobs.Net, recipe: Recipe) -> Job:
    model.norm = _recomputed(model.norm)
    wrapped = _compiled(nn.parallel.DistributedDataParallel(model))
    return TorchJob(wrapped, recipe(wrapped), recipe)


@kind("fsdp2compiled")
def _fsdp2_recomputed(model: jobs.Net, recipe: Recipe) -> Job:
    """Recomputed, compiled in place and sharded, in the order that is usual."""
    from torch.distributed.fsdp import fully_shard

    model.up = _recomputed(model.up)
    model.up.compile(backend="eager")
    fully_shard(model.up)
    fully_shard(model)
    model.compile(backend="eager")
    return TorchJob(model, recipe(model), recipe)
