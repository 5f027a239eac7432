"""From files to files: one pass, read from maps, written in order, with sums taken on the way.

Every target buffer is a stretch of a file that one thread fills from its first byte to its last, in
pieces of at most `piece` bytes: a piece that lies in one piece in a source is written from the map, any
other is put together in the thread's own staging. Writes of a MiB and more are slow on some systems.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from threading import Event, Lock, local
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.errors import Finding, Refused
from dynadapt.files import FileBuffer, raw_dtype, unwritable
from dynadapt.transport.casts import cast, same_values
from dynadapt.transport.certificate import MASK, weighted_sum
from dynadapt.vps.box import Box, atoms, row_major_strides, uncovered
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from dynadapt.transport.plan import Match, Narrow, Pair
    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import Row, RowLayout

__all__ = [
    "PIECE",
    "Progress",
    "Sources",
    "Stopped",
    "Streamed",
    "boxes_of",
    "key_sums",
    "stream",
    "view_of",
]

PIECE = 768 << 10
"""Bytes of one write."""


MARK = 64 << 20
"""Bytes of a buffer after which it is told how far it is, for who might continue."""


class Stopped(Exception):
    """Somebody wanted it to end before it was done."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a buffer is filled: its first `done` bytes, which are its first rows, in order.

    `sums` are those rows' in the target's dtype, `crc` the check sum of the bytes, `read` the source's.
    """

    sums: tuple[int, ...] = ()
    done: int = 0
    crc: int = 0
    read: int = 0


@dataclass
class Streamed:
    """What was written: sums of the source as the target's dtype, by target key; check sums by buffer.

    Of the `written` bytes, `kept` had been written before.
    """

    sums: dict[Key, int] = field(default_factory=dict)
    crcs: dict[str, int] = field(default_factory=dict)
    read: int = 0
    written: int = 0
    kept: int = 0


def view_of(array: NDArray[Any], row: Row, box: Box) -> NDArray[Any]:
    """The elements of `box` in a row over a 1-D array: a view."""
    size = array.itemsize
    start = row.offset_of(box.lo)
    strides = tuple(step * size for step in row.strides)
    last = start + sum((n - 1) * s for n, s in zip(box.shape, row.strides, strict=True))
    if start < 0 or last >= array.size:
        raise ValueError(f"{row.key} {box} leaves its buffer")
    return np.lib.stride_tricks.as_strided(array[start:], box.shape, strides, writeable=False)


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


class Sources:
    """The source's rows by key, and the arrays behind them."""

    def __init__(self, layout: RowLayout, buffers: Mapping[str, Any]) -> None:
        self._layout, self._buffers = layout, buffers
        self._rows: dict[Key, tuple[Row, ...]] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        self._lock = Lock()

    def array(self, row: Row) -> NDArray[Any]:
        """The buffer under a row; a file is opened once, not for every piece of it."""
        found = self._arrays.get(row.buffer)
        if found is None:
            found = self._arrays[row.buffer] = self._buffers[row.buffer].array()
        return found

    def rows(self, key: Key, box: Box) -> list[Row]:
        """Rows that serve a box together; of replicas the first."""
        with self._lock:
            every = self._rows.get(key)
            if every is None:
                held = (r for e in self._layout.endpoints for r in self._layout.rows_of(key, e))
                first: dict[Box, Row] = {}
                for row in held:
                    first.setdefault(row.box, row)
                every = self._rows[key] = tuple(first[b] for b in sorted(first))
        found = [row for row in every if row.box.intersect(box) is not None]
        whole = next((row for row in found if row.box.contains(box)), None)
        return found if whole is None else [whole]

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


def stream(
    matched: Match,
    source: RowLayout,
    buffers: Mapping[str, FileBuffer],
    target: RowLayout,
    targets: Mapping[str, FileBuffer],
    *,
    narrow: Narrow = "if-exact",
    threads: int = 2,
    piece: int = PIECE,
    share: Collection[str] | None = None,
    rest: Callable[[], Mapping[str, Progress]] | None = None,
    begun: Mapping[str, Progress] | None = None,
    on_bytes: Callable[[int], None] | None = None,
    on_mark: Callable[[str, Progress], None] | None = None,
    stop: Event | None = None,
) -> Streamed:
    """Fill the target's buffers from the source's. The files are there, in their full size.

    Each of the threads takes `piece` bytes at a time. Elements of a buffer that no row holds are zeros.
    `on_mark` is told how far a buffer is, now and then and when it is full. With `begun`, what it was told
    when the same was streamed before, buffers go on from there if the bytes still have their check sum.
    Only the buffers of a `share` are filled, if one is named; then `rest` is asked how the others ended
    up. When `stop` is set, `Stopped` is raised after the pieces that are under way. Raises `Refused` with
    everything that was found: `uncovered`, `narrowing`, `truncated-file`.
    """
    sources = Sources(source, buffers)
    by_buffer: dict[str, list[Row]] = {name: [] for name in targets}
    for endpoint in target.endpoints:
        for row in target.rows(endpoint):
            by_buffer[row.buffer].append(row)
    findings = [
        Finding("uncovered", f"{row.key} {gap}", "no file of the source holds it")
        for rows in by_buffer.values()
        for row in rows
        if (pair := matched.by_target.get(row.key)) is not None and not pair.fill
        for gap in uncovered((r.box for r in sources.rows(pair.source.key, row.box)), row.box)[:1]
    ]
    if findings:
        raise Refused(findings)
    stop = stop or Event()
    writer = _Writer(matched, sources, narrow, piece, begun, on_bytes, on_mark, stop)
    names = [name for name in by_buffer if share is None or name in share]
    names.sort(key=lambda name: (-targets[name].nbytes, name))
    order = {name: sorted(rows, key=lambda r: r.offset) for name, rows in by_buffer.items()}
    filled: dict[str, Progress] = {}
    with ThreadPoolExecutor(threads) as pool:
        try:
            tasks = {n: pool.submit(writer.fill, n, targets[n], order[n]) for n in names}
            errors: list[Finding] = []
            for name, task in tasks.items():
                try:
                    filled[name] = task.result()
                except Refused as error:
                    errors += error.findings
        except BaseException:  # the threads shall not work on for an interrupt's sake
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if errors:
        raise Refused(errors)
    if rest is not None:
        found = rest()
        filled |= {n: found.get(n, Progress()) for n in by_buffer if n not in filled}  # empty ones
    return _total(filled, order, writer.kept)


def _total(
    filled: Mapping[str, Progress], order: Mapping[str, Sequence[Row]], kept: int
) -> Streamed:
    done = Streamed(kept=kept)
    counted: set[tuple[Key, Box]] = set()
    for name, progress in filled.items():
        done.crcs[name] = progress.crc
        done.read += progress.read
        done.written += progress.done
        for row, value in zip(order[name], progress.sums, strict=True):
            whole = (row.key, row.box)
            if whole not in counted:  # else a replica: every element counts once
                counted.add(whole)
                done.sums[row.key] = (done.sums.get(row.key, 0) + value) & MASK
    return done


class _Writer:
    """Fills buffers; one call of `fill` a thread."""

    def __init__(
        self,
        matched: Match,
        sources: Sources,
        narrow: Narrow,
        piece: int,
        begun: Mapping[str, Progress] | None,
        on_bytes: Callable[[int], None] | None,
        on_mark: Callable[[str, Progress], None] | None,
        stop: Event,
    ) -> None:
        self._matched, self._sources, self._narrow = matched, sources, narrow
        self._most, self._begun = piece, begun
        self._on_bytes, self._on_mark = on_bytes, on_mark
        self._stop = stop
        self._lock = Lock()
        self._own = local()
        self.kept = 0

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
        marked = start.done
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
                    for box in boxes_of(row.box, max(self._most // size, 1)):
                        if self._stop.is_set():
                            raise Stopped(buffer.path)
                        piece = self._piece(pair, box, buffer.dtype)
                        data = piece.reshape(-1).view(np.uint8).data
                        _write(fd, data, buffer.offset + at * size)
                        crc = zlib.crc32(data, crc)
                        total += weighted_sum(piece, box, row.key)
                        at += box.volume
                        read += box.volume * itemsize(pair.source.dtype)
                        if self._on_bytes is not None:
                            self._on_bytes(len(data))
                sums.append(total & MASK)
                if self._on_mark is not None and at * size - marked >= MARK:
                    marked = at * size
                    self._on_mark(name, Progress(tuple(sums), marked, crc, read))
            crc = self._zeros(fd, buffer, at, buffer.numel, crc, fresh)
            if self._on_mark is not None:
                self._on_mark(name, Progress(tuple(sums), buffer.nbytes, crc, read))
        return Progress(tuple(sums), buffer.nbytes, crc, read)

    def _kept(self, fd: int, name: str, buffer: FileBuffer) -> Progress:
        """How far a buffer had come before, if what was written then is still there."""
        known = (self._begun or {}).get(name)
        if known is None or not 0 <= known.done <= buffer.nbytes:
            return Progress()
        crc, at = 0, 0
        while at < known.done and not self._stop.is_set():
            data = os.pread(fd, min(self._most, known.done - at), buffer.offset + at)
            if not data:
                return Progress()
            crc, at = zlib.crc32(data, crc), at + len(data)
        if crc != known.crc:
            return Progress()
        with self._lock:
            self.kept += known.done
        if self._on_bytes is not None:
            self._on_bytes(known.done)
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
            crc = zlib.crc32(part, crc)
            at += len(part)
        return crc

    def _piece(self, pair: Pair, box: Box, dtype: str) -> NDArray[Any]:
        """The elements of a box in the target's dtype: straight from the map where that can be."""
        rows = self._sources.rows(pair.source.key, box)
        kind = pair.source.dtype
        if len(rows) == 1:
            found = view_of(self._sources.array(rows[0]), rows[0], box)
            if kind != dtype:
                return np.asarray(self._cast(pair, found, dtype, box), order="C")
            if found.flags.c_contiguous:
                return found
        out = self._staging(box.volume, dtype).reshape(box.shape)
        for row in rows:
            part = row.box.intersect(box)
            if part is None:
                continue
            found = view_of(self._sources.array(row), row, part)
            if kind != dtype:
                found = self._cast(pair, found, dtype, part)
            out[inside(part, box)] = found
        return out

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
            fix = "keep the dtype, or allow it (--narrow allow)"
            raise Refused([Finding("narrowing", f"{pair.target.key} {box}", cause, fix)])
        return found


def _exact(array: NDArray[Any], found: NDArray[Any], kind: str, dtype: str) -> bool:
    back = cast(found, dtype, kind)
    if kind == "bfloat16":
        array, back = cast(array, kind, "float32"), cast(back, kind, "float32")
    return same_values(array, back)


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done


_ZEROS = bytes(1 << 16)


def key_sums(
    layout: RowLayout,
    buffers: Mapping[str, FileBuffer],
    *,
    threads: int = 2,
    piece: int = PIECE,
    names: Mapping[int, str] | None = None,
) -> tuple[dict[Key, int], tuple[Finding, ...]]:
    """The sum of every key, derived copies too, and a finding for each replica that differs.

    `names` say what endpoints are called.
    """
    told = names or {}
    sources = Sources(layout, buffers)

    def one(row: Row, box: Box) -> int:
        total, array = 0, sources.array(row)
        for part in boxes_of(box, max(piece // array.itemsize, 1)):
            total += weighted_sum(view_of(array, row, part), part, row.key)
        return total & MASK

    def key_of(at: int) -> tuple[Key, int, list[Finding]]:
        spec = layout.keys[at]
        key = spec.key
        total = 0
        drifted: list[Finding] = []
        first: dict[Box, tuple[int, int]] = {}
        for endpoint in layout.endpoints:
            for row in layout.rows_of(key, endpoint):
                value = one(row, row.box)
                known = first.setdefault(row.box, (endpoint, value))
                if known[1] != value:
                    here, there = (told.get(e, str(e)) for e in (endpoint, known[0]))
                    where = f"{key} {row.box}"
                    cause = f"replicas differ: {there} and {here}"
                    drifted.append(Finding("replicas-differ", where, cause))
        if sum(box.volume for box in first) <= spec.numel:
            total = sum(value for _, value in first.values())
        else:  # boxes that overlap in part: every element counts once
            rows = sources.rows(key, Box.whole(spec.shape))
            for cell, numbers in atoms(row.box for row in rows):
                total += one(rows[numbers[0]], cell)
        return key, total & MASK, drifted

    moving = [i for i, s in enumerate(layout.keys) if s.numel and s.presence == "present"]
    moving.sort(key=lambda i: -layout.keys[i].nbytes)
    with ThreadPoolExecutor(threads) as pool:
        try:
            answers = list(pool.map(key_of, moving))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    findings = tuple(f for _, _, drifted in answers for f in drifted)
    return {key: total for key, total, _ in answers}, findings
