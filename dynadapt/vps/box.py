"""Half-open N-D boxes, flat spans, and the arithmetic between them.

Coordinates are Python integers and literal: nothing is clamped, a negative value is an error. A
0-dim tensor is covered by the one box of no dims, whose volume is 1; a tensor with a zero in its
shape has no elements and needs no box. All functions are pure and know no framework.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod
from operator import ge, le, sub
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "Box",
    "Span",
    "atoms",
    "boxes_in_span",
    "count_below",
    "linear_index",
    "row_major_strides",
    "uncovered",
]

MAX_DIMS = 8


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements `lo <= x < hi` of a tensor, per dim.

    >>> Box((0, 2), (4, 6)).intersect(Box((2, 0), (8, 3)))
    Box(lo=(2, 2), hi=(4, 3))
    """

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lo) != len(self.hi):
            raise ValueError(f"box {self.lo}..{self.hi} has two lengths")
        if len(self.lo) > MAX_DIMS:
            raise ValueError(f"box {self.lo}..{self.hi} has more than {MAX_DIMS} dims")
        if not all(map(le, self.lo, self.hi)) or min(self.lo, default=0) < 0:
            raise ValueError(f"box {self.lo}..{self.hi} needs 0 <= lo <= hi in every dim")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor.

        >>> Box.whole((2, 3))
        Box(lo=(0, 0), hi=(2, 3))
        """
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.lo)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dim, in elements."""
        return tuple(map(sub, self.hi, self.lo))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a box of no dims."""
        return prod(map(sub, self.hi, self.lo))

    def intersect(self, other: Box) -> Box | None:
        """The common elements, or None where there are none."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return None if any(map(ge, lo, hi)) else Box(lo, hi)

    def shifted(self, origin: Sequence[int], to: Sequence[int]) -> Box:
        """The box as it lies once the point `origin` is moved to the point `to`.

        >>> print(Box((1, 2), (3, 4)).shifted((1, 0), (5, 0)))
        [5:7,2:4]
        """
        moves = [b - a for a, b in zip(origin, to, strict=True)]
        return Box(
            tuple(at + move for at, move in zip(self.lo, moves, strict=True)),
            tuple(at + move for at, move in zip(self.hi, moves, strict=True)),
        )

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box."""
        return all(map(le, self.lo, other.lo)) and all(map(ge, self.hi, other.hi))

    def __str__(self) -> str:
        dims = ",".join(f"{low}:{high}" for low, high in zip(self.lo, self.hi, strict=True))
        return f"[{dims}]"


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Elements `[start, stop)` of a tensor flattened row-major.

    >>> Span(4, 10).boxes((4, 3))
    (Box(lo=(1, 1), hi=(2, 3)), Box(lo=(2, 0), hi=(3, 3)), Box(lo=(3, 0), hi=(4, 1)))
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"span [{self.start}, {self.stop}) needs 0 <= start <= stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def intersect(self, other: Span) -> Span | None:
        """The common elements, or None where there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def boxes(self, shape: Sequence[int]) -> tuple[Box, ...]:
        """Lower the span to at most `2 * ndim - 1` boxes, in row-major order."""
        total = prod(shape)
        if self.stop > total:
            raise ValueError(
                f"span [{self.start}, {self.stop}) leaves a tensor of {total} elements"
            )
        return tuple(_span_boxes(self.start, self.stop, tuple(shape), ()))


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def linear_index(coordinate: Sequence[int], shape: Sequence[int]) -> int:
    """Row-major index of one coordinate.

    >>> linear_index((1, 2), (4, 3))
    5
    """
    index = 0
    for value, size in zip(coordinate, shape, strict=True):
        index = index * size + value
    return index


def _span_boxes(
    start: int, stop: int, shape: tuple[int, ...], prefix: tuple[int, ...]
) -> Iterator[Box]:
    """Boxes of `[start, stop)` inside the sub-tensor at `prefix`, in order."""
    if start >= stop:
        return
    depth = len(prefix)
    tail = (1,) * depth

    def box(lo: tuple[int, ...], hi: tuple[int, ...]) -> Box:
        ones = tuple(p + q for p, q in zip(prefix, tail, strict=True))
        return Box(prefix + lo, ones + hi)

    if depth == len(shape):
        yield box((), ())
        return
    inner = prod(shape[depth + 1 :])
    rest = shape[depth + 1 :]
    first, first_rem = divmod(start, inner)
    last, last_rem = divmod(stop, inner)
    if first == last:
        yield from _span_boxes(first_rem, last_rem, shape, (*prefix, first))
        return
    if first_rem:
        yield from _span_boxes(first_rem, inner, shape, (*prefix, first))
        first += 1
    if first < last:
        yield box((first, *(0 for _ in rest)), (last, *rest))
    if last_rem:
        yield from _span_boxes(0, last_rem, shape, (*prefix, last))


def count_below(box: Box, shape: Sequence[int], index: int) -> int:
    """How many elements of `box` have a row-major index below `index`.

    >>> count_below(Box((0, 1), (2, 3)), (2, 4), 6)
    3
    """
    if index <= 0:
        return 0
    if index >= prod(shape):
        return box.volume
    count, volume = 0, box.volume
    strides = row_major_strides(shape)
    for low, high, stride in zip(box.lo, box.hi, strides, strict=True):
        if not volume:
            break
        at, index = divmod(index, stride)
        volume //= high - low
        count += volume * (min(max(at, low), high) - low)
        if not low <= at < high:
            break
    return count


def boxes_in_span(box: Box, shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The part of `box` whose row-major indices lie in `[start, stop)`, as boxes in order.

    >>> boxes_in_span(Box((0, 1), (2, 3)), (2, 4), 2, 6)
    (Box(lo=(0, 2), hi=(1, 3)), Box(lo=(1, 1), hi=(2, 2)))
    """
    if not box.volume:
        return ()
    first = linear_index(box.lo, shape)
    last = linear_index(tuple(high - 1 for high in box.hi), shape)
    if start <= first and last < stop:
        return (box,)
    span = Span(max(start, first), max(min(stop, last + 1), start, first))
    if span.start >= min(stop, last + 1):
        return ()
    parts = (piece.intersect(box) for piece in span.boxes(shape))
    return tuple(part for part in parts if part is not None)


def atoms(boxes: Iterable[Box]) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """The common refinement of boxes: disjoint cells, each with the numbers of the boxes that hold it.

    Boxes that are equal or disjoint stay whole; only where boxes overlap in part is anything cut. The
    cells come in the order of their lower corner.

    >>> for cell, holders in atoms([Box((0,), (4,)), Box((2,), (6,))]):
    ...     print(cell, holders)
    [0:2] (0,)
    [2:4] (0, 1)
    [4:6] (1,)
    """
    classes: dict[Box, list[int]] = {}
    for number, box in enumerate(boxes):
        if box.volume:
            classes.setdefault(box, []).append(number)
    cells: list[tuple[Box, tuple[int, ...]]] = []
    distinct = sorted(classes)
    for group in _overlapping(distinct):
        if len(group) == 1:
            cells.append((group[0], tuple(classes[group[0]])))
        else:
            cells.extend(_refine(group, classes))
    return tuple(sorted(cells))


def _overlapping(boxes: list[Box]) -> list[list[Box]]:
    """Split sorted boxes into groups such that boxes of different groups share no element."""
    if not boxes or not boxes[0].ndim:
        return [boxes] if boxes else []
    parent = list(range(len(boxes)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    active: list[int] = []
    for i, box in enumerate(boxes):  # sorted by lo, so a sweep over dim 0 sees all overlaps
        active = [j for j in active if boxes[j].hi[0] > box.lo[0]]
        for j in active:
            if find(j) != find(i) and box.intersect(boxes[j]) is not None:
                parent[find(j)] = find(i)
        active.append(i)
    groups: dict[int, list[Box]] = {}
    for i, box in enumerate(boxes):
        groups.setdefault(find(i), []).append(box)
    return list(groups.values())


def _refine(
    group: list[Box], classes: dict[Box, list[int]]
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Cells of boxes that overlap in part: a slab sweep, dim by dim."""

    def sweep(
        members: list[Box], dim: int, lo: tuple[int, ...], hi: tuple[int, ...]
    ) -> Iterator[tuple[Box, tuple[int, ...]]]:
        if dim == group[0].ndim:
            yield Box(lo, hi), tuple(sorted(n for box in members for n in classes[box]))
            return
        cuts = sorted({v for box in members for v in (box.lo[dim], box.hi[dim])})
        for low, high in itertools.pairwise(cuts):
            inside = [box for box in members if box.lo[dim] <= low and high <= box.hi[dim]]
            if inside:
                yield from sweep(inside, dim + 1, (*lo, low), (*hi, high))

    yield from sweep(group, 0, (), ())


def uncovered(boxes: Iterable[Box], within: Box) -> tuple[Box, ...]:
    """The parts of `within` that no box holds.

    >>> uncovered([Box((0,), (2,)), Box((3,), (5,))], Box((0,), (6,)))
    (Box(lo=(2,), hi=(3,)), Box(lo=(5,), hi=(6,)))
    """
    clipped = (box.intersect(within) for box in boxes)
    members = sorted({box for box in clipped if box is not None and box.volume})
    if not within.volume:
        return ()
    return tuple(_gaps(members, within, 0))


def _gaps(members: list[Box], within: Box, dim: int) -> Iterator[Box]:
    if not members:
        yield within
        return
    if dim == within.ndim:
        return
    cuts = {within.lo[dim], within.hi[dim]}
    cuts |= {v for box in members for v in (box.lo[dim], box.hi[dim])}
    edges = sorted(cuts)
    for low, high in itertools.pairwise(edges):
        inside = [box for box in members if box.lo[dim] <= low and high <= box.hi[dim]]
        slab = Box(
            (*within.lo[:dim], low, *within.lo[dim + 1 :]),
            (*within.hi[:dim], high, *within.hi[dim + 1 :]),
        )
        yield from _gaps(inside, slab, dim + 1)
