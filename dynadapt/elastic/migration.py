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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dynadapt.elastic import rng
from dynadapt.elastic.memory import Parked, available_bytes, state_to_make, too_little
from dynadapt.elastic.outcome import MigrationReport
from dynadapt.elastic.side import Side, unite
from dynadapt.errors import Finding, MigrationAborted, Refused
from dynadapt.protocols import Outcome
from dynadapt.registry import adapter_for
from dynadapt.transport.certificate import fingerprint
from dynadapt.transport.certify import Sums, Wanted, count
from dynadapt.transport.control import Control, Timeouts
from dynadapt.transport.executor import Moved, Storage, execute, staging_bytes
from dynadapt.transport.match import match
from dynadapt.transport.plan import Match, Options, SeatPlan
from dynadapt.transport.planner import plan_for
from dynadapt.transport.schedule import Chunk, chunks, cut, grid, traffic
from dynadapt.vps import cover
from dynadapt.vps.keys import Key, KeySpec

if TYPE_CHECKING:
    from dynadapt.elastic.worlds import Session
    from dynadapt.protocols import Adapter, Buffer, Channel, Described

__all__ = ["PHASES", "Settings", "fingerprint_of", "migrate", "plan", "side_of"]

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
DEFAULT_BUDGET = 256 << 20
OnPhase = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may decide; must be equal on every seat."""

    budget: int = DEFAULT_BUDGET
    mode: Literal["keep", "park"] = "keep"
    narrow: Literal["if-exact", "allow", "refuse"] = "if-exact"
    on_drift: Literal["error", "first"] = "error"
    allow: frozenset[str] = frozenset()
    timeouts: Timeouts = Timeouts()

    def __post_init__(self) -> None:
        known = {"extra", "missing", "tie", "step"}
        findings = []
        if self.mode not in {"keep", "park"}:
            findings.append(_bad("mode", self.mode, "'keep' or 'park'"))
        if self.narrow not in {"if-exact", "allow", "refuse"}:
            findings.append(_bad("narrow", self.narrow, "'if-exact', 'allow' or 'refuse'"))
        if self.on_drift not in {"error", "first"}:
            findings.append(_bad("on_drift", self.on_drift, "'error' or 'first'"))
        if self.allow - known:
            findings.append(_bad("allow", sorted(self.allow - known), f"some of {sorted(known)}"))
        if self.budget < 64 << 10:
            findings.append(_bad("budget", self.budget, "at least 65536 bytes"))
        if findings:
            raise Refused(findings)


def _bad(name: str, value: object, wanted: str) -> Finding:
    return Finding("bad-argument", name, f"is {value!r}, must be {wanted}")


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
        with run.phase("plan"):
            run.make_plan()
        every = {
            seat: plan_for(seat, run.source.layout, run.target.layout, run.matched, run.options)
            for seat in run.control.seats
        }
        return run.matched, every
    finally:
        run.undo()
        run.control.close()


def side_of(session: Session, x: Any, settings: Settings) -> tuple[Side, Described | None]:
    """Describe one state over all seats; nothing is changed but gathered copies are dropped."""
    control = Control(
        session.store(next(session.counter)), session.seat, session.seats, settings.timeouts
    )
    try:
        with control.phase("describe"):
            own = None
            if x is not None:
                adapter = adapter_for(x)
                adapter.quiesce(x)
                own = adapter.describe(x)
            side = unite("described", control, own)
            if side is None:
                raise Refused([Finding("no-state", "x", "no rank passed a state")])
        return side, own
    finally:
        control.close()


def fingerprint_of(session: Session, x: Any, settings: Settings) -> str:
    """The layout-free fingerprint of a state. All seats call it."""
    side, own = side_of(session, x, settings)
    control = Control(
        session.store(next(session.counter)), session.seat, session.seats, settings.timeouts
    )
    try:
        with control.phase("fingerprint"):
            specs = [s for s in side.layout.keys if s.moves]
            wanted = [Wanted(spec, spec.dtype, spec.key) for spec in specs]
            seats = tuple(s for s in side.layout.endpoints if s >= 0) or control.seats
            sums = count("own", control, side.layout, _storage(own), wanted, seats)
        return fingerprint(
            side.layout.keys, {s.key: v for s, v in zip(specs, sums.values, strict=True)}
        )
    finally:
        control.close()


def _storage(own: Described | None, buffers: Any = None) -> Storage:
    if own is None:
        return Storage((), {})
    rows = [*own.rows, *(row for part in own.files.values() for row in part)]
    return Storage(rows, own.buffers if buffers is None else buffers)


class _Migration:
    """One seat's run; attributes come to life phase by phase."""

    source: Side
    target: Side
    matched: Match
    options: Options
    seat_plan: SeatPlan
    chunk_list: list[Chunk]
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
        self.number = next(session.counter)
        self.control = Control(
            session.store(self.number), session.seat, session.seats, settings.timeouts
        )
        self.seconds: dict[str, float] = {}
        self.source_adapter: Adapter | None = None
        self.target_adapter: Adapter | None = None
        self.own_source: Described | None = None
        self.own_target: Described | None = None
        self.preparing = False
        self.parked: Parked | None = None
        self.channel: Channel | None = None
        self.outcomes: list[Outcome] = []
        self.warnings: list[Finding] = []
        self.moved = Moved()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, tell the listener, vote."""
        began = time.perf_counter()
        with self.control.phase(name):
            if self.on_phase is not None:
                self.on_phase(name)
            yield
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
            streams = self.gather_streams()
        with self.phase("commit"):
            pass
        if streams is not None:
            self.set_streams(streams)
        if self.channel is not None:
            self.channel.close()
        return MigrationReport(
            **totals,
            seconds=self.seconds,
            fingerprint_source=self.print_source(),
            fingerprint_target=print_target,
            outcomes=tuple(self.outcomes),
            warnings=tuple(dict.fromkeys(self.warnings)),
            source=_summary(self.source),
            target=_summary(self.target),
        )

    def prologue(self) -> None:
        """Up to and including `prepare`."""
        with self.phase("quiesce"):
            if self.x_source is not None:
                self.source_adapter = adapter_for(self.x_source)
                self.source_adapter.quiesce(self.x_source)
            if self.x_target is not None:
                self.target_adapter = adapter_for(self.x_target)
                self.target_adapter.quiesce(self.x_target)
        with self.phase("describe"):
            if self.source_adapter is not None:
                self.own_source = self.source_adapter.describe(self.x_source)
            side = unite("source", self.control, self.own_source)
            if side is None:
                raise Refused([Finding("no-state", "source", "no rank passed a source")])
            self.source = side
        with self.phase("prepare"):
            self.prepare()

    def prepare(self) -> None:
        """Make room: check memory, park the source if asked, let the target make absent state."""
        needed = 0
        if self.target_adapter is not None:
            before = self.target_adapter.describe(self.x_target)
            needed = state_to_make(self.source.layout.keys, before)
        self.check_memory("room", "new optimizer state", needed)
        if self.settings.mode == "park" and self.own_source is not None:
            self.parked = Parked(self.own_source.buffers)
        if self.target_adapter is not None:
            self.preparing = True
            self.own_target = self.target_adapter.prepare(self.x_target, self.source.layout.keys)
            for buffer in self.own_target.buffers.values():
                buffer.refill()
        side = unite("target", self.control, self.own_target)
        if side is None:
            raise Refused([Finding("no-state", "target", "no rank passed a target")])
        self.target = side

    def check_memory(self, name: str, what: str, needed: int) -> None:
        """Refuse, on all seats alike, what does not fit the memory of some host."""
        device = self.device()
        told = self.control.gather_values(name, [needed, available_bytes(device), self.session.host])
        place = device if device.startswith("cuda") else ""
        findings = too_little(
            what,
            {seat: int(n) for seat, (n, _, _) in told.items()},
            {seat: free for seat, (_, free, _) in told.items()},
            {seat: f"{host}{f'/{seat}' if place else ''}" for seat, (_, _, host) in told.items()},
        )
        if findings:
            raise Refused(findings)
        self.hosts = {seat: str(host) for seat, (_, _, host) in told.items()}

    def device(self) -> str:
        """Where this seat's state lies: "cpu" or its CUDA device."""
        buffers: list[Buffer] = []
        for own in (self.own_source, self.own_target):
            if own is not None:
                buffers += own.buffers.values()
        kinds = {str(b.tensor().device) for b in buffers if b.dtype}
        cuda = sorted(kind for kind in kinds if kind.startswith("cuda"))
        return cuda[0] if cuda else "cpu"

    def workers(self) -> tuple[int, ...]:
        """The seats that read and write files for others."""
        return self.control.seats

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
        findings = [*self.matched.findings, *cover.prove(target), *self.step_findings()]
        if findings:
            raise Refused(findings)
        for path, note in self.matched.notes:
            self.outcomes.append(Outcome(path, "derived", note))
        self.options = replace(self.options, first_only=self.count_source())
        self.seat_plan = plan_for(self.session.seat, source, target, self.matched, self.options)
        if self.seat_plan.findings:
            raise Refused(self.seat_plan.findings)
        edges = grid(self.matched.total, settings.budget)
        mine = traffic(self.seat_plan, self.matched, edges)
        busiest = self.control.combine("traffic", mine, np.maximum)
        borders = cut(busiest, edges, settings.budget)
        self.chunk_list = list(chunks(self.seat_plan, self.matched, borders))
        self.check_memory("staging", "staging", staging_bytes(self.chunk_list))

    def step_findings(self) -> list[Finding]:
        """A target with one step per flat buffer needs equal steps, unless `allow` has "step"."""
        if not self.target.flat_step or "step" in self.settings.allow:
            return []
        steps = {n: v["step"] for n, v in self.source.scalars.items() if "step" in v}
        if len(set(steps.values())) <= 1:
            return []
        low, high = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        return [
            Finding(
                "step",
                "optimizer",
                f"{low} is at step {steps[low]:g} and {high} at step {steps[high]:g}, and the target "
                "keeps one step for many parameters",
                'allow={"step"} takes the largest step',
            )
        ]

    def count_source(self) -> frozenset[Key]:
        """Take the source's sums; returns the keys of which only the first holder counts."""
        pairs = [p for p in self.matched.pairs if not p.fill]
        wanted = [Wanted(p.source, p.target.dtype, p.target.key) for p in pairs]
        derived = _derived(self.source)
        sums = count(
            "source",
            self.control,
            self.source.layout,
            _storage(self.own_source, self.parked.buffers if self.parked else None),
            [*wanted, *(w for two in derived for w in two)],
            self.workers(),
        )
        self.source_sums = sums.values[: len(wanted)]
        stale = _stale(derived, sums.values[len(wanted) :])
        self.warnings += [
            Finding("stale-copy", str(key), "differs from its master in the source; it is not moved")
            for key in stale
        ]
        return self.judge_drift(sums)

    def judge_drift(self, sums: Sums) -> frozenset[Key]:
        """Replicas that differ: an error for parameters and states, first holder's for buffers."""
        fatal: list[Finding] = []
        first: set[Key] = set()
        by_name = self.source.layout.by_name
        for key, findings in sums.drifted.items():
            if by_name[key].derived:
                continue
            is_buffer = by_name[key].kind in {"buffer", "transient"}
            if is_buffer or self.settings.on_drift == "first":
                first.add(key)
                self.warnings += findings
            else:
                fatal += findings
        if fatal:
            raise Refused(fatal)
        if first:  # sums of replicas that differ count the first holder only, as the plan does
            self.warnings.append(
                Finding("replicas-differ", "source", f"took the first holder of {len(first)} tensors")
            )
        return frozenset(first)

    def agree(self) -> None:
        """Before the first byte: equal layouts and options, equal message lists at both ends."""
        mine = {
            "options": self.options.digest(),
            "source": self.source.layout.digest(),
            "target": self.target.layout.digest(),
            "pairs": self.seat_plan.pair_digests(),
            "device": self.device(),
            "settings": repr(self.settings),
        }
        told = self.control.gather_values("agree", mine)
        findings = []
        for what in ("settings", "options", "source", "target"):
            if len({report[what] for report in told.values()}) > 1:
                findings.append(
                    Finding("ranks-disagree", what, "is not equal on all seats", "pass equal arguments")
                )
        for seat, report in told.items():
            for name, digest in report["pairs"].items():
                peer, way = int(name[:-1]), name[-1]
                other = told[peer]["pairs"].get(f"{seat}{'<' if way == '>' else '>'}")
                if other != digest:
                    findings.append(
                        Finding("plans-differ", f"seat {seat} {way} seat {peer}", "message lists differ")
                    )
        if findings:
            raise Refused(findings)
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
            _storage(self.own_source, self.parked.buffers if self.parked else None),
            _storage(self.own_target),
            self.channel,
            narrow=self.settings.narrow,
            timeout=self.settings.timeouts.phase,
            device=self.wire_device,
        )

    def finish(self) -> None:
        """The target's own repairs; a failure before its first collective is voted on first."""
        agreed = False

        def agree() -> None:
            nonlocal agreed
            if not agreed:
                agreed = True
                self.control.vote("finish")

        try:
            if self.target_adapter is not None:
                self.outcomes += self.target_adapter.finish(
                    self.x_target,
                    self.source.layout.keys,
                    self.source.scalars,
                    self.source.aux,
                    agree,
                )
            agree()
        except MigrationAborted:
            raise
        except Exception as error:
            if not agreed:
                agreed = True
                self.control.vote("finish", error)
            raise

    def certify(self) -> str:
        """Describe the target anew and compare every sum, every derived copy, every scalar."""
        after = None
        findings: list[Finding] = []
        if self.target_adapter is not None:
            after = self.target_adapter.describe(self.x_target)
            findings += _same_rows(self.own_target, after) + self.scalar_findings(after)
        pairs = self.matched.pairs
        wanted = [Wanted(p.target, p.target.dtype, p.target.key) for p in pairs]
        derived = _derived(self.target)
        sums = count(
            "target",
            self.control,
            self.target.layout,
            _storage(after),
            [*wanted, *(w for two in derived for w in two)],
            self.workers(),
        )
        moving = iter(self.source_sums)
        expected = [0 if p.fill else next(moving) for p in pairs]
        for pair, should, has in zip(pairs, expected, sums.values, strict=False):
            if should != has and not pair.target.local:
                findings.append(
                    Finding(
                        "certificate",
                        str(pair.target.key),
                        f"the target's sum {has:016x} is not the source's {should:016x}",
                        "the source is intact; please report this",
                    )
                )
        findings += [f for parts in sums.drifted.values() for f in parts]
        findings += [
            Finding("stale-copy", str(key), "differs from its master in the target")
            for key in _stale(derived, sums.values[len(wanted) :])
        ]
        if findings:
            raise Refused(findings)
        values = {p.target.key: v for p, v in zip(pairs, sums.values, strict=False)}
        return fingerprint(self.target.layout.keys, values)

    def scalar_findings(self, after: Described) -> list[Finding]:
        """Scalars of the source that this seat's target holds must be equal there."""
        if "step" in self.settings.allow and self.target.flat_step:
            return []
        findings = []
        for name, values in self.source.scalars.items():
            for label, value in values.items():
                has = after.scalars.get(name, {}).get(label, value)
                if has != value:
                    cause = f"is {has} in the target and {value} in the source"
                    findings.append(Finding("certificate", f"{name}/{label}", cause))
        return findings

    def print_source(self) -> str:
        """The source's fingerprint, of its values as the target's dtypes."""
        moving = iter(self.source_sums)
        values = {p.target.key: 0 if p.fill else next(moving) for p in self.matched.pairs}
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
                for row in self.own_target.rows
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

    def gather_streams(self) -> dict[rng.Coordinate, Any] | None:
        """The source's random streams by place, if any seat's place changes."""
        here = {s: rng.coordinate_of(c) for s, c in self.source.coordinates.items()}
        there = {s: rng.coordinate_of(c) for s, c in self.target.coordinates.items()}
        live = [seat for seat in there if seat >= 0]
        if not here or all(here.get(seat) == there[seat] for seat in live):
            return None
        mine = rng.capture() if self.own_source is not None else None
        told = self.control.gather_values("streams", mine)
        return {here[s]: told[s] for s in sorted(here) if told.get(s) is not None}

    def set_streams(self, streams: dict[rng.Coordinate, Any]) -> None:
        """After the commit: give this seat the stream of its new place."""
        for seat, place in sorted(self.target.coordinates.items()):
            stream, outcome = rng.stream_for(rng.coordinate_of(place), streams)
            self.outcomes.append(outcome)
            if seat == self.session.seat:
                if isinstance(stream, int):
                    rng.reseed(stream)
                else:
                    rng.apply(stream)

    def undo(self) -> None:
        """After a failure: break the channel, undo `prepare`, put a parked source back."""
        if self.channel is not None:
            self.channel.abort()
        try:
            if self.preparing and self.target_adapter is not None:
                self.target_adapter.abandon(self.x_target)
        except Exception as error:
            warnings.warn(f"the target could not be undone: {error!r}", stacklevel=2)
        if self.parked is not None:
            self.parked.restore()


def _derived(side: Side) -> list[tuple[Wanted, Wanted]]:
    """Per derived copy with rows: its own sum, and its master's as it should be."""
    found = []
    for spec in side.layout.keys:
        master = side.layout.by_name.get(Key(spec.key.name, "param"))
        if not spec.derived or not spec.numel or master is None:
            continue
        if any(True for _ in side.layout.holders(spec.key, _whole(spec))):
            copy = Wanted(spec, spec.dtype, spec.key)
            found.append((copy, Wanted(master, spec.dtype, spec.key)))
    return found


def _whole(spec: KeySpec) -> Any:
    from dynadapt.vps.box import Box

    return Box.whole(spec.shape)


def _stale(derived: list[tuple[Wanted, Wanted]], values: tuple[int, ...]) -> list[Key]:
    return [
        two[0].spec.key
        for i, two in enumerate(derived)
        if values[2 * i] != values[2 * i + 1]
    ]


def _same_rows(before: Described | None, after: Described) -> list[Finding]:
    """`finish` must not have changed who holds what."""
    if before is None:
        return []
    old = {(row.key, row.box) for row in before.rows}
    new = {(row.key, row.box) for row in after.rows}
    return [
        Finding("certificate", f"{key} {box}", "is held differently after finish")
        for key, box in sorted(old ^ new)
    ]


def _summary(side: Side) -> dict[str, Any]:
    seats = [endpoint for endpoint in side.layout.endpoints if endpoint >= 0]
    return {
        "seats": seats,
        "keys": len(side.layout.keys),
        "coordinates": {str(seat): dict(place) for seat, place in side.coordinates.items()},
    }
