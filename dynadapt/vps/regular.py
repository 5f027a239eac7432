"""From rows to the placements that explain them: is an observed layout a regular one?

The way back from `MeshLayout`. A few placements are guessed from what the first places hold, and each
guess is computed for all places and compared, so that an answer is always right.
"""

from __future__ import annotations

import itertools
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dynadapt.errors import Finding, Refused
from dynadapt.vps.box import Box, linear_index
from dynadapt.vps.mesh_layout import MeshLayout
from dynadapt.vps.placement import Flat, Pin, Placement, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from dynadapt.vps.keys import Key, KeySpec
    from dynadapt.vps.layout import RowLayout

    Ints = NDArray[np.int64]

__all__ = ["regular"]

Boxes = tuple[Box, ...]
Interval = tuple[int, int]


def regular(layout: RowLayout, axes: Mapping[str, int]) -> MeshLayout:
    """The declared layout that holds the same boxes on the same endpoints.

    Endpoints fill the mesh in ascending order, the last axis fastest. Where several placements say the
    same, shards are preferred to pins and those to flat spans. Raises `Refused` with every key that no
    placements explain (`irregular`), or where mesh and endpoints differ in number (`bad-mesh`).

    >>> from dynadapt.vps.keys import Key, KeySpec
    >>> from dynadapt.vps.layout import Row, RowLayout
    >>> spec = KeySpec(Key("w", "param"), (5, 2), "float32")
    >>> boxes = (Box((0, 0), (3, 2)), Box((3, 0), (5, 2)))
    >>> rows = {rank: [Row(spec.key, box, "b", 0, (2, 1))] for rank, box in enumerate(boxes)}
    >>> regular(RowLayout([spec], rows), {"dp": 2}).placements(spec.key)
    (Shard(axes='dp', dim=0, multiple=1, blocks=1, copies=1),)
    """
    if len(layout.endpoints) != prod(axes.values()):
        cause = f"{len(layout.endpoints)} endpoints are no mesh of {dict(axes)}"
        raise Refused([Finding("bad-mesh", "mesh", cause, "name the axes of this world")])
    known: dict[tuple[tuple[int, ...], tuple[Boxes, ...]], tuple[Placement, ...] | None] = {}
    placements: dict[Key, tuple[Placement, ...]] = {}
    findings = []
    for spec in layout.keys:
        held = tuple(
            tuple(row.box for row in layout.rows_of(spec.key, endpoint))
            for endpoint in layout.endpoints
        )
        at = (spec.shape, held)
        if at not in known:
            known[at] = _explained(spec, axes, held) if spec.presence == "present" else ()
        found = known[at]
        if found is None:
            fix = "describe it with rows, or name other axes"
            findings.append(Finding("irregular", str(spec.key), _shown(layout, held), fix))
        else:
            placements[spec.key] = found
    if findings:
        raise Refused(findings)
    return MeshLayout(axes, layout.keys, placements, layout.endpoints)


def _shown(layout: RowLayout, held: Sequence[Boxes]) -> str:
    parts = [
        f"{endpoint}: {' '.join(map(str, boxes)) or 'nothing'}"
        for endpoint, boxes in zip(layout.endpoints, held, strict=True)
    ]
    more = f", and {len(parts) - 4} more" if len(parts) > 4 else ""
    return f"no placements explain it ({', '.join(parts[:4])}{more})"


def _explained(
    spec: KeySpec, axes: Mapping[str, int], held: tuple[Boxes, ...]
) -> tuple[Placement, ...] | None:
    """The first guess that says for every place what it holds."""
    if not spec.numel:
        return None if any(held) else ()
    distinct = list(dict.fromkeys(held))
    number = {boxes: at for at, boxes in enumerate(distinct)}
    grid = np.array([number[boxes] for boxes in held], np.int64)
    guesses = _Guesses(distinct)
    for guess in guesses.of(grid.reshape(tuple(axes.values())), tuple(axes), Box.whole(spec.shape)):
        try:
            mesh = MeshLayout(axes, [spec], {spec.key: guess})
        except Refused:  # e.g. copies over two axes
            continue
        rows = (mesh.rows(place) for place in range(len(held)))
        if all(
            tuple(row.box for row in own) == boxes for own, boxes in zip(rows, held, strict=True)
        ):
            return guess
    return None


class _Guesses:
    """Placements that may explain a grid of holdings; a holding is its number in `held`."""

    def __init__(self, held: Sequence[Boxes]) -> None:
        self.held = held
        self.some = np.array([bool(boxes) for boxes in held])

    def of(self, grid: Ints, names: tuple[str, ...], slab: Box) -> Iterator[tuple[Placement, ...]]:
        """For a grid, one axis a name, whose first place that holds anything has a part of `slab`."""
        for axis in range(grid.ndim - 1, -1, -1):
            if (grid == np.take(grid, [0], axis)).all():
                grid, names = np.take(grid, 0, axis), names[:axis] + names[axis + 1 :]
        if not names:
            yield ()
            return
        every = range(len(names))
        several = [
            group
            for count in range(2, len(names) + 1)
            for group in itertools.permutations(every, count)
        ]
        singles = [(axis,) for axis in every]
        yield from self._sharded(grid, names, slab, singles, even=True)
        yield from self._pinned(grid, names, slab)
        yield from self._sharded(grid, names, slab, several, even=True)
        yield from self._sharded(grid, names, slab, [*singles, *several], even=False)
        for order in itertools.permutations(every):
            flat = [self.held[at] for at in grid.transpose(order).reshape(-1).tolist()]
            axes = tuple(names[axis] for axis in order)
            yield from ((guess,) for guess in _flats(flat, axes, slab))

    def _pinned(
        self, grid: Ints, names: tuple[str, ...], slab: Box
    ) -> Iterator[tuple[Placement, ...]]:
        """An axis of which only some places hold anything, all of those the same."""
        for axis, name in enumerate(names):
            others = tuple(each for each in range(grid.ndim) if each != axis)
            holding = np.flatnonzero(self.some[grid].any(axis=others)).tolist()
            if holding and len(holding) < grid.shape[axis]:
                pin = Pin(name, holding[0], tuple(holding[1:]))
                rest = np.take(grid, holding[0], axis)
                for guess in self.of(rest, names[:axis] + names[axis + 1 :], slab):
                    yield (pin, *guess)

    def _sharded(
        self,
        grid: Ints,
        names: tuple[str, ...],
        slab: Box,
        groups: Sequence[tuple[int, ...]],
        even: bool,
    ) -> Iterator[tuple[Placement, ...]]:
        """A dim that a group of axes cuts, and what explains the rest. One block is tried first."""
        later: list[tuple[Placement, ...]] = []
        for group, dim in itertools.product(groups, range(slab.ndim)):
            others = tuple(axis for axis in range(grid.ndim) if axis not in group)
            ways = prod(grid.shape[axis] for axis in group)
            parts = grid.transpose((*group, *others)).reshape(ways, -1)
            axes = tuple(names[axis] for axis in group)
            held = [[self.held[at] for at in set(part)] for part in parts.tolist()]
            shard = _shard(axes if len(axes) > 1 else axes[0], dim, held, slab, even)
            if shard is None:
                continue
            if shard.blocks > 1:  # what it leaves is no box, so nothing can follow
                later.append((shard,))
                continue
            low = slab.lo[dim]
            high = min(low + shard.part(slab.shape[dim], ways), slab.hi[dim])
            inner = _slab(slab, dim, low, high)
            rest = parts[0].reshape([grid.shape[axis] for axis in others])
            for guess in self.of(rest, tuple(names[axis] for axis in others), inner):
                yield (shard, *guess)
        yield from later


def _slab(slab: Box, dim: int, low: int, high: int) -> Box:
    lo, hi = slab.lo, slab.hi
    return Box((*lo[:dim], low, *lo[dim + 1 :]), (*hi[:dim], high, *hi[dim + 1 :]))


def _shard(
    axes: str | tuple[str, ...], dim: int, parts: Sequence[Sequence[Boxes]], slab: Box, even: bool
) -> Shard | None:
    """The cut that leaves part `i` of a dim to the places of `parts[i]`, all of them together.

    `even`: as `torch.chunk` cuts; else in longer parts.
    """
    cuts = [_intervals(part, dim) for part in parts]
    blocks, ways = len(cuts[0]), len(cuts)
    if not blocks or slab.shape[dim] % blocks:
        return None
    copies = next((i for i, cut in enumerate(cuts) if cut != cuts[0]), ways)
    if copies == ways or ways % copies:
        return None
    size, part = slab.shape[dim] // blocks, cuts[0][0][1] - cuts[0][0][0]
    shard = Shard(axes, dim, 1 if even else part, blocks, copies)
    whole = part >= size and not even  # one place has it all, which is a pin
    if whole or shard.part(size, ways) != part:
        return None
    expected = (
        _expected(at // copies, part, size, blocks, slab.lo[dim]) for at in range(len(cuts))
    )
    return shard if all(a == b for a, b in zip(cuts, expected, strict=True)) else None


def _expected(index: int, part: int, size: int, blocks: int, low: int) -> list[Interval]:
    start, stop = min(index * part, size), min((index + 1) * part, size)
    bases = range(low, low + blocks * size, size)
    return [(base + start, base + stop) for base in bases] if start < stop else []


def _intervals(part: Sequence[Boxes], dim: int) -> list[Interval]:
    """What the boxes of some places cover of one dim, as disjoint intervals."""
    found: list[Interval] = []
    for low, high in sorted({(box.lo[dim], box.hi[dim]) for boxes in part for box in boxes}):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def _flats(flat: Sequence[Boxes], axes: tuple[str, ...], slab: Box) -> Iterator[Flat]:
    """Spans of a flattened slab, one after another: alone in a buffer, else with part and offset."""
    over = axes if len(axes) > 1 else axes[0]
    yield Flat(over)
    ends = [(place, _end(boxes, slab)) for place, boxes in enumerate(flat) if boxes]
    total = slab.volume
    if not ends or ends[-1][1] != total:
        return
    first, end = ends[0]
    if len(ends) == 1:  # whole in one place: any part that is long enough will do
        part = end = total
    elif len(ends) == 2:
        part = max(end, total - end)
    else:
        part = ends[1][1] - end
    offset = (first + 1) * part - end
    if offset:
        yield Flat(over, part=part, offset=offset)
    else:
        yield Flat(over, multiple=part)


def _end(boxes: Boxes, slab: Box) -> int:
    """Where a span ends that is lowered to these boxes."""
    last = [high - 1 - base for high, base in zip(boxes[-1].hi, slab.lo, strict=True)]
    return linear_index(last, slab.shape) + 1
