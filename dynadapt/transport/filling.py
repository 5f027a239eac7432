"""The buffers of files filled in order, each by one thread.

What is taken at a time is written, and its sums are taken while it is in the cache. Writes of 2 MiB and
more are slow on some systems.
"""

from __future__ import annotations

import os
from threading import local
from typing import TYPE_CHECKING, Any

import numpy as np
from isal.isal_zlib import crc32, crc32_combine

from dynadapt.errors import Finding, Refused
from dynadapt.files import FileBuffer, raw_dtype, unwritable
from dynadapt.files import write_at as _write
from dynadapt.transport.casts import cast, same_values
from dynadapt.transport.certificate import weighted_sum
from dynadapt.transport.progress import TELL, Progress, Stopped
from dynadapt.transport.source_sums import Taken
from dynadapt.transport.sources import Sources, inside, view_of
from dynadapt.transport.weights import MASK
from dynadapt.vps.box import Box, row_major_strides
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from dynadapt.transport.plan import Match, Narrow, Pair
    from dynadapt.transport.watch import Heard
    from dynadapt.vps.layout import Row

    _Part = tuple[Row, Box, NDArray[Any]]

__all__ = ["WRITE", "Writer"]

WRITE = 1536 << 10
"""Bytes of one write."""

EARLY = 32 << 20
"""Bytes of a buffer after which the disk is told to begin with them."""

LATE = 1 << 20
"""Bytes that the disk is not told of at a buffer's end, if they are fewer: it has enough to do by then."""

MARK = 64 << 20
"""Bytes of a buffer after which it is told how far it is, for who might continue."""


class _Filling:
    """One buffer as it is filled: how far it is, in bytes, with what is told of it."""

    def __init__(
        self, fd: int, name: str, buffer: FileBuffer, heard: Heard, fresh: bool, start: Progress
    ) -> None:
        self._fd, self._name, self.buffer = fd, name, buffer
        self._heard, self._fresh = heard, fresh
        self._sums, self.done, self._crc, self.read = (
            list(start.sums),
            start.done,
            start.crc,
            start.read,
        )
        self.taken: list[Taken] = []
        self._marked = self._begun = start.done
        self._untold = 0

    def progress(self) -> Progress:
        """How far it is."""
        return Progress(tuple(self._sums), self.done, self._crc, self.read)

    def zeros(self, stop: int) -> None:
        """Zeros up to a byte; written if the file is not fresh."""
        while self.done < stop:
            part = memoryview(_ZEROS)[: min(stop - self.done, len(_ZEROS))]
            if not self._fresh:
                _write(self._fd, part, self.buffer.offset + self.done)
            self._crc = crc32(part, self._crc)
            self.done += len(part)

    def put(self, data: memoryview, crc: int) -> None:
        """Write bytes, whose check sum is known."""
        for i in range(0, len(data), WRITE):
            _write(self._fd, data[i : i + WRITE], self.buffer.offset + self.done + i)
        self._crc = crc32_combine(self._crc, crc, len(data))
        self.done += len(data)
        if self.done - self._begun >= EARLY:
            self._early(self.done)
        self._untold += len(data)
        if self._untold >= TELL:
            self._tell()

    def end_row(self, total: int) -> None:
        """A row is whole, and this is its sum."""
        self._sums.append(total)
        if self.done - self._marked >= MARK:
            self._marked = self.done
            self._heard.mark(self._name, self.progress())

    def end(self) -> None:
        """All rows are whole."""
        self.zeros(self.buffer.nbytes)
        if self.done - self._begun >= LATE:
            self._early(self.done)
        self._tell()
        self._heard.mark(self._name, self.progress())

    def _early(self, stop: int) -> None:
        if stop > self._begun:
            nbytes = stop - self._begun
            self._heard.early(self.buffer.path, self.buffer.offset + self._begun, nbytes)
            self._begun = stop

    def _tell(self) -> None:
        self._heard.bytes(self._untold)
        self._untold = 0


class Writer:
    """Fills buffers; one call of `fill` a thread. `heard` is told how far each is."""

    def __init__(
        self,
        matched: Match,
        sources: Sources,
        narrow: Narrow,
        piece: int,
        begun: Mapping[str, Progress] | None,
        heard: Heard,
    ) -> None:
        self._matched, self._sources, self._narrow = matched, sources, narrow
        self._most, self._begun, self._heard = piece, begun, heard
        self._own = local()

    def _staging(self, count: int, dtype: str) -> NDArray[Any]:
        if not hasattr(self._own, "staging"):
            self._own.staging = np.empty(self._most, np.uint8)
        nbytes = count * itemsize(dtype)
        if nbytes > self._most:
            return np.empty(count, raw_dtype(dtype))
        found: NDArray[Any] = self._own.staging[:nbytes].view(raw_dtype(dtype))
        return found

    def fill(self, name: str, buffer: FileBuffer, rows: Sequence[Row]) -> Progress:
        """Write one buffer from its first byte, or from where it was left, to its last."""
        try:
            fd = os.open(buffer.path, os.O_RDWR)
            try:
                return self._fill(fd, name, buffer, rows)
            finally:
                os.close(fd)
        except OSError as error:
            raise Refused([unwritable(buffer.path, error)]) from error

    def _fill(self, fd: int, name: str, buffer: FileBuffer, rows: Sequence[Row]) -> Progress:
        size = itemsize(buffer.dtype)
        start = self._kept(fd, name, buffer)
        if start.done == buffer.nbytes and len(start.sums) == len(rows):
            return start
        # a fresh file's gaps are zeros as they are
        filling = _Filling(fd, name, buffer, self._heard, self._begun is None, start)
        for row in rows[len(start.sums) :]:
            if row.strides != row_major_strides(row.box.shape) or row.offset * size < filling.done:
                raise ValueError(f"{row.key} {row.box} is not laid out in order")
            filling.zeros(row.offset * size)
            pair, total = self._matched.by_target.get(row.key), 0
            if pair is None or pair.fill:
                filling.zeros((row.offset + row.box.volume) * size)
            else:
                total = self._row(filling, pair, row)
            filling.end_row(total & MASK)
        filling.end()
        return filling.progress()._replace(taken=tuple(filling.taken))

    def _row(self, filling: _Filling, pair: Pair, row: Row) -> int:
        """Write a row piece by piece; returns its sum."""
        dtype, total = filling.buffer.dtype, 0
        most = self._elements(pair, dtype)
        for box, serving in self._sources.pieces(pair.source.key, row.box, most):
            if self._heard.is_set():
                raise Stopped(filling.buffer.path)
            piece, parts = self._piece(pair, box, serving, dtype)
            total += weighted_sum(piece, box, row.key)  # first: it maps pages faster than a write
            data = _bytes(piece)
            crc = crc32(data)
            filling.put(data, crc)
            filling.taken += self._taken(parts, piece, crc)
            filling.read += box.volume * itemsize(pair.source.dtype)
        return total

    def _taken(self, parts: Iterable[_Part], piece: NDArray[Any], crc: int) -> Iterator[Taken]:
        """What of the source a piece was, where its file has a check sum of it."""
        for row, box, found in parts:
            if self._sources.buffer(row).crc and found.flags.c_contiguous:
                own = crc if found is piece else crc32(_bytes(found))
                start = row.offset_of(box.lo) * found.itemsize
                yield Taken(row.buffer, start, found.nbytes, own)

    def _elements(self, pair: Pair, dtype: str) -> int:
        """How many are taken at a time: few where they are cast, which takes room of its own."""
        nbytes = self._most if pair.source.dtype == dtype else self._most // 4
        return max(nbytes // itemsize(dtype), 1)

    def _kept(self, fd: int, name: str, buffer: FileBuffer) -> Progress:
        """How far a buffer had come before, if what was written then is still there."""
        known = (self._begun or {}).get(name)
        if known is None or not 0 <= known.done <= buffer.nbytes:
            return Progress()
        crc, at = 0, 0
        while at < known.done and not self._heard.is_set():
            data = os.pread(fd, min(self._most, known.done - at), buffer.offset + at)
            if not data:
                return Progress()
            crc, at = crc32(data, crc), at + len(data)
        if crc != known.crc:
            return Progress()
        self._heard.kept(known.done)
        return known

    def _piece(
        self, pair: Pair, box: Box, rows: Sequence[Row], dtype: str
    ) -> tuple[NDArray[Any], list[_Part]]:
        """The elements of a box in the target's dtype, and the parts of the source that they were.

        Straight from the map where that can be.
        """
        kind, parts = pair.source.dtype, []
        if len(rows) == 1:
            found = view_of(self._sources.array(rows[0]), rows[0], box)
            parts.append((rows[0], box, found))
            if kind != dtype:
                return np.asarray(self._cast(pair, found, dtype, box), order="C"), parts
            if found.flags.c_contiguous:
                return found, parts
            parts.clear()
        out = self._staging(box.volume, dtype).reshape(box.shape)
        for row in rows:
            part = row.box.intersect(box)
            if part is None:
                continue
            found = view_of(self._sources.array(row), row, part)
            parts.append((row, part, found))
            if kind != dtype:
                found = self._cast(pair, found, dtype, part)
            out[inside(part, box)] = found
        return out, parts

    def _cast(self, pair: Pair, array: NDArray[Any], dtype: str, box: Box) -> NDArray[Any]:
        kind = pair.source.dtype
        found = cast(array, kind, dtype)
        narrows = itemsize(dtype) <= itemsize(kind)
        rounds = pair.target.derived  # a copy is rounded by its nature
        if (
            narrows
            and not rounds
            and self._narrow == "if-exact"
            and not _exact(array, found, kind, dtype)
        ):
            cause = f"{kind} would lose bits as {dtype}"
            fix = f"ask for it by --dtype (dtype=), or write a format that keeps {kind}"
            raise Refused([Finding("narrowing", f"{pair.target.key} {box}", cause, fix)])
        if narrows and not rounds and (lost := _overflown(array, found, kind, dtype)):
            cause = f"{lost:,} values of {kind} would be infinite as {dtype}"
            fix = "ask for bfloat16 or float32 by --dtype (dtype=), or name it in --keep-dtype (keep_dtype=)"
            raise Refused([Finding("narrowing", f"{pair.target.key} {box}", cause, fix)])
        return found


def _overflown(array: NDArray[Any], found: NDArray[Any], kind: str, dtype: str) -> int:
    """How many finite values are infinite now: that is no rounding."""
    now = (found & 0x7FFF) == 0x7F80 if dtype == "bfloat16" else np.isinf(found)
    if not now.any():
        return 0
    was = (array & 0x7FFF) == 0x7F80 if kind == "bfloat16" else np.isinf(array)
    return int((now & ~was).sum())


def _exact(array: NDArray[Any], found: NDArray[Any], kind: str, dtype: str) -> bool:
    back = cast(found, dtype, kind)
    if kind == "bfloat16":
        array, back = cast(array, kind, "float32"), cast(back, kind, "float32")
    return same_values(array, back)


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


_ZEROS = bytes(1 << 16)
