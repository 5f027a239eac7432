"""Rows of files as arrays: boxes cut in pieces, and each read where it lies, or put together."""

from __future__ import annotations

from collections import OrderedDict
from itertools import product
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.files import MAPS
from dynadapt.vps.box import Box, linear_index

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import Row, RowLayout

__all__ = ["PIECE", "Sources", "boxes_of", "inside", "view_of"]

PIECE = 3 << 20
"""Bytes that a thread takes at a time, at most."""

FEW = 64 << 10
"""Elements of a stretch from which on it is worth to be written alone."""


def view_of(array: NDArray[Any], row: Row, box: Box) -> NDArray[Any]:
    """The elements of `box` in a row over a 1-D array: a view."""
    size = array.itemsize
    start = row.offset_of(box.lo)
    strides = tuple(step * size for step in row.strides)
    last = start + sum((n - 1) * s for n, s in zip(box.shape, row.strides, strict=True))
    if start < 0 or last >= array.size:
        raise ValueError(f"{row.key} {box} leaves its buffer")
    found: NDArray[Any] = np.ndarray(box.shape, array.dtype, array, start * size, strides)
    found.flags.writeable = False
    return found


def boxes_of(box: Box, most: int) -> Iterator[Box]:
    """A box in row-major stretches of at most `most` elements, in order; each a box.

    >>> [str(b) for b in boxes_of(Box((0, 0), (3, 4)), 8)]
    ['[0:2,0:4]', '[2:3,0:4]']
    """
    if box.volume <= most:
        yield box
        return
    inner, dim = 1, box.ndim
    while dim and inner * (box.hi[dim - 1] - box.lo[dim - 1]) <= most:
        dim -= 1
        inner *= box.hi[dim] - box.lo[dim]
    cut = dim - 1  # the dim that is cut; those before it one by one, those after it whole
    step = max(most // inner, 1)
    outer = [range(lo, hi) for lo, hi in zip(box.lo[:cut], box.hi[:cut], strict=True)]
    for at in product(*outer):
        ends = tuple(n + 1 for n in at)
        for lo in range(box.lo[cut], box.hi[cut], step):
            hi = min(lo + step, box.hi[cut])
            yield Box((*at, lo, *box.lo[dim:]), (*ends, hi, *box.hi[dim:]))


def inside(part: Box, box: Box) -> tuple[slice, ...]:
    """Where a part of a box lies in an array of the box."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(part.lo, part.hi, box.lo, strict=True))


def _in_order(parts: list[tuple[Box, Row]], box: Box) -> tuple[tuple[Box, Row], ...]:
    """Parts of a box as stretches that follow one another in it, row-major; none if they do not."""
    found, at = [], 0
    stretches = []
    for part, row in parts:
        lo, hi = (
            tuple(x - o for x, o in zip(end, box.lo, strict=True)) for end in (part.lo, part.hi)
        )
        first = linear_index(lo, box.shape)
        last = linear_index(tuple(x - 1 for x in hi), box.shape)
        stretches.append((first, last + 1, part, row))
    for first, stop, part, row in sorted(stretches, key=lambda s: s[0]):
        if first != at or stop - first != part.volume:
            return ()
        found.append((part, row))
        at = stop
    return tuple(found) if at == box.volume else ()


class Sources:
    """The source's rows by key, and the arrays behind them."""

    def __init__(self, layout: RowLayout, buffers: Mapping[str, Any]) -> None:
        self._layout, self._buffers = layout, buffers
        self._rows: dict[Key, tuple[Row, ...]] = {}
        self._arrays: OrderedDict[str, NDArray[Any]] = OrderedDict()
        self._lock = Lock()

    def array(self, row: Row) -> NDArray[Any]:
        """The buffer under a row; a file is opened once, not for every piece of it.

        Of many the last ones are kept: each holds its file's map, and that a descriptor.
        """
        with self._lock:
            known = self._arrays.get(row.buffer)
            if known is not None:
                self._arrays.move_to_end(row.buffer)
                return known
        found: NDArray[Any] = self._buffers[row.buffer].array()
        with self._lock:
            self._arrays[row.buffer] = found
            while len(self._arrays) > MAPS:
                self._arrays.popitem(last=False)
        return found

    def buffer(self, row: Row) -> Any:
        """The buffer under a row."""
        return self._buffers[row.buffer]

    def rows(self, key: Key, box: Box) -> list[Row]:
        """Rows that serve a box together; of replicas the first."""
        every = self._rows.get(key)
        if every is None:
            first: dict[Box, Row] = {}
            with self._lock:
                for _, row in self._layout.held(key):
                    first.setdefault(row.box, row)
            every = self._rows[key] = tuple(first[b] for b in sorted(first))
        found = [row for row in every if row.box.intersect(box) is not None]
        whole = next((row for row in found if row.box.contains(box)), None)
        return found if whole is None else [whole]

    def pieces(self, key: Key, box: Box, most: int) -> Iterator[tuple[Box, list[Row]]]:
        """A box in row-major stretches of at most `most` elements, in order, and the rows that serve each.

        It is cut where its rows end, so that each piece can be taken from where it lies. If they are no
        stretches, or short ones, they must be put together, and it is cut anywhere.
        """
        parts = [(part, row) for row in self.rows(key, box) if (part := row.box.intersect(box))]
        cuts = _in_order(parts, box) if len(parts) * FEW <= box.volume else ()
        for part, row in cuts:
            for piece in boxes_of(part, most):
                yield piece, [row]
        for piece in () if cuts else boxes_of(box, most):
            yield piece, self.rows(key, piece)

    def read(self, key: Key, box: Box) -> NDArray[Any]:
        """The elements of a box, raw: a view where one row has them all, else put together."""
        rows = self.rows(key, box)
        if len(rows) == 1:
            return view_of(self.array(rows[0]), rows[0], box)
        out = np.empty(box.shape, self.array(rows[0]).dtype)
        for row in rows:
            part = row.box.intersect(box)
            if part is not None:
                out[inside(part, box)] = view_of(self.array(row), row, part)
        return out
