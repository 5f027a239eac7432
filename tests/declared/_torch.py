"""What DDP, FSDP2, HSDP and DTensor tensor parallelism hold, learnt from real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dynadapt.vps.keys import canonical_name
from dynadapt.vps.probe import markers, probe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from dynadapt.vps.layout import Row

RULES = {
    "embed": "embedding_rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise",
}


@dataclass(frozen=True)
class World:
    """A model on a mesh of `replicas` x the rest x `tp`. No `cut`: DDP over what is not `tp`."""

    tp: int = 1
    replicas: int = 1
    cut: bool = True
    vocabulary: int = 11
    inner: int = 7
    tied: bool = False


class Net(nn.Module):
    """Odd sizes, a part smaller than any world, a frozen one, and what tensor parallelism can cut."""

    def __init__(self, world: World) -> None:
        super().__init__()
        width = 6
        self.embed = nn.Embedding(world.vocabulary, width)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.Module()
            block.norm = nn.LayerNorm(width)
            block.up = nn.Linear(width, world.inner)
            block.down = nn.Linear(world.inner, width)
            self.blocks.append(block)
        self.row = nn.Parameter(torch.zeros(1, 3))
        self.frozen = nn.Parameter(torch.zeros(5, 2), requires_grad=False)
        self.head = nn.Linear(width, world.vocabulary, bias=False)
        if world.tied:
            self.head.weight = self.embed.weight


def shapes_of(case: World) -> dict[str, tuple[int, ...]]:
    """The tensors of a `Net` by name."""
    return {name: tuple(param.shape) for name, param in Net(case).named_parameters()}


def observe_torch(
    rank: int, world: int, case: World
) -> tuple[tuple[Row, ...], tuple[tuple[Any, Any], ...]]:
    """Rows learnt from marks, and (key, box) of what the adapter describes."""
    from dynadapt.adapters.live.torch_module import TorchModuleAdapter
    from dynadapt.protocols import TrainState

    models: list[nn.Module] = []

    def load(values: Mapping[str, NDArray[Any]]) -> nn.Module:
        net = Net(case)
        with torch.no_grad():
            for name, param in net.named_parameters():
                param.copy_(torch.from_numpy(values[name]))
        models.append(spread(net, case, world))
        return models[-1]

    rows = probe(markers(shapes_of(case)), load, read_locals)
    optimizer = torch.optim.AdamW([p for p in models[-1].parameters() if p.requires_grad])
    adapter = TorchModuleAdapter()
    state = TrainState(models[-1], optimizer)
    adapter.quiesce(state)
    described = adapter.describe(state).rows
    return rows, tuple((row.key, row.box) for row in described if row.key.slot == "param")


def spread(net: Net, case: World, world: int) -> nn.Module:
    """Cut by tensor parallelism first, then by data parallelism, as everybody does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn.parallel import DistributedDataParallel

    shape = (case.replicas, world // case.replicas // case.tp, case.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("rep", "dp", "tp"))
    if case.tp > 1:
        plan = {
            "embed": RowwiseParallel(),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "head": ColwiseParallel(),
        }
        parallelize_module(net, mesh["tp"], plan)
        if case.tied:
            net.head.weight = net.embed.weight  # parallelize_module cuts the tie
    if not case.cut:
        return DistributedDataParallel(net) if case.tp == 1 else net
    data = mesh["rep", "dp"] if case.replicas > 1 else mesh["dp"]
    for block in net.blocks:
        fully_shard(block, mesh=data)
    return fully_shard(net, mesh=data)


def read_locals(model: nn.Module) -> dict[str, NDArray[Any]]:
    """This rank's part of each parameter."""
    from torch.distributed.tensor import DTensor

    found = {}
    for raw, param in model.named_parameters():
        local = param.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        found[canonical_name(raw)] = local.numpy()
    return found
