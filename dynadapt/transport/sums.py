"""Sums of what files hold: every element of a key counted once, replicas compared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dynadapt.errors import Finding
from dynadapt.transport.certificate import weighted_sum
from dynadapt.transport.read_back import row_in_file
from dynadapt.transport.sources import Sources, view_of
from dynadapt.transport.weights import MASK
from dynadapt.vps.box import Box, atoms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.files import FileBuffer
    from dynadapt.transport.read_back import RowInFile
    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import Row, RowLayout

__all__ = ["key_sums"]

_FIX = "copy them again; if they are as they were saved, convert takes the first one's"


def key_sums(
    layout: RowLayout,
    buffers: Mapping[str, FileBuffer],
    *,
    threads: int = 2,
    names: Mapping[int, str] | None = None,
    known: Mapping[RowInFile, int] | None = None,
) -> tuple[dict[Key, int], tuple[Finding, ...]]:
    """The sum of every key, derived copies too, and a finding for each replica that differs.

    `names` say what endpoints are called. `known` rows are not read: their sums are told.
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
            own = row_in_file(row, buffers[row.buffer]) if have else None
            value = have.get(own) if own is not None else None
            if value is None:
                value = one(row, row.box)
            other, its = first.setdefault(row.box, (endpoint, value))
            if its != value:
                here, there = (told.get(e, str(e)) for e in (endpoint, other))
                where = f"{key} {row.box}"
                cause = f"replicas differ: {there} and {here}"
                drifted.append(Finding("replicas-differ", where, cause, _FIX))
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
