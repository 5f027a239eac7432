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

MARK = 64 << 20
"""Bytes of a buffer after which it is told how far it is, for who might continue."""


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
        fresh = self._begun is None  # a fresh file's gaps are zeros as they are
        sums, at, crc, read = list(start.sums), start.done // size, start.crc, start.read
        marked = begun = start.done
        taken: list[Taken] = []
        untold = 0
        if start.done < buffer.nbytes or len(sums) < len(rows):
            for row in rows[len(sums) :]:
                if row.strides != row_major_strides(row.box.shape) or row.offset < at:
                    raise ValueError(f"{row.key} {row.box} is not laid out in order")
                crc = self._zeros(fd, buffer, at, row.offset, crc, fresh)
                pair, at, total = self._matched.by_target.get(row.key), row.offset, 0
                if pair is None or pair.fill:
                    crc = self._zeros(fd, buffer, at, at + row.box.volume, crc, fresh)
                    at += row.box.volume
                else:
                    most = self._elements(pair, buffer.dtype)
                    for box, serving in self._sources.pieces(pair.source.key, row.box, most):
                        if self._heard.is_set():
                            raise Stopped(buffer.path)
                        piece, parts = self._piece(pair, box, serving, buffer.dtype)
                        total += weighted_sum(piece, box, row.key)
                        data = _bytes(piece)
                        own = crc32(data)
                        crc = crc32_combine(crc, own, len(data))
                        taken += self._taken(parts, piece, own)
                        for i in range(0, len(data), WRITE):
                            part = data[i : i + WRITE]
                            _write(fd, part, buffer.offset + at * size + i)
                        at += box.volume
                        read += box.volume * itemsize(pair.source.dtype)
                        if at * size - begun >= EARLY:
                            self._early(buffer, begun, at * size)
                            begun = at * size
                        untold += len(data)
                        if untold >= TELL:
                            self._heard.bytes(untold)
                            untold = 0
                sums.append(total & MASK)
                if at * size - marked >= MARK:
                    marked = at * size
                    self._heard.mark(name, Progress(tuple(sums), marked, crc, read))
            crc = self._zeros(fd, buffer, at, buffer.numel, crc, fresh)
            self._early(buffer, begun, buffer.nbytes)
            self._heard.bytes(untold)
            self._heard.mark(name, Progress(tuple(sums), buffer.nbytes, crc, read))
        return Progress(tuple(sums), buffer.nbytes, crc, read, tuple(taken))

    def _taken(self, parts: Iterable[_Part], piece: NDArray[Any], crc: int) -> Iterator[Taken]:
        """What of the source a piece was, where its file has a check sum of it."""
        for row, box, found in parts:
            if self._sources.buffer(row).crc and found.flags.c_contiguous:
                own = crc if found is piece else crc32(_bytes(found))
                start = row.offset_of(box.lo) * found.itemsize
                yield Taken(row.buffer, start, found.nbytes, own)

    def _early(self, buffer: FileBuffer, start: int, stop: int) -> None:
        if stop > start:
            self._heard.early(buffer.path, buffer.offset + start, stop - start)

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

    def _zeros(
        self, fd: int, buffer: FileBuffer, start: int, stop: int, crc: int, fresh: bool
    ) -> int:
        """The check sum after zeros for the elements `[start, stop)`, written if the file is not fresh."""
        size = itemsize(buffer.dtype)
        at, end = buffer.offset + start * size, buffer.offset + stop * size
        while at < end:
            part = memoryview(_ZEROS)[: min(end - at, len(_ZEROS))]
            if not fresh:
                _write(fd, part, at)
            crc = crc32(part, crc)
            at += len(part)
        return crc

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
            fix = "--dtype bfloat16 or float32, or --keep-dtype with this name"
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
