"""What can be done to one rank in the middle of a migration, and which of it is done."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynadapt.elastic.migration import PHASES
from tests.live.jobs import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LATE", "TIMEOUT", "Fault", "every_fault", "some_faults"]

TIMEOUT = 3.0
"""Seconds a phase may take, and a rank may show no sign of life, where a rank is held up or lost."""

LATE = 1.5 * TIMEOUT + 1
"""Seconds that a rank is held up: longer than all others wait for it."""

WORLD = 4
MODES = ("keep", "park")
JOBS = (
    ("zero3-bf16", "tpdp"),
    ("fsdp2", "zero1-fp32"),
    ("zero2-bf16", "plain"),
    ("tpdp", "zero3-fp32"),
    ("zero1rr-bf16", "tpfsdp"),
    ("fsdp1-FULL_SHARD", "fsdp2"),
    ("plain", "zero2rr-fp32"),
)

#: Of these, the ones for a model so wide that its bytes travel in several chunks: from every rank to
#: others, and not cut into a thousand sub-groups.
WIDE_JOBS = tuple(
    (source, target)
    for source, target in JOBS
    if source != "plain" and "zero3" not in source + target
)

#: For `mode="release"`: sources whose memory is in many pieces, so that some of it goes before the rest.
RELEASE_JOBS = (
    ("fsdp2", "tpdp"),
    ("zero3-bf16", "plain"),
    ("tpdp", "fsdp2"),
    ("plain", "zero3-fp32"),
)
RELEASE_WIDTH = 1_000
"""Makes some 100 KB of state: two rounds."""

#: (phase, call inside it): see `_inject`. A rank that raises there has a cause of its own.
INSIDE = (
    ("quiesce", "adapter.quiesce"),
    ("quiesce", "adapter.quiesce, agreed"),
    ("describe", "store.set"),
    ("describe", "store.multi_get"),
    ("prepare", "store.check"),
    ("prepare", "adapter.prepare, done"),
    ("prepare", "park"),
    ("plan", "hash"),
    ("plan", "store.set"),
    ("agree", "channel.open"),
    ("agree", "channel.open, done"),
    ("move", "copy"),
    ("move", "channel.post"),
    ("move", "channel.post, done"),
    ("move", "posted.wait"),
    ("move", "posted.wait, done"),
    ("finish", "adapter.finish"),
    ("finish", "adapter.finish, done"),
    ("certify", "adapter.describe"),
    ("certify", "hash"),
    ("certify", "store.multi_get"),
)
#: Where only a rank that is gone, or late, tells something: what it did before counts as done.
ALONE = (
    ("finish", "adapter.finish, agreed"),
    ("plan", "decide"),
    ("certify", "decide"),
    ("commit", "decide"),
    ("commit", "store.add"),
    ("commit", "voted"),
)
#: Inside `mode="release"`: before and after a rank has freed memory of its source for the first time.
FREES = (("move", "free"), ("move", "free, done"))
#: Bits that are flipped: where they lie, in the phase before whose work it is done.
FLIPS = (("finish", "placed"), ("certify", "placed"), ("move", "source"))
#: Memory that runs out, for real: by a limit on the address space.
#: Not while a source is parked: what it needs to be put back is then under the limit as well, and whether
#: that is enough is `malloc`'s to say (`source-lost` says it is not; docs/refusals.md).
TIGHT = (("prepare", ""), ("agree", ""))


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to `rank`: at the beginning of `phase`, or inside it at the `nth` call of `call`.

    `kind` is "raise", "delay" and "stop" (for longer than all others wait), "kill", "flip" (a bit), or
    "memory" (it runs out). `source` and `target` are kinds of jobs.
    """

    kind: str
    phase: str
    call: str
    nth: int
    rank: int
    source: str
    target: str
    mode: str

    def __str__(self) -> str:
        where = f"{self.phase}: {self.call} {self.nth}" if self.call else self.phase
        jobs = f"{self.source} -> {self.target}"
        return f"{self.kind} on rank {self.rank} in {where}, {jobs}, {self.mode}"

    @property
    def width(self) -> int:
        """The model's hidden width: wide where a rank is to be hit between chunks, or in `malloc`."""
        if self.mode == "release":
            return RELEASE_WIDTH
        if self.kind == "memory":
            return 30_000
        return 4_000 if self.phase == "move" and self.call else HIDDEN

    @property
    def takes_source(self) -> bool:
        """Whether it takes away a rank that has the only copy of a part of the source."""
        late = self.phase in {"finish", "certify", "commit"} or (self.phase, self.call) in FREES
        return self.mode == "release" and self.kind == "kill" and late

    @property
    def timeout(self) -> float:
        """What `migrate` is given: short where it is what ends the wait."""
        return TIMEOUT if self.kind in {"delay", "stop", "kill"} else 30.0


def every_fault() -> tuple[Fault, ...]:
    """The whole list, the same each time.

    Every kind at the beginning of every phase on every rank, kills in every mode; then places inside
    phases, on ranks by turns. Jobs go by turns too. Then the same for `mode="release"`.
    """
    found: list[Fault] = []
    turn = 0

    def add(kind: str, phase: str, call: str, nth: int, rank: int, mode: str) -> None:
        nonlocal turn
        if call in {"park", "source"}:  # the copies of a parked source are nobody's to touch
            mode = {"park": "park", "source": "keep"}[call]
        jobs = WIDE_JOBS if (phase == "move" and call) or kind == "memory" else JOBS
        if call.startswith(
            "channel.open"
        ):  # from a plain job nothing moves, and no channel is opened
            jobs = tuple(job for job in jobs if job[0] != "plain")
        if call == "adapter.finish, agreed":  # others than these vote after their work
            jobs = tuple(job for job in jobs if job[1].startswith(("zero1", "zero2")))
        found.append(Fault(kind, phase, call, nth, rank, *jobs[turn % len(jobs)], mode))
        turn += 1

    for kind in ("raise", "kill", "delay", "stop"):
        modes = MODES if kind in {"raise", "kill"} else ("",)
        for i, phase in enumerate(PHASES):
            for rank in range(WORLD):
                for mode in modes:
                    add(kind, phase, "", 1, rank, mode or MODES[(i + rank) % len(MODES)])
    for number, (phase, call) in enumerate((*INSIDE, *ALONE)):
        kinds = ("kill", "stop") if (phase, call) in ALONE else ("raise", "kill", "raise", "delay")
        for at, kind in enumerate(kinds):
            rank, nth = (number + at) % WORLD, 1 + (number + at) % 2
            nth = (
                1
                if "adapter" in call or "open" in call or call in {"decide", "voted", "store.add"}
                else nth
            )
            add(kind, phase, call, nth, rank, MODES[(number + at) % len(MODES)])
    for number, (phase, call) in enumerate(FLIPS):
        for rank in range(WORLD):
            add("flip", phase, call, 1, rank, MODES[(number + rank) % len(MODES)])
    for phase, call in TIGHT:
        for rank in range(WORLD):
            add("memory", phase, call, 1, rank, "keep")
    return (*found, *_release_faults())


def _release_faults() -> Iterator[Fault]:
    """Raise, delay and kill at the beginning of every phase, and as memory of the source is freed."""
    places = [(phase, "") for phase in PHASES]
    for kind, ranks in (("raise", WORLD), ("kill", 2), ("delay", 1)):
        for number, (phase, call) in enumerate((*places, *FREES)):
            for at in range(ranks):
                rank, jobs = (number + at) % WORLD, RELEASE_JOBS[(number + at) % len(RELEASE_JOBS)]
                yield Fault(kind, phase, call, 1, rank, *jobs, "release")


def some_faults(number: int = 40) -> tuple[Fault, ...]:
    """A fixed part of the list for every run of the tests: of each kind as many as time allows."""
    share = {"raise": 0.4, "kill": 0.25, "delay": 0.1, "stop": 0.1, "flip": 0.075, "memory": 0.075}
    draw = random.Random(4)
    found: list[Fault] = []
    for kind, part in share.items():
        own = [fault for fault in every_fault() if fault.kind == kind]
        found += draw.sample(own, round(number * part))
    return tuple(found)
