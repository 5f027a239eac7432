"""Which logical boxes a rank's local tensor of a DTensor holds: integers in, boxes out.

A mesh axis either copies a tensor or cuts one dim of it into `ceil(size / count)` pieces, as
`torch.chunk` does: trailing pieces may be short or empty. Axes that cut the same dim do so one after
another, and not always from left to right: FSDP2 over TP cuts what TP left, and writes its axis first
as a strided shard whose split factor is the number of pieces that the later axes make.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dynadapt.errors import Finding, Refused
from dynadapt.vps.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch.distributed.tensor import Placement

__all__ = ["LocalBox", "Split", "boxes_of", "local_boxes", "placed_rows"]

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Split:
    """A mesh axis cuts `dim`; with a `factor` above 1, each of `factor` equal parts of it.

    >>> Split(0)
    Split(dim=0, factor=1)
    """

    dim: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A logical box, and where in the local tensor its first element lies."""

    box: Box
    start: tuple[int, ...]


def boxes_of(
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Split | None],
) -> tuple[tuple[int, ...], tuple[LocalBox, ...]]:
    """The shape of the local tensor at a mesh coordinate, and the boxes it is made of.

    `mesh` is the sizes of its axes, `placements` one entry per axis, None where the axis copies.
    Boxes without elements are left out. More than one box means that equal factors were not undone by
    other axes, so that the local tensor is several stretches of a dim put together.

    >>> boxes_of((8, 2), (2, 2), (1, 0), (Split(0, 2), Split(0)))  # FSDP2 over TP
    ((2, 2), (LocalBox(box=Box(lo=(2, 0), hi=(4, 2)), start=(0, 0)),))
    >>> [str(b.box) for b in boxes_of((8,), (2,), (1,), (Split(0, 2),))[1]]
    ['[2:4]', '[6:8]']
    """
    per_dim = [_dim_ranges(shape, mesh, coordinate, placements, dim) for dim in range(len(shape))]
    local_shape = tuple(_total(ranges) for ranges in per_dim)
    boxes: list[LocalBox] = []
    for parts in product(*map(_with_starts, per_dim)):
        lo, hi, start = (tuple(part[i] for part in parts) for i in range(3))
        box = Box(lo, hi)
        if box.volume:
            boxes.append(LocalBox(box, start))
    return local_shape, tuple(boxes)


_boxes_of = lru_cache(maxsize=4096)(boxes_of)
"""A model has many tensors and few shapes, and each is asked for with every state of it."""


def _dim_ranges(
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Split | None],
    dim: int,
) -> Ranges:
    """The stretches of one dim that are here, in the order they lie in."""
    splits = {
        axis: split
        for axis, split in enumerate(placements)
        if split is not None and split.dim == dim
    }
    order = _true_order(splits, mesh)
    ranges: Ranges = ((0, shape[dim]),)
    for axis in splits if order is None else order:
        factor = splits[axis].factor if order is None else 1
        ranges = _cut(ranges, mesh[axis], coordinate[axis], factor)
    return ranges


def _true_order(splits: dict[int, Split], mesh: Sequence[int]) -> list[int] | None:
    """The order in which the axes cut, or None if the factors tell of no order.

    Read from right to left, an axis with factor f stands behind the axes whose pieces multiply to f.
    """
    order: list[int] = []
    for axis in reversed(splits):
        pieces = 1
        for at in range(len(order) + 1):
            if pieces == splits[axis].factor:
                order.insert(at, axis)
                break
            pieces *= mesh[order[at]] if at < len(order) else 1
        else:
            return None
    return order


def _cut(ranges: Ranges, count: int, index: int, factor: int) -> Ranges:
    """Piece `index` of `count` of each of `factor` parts of stretches laid end to end."""
    total = _total(ranges)
    part = -(-total // factor)
    found: list[tuple[int, int]] = []
    for number in range(factor):
        start = min(number * part, total)
        size = min(part, total - start)
        piece = -(-size // count)
        low = min(index * piece, size)
        high = min(low + piece, size)
        found += _slice(ranges, start + low, start + high)
    return _merged(found)


def _slice(ranges: Ranges, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Elements `[start, stop)` of stretches laid end to end."""
    at = 0
    for low, high in ranges:
        first, last = max(start - at, 0), min(stop - at, high - low)
        if first < last:
            yield low + first, low + last
        at += high - low


def _merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in ranges:
        if merged and merged[-1][1] == low:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    return tuple(merged)


def _total(ranges: Ranges) -> int:
    return sum(high - low for low, high in ranges)


def _with_starts(ranges: Ranges) -> list[tuple[int, int, int]]:
    """Each stretch with its position in the local tensor."""
    starts: list[tuple[int, int, int]] = []
    at = 0
    for low, high in ranges:
        starts.append((low, high, at))
        at += high - low
    return starts


def local_boxes(name: str, tensor: DTensor) -> tuple[LocalBox, ...]:
    """The boxes in this rank's local tensor; none where the rank is not in the tensor's mesh.

    Pure arithmetic on the mesh coordinate. Raises `Refused`: `partial-placement` for a pending sum,
    `unknown-layout` where the local tensor's shape is not what the placements say.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    placements = tuple(_split(name, placement) for placement in tensor.placements)
    if coordinate is None:
        return ()
    expected, boxes = _boxes_of(
        tuple(tensor.shape), tuple(mesh.shape), tuple(coordinate), placements
    )
    actual = tuple(tensor._local_tensor.shape)
    if actual != expected and 0 in tensor.shape and 0 in actual:
        return ()  # FSDP2 cuts what is empty in another dim as it likes: no element is anywhere
    if actual != expected:
        raise Refused(
            [
                Finding(
                    "unknown-layout",
                    name,
                    f"placements {tuple(tensor.placements)} on a mesh of {tuple(mesh.shape)} give a "
                    f"local shape of {expected}, and this rank holds {actual}",
                    "shard it with fully_shard, parallelize_module or distribute_tensor",
                )
            ]
        )
    return boxes


def _split(name: str, placement: Placement) -> Split | None:
    if isinstance(placement, _StridedShard):
        return Split(placement.dim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Split(placement.dim)
    if isinstance(placement, Replicate):
        return None
    reason = "partial-placement" if placement.is_partial() else "unknown-layout"
    raise Refused(
        [
            Finding(
                reason,
                name,
                f"its placement {placement} says that no rank holds final values",
                "redistribute it to Shard or Replicate first",
            )
        ]
    )


def placed_rows(name: str, tensor: torch.Tensor) -> tuple[tuple[Box, torch.Tensor], ...]:
    """Each logical box of a tensor that is here, with the view that holds it.

    A tensor that is no DTensor is whole on every rank that has it.

    >>> import torch
    >>> [str(box) for box, _ in placed_rows("w", torch.zeros(2, 3))]
    ['[0:2,0:3]']
    """
    if not isinstance(tensor, DTensor):
        return ((Box.whole(tuple(tensor.shape)), tensor.detach()),)
    local = tensor._local_tensor.detach()
    views: list[tuple[Box, torch.Tensor]] = []
    for part in local_boxes(name, tensor):
        view = local
        for dim, (start, size) in enumerate(zip(part.start, part.box.shape, strict=True)):
            view = view.narrow(dim, start, size)
        views.append((part.box, view))
    return tuple(views)
