"""Sums of what files hold: every element of a key counted once, replicas compared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynadapt.errors import Finding, Refused
from dynadapt.transport.casts import same_bits
from dynadapt.transport.certificate import weighted_sum
from dynadapt.transport.forks import Forks
from dynadapt.transport.read_back import row_in_file
from dynadapt.transport.sources import Sources, view_of
from dynadapt.transport.weights import MASK
from dynadapt.vps.box import Box, atoms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynadapt.files import FileBuffer
    from dynadapt.transport.read_back import RowInFile
    from dynadapt.vps.keys import Key, KeySpec
    from dynadapt.vps.layout import Row, RowLayout

__all__ = ["key_sums", "unlike_replicas"]

LOT = 8 << 20
"""Bytes of keys that are summed by one thread or process before it takes others, at least."""

_FIX = "copy them again; if they are as they were saved, convert takes the first one's"
_TAKEN = "the first one's was taken; if the files are not as they were saved, copy them again"


def key_sums(
    layout: RowLayout,
    buffers: Mapping[str, FileBuffer],
    *,
    threads: int = 2,
    names: Mapping[int, str] | None = None,
    known: Mapping[RowInFile, int] | None = None,
    fork: bool = False,
) -> tuple[dict[Key, int], tuple[Finding, ...]]:
    """The sum of every key, derived copies too, and a finding for each replica that differs.

    `names` say what endpoints are called. `known` rows are not read: their sums are told. Threads are at
    work, or with `fork` processes. Raises `Refused`, and `ForkLost`.
    """
    told, have = names or {}, known or {}
    sources = Sources(layout, buffers)

    def one(row: Row, box: Box) -> int:
        return weighted_sum(view_of(sources.array(row), row, box), box, row.key)

    def add(spec: KeySpec, done: _Lot) -> None:
        key = spec.key
        first: dict[Box, tuple[int, int]] = {}
        for endpoint, row in layout.held(key):
            own = row_in_file(row, buffers[row.buffer]) if have else None
            value = have.get(own) if own is not None else None
            if value is None:
                value = one(row, row.box)
            other, its = first.setdefault(row.box, (endpoint, value))
            if its != value:
                done.drifted.append(_unlike(key, row.box, endpoint, other, told, _FIX))
        if sum(box.volume for box in first) <= spec.numel:
            total = sum(value for _, value in first.values())
        else:  # boxes that overlap in part: every element counts once
            rows = sources.rows(key, Box.whole(spec.shape))
            cells = atoms(row.box for row in rows)
            total = sum(one(rows[numbers[0]], cell) for cell, numbers in cells)
        done.sums[key] = total & MASK

    def summed(lot: Sequence[int]) -> _Lot:
        done = _Lot()
        try:
            for at in lot:
                add(layout.keys[at], done)
        except Refused as error:
            done.refused = error.findings
        return done

    lots = _lots(layout.keys)
    if fork:
        with Forks().begun(summed, lots, threads) as answers:
            found = answers()
    else:
        with ThreadPoolExecutor(threads) as pool:
            try:
                found = list(pool.map(summed, lots))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    refused = [finding for each in found for finding in each.refused]
    if refused:
        raise Refused(refused)
    sums = {key: value for each in found for key, value in each.sums.items()}
    return sums, tuple(finding for each in found for finding in each.drifted)


def unlike_replicas(
    layout: RowLayout,
    buffers: Mapping[str, FileBuffer],
    keys: Iterable[Key],
    names: Mapping[int, str] | None = None,
) -> tuple[Finding, ...]:
    """A finding for each row that has not the bits of the first one that holds the same; of some keys.

    Reads only what several rows hold.
    """
    sources, findings = Sources(layout, buffers), []
    for key in sorted(keys):
        first: dict[Box, tuple[int, Row]] = {}
        for endpoint, row in layout.held(key):
            other, same = first.setdefault(row.box, (endpoint, row))
            if same is row:
                continue
            mine, its = (view_of(sources.array(r), r, r.box) for r in (row, same))
            if not same_bits(mine, its):
                findings.append(_unlike(key, row.box, endpoint, other, names or {}, _TAKEN))
    return tuple(findings)


def _unlike(
    key: Key, box: Box, endpoint: int, other: int, names: Mapping[int, str], fix: str
) -> Finding:
    here, there = (names.get(e, str(e)) for e in (endpoint, other))
    cause = f"replicas differ: {there} and {here}"
    return Finding("replicas-differ", f"{key} {box}", cause, fix)


@dataclass
class _Lot:
    """What some keys came to: also from another process, so what was refused is a value."""

    sums: dict[Key, int] = field(default_factory=dict)
    drifted: list[Finding] = field(default_factory=list)
    refused: tuple[Finding, ...] = ()


def _lots(specs: Sequence[KeySpec]) -> list[list[int]]:
    """Numbers of keys as they are handed over: large ones first, small ones together."""
    lots: list[list[int]] = []
    room = 0
    moving = [i for i, s in enumerate(specs) if s.numel and s.presence == "present"]
    for at in sorted(moving, key=lambda i: -specs[i].nbytes):
        if room <= 0:
            lots.append([])
            room = LOT
        lots[-1].append(at)
        room -= specs[at].nbytes
    return lots
