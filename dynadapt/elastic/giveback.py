"""The way back of `mode="release"`: what was freed is refilled from the target, round by round.

The target's rows that hold it were proven to, and are only read here. Rounds go back in the opposite
order, and target buffers are emptied as soon as nothing needs them, so it takes no more memory than the
way there did. At the end the source's sums must be what they were before anything moved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dynadapt.elastic.cutting import cut_chunks
from dynadapt.elastic.state import refuse
from dynadapt.errors import Finding
from dynadapt.transport.certify import count
from dynadapt.transport.executor import execute
from dynadapt.transport.hashing import Wanted
from dynadapt.transport.plan import Match, Pair
from dynadapt.transport.planner import plan_for
from dynadapt.vps import wire
from dynadapt.vps.layout import RowLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.elastic.release import Release
    from dynadapt.elastic.run import Run
    from dynadapt.protocols import Channel
    from dynadapt.transport.control import Control
    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import Row

__all__ = ["give_back"]


def give_back(run: Run, release: Release, control: Control) -> None:
    """Restore every freed source buffer of every seat. All seats call it, inside a phase.

    Raises what the move may raise, and `Refused` (`source-lost`) if the source's sums are not what they
    were: then the target had been changed after it was proven.
    """
    rows = _freed_rows(run, release)
    told = control.gather_values(
        "freed", [[number, wire.encode_rows(own)] for number, own in sorted(rows.items())]
    )
    theirs: dict[int, dict[int, tuple[Row, ...]]] = {}
    for seat, report in told.items():
        for number, data in report:
            theirs.setdefault(number, {})[seat] = wire.decode_rows(data)
    channel = None
    if len(control.seats) > 1:
        timeout = run.settings.timeouts.phase
        channel = run.session.channel(-1 - run.number, run.wire_device, timeout)
    try:
        for number in sorted(theirs, reverse=True):
            _restore(run, release, control, channel, number, theirs[number])
            left = {
                row.key for n, by in theirs.items() if n < number for r in by.values() for row in r
            }
            _empty(run, release, left)
    except BaseException:
        if channel is not None:
            channel.abort()
        raise
    if channel is not None:
        channel.close()
    _verify(run, control)


def _freed_rows(run: Run, release: Release) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    rows = run.source.canonical(run.own_source.rows) if run.own_source is not None else []
    for row in rows:
        if row.buffer in release.freed:
            found.setdefault(release.freed[row.buffer], []).append(row)
    return found


def _restore(
    run: Run,
    release: Release,
    control: Control,
    channel: Channel | None,
    number: int,
    rows: Mapping[int, tuple[Row, ...]],
) -> None:
    """One round's source buffers, on all seats."""
    mine = [name for name, freed in release.freed.items() if freed == number]
    for name in mine:
        release.source[name].refill()
    keys = {row.key for own in rows.values() for row in own}
    pairs = {key: run.matched.by_source[key][0] for key in keys}
    back = Match(tuple(_turned(pairs[key]) for key in sorted(keys)))
    by_name = run.source.layout.by_name
    every: dict[int, tuple[Row, ...]] = dict.fromkeys(run.source.layout.endpoints, ())
    part = RowLayout([by_name[key] for key in sorted(keys)], {**every, **rows})
    options = replace(run.options, narrow="allow", first_only=frozenset(), workers=())
    plan = plan_for(run.session.seat, run.target.layout, part, back, options)
    refuse(plan.findings)
    execute(
        plan,
        cut_chunks(control, plan, run.settings.budget, f"back {number}"),
        back,
        run.target_storage(),
        run.source_storage(),
        channel,
        narrow="allow",  # it is exact: the bits were compared in the source's dtype
        timeout=run.settings.timeouts.phase,
        device=run.wire_device,
    )
    for name in mine:
        release.put_back(name)


def _turned(pair: Pair) -> Pair:
    return Pair(pair.target, pair.source)


def _empty(run: Run, release: Release, needed: set[Key]) -> None:
    """Free the target buffers that nothing is to be restored from any more."""
    if run.own_target is None:
        return
    serving = {pair.target.key for key in needed for pair in run.matched.by_source[key]}
    busy = {r.buffer for r in run.target.canonical(run.own_target.rows) if r.key in serving}
    for names in release.fills.values():
        for name in names:
            if name not in busy:
                release.target[name].free()


def _verify(run: Run, control: Control) -> None:
    """The source's sums are those of before."""
    pairs = [pair for pair in run.matched.pairs if not pair.fill]
    wanted = [Wanted(p.source, p.target.dtype, p.target.key) for p in pairs]
    sums = count("back", control, run.source.layout, run.source_storage(), wanted, run.workers())
    wrong: dict[str, Any] = {
        str(pair.source.key): None
        for pair, value, before in zip(pairs, sums.values, run.source_sums, strict=True)
        if value != before
    }
    cause = "the target's copy, which is the only one, was changed after it had been placed"
    fix = "go back to a checkpoint; please report this"
    refuse(Finding("source-lost", key, cause, fix) for key in wrong)
