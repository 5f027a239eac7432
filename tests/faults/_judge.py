"""Whether what the ranks tell of a fault is what they were promised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynadapt.elastic.migration import PHASES
from tests.faults._fault import LATE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests._ranks import Outcome
    from tests.faults._fault import Fault

__all__ = ["Verdict", "judge"]

MARGIN = 10.0
"""Seconds that a rank may take beyond the longest wait that is promised: the machine may be busy."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`outcome` is "undone", "done" (the migration succeeded), "source-lost" (told so, as `release` has
    it), "lost" (state) or "hung"; `complaints` say what broke its promise.
    """

    fault: Fault
    outcome: str
    complaints: tuple[str, ...]
    seconds: float


def judge(fault: Fault, outcomes: Sequence[Outcome]) -> Verdict:
    """The verdict on one fault from all ranks' answers."""
    found: list[str] = []
    killed = fault.kind == "kill"
    dead = [outcome.rank for outcome in outcomes if outcome.died]
    answers = [outcome.value for outcome in outcomes if outcome.error is None]
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    hung = any(outcome.error == "did not answer in time" for outcome in outcomes)
    victim = dead[0] if killed and len(dead) == 1 else fault.rank
    found += [
        f"rank {outcome.rank}: {outcome.error}\n{outcome.detail}"
        for outcome in failed
        if not (killed and outcome.rank == victim and outcome.error == "died (SIGKILL)")
    ]
    if killed and not dead:
        found.append("nobody was killed")
    told = {(a.get("seat"), a.get("phase"), a.get("reason"), a.get("error")) for a in answers}
    if len(told) > 1:
        found.append(f"ranks were told different things: {told}")
    elif answers:
        found += _said(fault, victim, answers[0])
    for answer in answers:
        lost = [name for name, fine in answer.items() if fine is False]
        found += [f"rank {answer['rank']}: not {name}" for name in lost]
        longest = _longest(fault, answer["rank"] == victim)
        if answer["seconds"] > longest:
            found.append(f"rank {answer['rank']} took {answer['seconds']:.1f} s, not {longest:.1f}")
    outcome = "undone" if answers and "error" in answers[0] else "done"
    if answers and answers[0].get("reason") == "source-lost":
        outcome = "source-lost" if fault.takes_source else "lost"
    if hung:
        outcome = "hung"
    elif any(fine is False for answer in answers for fine in answer.values()) or len(told) > 1:
        outcome = "lost"
    slowest = max((answer["seconds"] for answer in answers), default=0.0)
    return Verdict(fault, outcome, tuple(found), slowest)


#: How an error tells its cause, by the kind of fault, and its reason, if there is but one.
CAUSES = {
    "raise": ("on purpose", {"failed"}),
    "delay": ("", {"timeout"}),
    "stop": (
        "",
        {"seat-lost", "timeout"},
    ),  # it lives: whether it is missed first, or late, is luck
    "kill": ("no sign of it", {"seat-lost"}),
    "flip": ("", {"certificate", "stale-copy", "replicas-differ"}),
    "memory": ("", {"out-of-memory"}),
}


def _said(fault: Fault, victim: int, answer: dict[str, Any]) -> list[str]:
    """What is wrong with the one error that all ranks raised, or with its absence."""
    if "error" not in answer:
        # who is lost after its last vote is not missed; it is in the store before it is counted
        after = fault.phase == "commit" and fault.call in {"store.add", "voted", "decide"}
        return [] if after else ["nothing was noticed"]
    found = []
    cause, reasons = CAUSES[fault.kind]
    if fault.takes_source:
        reasons = {"source-lost"}
    if fault.kind == "delay" and fault.call.startswith("channel.open"):
        cause, reasons, victim = "connect", {"channel"}, answer["seat"]  # all are held up alike
    if fault.kind == "stop" and fault.call == "decide":
        victim = answer["seat"]  # whoever votes last decides: which rank that is, nobody chose
    if cause not in answer["error"] or answer["reason"] not in reasons:
        found.append(f"the cause is not told ({answer['reason']}): {answer['error']}")
    held_up = fault.kind == "delay" and fault.call == "channel.post"
    if held_up and "under way in chunk" not in answer["error"]:
        found.append(f"it is not told what was under way: {answer['error']}")
    if fault.kind == "flip":
        return found
    if fault.kind == "memory":  # what was left may do for a while
        early = PHASES.index(answer["phase"]) < PHASES.index(fault.phase)
        return [*found, f"in phase {answer['phase']!r} already"] if early else found
    if answer["seat"] != victim:
        found.append(f"seat {answer['seat']} is blamed, not {victim}: {answer['error']}")
    # who dies deciding is missed in the next phase: all ballots are there
    if answer["phase"] != fault.phase and fault.call != "decide":
        found.append(f"the phase is {answer['phase']!r}, not {fault.phase!r}: {answer['error']}")
    return found


def _longest(fault: Fault, victim: bool) -> float:
    """Seconds a rank may be kept: whoever is not missed is waited for as long as a phase and a half."""
    phases = 2 if fault.mode == "release" else 1  # the way back is another, over another channel
    if fault.kind in {"delay", "stop", "kill"}:
        return phases * (MARGIN + max(1.5 * fault.timeout, LATE if victim else 0))
    return phases * MARGIN
