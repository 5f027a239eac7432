"""Which elements of a buffer belong to no row."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dynadapt.vps.layout import Row

__all__ = ["gaps"]

LIMIT = 65536
"""Stretches that a buffer's rows may be made of."""


def gaps(rows: Iterable[Row], numel: int) -> tuple[tuple[int, int], ...] | None:
    """The stretches `[start, stop)` of a buffer of `numel` elements that no row covers, in order.

    None where the rows lie in too many pieces to say.

    >>> from dynadapt.vps.box import Box
    >>> from dynadapt.vps.keys import Key
    >>> from dynadapt.vps.layout import Row
    >>> gaps([Row(Key("w", "param"), Box((0, 0), (2, 3)), "b", 1, (4, 1))], 10)
    ((0, 1), (4, 5), (8, 10))
    """
    covered: list[tuple[int, int]] = []
    for row in rows:
        for start, stop in _stretches(row):
            covered.append((start, stop))
            if len(covered) > LIMIT:
                return None
    found = []
    at = 0
    for start, stop in sorted(covered):
        if start > at:
            found.append((at, start))
        at = max(at, stop)
    if at < numel:
        found.append((at, numel))
    return tuple(found)


def _stretches(row: Row) -> Iterator[tuple[int, int]]:
    """A row's elements in memory: its fastest dims together, as far as they are dense."""
    dims = [(stride, size) for stride, size in zip(row.strides, row.box.shape, strict=True)]
    dims = sorted((stride, size) for stride, size in dims if size > 1)
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    for place in product(*(range(size) for _, size in dims)):
        start = row.offset + sum(x * stride for x, (stride, _) in zip(place, dims, strict=True))
        yield start, start + length
