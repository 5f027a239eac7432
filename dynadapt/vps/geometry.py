"""The boxes of one placement, for all places and many tensors at once, in numpy columns.

Tensors of one shape and one list of placements share a `Geometry`: per dim the intervals that shards
cut, each with the place it belongs to, and the flat split of what is left. A place is the row-major
number of a mesh coordinate; it is a sum over axes, so sharded, pinned and replicating axes add up
apart. Nothing here costs the world's size, only the pieces that are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dynadapt.vps.placement import Flat, Pin, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dynadapt.vps.placement import Placement

__all__ = ["Geometry", "Pieces", "mesh_strides", "ragged", "span_boxes"]


class Flats(NamedTuple):
    """Where tensors lie in flat buffers that they share: `offsets` and `parts` (tensors,) int64."""

    offsets: NDArray[np.int64]
    parts: NDArray[np.int64]

    def take(self, chosen: NDArray[np.int64]) -> Flats:
        """Those of some tensors."""
        return Flats(self.offsets[chosen], self.parts[chosen])


class Pieces(NamedTuple):
    """Boxes that meet the queries: whose query, the box (unclipped), and the place without replicas.

    `query` and `place` are (n,), `lo` and `hi` (n, ndim), all int64.
    """

    query: NDArray[np.int64]
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    place: NDArray[np.int64]

    def take(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Pieces:
        """Some of the pieces, by mask or by index."""
        return Pieces(self.query[chosen], self.lo[chosen], self.hi[chosen], self.place[chosen])


def mesh_strides(axes: Mapping[str, int]) -> dict[str, int]:
    """What one step along each axis adds to a place.

    >>> mesh_strides({"dp": 4, "tp": 2})
    {'dp': 2, 'tp': 1}
    """
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed(list(axes)):
        strides[axis] = step
        step *= axes[axis]
    return {axis: strides[axis] for axis in axes}


def ragged(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For counts per item: the item of every element, and the element's number within its item.

    >>> [column.tolist() for column in ragged(np.array([2, 0, 1]))]
    [[0, 0, 2], [0, 1, 0]]
    """
    item = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return item, np.arange(len(item)) - starts[item]


def span_boxes(
    start: NDArray[np.int64], stop: NDArray[np.int64], shape: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Lower spans `[start, stop)` of tensors of `shape` (n, ndim) to boxes, in row-major order.

    Returns whose span, lower and upper corners; at most `2 * ndim - 1` boxes a span, as `Span.boxes`.

    >>> which, lo, hi = span_boxes(np.array([4]), np.array([10]), np.array([[4, 3]]))
    >>> lo.tolist(), hi.tolist()
    ([[1, 1], [2, 0], [3, 0]], [[2, 3], [3, 3], [4, 1]])
    """
    count, ndim = shape.shape
    if not ndim:
        keep = np.flatnonzero(start < stop)
        return keep, shape[keep], shape[keep]
    inner = np.ones((count, ndim), np.int64)
    for dim in range(ndim - 2, -1, -1):
        inner[:, dim] = inner[:, dim + 1] * shape[:, dim + 1]
    first, rest_a = np.empty_like(inner), start
    last, rest_b = np.empty_like(inner), stop
    rests = []
    split = np.full(count, ndim - 1)
    open_ = np.ones(count, bool)  # whether start and stop still share all digits before this dim
    for dim in range(ndim):
        first[:, dim], rest_a = np.divmod(rest_a, inner[:, dim])
        last[:, dim], rest_b = np.divmod(rest_b, inner[:, dim])
        rests.append((rest_a > 0, rest_b > 0))
        parted = open_ & (first[:, dim] != last[:, dim])
        split[parted] = dim
        open_ &= ~parted
    found: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []

    def emit(
        which: NDArray[np.int64], at: NDArray[np.int64], dim: int, low: Any, high: Any
    ) -> None:
        lo, hi = np.zeros((len(which), ndim), np.int64), shape[which].copy()
        lo[:, :dim] = at[which, :dim]
        hi[:, :dim] = at[which, :dim] + 1
        lo[:, dim], hi[:, dim] = low, high
        found.append((which, lo, hi))

    for dim in range(ndim - 1, 0, -1):  # the rest of a started line, from the innermost dim out
        low = first[:, dim] + rests[dim][0]
        which = np.flatnonzero((split < dim) & rests[dim - 1][0] & (low < shape[:, dim]))
        if len(which):
            emit(which, first, dim, low[which], shape[which, dim])
    for dim in range(ndim):  # whole lines
        low = first[:, dim] + rests[dim][0]
        which = np.flatnonzero((split == dim) & (low < last[:, dim]) & (start < stop))
        if len(which):
            emit(which, first, dim, low[which], last[which, dim])
    for dim in range(1, ndim):  # the start of a line that is not finished
        which = np.flatnonzero((split < dim) & rests[dim - 1][1] & (last[:, dim] > 0))
        if len(which):
            emit(which, last, dim, 0, last[which, dim])
    if not found:
        empty = np.zeros(0, np.int64)
        return empty, np.zeros((0, ndim), np.int64), np.zeros((0, ndim), np.int64)
    if len(found) == 1:
        return found[0]
    whose = np.concatenate([each[0] for each in found])
    order = np.argsort(whose, kind="stable")  # within a span the parts were made in their order
    return (
        whose[order],
        np.concatenate([each[1] for each in found])[order],
        np.concatenate([each[2] for each in found])[order],
    )


@dataclass(frozen=True)
class _Cuts:
    """The intervals of one dim, ascending and not empty; `place` is what each adds to a place."""

    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    place: NDArray[np.int64]

    def split(self, shard: Shard, steps: NDArray[np.int64]) -> _Cuts:
        """Every interval cut once more, a part for each of `steps`; with blocks, every block of it."""
        size = (self.hi - self.lo) // shard.blocks
        per = -(-size // (len(steps) * shard.multiple)) * shard.multiple
        number = np.arange(len(steps))
        start = self.lo[:, None, None] + size[:, None, None] * np.arange(shard.blocks)[:, None]
        low = np.minimum(number * per[:, None, None], size[:, None, None])
        high = np.minimum((number + 1) * per[:, None, None], size[:, None, None])
        low, high, start, place = np.broadcast_arrays(
            low, high, start, self.place[:, None, None] + steps
        )
        keep = low < high
        return _Cuts((start + low)[keep], (start + high)[keep], place[keep])


class Geometry:
    """What one list of placements does to tensors of one shape on one mesh.

    >>> cut = Geometry({"dp": 2, "tp": 2}, (4, 3), (Shard("tp", 0), Flat("dp")))
    >>> found = cut.meet(np.array([[3, 0]]), np.array([[4, 1]]))
    >>> found.lo.tolist(), found.hi.tolist(), found.place.tolist()
    ([[3, 0]], [[4, 3]], [3])
    """

    def __init__(
        self, axes: Mapping[str, int], shape: Sequence[int], placements: Sequence[Placement]
    ) -> None:
        self.shape = tuple(shape)
        self.ndim = len(self.shape)
        strides = mesh_strides(axes)
        cuts = [_Cuts(*(np.array([v]) for v in (0, size, 0))) for size in self.shape]
        self._by_dim: list[list[Shard]] = [[] for _ in self.shape]
        self.flat: Flat | None = None
        self._pins: list[tuple[int, int, NDArray[np.int64]]] = []
        spread: list[NDArray[np.int64]] = []  # per replicating axis, what its places add
        self._fixed: list[tuple[int, int, NDArray[np.int64]]] = []
        named: set[str] = set()
        for placement in placements:
            if isinstance(placement, Replicate):
                continue
            named.update(placement.over)
            copies = placement.copies if isinstance(placement, Shard) else 1
            for axis in placement.over:
                stride, number = strides[axis], np.arange(axes[axis])
                if copies > 1:
                    spread.append(np.arange(copies) * stride)
                if isinstance(placement, Pin):
                    number[list(placement.also)] = placement.index
                self._fixed.append((stride, axes[axis], number // copies * copies * stride))
            steps = _sums(
                [np.arange(0, axes[a], copies) * strides[a] for a in placement.over], ordered=False
            )
            if isinstance(placement, Shard):
                dim = placement.dim
                cuts[dim] = cuts[dim].split(placement, steps)
                self._by_dim[dim].append(placement)
            elif isinstance(placement, Flat):
                self.flat, self._flat_place = placement, steps
            else:
                self._pins.append(self._fixed[-1])
                if placement.also:
                    away = np.array([0, *(at - placement.index for at in placement.also)])
                    spread.append(away * strides[placement.axis])
        spread += (np.arange(size) * strides[a] for a, size in axes.items() if a not in named)
        self._cuts = [
            cut if size else _Cuts(*(np.zeros(0, np.int64),) * 3)
            for cut, size in zip(cuts, self.shape, strict=True)
        ]
        self.replicas = _sums(spread)
        self._axes, self._strides = dict(axes), strides

    def fixed(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The part of each place that tells what it holds: places with the same one are replicas."""
        found = np.zeros_like(places)
        for stride, size, table in self._fixed:
            found += table[places // stride % size]
        return found

    def pinned(self, place: int) -> int:
        """What a place's coordinates on the pinned axes add up to."""
        return sum(int(table[place // stride % size]) for stride, size, table in self._pins)

    def meet(
        self,
        lo: NDArray[np.int64],
        hi: NDArray[np.int64],
        flats: Flats | None = None,
    ) -> Pieces:
        """All pieces that share elements with the query boxes `[lo, hi)`, each (n, ndim), none empty.

        `flats`, one per query, is where the query's tensor lies in its flat buffer; by default what the
        placement says. Pieces of one query come in no particular order.
        """
        query, cell_lo, cell_hi, place = self._cells(lo, hi)
        if self.flat is None:
            return Pieces(query, cell_lo, cell_hi, place)
        shape = cell_hi - cell_lo
        low = np.maximum(lo[query], cell_lo) - cell_lo
        high = np.minimum(hi[query], cell_hi) - cell_lo - 1
        first, last, volume = (np.full_like(query, n) for n in (0, 0, 1))
        for dim in range(self.ndim):
            first, last = first * shape[:, dim] + low[:, dim], last * shape[:, dim] + high[:, dim]
            volume *= shape[:, dim]
        at, part = self._flat_at(self.flat, volume, None if flats is None else flats.take(query))
        ways = len(self._flat_place)
        begin = (at + first) // part
        end = np.minimum((at + last) // part, ways - 1)
        cell, number = ragged(np.maximum(end - begin + 1, 0))
        number += begin[cell]
        start = np.maximum(number * part[cell] - at[cell], 0)
        stop = np.minimum((number + 1) * part[cell] - at[cell], volume[cell])
        which, box_lo, box_hi = span_boxes(start, stop, shape[cell])
        cell, number = cell[which], number[which]
        box_lo += cell_lo[cell]
        box_hi += cell_lo[cell]
        whose = query[cell]
        keep = np.all((box_lo < hi[whose]) & (lo[whose] < box_hi), axis=1)
        found = Pieces(whose, box_lo, box_hi, place[cell] + self._flat_place[number])
        return found if keep.all() else found.take(keep)

    def _cells(
        self, lo: NDArray[np.int64], hi: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The grid cells that meet each query: whose, corners, and what the shards add to a place."""
        count = len(lo)
        query = np.arange(count)
        place = np.zeros(count, np.int64)
        chosen: list[NDArray[np.int64]] = []
        for dim, cuts in enumerate(self._cuts):
            begin = np.searchsorted(cuts.hi, lo[query, dim], "right")
            end = np.searchsorted(cuts.lo, hi[query, dim], "left")
            counts = np.maximum(end - begin, 0)
            if len(counts) and counts.min() == counts.max() == 1:
                number = begin
            else:
                item, number = ragged(counts)
                number += begin[item]
                query, place = query[item], place[item]
                chosen = [each[item] for each in chosen]
            place = place + cuts.place[number]
            chosen.append(number)
        cell_lo = np.empty((len(query), self.ndim), np.int64)
        cell_hi = np.empty((len(query), self.ndim), np.int64)
        for dim, number in enumerate(chosen):
            cell_lo[:, dim] = self._cuts[dim].lo[number]
            cell_hi[:, dim] = self._cuts[dim].hi[number]
        return query, cell_lo, cell_hi, place

    def _flat_at(
        self, flat: Flat, volume: NDArray[np.int64], flats: Flats | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offset and part of each of some cells with so many elements."""
        if flats is not None:
            return flats
        step = len(self._flat_place) * flat.multiple
        part = np.maximum(-(-volume // step) * flat.multiple, 1)
        if flat.part is not None:
            part = np.full_like(volume, flat.part)
        return np.full_like(volume, flat.offset), part

    def held(self, place: int, flats: Flats | None = None, count: int = 1) -> Pieces:
        """The boxes of one place, of `count` tensors, or of as many as there are `flats`."""
        if flats is not None:
            count = len(flats.offsets)
        own = []
        for cuts, shards in zip(self._cuts, self._by_dim, strict=True):
            mine = 0
            for shard in shards:
                for axis in shard.over:
                    stride, step = self._strides[axis], shard.copies
                    mine += place // stride % self._axes[axis] // step * (step * stride)
            own.append(np.flatnonzero(cuts.place == mine))
        grid = np.zeros((1, 0), np.int64)
        if self.ndim:
            grid = np.array(np.meshgrid(*own, indexing="ij")).reshape(self.ndim, -1).T
        cells = len(grid)
        lo = np.empty((cells, self.ndim), np.int64)
        hi = np.empty((cells, self.ndim), np.int64)
        for dim in range(self.ndim):
            lo[:, dim] = self._cuts[dim].lo[grid[:, dim]]
            hi[:, dim] = self._cuts[dim].hi[grid[:, dim]]
        query = np.repeat(np.arange(count), cells)
        lo, hi = np.tile(lo, (count, 1)), np.tile(hi, (count, 1))
        places = np.full(len(query), place)
        if self.flat is None:
            return Pieces(query, lo, hi, places)
        index = 0
        for axis in self.flat.over:
            index = index * self._axes[axis] + place // self._strides[axis] % self._axes[axis]
        shape = hi - lo
        volume = np.prod(shape, axis=1)
        at, part = self._flat_at(self.flat, volume, None if flats is None else flats.take(query))
        start = np.clip(index * part - at, 0, volume)
        stop = np.clip((index + 1) * part - at, 0, volume)
        which, box_lo, box_hi = span_boxes(start, stop, shape)
        base = lo[which]
        return Pieces(query[which], box_lo + base, box_hi + base, places[which])


def _sums(steps: list[NDArray[np.int64]], ordered: bool = True) -> NDArray[np.int64]:
    """All sums of one member of each list: ascending, or with the first list the slowest."""
    found = np.zeros(1, np.int64)
    for each in steps:
        found = (found[:, None] + each).reshape(-1)
    return np.sort(found) if ordered else found
