"""The one sequence in which a state changes its layout, on every seat, all or nothing.

    quiesce -> describe -> prepare -> plan -> agree -> move -> finish -> certify -> commit

Every phase ends in a vote. Until the last one the source is only read (or parked, and put back), so
any failure, on any seat, in any phase, leaves it as it was.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.elastic import checks, rng
from dynadapt.elastic.cutting import cut_chunks
from dynadapt.elastic.memory import (
    Parked,
    Woken,
    available_bytes,
    state_to_make,
    too_little,
)
from dynadapt.elastic.naming import Naming, Own, renamed
from dynadapt.elastic.outcome import MigrationReport
from dynadapt.elastic.side import Side, unite
from dynadapt.elastic.state import ballot, control_of, parked_findings, refuse, storage_of
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import Outcome, TrainState
from dynadapt.registry import adapter_for
from dynadapt.transport.certificate import fingerprint
from dynadapt.transport.certify import Wanted, count
from dynadapt.transport.executor import Moved, execute, staging_bytes
from dynadapt.transport.match import match
from dynadapt.transport.plan import Options
from dynadapt.transport.planner import plan_for, remembered_plan
from dynadapt.vps import cover

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dynadapt.elastic.settings import Settings
    from dynadapt.elastic.worlds import Session
    from dynadapt.protocols import Adapter, Buffer, Channel, Described
    from dynadapt.transport.executor import Storage
    from dynadapt.transport.plan import Match, SeatPlan
    from dynadapt.transport.schedule import Chunk
    from dynadapt.vps.keys import Key

__all__ = ["PHASES", "migrate", "plan"]

PHASES = (
    "quiesce",
    "describe",
    "prepare",
    "plan",
    "agree",
    "move",
    "finish",
    "certify",
    "commit",
)
OnPhase = Callable[[str], None]


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
    run = _Migration(session, source, target, settings, on_phase)
    try:
        return run.whole()
    except BaseException:
        run.undo()
        raise
    finally:
        run.control.close()


def plan(
    session: Session, source: Any, target: Any, settings: Settings
) -> tuple[Match, dict[int, SeatPlan]]:
    """The plan of every seat, by seat, without moving anything: the target is left as it was."""
    run = _Migration(session, source, target, settings, None)
    try:
        run.prologue()
        with run.phase("plan", last=True):
            run.make_plan()
        every = {
            seat: plan_for(seat, run.source.layout, run.target.layout, run.matched, run.options)
            for seat in run.control.seats
            if seat != session.seat
        }
        every[session.seat] = run.seat_plan
        return run.matched, every
    finally:
        run.undo()
        run.control.close()


class _Migration:
    """One seat's run; attributes come to life phase by phase."""

    source: Side
    target: Side
    wanted: Own
    matched: Match
    options: Options
    seat_plan: SeatPlan
    chunk_list: tuple[Chunk, ...]
    source_sums: tuple[int, ...]

    def __init__(
        self,
        session: Session,
        source: Any,
        target: Any,
        settings: Settings,
        on_phase: OnPhase | None,
    ) -> None:
        self.session, self.settings, self.on_phase = session, settings, on_phase
        self.x_source, self.x_target = source, target
        self.number, self.control = control_of(session, settings)
        self.seconds: dict[str, float] = {}
        self.source_adapter: Adapter | None = None
        self.target_adapter: Adapter | None = None
        self.own_source: Described | None = None
        self.own_target: Described | None = None
        self.preparing = False
        self.committed = False
        self.parked: Parked | None = None
        self.woken: Woken | None = None
        self.channel: Channel | None = None
        self.outcomes: list[Outcome] = []
        self.warnings: list[Finding] = []
        self.moved = Moved()

    @contextmanager
    def phase(self, name: str, *, last: bool = False) -> Iterator[None]:
        """Time a phase, tell the listener, vote."""
        began = time.perf_counter()
        with self.control.phase(name, last=last):
            try:
                if self.on_phase is not None:
                    self.on_phase(name)
                yield
            except Exception:
                if self.channel is not None:
                    self.channel.abort()  # peers that wait for this seat need not wait for the vote
                raise
        self.seconds[name] = time.perf_counter() - began

    def whole(self) -> MigrationReport:
        """All phases."""
        self.prologue()
        with self.phase("plan"):
            self.make_plan()
        with self.phase("agree"):
            self.agree()
        with self.phase("move"):
            self.move()
        with self.phase("finish"):
            self.finish()
        with self.phase("certify"):
            print_target = self.certify()
            totals = self.totals()
            streams = rng.gather(self.control, self.source, self.target)
        with self.phase("commit", last=True):
            pass
        self.committed = True
        if self.woken is not None:
            self.woken.settle()
        if streams is not None:
            self.outcomes += rng.hand_out(streams, self.target, self.session.seat)
        if self.channel is not None:
            self.channel.close()
        return MigrationReport(
            **totals,
            seconds=self.seconds,
            fingerprint_source=self.print_of(self.expected()),
            fingerprint_target=print_target,
            outcomes=tuple(self.outcomes),
            warnings=tuple(dict.fromkeys(self.warnings)),
            source=summary(self.source),
            target=summary(self.target),
        )

    def prologue(self) -> None:
        """Up to and including `prepare`."""
        with self.phase("quiesce"):
            refuse(self.settings.findings())
            if self.x_source is not None:
                self.source_adapter = adapter_for(self.x_source)
                refuse(parked_findings("source", self.x_source))
            if self.x_target is not None:
                self.target_adapter = adapter_for(self.x_target)
                self.woken = Woken(TrainState.of(self.x_target).model)
            for adapter, x in (
                (self.source_adapter, self.x_source),
                (self.target_adapter, self.x_target),
            ):
                with ballot(self.control, "quiesce") as agree:
                    if adapter is not None:
                        adapter.quiesce(x, agree)
        with self.phase("describe"):
            told = self.control.gather_values("settings", self.settings.to_json())
            refuse(checks.disagreements(told))
            if self.source_adapter is not None:
                self.own_source = self.source_adapter.describe(self.x_source)
            side = unite("source", self.control, self.own_source)
            if side is None:
                raise Refused([Finding("no-state", "source", "no rank passed a source")])
            self.source = renamed("source", side, self.settings.source_map, self.settings.allow)
        with self.phase("prepare"):
            self.prepare()

    def prepare(self) -> None:
        """Make room: check memory, park the source if asked, let the target make absent state."""
        needed = 0
        before: Described | None = None
        if self.target_adapter is not None:
            before = self.target_adapter.describe(self.x_target)
        self.wanted = self.in_target_names(before)
        if before is not None:
            needed = state_to_make(self.wanted.keys, before)
        self.check_memory("room", "new optimizer state", needed)
        if self.settings.mode == "park" and self.own_source is not None and not self.source.readers:
            model = TrainState.of(self.x_source).model
            if self.x_target is not None and TrainState.of(self.x_target).model is model:
                cause = "source and target are the same model, which cannot be parked away"
                refuse([Finding("bad-argument", "mode", cause, "use mode='keep'")])
            self.parked = Parked(model, self.own_source.buffers)
            self.parked.park()
        if self.target_adapter is not None and before is not None:
            self.preparing = True
            aux = {item.path: item for item in before.aux}
            unlike = checks.optimizers_differ(self.source.aux, aux, self.settings.allow)
            self.own_target = self.target_adapter.prepare(self.x_target, self.wanted.keys)
            refuse(unlike)
        blank = None  # what the target says of steps and hyperparameters is about to be replaced
        if self.own_target is not None:
            blank = replace(self.own_target, scalars={}, aux=())
        side = unite("target", self.control, blank)
        if side is None:
            raise Refused([Finding("no-state", "target", "no rank passed a target")])
        self.target = renamed("target", side, self.settings.target_map, self.settings.allow)

    def in_target_names(self, before: Described | None) -> Own:
        """The source as the target's adapter is to know it. All seats call it."""
        source, tensor_map = self.source, self.settings.target_map
        if tensor_map is None:
            return Own(source.layout.keys, source.scalars, source.aux)
        blank = None
        if before is not None:  # states may be there for some of a map's parts only, as yet
            specs = tuple(spec for spec in before.specs if spec.key.slot in {"param", "buffer"})
            blank = replace(before, specs=specs, rows=(), files={}, scalars={}, aux=())
        side = unite("target names", self.control, blank)
        if side is None:
            raise Refused([Finding("no-state", "target", "no rank passed a target")])
        return Naming("target", tensor_map, side.layout.keys).of(source)

    def told(self, findings: Iterable[Finding]) -> list[Finding]:
        """Findings placed by common names, with the names that the user knows."""
        namings = [side.naming for side in (self.source, self.target) if side.naming is not None]
        found = list(findings)
        for naming in namings:
            found = [naming.told(finding) for finding in found]
        return found

    def check_memory(self, name: str, what: str, needed: int) -> None:
        """Refuse, on all seats alike, what does not fit the memory of some host."""
        device = self.device()
        told = self.control.gather_values(
            name, [needed, available_bytes(device), self.session.host]
        )
        place = device if device.startswith("cuda") else ""
        findings = too_little(
            what,
            {seat: int(n) for seat, (n, _, _) in told.items()},
            {seat: free for seat, (_, free, _) in told.items()},
            {seat: f"{host}{f'/{seat}' if place else ''}" for seat, (_, _, host) in told.items()},
        )
        refuse(findings)
        self.hosts = {seat: str(host) for seat, (_, _, host) in told.items()}

    def device(self) -> str:
        """Where this seat's state lies: "cpu" or its CUDA device."""
        buffers: list[Buffer] = []
        for own in (self.own_source, self.own_target):
            if own is not None:
                buffers += own.buffers.values()
        kinds = {buffer.device for buffer in buffers}
        cuda = sorted(kind for kind in kinds if kind.startswith("cuda"))
        return cuda[0] if cuda else "cpu"

    def source_storage(self) -> Storage:
        """What this seat can read of the source, from the parked copies if there are any."""
        buffers = self.parked.buffers if self.parked else None
        return storage_of(self.session, self.source, self.own_source, buffers)

    def workers(self) -> tuple[int, ...]:
        """The seats that read and write files for others."""
        readers = [set(side.readers) for side in (self.source, self.target) if side.readers]
        return tuple(sorted(set.intersection(*readers))) if readers else self.control.seats

    def make_plan(self) -> None:
        """Match keys, take the source's sums, choose replicas, cut chunks. All findings together."""
        settings = self.settings
        self.options = Options(
            budget=settings.budget,
            narrow=settings.narrow,
            allow=settings.allow,
            hosts=self.hosts,
            workers=self.workers(),
        )
        source, target = self.source.layout, self.target.layout
        self.matched = match(source.keys, target.keys, self.options)
        steps = checks.steps_differ(self.source.scalars, self.target.flat_step, settings.allow)
        files = checks.files_unreachable(self.source, self.target)
        refuse(self.told([*self.matched.findings, *cover.prove(target), *steps, *files]))
        for path, note in self.matched.notes:
            self.outcomes.append(Outcome(path, "derived", note))
        self.options = replace(self.options, first_only=self.count_source())
        seat = self.session.seat
        self.seat_plan = remembered_plan(seat, source, target, self.matched, self.options)
        refuse(self.told(self.seat_plan.findings))
        self.chunk_list = cut_chunks(self.control, self.seat_plan, settings.budget)
        self.check_memory("staging", "staging", staging_bytes(self.chunk_list))

    def count_source(self) -> frozenset[Key]:
        """Take the source's sums; returns the keys of which only the first holder counts."""
        pairs = [p for p in self.matched.pairs if not p.fill]
        wanted = [Wanted(p.source, p.target.dtype, p.target.key) for p in pairs]
        derived = checks.derived_sums(self.source)
        sums = count(
            "source",
            self.control,
            self.source.layout,
            self.source_storage(),
            [*wanted, *(w for two in derived for w in two)],
            self.workers(),
        )
        self.source_sums = sums.values[: len(wanted)]
        cause = "differs from its master in the source; it is not moved"
        self.warnings += self.told(
            Finding("stale-copy", str(key), cause)
            for key in checks.stale(derived, sums.values[len(wanted) :])
        )
        drift = checks.drift(sums, self.source.layout.by_name, self.settings.on_drift)
        refuse(self.told(drift.fatal))
        self.warnings += self.told(drift.told)
        return drift.first_only

    def agree(self) -> None:
        """Before the first byte: equal layouts and options, equal message lists at both ends."""
        mine: dict[str, Any] = {
            "options": self.options.digest(),
            "source": self.source.layout.digest(),
            "target": self.target.layout.digest(),
            "pairs": self.seat_plan.pair_digests(),
            "device": self.device(),
        }
        told = self.control.gather_values("agree", mine)
        refuse(checks.disagreements(told))
        devices = {report["device"] for report in told.values()}
        on_cuda = all(device.startswith("cuda") for device in devices)
        self.wire_device = mine["device"] if on_cuda else "cpu"
        if len(self.control.seats) > 1:
            self.channel = self.session.channel(
                self.number, self.wire_device, self.settings.timeouts.phase
            )

    def move(self) -> None:
        """All bytes."""
        self.moved = execute(
            self.seat_plan,
            self.chunk_list,
            self.matched,
            self.source_storage(),
            storage_of(self.session, self.target, self.own_target),
            self.channel,
            narrow=self.settings.narrow,
            timeout=self.settings.timeouts.phase,
            device=self.wire_device,
        )

    def finish(self) -> None:
        """The target's own repairs; a failure before its first collective is voted on first."""
        with ballot(self.control, "finish") as agree:
            if self.target_adapter is not None:
                self.outcomes += self.target_adapter.finish(
                    self.x_target,
                    self.wanted.keys,
                    self.wanted.scalars,
                    self.wanted.aux,
                    agree,
                )

    def certify(self) -> str:
        """Describe the target anew and compare every sum, every derived copy, every scalar."""
        after = None
        findings: list[Finding] = []
        if self.target_adapter is not None:
            after = self.target_adapter.describe(self.x_target)
            findings += checks.held_differently(self.own_target, after)
            unlike = checks.scalars_differ(self.wanted.scalars, after.scalars)
            if "step" in self.settings.allow and self.target.flat_step:
                self.outcomes += [Outcome(f.where, "derived", f.cause) for f in unlike]
            else:
                findings += unlike
        pairs = self.matched.pairs
        wanted = [Wanted(p.target, p.target.dtype, p.target.key) for p in pairs]
        derived = checks.derived_sums(self.target)
        sums = count(
            "target",
            self.control,
            self.target.layout,
            storage_of(self.session, self.target, after),
            [*wanted, *(w for two in derived for w in two)],
            self.workers(),
        )
        findings += checks.sums_differ(pairs, self.expected(), sums.values[: len(pairs)])
        findings += [f for parts in sums.drifted.values() for f in parts]
        findings += [
            Finding("stale-copy", str(key), "differs from its master in the target")
            for key in checks.stale(derived, sums.values[len(wanted) :])
        ]
        refuse(self.told(findings))
        return self.print_of(sums.values[: len(pairs)])

    def expected(self) -> list[int]:
        """The sums the target must have, by pair: the source's, and zero where zeros were filled in."""
        moving = iter(self.source_sums)
        return [0 if pair.fill else next(moving) for pair in self.matched.pairs]

    def print_of(self, sums: Sequence[int]) -> str:
        """The fingerprint of a state with these sums by pair, under the target's names and dtypes."""
        pairs = zip(self.matched.pairs, sums, strict=True)
        values = {pair.target.key: value for pair, value in pairs}
        return fingerprint(self.target.layout.keys, values)

    def totals(self) -> dict[str, int]:
        """Byte counts over all seats."""
        made = self.own_target.allocated if self.own_target is not None else 0
        parked = self.parked.nbytes if self.parked is not None else 0
        rebuilt = self.moved.filled
        if self.own_target is not None:
            derived = {s.key: s for s in self.target.layout.keys if s.derived}
            rebuilt += sum(
                row.box.volume * derived[row.key].nbytes // max(derived[row.key].numel, 1)
                for row in self.target.canonical(self.own_target.rows)
                if row.key in derived
            )
        moved = self.moved
        sums = np.array([moved.received, self.seat_plan.minimum, rebuilt, moved.copied], np.int64)
        most = np.array(
            [made + parked + moved.peak_staging, moved.peak_staging, moved.chunks], np.int64
        )
        sums = self.control.combine("total", sums, np.add)
        most = self.control.combine("most", most, np.maximum)
        names = ("bytes_moved", "bytes_minimum", "bytes_rebuilt", "bytes_resident")
        tops = ("peak_extra_bytes", "staging_bytes", "chunks")
        return {
            **{name: int(v) for name, v in zip(names, sums, strict=True)},
            **{name: int(v) for name, v in zip(tops, most, strict=True)},
        }

    def undo(self) -> None:
        """After a failure: break the channel, undo `prepare`, put a parked source back.

        Each of them whatever became of the others. After the commit there is nothing to undo: the other
        seats have gone on with the target.
        """
        if self.committed:
            return
        try:
            if self.channel is not None:
                self.channel.abort()
        finally:
            try:
                if self.preparing and self.target_adapter is not None:
                    self.target_adapter.abandon(self.x_target)
            except Exception as error:
                warnings.warn(f"the target could not be undone: {error!r}", stacklevel=2)
            finally:
                if self.woken is not None:
                    self.woken.undo()
                if self.parked is not None:
                    self.parked.restore()


def summary(side: Side) -> dict[str, Any]:
    """One side for the report."""
    return {
        "seats": [endpoint for endpoint in side.layout.endpoints if endpoint >= 0],
        "keys": len(side.layout.keys),
        "coordinates": {str(seat): dict(place) for seat, place in side.coordinates.items()},
    }
