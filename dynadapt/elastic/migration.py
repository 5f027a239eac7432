"""The one sequence in which a state changes its layout, on every seat, all or nothing.

    quiesce -> describe -> prepare -> plan -> agree -> move -> finish -> certify -> commit

Every phase ends in a vote. Until the last one the source is only read (or parked, and put back; or
released, and given back), so any failure, on any seat, in any phase, leaves it as it was. `before` has
the phases up to the move, `after` those from it on, `undo` the way back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dynadapt.elastic import after, before, release, rng
from dynadapt.elastic.outcome import MigrationReport
from dynadapt.elastic.peak import Meter, current_device
from dynadapt.elastic.plan_report import PlanReport
from dynadapt.elastic.run import PHASES, OnPhase, Run
from dynadapt.elastic.undo import undo
from dynadapt.transport.executor import execute
from dynadapt.transport.into_files import write_moves
from dynadapt.transport.planner import plan_for

if TYPE_CHECKING:
    from dynadapt.elastic.settings import Settings
    from dynadapt.elastic.worlds import Session

__all__ = ["PHASES", "migrate", "plan"]


def migrate(
    session: Session,
    source: Any,
    target: Any,
    settings: Settings,
    on_phase: OnPhase | None = None,
) -> MigrationReport:
    """Move a state. `source` or `target` is None on a seat that has no part in that side.

    Raises `MigrationAborted`, the same on every seat, with the source as it was.
    """
    run = Run(session, source, target, settings, on_phase)
    try:
        with torch.inference_mode(False):  # states made under the caller's could not be trained on
            return _whole(run)
    except BaseException as error:
        undo(run, error)
        raise
    finally:
        if run.meter is not None:
            run.meter.stop()
        run.control.close()


def plan(session: Session, source: Any, target: Any, settings: Settings) -> PlanReport:
    """The plan of every seat, without moving anything: both sides are left as they were."""
    run = Run(session, source, target, settings, dry=True)
    try:
        before.prologue(run)
        with run.phase("plan", last=True):
            before.make_plan(run)
        every = {
            seat: plan_for(seat, run.source.layout, run.target.layout, run.matched, run.options)
            for seat in run.control.seats
            if seat != session.seat
        }
        every[session.seat] = run.seat_plan
        return PlanReport.of(run.matched, every, run.promises, run.warnings)
    finally:
        undo(run)
        run.control.close()


def _whole(run: Run) -> MigrationReport:
    """All phases."""
    run.meter = Meter(current_device())
    before.prologue(run)
    with run.phase("plan"):
        before.make_plan(run)
    with run.phase("agree"):
        before.agree(run)
    with run.phase("move"):
        _move(run)
    with run.phase("finish"):
        after.finish(run)
    with run.phase("certify"):
        print_target = after.certify(run)
        after.look_for_holders(run)
        totals = after.totals(run)
        streams = rng.gather(run.control, run.source, run.target)
    with run.phase("commit", last=True):
        if run.saving is not None:
            run.saving.settle()
    run.committed = True
    if run.saving is not None:
        run.saving.close()
    release.settle(run)
    if run.woken is not None:
        run.woken.settle()
    if streams is not None:
        run.outcomes += rng.hand_out(streams, run.target, run.session.seat)
    if run.channel is not None:
        run.channel.close()
    return MigrationReport(
        **totals,
        seconds=run.seconds,
        transfer_seconds=run.moved.seconds,
        fingerprint_source=run.print_of(run.expected()),
        fingerprint_target=print_target,
        outcomes=tuple(run.outcomes),
        warnings=tuple(dict.fromkeys(run.warnings)),
        source=after.summary(run.source),
        target=after.summary(run.target),
    )


def _move(run: Run) -> None:
    """All bytes."""
    if run.release is not None:
        run.moved = release.move(run, run.release)
        return
    if run.saving is not None:
        run.moved = write_moves(
            *(run.seat_plan, run.matched, run.source_storage(), run.target_storage()),
            narrow=run.settings.narrow,
        )
        return
    run.moved = execute(
        run.seat_plan,
        run.chunk_list,
        run.matched,
        run.source_storage(),
        run.target_storage(),
        run.channel,
        narrow=run.settings.narrow,
        timeout=run.control.left(),
        device=run.wire_device,
    )
