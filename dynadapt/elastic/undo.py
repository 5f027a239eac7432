"""After a failure: the channel broken, `prepare` undone, a parked source put back."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynadapt.elastic.run import Run

__all__ = ["undo"]


def undo(run: Run) -> None:
    """Take a failed run back, each part of it whatever became of the others.

    After the commit there is nothing to undo: the other seats have gone on with the target.
    """
    if run.committed:
        return
    try:
        if run.channel is not None:
            run.channel.abort()
    finally:
        try:
            if run.preparing and run.target_adapter is not None:
                run.target_adapter.abandon(run.x_target)
        except Exception as error:
            warnings.warn(f"the target could not be undone: {error!r}", stacklevel=2)
        finally:
            if run.woken is not None:
                run.woken.undo()
            if run.parked is not None:
                run.parked.restore()
