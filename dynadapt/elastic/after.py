"""The phases after the bytes landed: finish, certify; and what the report counts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.elastic import checks, drift
from dynadapt.elastic.held import points_at_source, unused_gradients
from dynadapt.elastic.side import unite
from dynadapt.elastic.state import ballot, refuse, storage_of
from dynadapt.errors import Finding
from dynadapt.protocols import Outcome
from dynadapt.transport.hashing import Wanted
from dynadapt.vps import cover

if TYPE_CHECKING:
    from dynadapt.elastic.run import Run
    from dynadapt.elastic.side import Side

__all__ = ["certify", "finish", "look_for_holders", "summary", "totals"]

HOLDERS = 50
"""Things named that point at the source."""


def finish(run: Run) -> None:
    """The target's own repairs; a failure before its first collective is voted on first."""
    with ballot(run.control, "finish") as agree:
        if run.target_adapter is not None:
            run.outcomes += run.target_adapter.finish(
                run.x_target,
                run.wanted.keys,
                run.wanted.scalars,
                run.wanted.aux,
                agree,
            )


def certify(run: Run) -> str:
    """Describe the target anew and compare every sum, every derived copy, every scalar."""
    after, findings = None, []
    if run.target_adapter is not None:
        after = run.target_adapter.describe(run.x_target)
        findings += checks.held_differently(run.own_target, after)
        unlike = checks.scalars_differ(run.wanted.scalars, after.scalars)
        flat = run.target.flat if "step" in run.settings.allow else ()
        largest = [f for f in unlike if f.where.startswith(flat)]
        run.outcomes += [Outcome(f.where, "derived", f.cause) for f in largest]
        findings += [f for f in unlike if f not in largest]
        odd, told = checks.groups_differ(
            run.wanted.aux, {item.path: item for item in after.aux}, run.outcomes
        )
        findings += odd
        run.outcomes += told
    pairs = run.matched.pairs
    wanted = [Wanted(p.target, p.target.dtype, p.target.key) for p in pairs]
    side = run.target
    if run.saving is not None:  # read as anybody would, who may know nothing of how it was written
        side = unite("read back", run.control, after) or side
        findings += cover.prove(side.layout)
    storage = storage_of(run.session, side, after or run.own_target)
    compared = drift.compare("target", run.control, side, storage, wanted, run.workers())
    findings += checks.sums_differ(pairs, run.expected(), compared.values)
    for unequal in (compared.replicas, compared.stale):
        findings += [finding for parts in unequal.values() for finding in parts]
    refuse(run.told(findings))
    prints = run.print_of(compared.values)
    if run.saving is not None:
        keys = (pair.target.key for pair in pairs)
        run.saving.sign(prints, dict(zip(keys, compared.values, strict=True)))
        if run.session.seat == min(s for s, h in run.hosts.items() if h == run.session.host):
            os.sync()  # one a host, for all files: much faster than an fsync each
    return prints


def look_for_holders(run: Run) -> None:
    """Warn of what still points at the source, on any seat. It never fails a migration.

    Nothing has to leave files, or a job that was written to some.
    """
    mine: list[list[str]] = []
    files = run.source.readers or run.target.readers
    if run.x_source is not None and run.x_target is not None and not files:
        try:
            found = [
                *unused_gradients(run.x_source),
                *points_at_source(run.x_source, run.x_target),
            ]
        except Exception as error:
            cause = f"could not be looked for: {error!r}"
            found = [Finding("points-at-source", "what you hold", cause)]
        mine = [[f.reason, f.where, f.cause, f.fix] for f in found[:HOLDERS]]
    told = run.control.gather_values("held", mine)
    every = dict.fromkeys(Finding(*f) for report in told.values() for f in report)
    run.warnings += every


def totals(run: Run) -> dict[str, Any]:
    """Byte counts over all seats."""
    rebuilt = run.moved.filled
    if run.own_target is not None:
        derived = {s.key: s for s in run.target.layout.keys if s.derived}
        rebuilt += sum(
            row.box.volume * derived[row.key].nbytes // max(derived[row.key].numel, 1)
            for row in run.target.canonical(run.own_target.rows)
            if row.key in derived
        )
    moved = run.moved
    own = (moved.received, run.seat_plan.minimum, rebuilt, moved.copied, moved.read, moved.written)
    sums = np.array(own, np.int64)
    most = np.array([moved.peak_staging, moved.chunks], np.int64)
    sums = run.control.combine("total", sums, np.add)
    most = run.control.combine("most", most, np.maximum)
    names = (
        *("bytes_moved", "bytes_minimum", "bytes_rebuilt", "bytes_resident"),
        *("bytes_read", "bytes_written"),
    )
    tops = ("staging_bytes", "chunks")
    return {
        **{name: int(v) for name, v in zip(names, sums, strict=True)},
        **{name: int(v) for name, v in zip(tops, most, strict=True)},
        **_memory(run),
    }


def _memory(run: Run) -> dict[str, Any]:
    """What each seat promised to hold at most, and what it held."""
    mine = run.meter.stop() if run.meter is not None else None
    measured = run.control.gather_values("measured", mine)
    known = [value for value in measured.values() if value is not None]
    return {
        "peak_extra_bytes": max(max(p["peak"], p["host"]) for p in run.promises.values()),
        "measured_extra_bytes": max(known) if len(known) == len(measured) else None,
        "memory": {
            str(seat): {**promise, "measured": measured[seat]}
            for seat, promise in run.promises.items()
        },
    }


def summary(side: Side) -> dict[str, Any]:
    """One side for the report."""
    return {
        "seats": [endpoint for endpoint in side.layout.endpoints if endpoint >= 0],
        "keys": len(side.layout.keys),
        "coordinates": {str(seat): dict(place) for seat, place in side.coordinates.items()},
    }
