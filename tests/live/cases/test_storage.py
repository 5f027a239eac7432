"""STORAGE B188, B190, B191: strides, views of larger storages, and counts beyond 32 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import dynadapt
from dynadapt.vps.model_shape import State

if TYPE_CHECKING:
    from tests._ranks import Pool


def _columns(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(24.0).reshape(4, 6)
    source, target = nn.Module(), nn.Module()
    source.weight = nn.Parameter(distribute_tensor(full, mesh, [Shard(1)]))
    local = source.weight._local_tensor
    wide = torch.full((4, 7), -1.0)
    wide[:, 2:5] = local
    source.weight._local_tensor = wide[:, 2:5]  # a slice with gaps, as a concat on dim 1 leaves
    target.weight = nn.Parameter(torch.zeros(4, 6))
    report = dynadapt.migrate(source, target, timeout=30)
    got = target.weight.detach().clone()
    with torch.no_grad():
        wide[:, 2:5] = 0
    dynadapt.migrate(target, source, timeout=30)
    return {
        "contiguous": target.weight.is_contiguous(),
        "same": torch.equal(got, full),
        "back": torch.equal(wide[:, 2:5], full[:, 3 * rank : 3 * rank + 3]),
        "around": float(wide[:, [0, 1, 5, 6]].sum()),
        "bytes": report.bytes_moved,
    }


def test_a_slice_with_gaps(ranks2: Pool) -> None:
    """B188: read and written where it lies; the target keeps its own strides, and gaps their content."""
    for answer in ranks2.run(_columns):
        expected = {"contiguous": True, "same": True, "back": True, "around": -16.0, "bytes": 96}
        assert answer == expected


def _narrow(rank: int, world: int) -> dict[str, int]:
    class Piece(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1 << 20).narrow(0, 77, 8))

    source = Piece() if rank == 0 else None
    target = Piece() if rank == 1 else None
    planned = dynadapt.plan(source, target, timeout=30)
    report = dynadapt.migrate(source, target, timeout=30)
    return {"bytes": report.bytes_moved, "peak": planned.peak_extra_bytes}


def test_a_narrow_view_of_a_large_storage(ranks2: Pool) -> None:
    """B190: eight elements are 32 bytes, not the 4 MB that they are a view of."""
    for answer in ranks2.run(_narrow):
        assert answer["bytes"] == 32
        assert answer["peak"] < 1 << 21


def test_more_elements_than_32_bits_count() -> None:
    """B191: one parameter of 2^32 + 8 elements; what moves is counted to the element."""
    with torch.device("meta"):
        model = nn.Embedding((1 << 32) + 8, 1)
    count = (1 << 32) + 8
    weights = (State("param"),)
    layout = dynadapt.declare("zero3:dp=4", model, states=weights)
    ends = [box for seat in range(4) for row in layout.rows(seat) for box in [row.box]]
    assert sum(box.volume for box in ends) == count
    assert max(box.hi[0] for box in ends) == count
    simulation = dynadapt.simulate("zero3:dp=4", "ddp:dp=4", model, states=weights)
    whole = 4 * count
    assert int(simulation.sent.sum()) == 4 * whole - whole
