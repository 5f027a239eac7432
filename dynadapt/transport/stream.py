"""From files to files: one pass, read from maps, written in order, with sums taken on the way.

Every target buffer is a stretch of a file that one thread fills from its first byte to its last: what
lies in one piece in a source is written from the map, anything else is put together in the thread's own
staging.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, TypeVar

from dynadapt.errors import Finding, Refused
from dynadapt.transport.certificate import MASK, weighted_sum
from dynadapt.transport.filling import Writer
from dynadapt.transport.forks import Forks
from dynadapt.transport.progress import Progress
from dynadapt.transport.read_back import Stretch, place_of
from dynadapt.transport.sources import Sources, view_of
from dynadapt.transport.watch import Watch
from dynadapt.vps.box import Box, atoms, uncovered

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from threading import Event

    from dynadapt.files import FileBuffer
    from dynadapt.transport.plan import Match, Narrow
    from dynadapt.transport.read_back import Place
    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import Row, RowLayout

__all__ = ["PIECE", "Streamed", "key_sums", "stream"]

PIECE = 3 << 20
"""Bytes that a thread takes at a time."""

LOT = 8 << 20
"""Bytes of the buffers that a thread takes to fill, at least."""

T = TypeVar("T")


@dataclass
class Streamed:
    """What was written: sums of the source as the target's dtype, by target key; check sums by buffer.

    `stretches` say it row by row. Of the `written` bytes, `kept` had been written before.
    """

    sums: dict[Key, int] = field(default_factory=dict)
    crcs: dict[str, int] = field(default_factory=dict)
    read: int = 0
    written: int = 0
    kept: int = 0
    stretches: tuple[Stretch, ...] = ()


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
    fork: bool = False,
) -> Streamed:
    """Fill the target's buffers from the source's. The files are there, in their full size.

    Each of the threads, or with `fork` of as many processes, takes `piece` bytes at a time. Elements of a
    buffer that no row holds are zeros.
    `on_mark` is told how far a buffer is, now and then and when it is full. With `begun`, what it was told
    when the same was streamed before, buffers go on from there if the bytes still have their check sum.
    Only the buffers of a `share` are filled, if one is named; then `rest` is asked how the others ended
    up. When `stop` is set, `Stopped` is raised after the pieces that are under way. Raises `Refused` with
    everything that was found: `uncovered`, `narrowing`, `truncated-file`; and `ForkLost`.
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
    lots = _lots((n for n in by_buffer if share is None or n in share), targets)
    order = {name: sorted(rows, key=lambda r: r.offset) for name, rows in by_buffer.items()}
    with Watch(on_bytes, on_mark, stop) as watch:
        forks = Forks() if fork and threads > 1 else None
        writer = Writer(matched, sources, narrow, piece, begun, forks or watch)

        def fill(lot: Sequence[str]) -> list[Progress | tuple[Finding, ...]]:
            return [_filled(writer, name, targets[name], order[name]) for name in lot]

        if forks is not None:
            found = forks.run(fill, lots, threads, watch)
        else:
            found = _by_threads(fill, lots, threads, watch)
    filled: dict[str, Progress] = {}
    errors: list[Finding] = []
    for name, each in zip(chain(*lots), chain(*found), strict=True):
        if isinstance(each, Progress):
            filled[name] = each
        else:
            errors += each
    if errors:
        raise Refused(errors)
    if rest is not None:
        others = rest()
        filled |= {n: others.get(n, Progress()) for n in by_buffer if n not in filled}  # empty ones
    return _total(filled, order, targets, watch.before)


def _filled(
    writer: Writer, name: str, buffer: FileBuffer, rows: Sequence[Row]
) -> Progress | tuple[Finding, ...]:
    try:
        return writer.fill(name, buffer, rows)
    except Refused as error:
        return error.findings


def _by_threads(
    fill: Callable[[Sequence[str]], T], lots: Sequence[Sequence[str]], threads: int, watch: Watch
) -> list[T]:
    with ThreadPoolExecutor(threads) as pool:
        try:
            return [task.result() for task in [pool.submit(fill, lot) for lot in lots]]
        except BaseException:  # the threads shall not work on for an interrupt's sake
            watch.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _lots(names: Iterable[str], targets: Mapping[str, FileBuffer]) -> list[list[str]]:
    """Buffers as they are handed over: large ones first, small ones of a file together, files by turns.

    A file system lets one writer at a time into a file.
    """
    files: dict[str, list[list[str]]] = {}
    room: dict[str, int] = {}
    for name in sorted(names, key=lambda name: (-targets[name].nbytes, name)):
        path = targets[name].path
        own = files.setdefault(path, [])
        if room.get(path, 0) <= 0:
            own.append([])
            room[path] = LOT
        own[-1].append(name)
        room[path] -= max(targets[name].nbytes, 1)
    turns = zip_longest(*files.values(), fillvalue=[])
    return [lot for turn in turns for lot in turn if lot]


def _total(
    filled: Mapping[str, Progress],
    order: Mapping[str, Sequence[Row]],
    targets: Mapping[str, FileBuffer],
    kept: int,
) -> Streamed:
    stretches = (Stretch(targets[n], order[n], p.sums, p.crc) for n, p in filled.items())
    done = Streamed(kept=kept, stretches=tuple(stretches))
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


def key_sums(
    layout: RowLayout,
    buffers: Mapping[str, FileBuffer],
    *,
    threads: int = 2,
    names: Mapping[int, str] | None = None,
    known: Mapping[Place, int] | None = None,
) -> tuple[dict[Key, int], tuple[Finding, ...]]:
    """The sum of every key, derived copies too, and a finding for each replica that differs.

    `names` say what endpoints are called. Rows at `known` places are not read: their sums are told.
    """
    told, have = names or {}, known or {}
    sources = Sources(layout, buffers)

    def one(row: Row, box: Box) -> int:
        return weighted_sum(view_of(sources.array(row), row, box), box, row.key)

    def key_of(at: int) -> tuple[Key, int, list[Finding]]:
        spec = layout.keys[at]
        key = spec.key
        total = 0
        drifted: list[Finding] = []
        first: dict[Box, tuple[int, int]] = {}
        for endpoint, row in layout.held(key):
            place = place_of(row, buffers[row.buffer]) if have else None
            value = have.get(place) if place is not None else None
            if value is None:
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
