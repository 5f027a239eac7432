"""Plain modules, DDP, FSDP2 and tensor parallelism by DTensor, and products of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from tests.live import jobs
from tests.live.kinds._base import TorchJob, kind

if TYPE_CHECKING:
    from tests.live.kinds._base import Job, Recipe


@kind("plain")
def _plain(model: jobs.Net, recipe: Recipe) -> Job:
    return TorchJob(model, recipe(model), recipe)


@kind("ddp")
def _ddp(model: jobs.Net, recipe: Recipe) -> Job:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return TorchJob(wrapped, recipe(wrapped), recipe)


@kind("fsdp2")
def _fsdp2(model: jobs.Net, recipe: Recipe) -> Job:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.up)
    fully_shard(model)
    return TorchJob(model, recipe(model), recipe)


@kind("hsdp", worlds=(4,))
def _hsdp(model: jobs.Net, recipe: Recipe) -> Job:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    return TorchJob(model, recipe(model), recipe)


@kind("tp")
def _tp(model: jobs.Net, recipe: Recipe) -> Job:
    from torch.distributed.device_mesh import init_device_mesh

    jobs.parallelize(
        model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    )
    return TorchJob(model, recipe(model), recipe)


@kind("tpdp", worlds=(2, 4), dtype=torch.bfloat16)
def _tpdp(model: jobs.Net, recipe: Recipe) -> Job:
    parallel, _, _ = jobs.tensor_parallel(model)
    return TorchJob(parallel, recipe(parallel), recipe)


@kind("tpfsdp", worlds=(2, 4))
def _tpfsdp(model: jobs.Net, recipe: Recipe) -> Job:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    jobs.parallelize(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return TorchJob(model, recipe(model), recipe)
