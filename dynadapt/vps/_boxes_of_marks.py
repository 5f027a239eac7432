"""Elements found one by one in a buffer, put together to as few boxes with strides as may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dynadapt.vps.box import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["Placed", "boxes_of"]


class Placed(NamedTuple):
    """A box of one tensor; element `x` at `offset + sum((x_d - lo_d) * strides_d)` of a buffer."""

    box: Box
    offset: int
    strides: tuple[int, ...]


class _Pieces(NamedTuple):
    """Boxes by column: `lo`, `hi`, `strides` are (pieces, dims), `offset` (pieces,).

    A stride of 0 is one that is not known yet: the piece has one element in that dim.
    """

    lo: Ints
    hi: Ints
    offset: Ints
    strides: Ints


def boxes_of(linear: Ints, at: Ints, shape: Sequence[int], most: int) -> tuple[Placed, ...] | None:
    """Boxes, sorted, of elements `linear` (row-major, ascending, each once) that lie at `at`.

    Pieces grow from the last dim to the first, as long as the buffer's step is one and the same. A
    span of a flattened tensor gives the boxes of `Span.boxes`, a slice of a matrix one box with the
    matrix's strides, whatever the order of its dims in memory. None where there are more than `most`.

    >>> boxes_of(np.array([1, 2, 4, 5]), np.array([7, 9, 8, 10]), (2, 3), 8)
    (Placed(box=Box(lo=(0, 1), hi=(2, 3)), offset=7, strides=(1, 2)),)
    """
    pieces = _lines(linear, at, tuple(shape))
    for dim in range(len(shape) - 2, -1, -1):
        if shape[dim] > 1 and len(pieces.offset) > 1:
            pieces = _merged(pieces, dim)
    if len(pieces.offset) > most:
        return None
    found = zip(*(column.tolist() for column in pieces), strict=True)
    return tuple(
        sorted(
            Placed(box := Box(tuple(lo), tuple(hi)), offset, _completed(box, strides))
            for lo, hi, offset, strides in found
        )
    )


def _lines(linear: Ints, at: Ints, shape: tuple[int, ...]) -> _Pieces:
    """Elements to runs along the last dim."""
    width = shape[-1] if shape else 1
    link = (np.diff(linear) == 1) & (linear[1:] % width != 0)
    step = np.diff(at)
    starts = _segments(link, step)
    count = np.diff(np.append(starts, linear.size))
    # Coordinates are only computed for the runs: there may be millions of elements.
    lo = np.zeros((starts.size, len(shape)), np.int64)
    rest = linear[starts]
    for dim in range(len(shape) - 1, -1, -1):
        rest, lo[:, dim] = np.divmod(rest, shape[dim])
    hi, strides = lo + 1, np.zeros_like(lo)
    if shape:
        hi[:, -1] = lo[:, -1] + count
        strides[:, -1] = _step_of(starts, count, step)
    return _Pieces(lo, hi, at[starts], strides)


def _merged(pieces: _Pieces, dim: int) -> _Pieces:
    """Pieces that follow one another in `dim`, are alike in all other dims and equally far apart."""
    others = [d for d in range(pieces.lo.shape[1]) if d != dim]
    later = [d for d in others if d > dim]
    # Before a dim was merged, every piece has one element in it: no need to compare the ends there.
    alike = np.column_stack(
        [pieces.lo[:, others], pieces.hi[:, later], pieces.strides[:, later], pieces.lo[:, dim]]
    )
    order = np.lexsort(alike.T[::-1])
    alike, pieces = alike[order], _Pieces(*(column[order] for column in pieces))
    link = np.diff(alike[:, -1]) == 1
    link &= (alike[1:, :-1] == alike[:-1, :-1]).all(axis=1)
    step = np.diff(pieces.offset)
    starts = _segments(link, step)
    count = np.diff(np.append(starts, len(order)))
    lo, hi, offset, strides = (column[starts] for column in pieces)
    hi[:, dim] = lo[:, dim] + count
    strides[:, dim] = _step_of(starts, count, step)
    return _Pieces(lo, hi, offset, strides)


def _step_of(starts: Ints, count: Ints, step: Ints) -> Ints:
    """The step inside each segment, 0 for one of a single piece."""
    if not step.size:
        return np.zeros_like(starts)
    return np.where(count > 1, step[np.minimum(starts, step.size - 1)], 0)


def _segments(link: NDArray[np.bool_], step: Ints) -> Ints:
    """Where segments start in a row of things: all links of a segment hold and have one step.

    A thing between two different steps goes to the longer run of equal steps, else to the smaller
    step: a jump from one block to the next must not be taken for a stride.
    """
    valid = link & (step > 0)  # rows know no negative strides
    if not valid.size:
        return np.zeros(1, np.int64)
    fresh = np.ones(valid.size, bool)
    fresh[1:] = ~(valid[1:] & valid[:-1] & (step[1:] == step[:-1]))
    run = np.cumsum(fresh) - 1
    length = np.bincount(run)[run] * valid
    left, right = length[:-1], length[1:]
    takes_left = (left > right) | ((left == right) & (step[:-1] < step[1:]))
    kept = valid.copy()
    kept[1:] &= ~(fresh[1:] & takes_left)
    kept[:-1] &= ~(fresh[1:] & ~takes_left)
    return np.concatenate(([0], np.flatnonzero(~kept) + 1))


def _completed(box: Box, strides: Sequence[int]) -> tuple[int, ...]:
    """Strides with those of one-element dims filled in, as if the later dims lay closely packed."""
    found = list(strides)
    for dim in range(box.ndim - 1, -1, -1):
        inner = range(dim + 1, box.ndim)
        found[dim] = found[dim] or max((found[d] * box.shape[d] for d in inner), default=1)
    return tuple(found)
