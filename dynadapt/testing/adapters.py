"""One scenario that every live adapter passes, through real migrations. All seats call `check_adapter`.

A `Subject` says how a framework builds, trains and evaluates a state; the scenario calls all five
methods of its adapter, alone and in `api.migrate`, and compares every byte that the adapter describes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from dynadapt import api
from dynadapt.elastic.worlds import current_session
from dynadapt.errors import MigrationAborted
from dynadapt.testing._contract import (
    Turns,
    buffers_come_back,
    check_description,
    describing_changes_nothing,
    held,
    hyperparameters_are_taken,
    is_whole,
    nothing_is_passed_over,
    prepare_and_abandon_change_nothing,
    unchanged,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynadapt.elastic.worlds import Session

__all__ = ["Subject", "check_adapter", "check_description"]


class Subject(Protocol):
    """One framework's states, as the scenario needs them. All seats make the same calls."""

    def build(self, seed: int) -> Any:
        """A fresh state (what `api.migrate` takes) of one model and optimizer; weights by `seed`.

        Let hyperparameters differ by `seed` as well: then training tells whether they arrived. Seats
        that are threads share torch's global generator, so seed and build under a lock.
        """
        ...

    def train_step(self, x: Any, step: int) -> float:
        """One optimizer step on batch `step`; the loss over all seats."""
        ...

    def evaluate(self, x: Any) -> float:
        """A forward without gradients on a fixed batch, that changes nothing; the loss over all seats."""
        ...

    def open_step(self, x: Any) -> None:
        """Leave `x` in the middle of a step: gradients held, no optimizer step yet.

        On one seat alone, if that can be done: then the others must not go ahead.
        """
        ...

    def close_step(self, x: Any) -> None:
        """Back to a step boundary, by finishing the step or by dropping its gradients."""
        ...


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


def check_adapter(
    subject: Subject,
    other: Subject | None = None,
    *,
    session: Session | None = None,
    steps: int = 2,
    same_loss: Callable[[float, float], bool] = _close,
    timeout: float = 60.0,
) -> None:
    """Migrate from `subject` to `other` (default: to a second state of its own) and back.

    `same_loss` judges the losses of both; pass a looser one where their arithmetic differs. Raises
    `AssertionError`, or `DynadaptError` where a migration noticed first; what only one seat sees leaves
    the others waiting until their timeout. Against itself an adapter that is wrong in the same way on
    both sides passes: check it against another framework too.
    """
    there = other or subject
    more: dict[str, Any] = {"session": session, "timeout": timeout}
    turns = Turns(session or current_session(), timeout)
    a, b = subject.build(1), there.build(2)
    for step in range(steps):
        subject.train_step(a, step)
    for x in (a, b):
        describing_changes_nothing(x, turns)
        is_whole(api.describe(x, **more))
    seen = api.describe(a, **more)
    fresh = [each.build(3) for each in (there, subject)]
    for x in fresh:
        prepare_and_abandon_change_nothing(x, seen.layout.keys, turns)
    _planning_changes_nothing(a, b, more)
    _a_late_failure_is_undone(a, fresh[0], more)

    def same(losses: tuple[float, float], what: str, report: Any) -> None:
        told = "".join(f"\n{warning}" for warning in report.warnings)
        text = f"{what} gives {losses[0]} in the source and {losses[1]} in the target"
        assert same_loss(*losses), f"{text}{told}"

    kept = held(a)
    subject.evaluate(a)  # both may now hold gathered weights that hide their shards
    there.evaluate(b)
    report = api.migrate(a, b, **more)
    assert report.fingerprint_source == report.fingerprint_target, str(report)
    assert report.bytes_moved == report.bytes_minimum, str(report)
    nothing_is_passed_over(report.outcomes, seen.aux)
    unchanged(kept, held(a), "the source was changed")
    describing_changes_nothing(b, turns)
    same((subject.evaluate(a), there.evaluate(b)), "an evaluation", report)
    # One step shows what an evaluation does not: moments, step counts, hyperparameters.
    same((subject.train_step(a, steps), there.train_step(b, steps)), "the next step", report)
    same((subject.evaluate(a), there.evaluate(b)), "an evaluation after that step", report)

    _a_late_failure_is_undone(b, fresh[1], more)
    api.migrate(a, b, **more)
    kept = held(a)
    subject.train_step(a, steps + 1)
    assert held(a) != kept, "a training step changed nothing: the way back would prove nothing"
    subject.evaluate(a)
    there.evaluate(b)
    back = api.migrate(b, a, **more)
    assert back.bytes_moved == back.bytes_minimum, str(back)
    nothing_is_passed_over(back.outcomes, api.describe(b, **more).aux)
    unchanged(kept, held(a), "out and back is not bit for bit what it was")
    same((there.train_step(b, steps + 1), subject.train_step(a, steps + 1)), "the next step", back)
    same((there.evaluate(b), subject.evaluate(a)), "an evaluation after that step", back)

    _mid_step_is_refused(subject, a, b, more)
    _mid_step_is_refused(there, b, a, more)
    losses = subject.train_step(a, steps + 2), there.train_step(b, steps + 2)
    assert all(map(math.isfinite, losses)), losses
    report = api.migrate(a, b, **more)  # refusals left nothing behind
    same((subject.evaluate(a), there.evaluate(b)), "an evaluation", report)

    _parking_gives_memory_back(a, b, more)
    for source, target in (((subject, fresh[1]), (there, b)), ((there, fresh[0]), (subject, a))):
        _a_state_without_steps_arrives(source, target, same, more)
    hyperparameters_are_taken(b, api.describe(fresh[1], **more))
    hyperparameters_are_taken(a, api.describe(fresh[0], **more))


def _planning_changes_nothing(a: Any, b: Any, more: dict[str, Any]) -> None:
    before = held(a), held(b)
    plan = api.plan(a, b, **more)
    assert plan.bytes_moved == plan.bytes_minimum, str(plan)
    unchanged(before[0], held(a), "planning changed the source")
    unchanged(before[1], held(b), "planning changed the target")


def _a_late_failure_is_undone(a: Any, b: Any, more: dict[str, Any]) -> None:
    """When all bytes have landed and `finish` is over: the source untouched, the target not half made."""

    def fail(phase: str) -> None:
        if phase == "certify":
            raise RuntimeError("the scenario stops this migration")

    before = held(a), held(b)
    reason, text = _refusal(a, b, {**more, "on_phase": fail})
    assert text.endswith("the scenario stops this migration"), f"[{reason}] {text}"
    unchanged(before[0], held(a), "a migration that failed late changed the source")
    state, then = ({k: v for k, v in h.items() if " of " in k} for h in (before[1], held(b)))
    unchanged(state, then, "after a migration that failed late, abandon did not put back")


def _parking_gives_memory_back(a: Any, b: Any, more: dict[str, Any]) -> None:
    """Sources whose memory is freed while they are parked, and that come back as targets."""
    for x in (a, b):
        buffers_come_back(x)
    kept = held(a)
    for source, target in ((a, b), (b, a)):
        api.migrate(source, target, mode="park", **more)
    unchanged(kept, held(a), "parked and brought back, it is not bit for bit what it was")
    api.migrate(a, b, **more)


def _a_state_without_steps_arrives(
    source: tuple[Subject, Any],
    target: tuple[Subject, Any],
    same: Callable[[tuple[float, float], str, Any], None],
    more: dict[str, Any],
) -> None:
    """Into a target that has made steps: it has to forget them."""
    (one, fresh), (two, used) = source, target
    report = api.migrate(fresh, used, **more)
    same((one.train_step(fresh, 0), two.train_step(used, 0)), "the first step", report)
    same((one.evaluate(fresh), two.evaluate(used)), "an evaluation after the first step", report)


def _mid_step_is_refused(subject: Subject, x: Any, partner: Any, more: dict[str, Any]) -> None:
    """As a source and as a target, with both left as they were."""
    subject.open_step(x)
    for source, target in ((x, partner), (partner, x)):
        before = held(partner)
        reason, _ = _refusal(source, target, more)
        assert reason == "mid-step", f"in the middle of a step, the reason is {reason!r}"
        unchanged(before, held(partner), "a refused migration changed the other state")
    subject.close_step(x)
    subject.evaluate(x)  # hangs where some seats dropped gathered weights and others refused


def _refusal(source: Any, target: Any, more: dict[str, Any]) -> tuple[str, str]:
    """The reason and the text of a migration that has to fail."""
    try:
        api.migrate(source, target, **more)
    except MigrationAborted as error:
        return error.reason, str(error)
    return "not refused", ""
