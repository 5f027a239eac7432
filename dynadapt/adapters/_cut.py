"""How tensor parallelism cuts a parameter: which blocks of the whole one a rank's part is.

DeepSpeed's AutoTP writes this down for its checkpoints, at live parameters and in files, as a map of
affine views (deepspeed/checkpoint/affine.py): read here are those that are boxes, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

from dynadapt.vps.box import Box, row_major_strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dynadapt.vps.layout import Row

__all__ = ["Cut", "UnknownCutError", "along", "cut_of_map", "rows_of_cut"]


class UnknownCutError(Exception):
    """Why a parameter's cut cannot be told."""


@dataclass(frozen=True)
class Cut:
    """Blocks of a whole parameter of `shape`, and where each lies in a rank's `local` tensor.

    `pieces` are (box in the local tensor, box in the whole one), of equal shapes.
    """

    shape: tuple[int, ...]
    local: tuple[int, ...]
    pieces: tuple[tuple[Box, Box], ...]


def along(
    shape: Sequence[int],
    widths: Sequence[Sequence[int]],
    dim: int,
    rank: int,
    stop: int | None = None,
) -> Cut:
    """A parameter that is several ones along `dim`, of which rank r has `widths[i][r]` of number i.

    Of the whole one the first `stop` exist, the rest is padding; by default all.

    >>> [str(whole) for _, whole in along((6, 2), [(2, 2), (1, 1)], 0, 1).pieces]
    ['[2:4,0:2]', '[5:6,0:2]']
    """
    shape = tuple(shape)
    local = (*shape[:dim], sum(own[rank] for own in widths), *shape[dim + 1 :])
    stop = shape[dim] if stop is None else min(stop, shape[dim])
    begins = accumulate((sum(own) for own in widths), initial=0)
    pieces, inside = [], 0
    for own, begin in zip(widths, begins, strict=False):
        lo = begin + sum(own[:rank])
        hi = min(lo + own[rank], stop)
        if lo < hi and all(n for i, n in enumerate(shape) if i != dim):
            pieces.append((_slab(local, dim, inside, inside + hi - lo), _slab(shape, dim, lo, hi)))
        inside += own[rank]
    return Cut((*shape[:dim], stop, *shape[dim + 1 :]), local, tuple(pieces))


def _slab(shape: tuple[int, ...], dim: int, lo: int, hi: int) -> Box:
    low = tuple(lo if i == dim else 0 for i in range(len(shape)))
    return Box(low, tuple(hi if i == dim else n for i, n in enumerate(shape)))


def cut_of_map(stored: Mapping[str, Any], rank: int, local: tuple[int, ...]) -> Cut:
    """The cut that an affine map describes; raises `UnknownCutError` for what is no box, or not `local`'s."""
    shape = _numbers(stored["logical_shape"])
    ranks = {int(each): own for each, own in stored["ranks"].items()}
    own = ranks.get(rank)
    told = _numbers(own["shard_shape"]) if own is not None else ()
    if own is None or told != local:
        raise UnknownCutError(f"rank {rank} should hold {list(told)}, and has {list(local)}")
    pieces = tuple(_boxes(own["pieces"], shape, local))
    if sum(inside.volume for inside, _ in pieces) != prod(local):
        raise UnknownCutError("its blocks are not all of it")
    return Cut(shape, local, pieces)


def _boxes(
    pieces: Sequence[Mapping[str, Any]], shape: tuple[int, ...], local: tuple[int, ...]
) -> Iterator[tuple[Box, Box]]:
    for piece in pieces:
        size = _numbers(piece["shape"])
        if not prod(size):
            continue
        if (scale := piece.get("scale", 1.0)) != 1.0:
            raise UnknownCutError(f"the rank holds {scale:g} times the value")
        (source, source_strides), (inside, inside_strides) = piece["source"], piece["dest"]
        strides = _numbers(source_strides), _numbers(inside_strides)
        if strides != (row_major_strides(shape), row_major_strides(local)):
            raise UnknownCutError("its blocks do not lie row by row")
        yield _box(inside, local, size), _box(source, shape, size)


def _numbers(value: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(n) for n in value)


def _box(offset: int, within: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    lo = []
    for stride in row_major_strides(within):
        at, offset = divmod(offset, stride)
        lo.append(at)
    box = Box(tuple(lo), tuple(a + n for a, n in zip(lo, shape, strict=True)))
    if any(hi > n for hi, n in zip(box.hi, within, strict=True)):
        raise UnknownCutError(f"its block {box} leaves {list(within)}")
    return box


def rows_of_cut(row: Row, cut: Cut) -> Iterator[Row]:
    """A row of a rank's part as rows of the whole parameter, over the same buffer."""
    for local, whole in cut.pieces:
        inner = row.box.intersect(local)
        if inner is not None:
            steps = zip(inner.lo, row.box.lo, row.strides, strict=True)
            offset = row.offset + sum((a - b) * stride for a, b, stride in steps)
            yield replace(row, box=inner.shifted(local.lo, whole.lo), offset=offset)
