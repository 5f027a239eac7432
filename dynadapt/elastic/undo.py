"""After a failure: the channel broken, the source given back, `prepare` undone."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from dynadapt.elastic import parked
from dynadapt.elastic.giveback import give_back
from dynadapt.errors import MigrationAborted
from dynadapt.protocols import TrainState

if TYPE_CHECKING:
    from dynadapt.elastic.run import Run

__all__ = ["undo"]


def undo(run: Run, error: BaseException | None = None) -> None:
    """Take a failed run back, each part of it whatever became of the others.

    After the commit there is nothing to undo: the other seats have gone on with the target. Raises
    `MigrationAborted` (`source-lost`) where `mode="release"` had freed source buffers that cannot be
    given back, because a seat is gone or its target was changed; the target is then left as it is. So it
    does where `mode="park"` had given memory away that something else has taken since.
    """
    if run.committed:
        return
    try:
        if run.channel is not None:
            run.channel.abort()
    finally:
        _give_back(run, error)
        try:
            if run.release is not None:
                run.release.whole_target()
            if run.preparing and run.target_adapter is not None:
                run.target_adapter.abandon(run.x_target)
        except Exception as failure:
            warnings.warn(f"the target could not be undone: {failure!r}", stacklevel=2)
        finally:
            if run.woken is not None:
                run.woken.undo()
            _unpark(run)


def _unpark(run: Run) -> None:
    """Put a parked source back where it was, which needs the memory that it gave away meanwhile."""
    if run.parked is None:
        return
    try:
        run.parked.restore()
    except Exception as failure:
        seat = run.session.seat
        cause = (
            f"the source was parked, and cannot be put back: {failure}\nsomething else has taken the memory "
            "that it had; go back to a checkpoint, and use mode='keep' where memory is shared"
        )
        raise MigrationAborted(seat, "undo", cause, reason="source-lost") from failure


def _give_back(run: Run, error: BaseException | None) -> None:
    """In `release`: move back what was freed, on all seats if on any."""
    if run.release is None or not _freed(run):
        return
    control = run.control.again("undo")
    try:
        with control.phase("undo"):
            give_back(run, run.release, control)
    except Exception as failure:
        if run.own_source is not None:
            parked.left(TrainState.of(run.x_source).model, run.own_source.buffers)
        known = isinstance(error, MigrationAborted)
        seat = error.seat if known else run.session.seat  # type: ignore[union-attr]
        phase = error.phase if known else "move"  # type: ignore[union-attr]
        first = error.cause if known else repr(error)  # type: ignore[union-attr]
        cause = failure.cause if isinstance(failure, MigrationAborted) else repr(failure)
        raise MigrationAborted(
            seat,
            phase,
            f"{first}\nand mode='release' had freed source memory that could not be given back, so "
            f"the source is lost: {cause}\ngo back to a checkpoint",
            findings=failure.findings if isinstance(failure, MigrationAborted) else (),
            reason="source-lost",
        ) from failure
    finally:
        control.close()


def _freed(run: Run) -> bool:
    """Whether any seat has freed anything."""
    try:
        return run.control.marked("freed")
    except Exception:  # the store is lost
        return bool(run.release and run.release.freed)
