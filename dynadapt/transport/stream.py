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
from dynadapt.transport.filling import Writer
from dynadapt.transport.forks import Forks
from dynadapt.transport.progress import Progress
from dynadapt.transport.read_back import Stretch
from dynadapt.transport.sources import PIECE, Sources
from dynadapt.transport.watch import Watch
from dynadapt.transport.weights import MASK
from dynadapt.vps.box import uncovered

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from threading import Event

    from dynadapt.files import FileBuffer
    from dynadapt.transport.plan import Match, Narrow
    from dynadapt.transport.source_sums import Taken
    from dynadapt.vps.box import Box
    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import Row, RowLayout

__all__ = ["Streamed", "stream"]

LOT = 8 << 20
"""Bytes of the buffers that a thread takes to fill, at least."""

T = TypeVar("T")


@dataclass
class Streamed:
    """What was written: sums of the source as the target's dtype, by target key; check sums by buffer.

    `stretches` say it row by row. Of the `written` bytes, `kept` had been written before. `taken` is what
    of the source was read in one piece each.
    """

    sums: dict[Key, int] = field(default_factory=dict)
    crcs: dict[str, int] = field(default_factory=dict)
    read: int = 0
    written: int = 0
    kept: int = 0
    stretches: tuple[Stretch, ...] = ()
    taken: list[Taken] = field(default_factory=list)


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
        for row, gap in _gaps(chain(*by_buffer.values()), matched, sources)
    ]
    if findings:
        raise Refused(findings)
    order = {name: sorted(rows, key=lambda r: r.offset) for name, rows in by_buffer.items()}
    chosen = [name for name in order if share is None or name in share]
    lots = _lots(chosen, targets, _copies({name: order[name] for name in chosen}, targets, matched))
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


def _gaps(rows: Iterable[Row], matched: Match, sources: Sources) -> Iterator[tuple[Row, Box]]:
    """Rows of the target of which the source lacks something, each with the first that it lacks."""
    known: dict[tuple[Box, ...], tuple[Box, ...]] = {}  # many tensors lie alike
    for row in rows:
        pair = matched.by_target.get(row.key)
        if pair is None or pair.fill:
            continue
        held = (row.box, *(r.box for r in sources.rows(pair.source.key, row.box)))
        if held not in known:
            known[held] = uncovered(held[1:], row.box)[:1]
        for gap in known[held]:
            yield row, gap


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


def _copies(
    order: Mapping[str, Sequence[Row]], targets: Mapping[str, FileBuffer], matched: Match
) -> dict[str, list[str]]:
    """Buffers that hold a derived copy of what another one holds, by that one: its source is in the cache."""
    alone: dict[bool, dict[Key, str]] = {False: {}, True: {}}
    for name, rows in order.items():
        pair = matched.by_target.get(rows[0].key) if len(rows) == 1 else None
        if pair is not None and targets[name].nbytes <= LOT:
            alone[pair.target.derived][pair.source.key] = name
    found: dict[str, list[str]] = {}
    for key, name in alone[True].items():
        if (master := alone[False].get(key)) is not None:
            found.setdefault(master, []).append(name)
    return found


def _lots(
    names: Iterable[str], targets: Mapping[str, FileBuffer], copies: Mapping[str, Sequence[str]]
) -> list[list[str]]:
    """Buffers as they are handed over: large ones first, small ones together, files by turns.

    A file system lets one writer at a time into a file. `copies` come with what they are of.
    """
    names = set(names).difference(*copies.values())
    files: dict[str, list[list[str]]] = {}
    room: dict[str, int] = {}
    for name in sorted(names, key=lambda name: (-targets[name].nbytes, name)):
        path = targets[name].path
        own = files.setdefault(path, [])
        if room.get(path, 0) <= 0:
            own.append([])
            room[path] = LOT
        own[-1] += (name, *copies.get(name, ()))
        room[path] -= max(targets[name].nbytes, 1)
    turns = zip_longest(*files.values(), fillvalue=[])
    lots: list[list[str]] = []
    left = 0
    for lot in (lot for turn in turns for lot in turn if lot):
        if left <= 0:
            lots.append([])
            left = LOT
        lots[-1] += lot
        left -= sum(max(targets[name].nbytes, 1) for name in lot)
    return lots


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
        done.taken += progress.taken
        done.written += progress.done
        for row, value in zip(order[name], progress.sums, strict=True):
            whole = (row.key, row.box)
            if whole not in counted:  # else a replica: every element counts once
                counted.add(whole)
                done.sums[row.key] = (done.sums.get(row.key, 0) + value) & MASK
    return done
