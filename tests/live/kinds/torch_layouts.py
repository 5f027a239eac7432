"""Plain modules, DDP, FSDP2 and tensor parallelism by DTensor, and products of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from tests.live import jobs
from tests.live.kinds._base import TorchJob, kind

if TYPE_CHECKING:
    from tests.live.kinds._base import Job, Recipe


@kind("plain", about="a module and an optimizer, on every rank")
def _plain(model: jobs.Net, recipe: Recipe) -> Job:
    return TorchJob(model, recipe(model), recipe)


@kind("ddp", about="DistributedDataParallel")
def _ddp(model: jobs.Net, recipe: Recipe) -> Job:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return TorchJob(wrapped, recipe(wrapped), recipe)


class OwnersJob(TorchJob):
    """`ZeroRedundancyOptimizer`: each parameter's state is on one rank."""

    def tensors(self) -> jobs.Tensors:
        """The parameters as they are, the states by the optimizer's own consolidation."""
        found = jobs.torch_tensors(self.model, self.optimizer, ())
        self.optimizer.consolidate_state_dict(to=0)
        told = [self.optimizer.state_dict()["state"] if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(told, src=0)
        names = {id(p): name.removeprefix("module.") for name, p in self.model.named_parameters()}
        order = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        for index, state in (told[0] or {}).items():
            kept = {slot: state[slot] for slot in self.recipe.slots if slot in state}
            found |= {f"{order[index]}/{slot}": value.clone() for slot, value in kept.items()}
        return found


@kind("ddp-owners", about="DistributedDataParallel with ZeroRedundancyOptimizer")
def _ddp_owners(model: jobs.Net, recipe: Recipe) -> Job:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        recipe.groups(wrapped), optimizer_class=recipe.cls, **recipe.defaults
    )
    return OwnersJob(wrapped, optimizer, recipe)


def _sharded(model: jobs.Net, recipe: Recipe, **options: Any) -> Job:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.up, **options)
    fully_shard(model, **options)
    return TorchJob(model, recipe(model), recipe)


@kind("fsdp2", about="fully_shard, in two units")
def _fsdp2(model: jobs.Net, recipe: Recipe) -> Job:
    return _sharded(model, recipe)


@kind("fsdp2-bf16", dtype=torch.bfloat16, about="with a MixedPrecisionPolicy")
def _fsdp2_bf16(model: jobs.Net, recipe: Recipe) -> Job:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _sharded(model, recipe, mp_policy=policy)


@kind("fsdp2-off", about="with a CPUOffloadPolicy")
def _fsdp2_off(model: jobs.Net, recipe: Recipe) -> Job:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _sharded(model, recipe, offload_policy=CPUOffloadPolicy(pin_memory=False))


@kind("hsdp", worlds=(4,), about="fully_shard over replicas x shards, 2 x 2")
def _hsdp(model: jobs.Net, recipe: Recipe) -> Job:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    return TorchJob(model, recipe(model), recipe)


@kind("tp", about="parallelize_module over all ranks")
def _tp(model: jobs.Net, recipe: Recipe) -> Job:
    from torch.distributed.device_mesh import init_device_mesh

    jobs.parallelize(
        model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    )
    return TorchJob(model, recipe(model), recipe)


@kind(
    "tpdp", worlds=(2, 4), dtype=torch.bfloat16, about="parallelize_module and replicate, in bf16"
)
def _tpdp(model: jobs.Net, recipe: Recipe) -> Job:
    parallel, _, _ = jobs.tensor_parallel(model)
    return TorchJob(parallel, recipe(parallel), recipe)


@kind("tpfsdp", worlds=(2, 4), about="parallelize_module and fully_shard")
def _tpfsdp(model: jobs.Net, recipe: Recipe) -> Job:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    jobs.parallelize(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return TorchJob(model, recipe(model), recipe)
