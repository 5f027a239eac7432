"""The phases before a byte moves: quiesce, describe, prepare, plan, agree."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dynadapt.elastic import checks, drift, memory
from dynadapt.elastic.companions import said_by
from dynadapt.elastic.contract import over_limit, parking, promised
from dynadapt.elastic.conversion_layout import copies
from dynadapt.elastic.cutting import cut_chunks
from dynadapt.elastic.deferred import Deferred
from dynadapt.elastic.naming import Naming, Own, renamed
from dynadapt.elastic.parked import Parked, Woken
from dynadapt.elastic.release import cannot_undo, rounds_for, shared_with
from dynadapt.elastic.seen import changed_since, damaged_files
from dynadapt.elastic.shared import SharedFiles
from dynadapt.elastic.side import unite
from dynadapt.elastic.state import ballot, parked_findings, refuse
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import FileSource, FileTarget, Outcome, TrainState, modules_of
from dynadapt.registry import adapter_for
from dynadapt.transport.hashing import Wanted, acts_for
from dynadapt.transport.match import match
from dynadapt.transport.plan import Options
from dynadapt.transport.planner import remembered_plan
from dynadapt.vps import cover
from dynadapt.vps.keys import canonical_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from dynadapt.elastic.run import Run
    from dynadapt.files import FileBuffer
    from dynadapt.protocols import Described
    from dynadapt.vps.keys import Key

__all__ = ["agree", "make_plan", "prologue"]


def prologue(run: Run) -> None:
    """Up to and including `prepare`."""
    with run.phase("quiesce"):
        _quiesce(run)
    with run.phase("describe"):
        told = run.control.gather_values("settings", run.settings.to_json())
        refuse(checks.disagreements(told))
        if run.source_adapter is not None:
            run.own_source = run.source_adapter.describe(run.x_source)
            refuse(checks.no_memory(run.own_source))
        side = unite("source", run.control, run.own_source)
        if side is None:
            raise Refused([Finding("no-state", "source", "no rank passed a source")])
        run.source = renamed("source", side, run.settings.source_map, run.settings.allow)
    with run.phase("prepare"):
        _prepare(run)


def _names_in(x: Any) -> list[str]:
    """All names of a live model's parameters, of a tied one the first, as its framework has them."""
    parts = modules_of(TrainState.of(x).model) if x is not None else ()
    return [canonical_name(name) for part in parts for name, _ in part.named_parameters()]


def _quiesce(run: Run) -> None:
    refuse(run.settings.findings())
    if run.x_source is not None:
        run.source_adapter = adapter_for(run.x_source)
        refuse(parked_findings("source", run.x_source))
    if isinstance(run.x_target, FileTarget):
        run.saving = SharedFiles(run.x_target, run.control, force=run.settings.force)
        run.target_adapter = run.saving
    elif run.x_target is not None:
        run.target_adapter = adapter_for(run.x_target)
        run.woken = Woken(TrainState.of(run.x_target).model)
    for adapter, x in (
        (run.source_adapter, run.x_source),
        (run.target_adapter, run.x_target),
    ):
        with ballot(run.control, "quiesce") as vote:
            if adapter is not None:
                adapter.quiesce(x, vote)


def _prepare(run: Run) -> None:
    """Make room: check memory, park the source if asked, let the target make absent state."""
    needed = 0
    before: Described | None = None
    if run.target_adapter is not None:
        before = run.target_adapter.describe(run.x_target)
    run.wanted = _in_target_names(run, before)
    if before is not None:
        needed = memory.state_to_make(run.wanted.keys, before)
    parks = run.settings.mode == "park" and run.own_source is not None
    if parks and run.own_source is not None and not run.source.readers:
        run.parking = parking(run.own_source.buffers)
    if run.settings.mode != "release":
        _check_memory(run, "room", "new optimizer state", needed, run.parking[1])
    else:
        _check_memory(run, "room", "the migration", 0, 0)
    taken = run.settings.mode != "keep" and run.own_source is not None and not run.source.readers
    if taken and run.x_target is not None:
        model = TrainState.of(run.x_source).model
        other = modules_of(TrainState.of(run.x_target).model)
        if any(part is each for part in modules_of(model) for each in other):
            cause = "source and target are the same model, whose memory cannot be taken away"
            refuse([Finding("bad-argument", "mode", cause, "use mode='keep'")])
        if before is not None and run.own_source is not None:
            refuse(shared_with(run.own_source, before))
    if parks and taken and not run.dry and run.own_source is not None:
        run.parked = Parked(TrainState.of(run.x_source).model, run.own_source.buffers)
        run.parked.park()
    if run.target_adapter is not None and before is not None:
        run.preparing = True
        aux = {item.path: item for item in before.aux}
        states = any(spec.kind == "state" for spec in run.source.layout.keys)
        unlike = checks.optimizers_differ(
            *(run.source.aux, aux, run.settings.allow), unsaid=states and bool(run.source.readers)
        )
        deferred = Deferred() if run.settings.mode == "release" else None
        with deferred or nullcontext():
            if run.saving is not None:
                run.saving.aux = run.wanted.aux
                every = run.control.gather_values("called", _names_in(run.x_source))
                run.saving.called = tuple(name for own in every.values() for name in own)
                if run.settings.source_map is None:  # else names are others than the model's
                    told = run.control.gather_values("beside", said_by(run.x_source))
                    run.saving.beside = next((own for own in told.values() if own), {})
            run.own_target = run.target_adapter.prepare(run.x_target, run.wanted.keys)
        if deferred is not None:
            run.deferred = deferred.settle(run.own_target.buffers)
        run.lacking = [finding for finding in unlike if finding.reason == "missing-key"]
        refuse(finding for finding in unlike if finding not in run.lacking)
    blank = None  # what the target says of steps and hyperparameters is about to be replaced
    if run.own_target is not None:
        blank = replace(run.own_target, scalars={}, aux=())
    side = unite("target", run.control, blank)
    if side is None:
        raise Refused([Finding("no-state", "target", "no rank passed a target")])
    run.target = renamed("target", side, run.settings.target_map, run.settings.allow)


def _in_target_names(run: Run, before: Described | None) -> Own:
    """The source as the target's adapter is to know it. All seats call it."""
    source, tensor_map = run.source, run.settings.target_map
    if tensor_map is None:
        return Own(source.layout.keys, source.scalars, source.aux)
    blank = None
    if before is not None:  # states may be there for some of a map's parts only, as yet
        specs = tuple(spec for spec in before.specs if spec.key.slot in {"param", "buffer"})
        blank = replace(before, specs=specs, rows=(), files={}, scalars={}, aux=())
    side = unite("target names", run.control, blank)
    if side is None:
        raise Refused([Finding("no-state", "target", "no rank passed a target")])
    return Naming("target", tensor_map, side.layout.keys).of(source)


def _check_memory(run: Run, name: str, what: str, needed: int, host: int) -> None:
    """Refuse, on all seats alike, what does not fit a device, or the memory of a host."""
    device = run.device()
    on_cuda = device.startswith("cuda")
    pools = {"host": (host if on_cuda else max(host, needed), memory.available_bytes())}
    if on_cuda:
        pools["device"] = (needed, memory.available_bytes(device))
    told = run.control.gather_values(name, [pools, run.session.host])
    findings = []
    for pool in ("host", "device"):
        there = {seat: report[pool] for seat, (report, _) in told.items() if pool in report}
        findings += memory.too_little(
            what,
            {seat: int(n) for seat, (n, _) in there.items()},
            {seat: free for seat, (_, free) in there.items()},
            {
                seat: f"{host}/{seat}" if pool == "device" else host
                for seat, (_, host) in told.items()
            },
        )
    refuse(findings)
    run.hosts = {seat: str(host) for seat, (_, host) in told.items()}


def make_plan(run: Run) -> None:
    """Match keys, take the source's sums, choose replicas, cut chunks. All findings together."""
    settings = run.settings
    run.options = Options(
        budget=settings.budget,
        narrow=settings.narrow,
        allow=settings.allow | ({"extra"} if run.saving else set()),  # it is told what was dropped
        hosts=run.hosts,
        workers=run.workers(),
    )
    source, target = run.source.layout, run.target.layout
    run.matched = match(source.keys, target.keys, run.options)
    if run.saving is not None:
        copied = copies(source, target)
        run.matched = replace(run.matched, pairs=(*run.matched.pairs, *copied))
    steps = checks.steps_differ(run.source.scalars, run.target.flat, settings.allow)
    files = checks.files_unreachable(run.source, run.target)
    refuse(run.told([*run.lacking, *run.matched.findings, *cover.prove(target), *steps, *files]))
    for path, note in run.matched.notes:
        run.outcomes.append(Outcome(path, "derived", note))
    run.outcomes += [Outcome(path, "dropped", note) for path, note in run.matched.left]
    run.options = replace(run.options, first_only=_count_source(run))
    seat = run.session.seat
    run.seat_plan = remembered_plan(seat, source, target, run.matched, run.options)
    refuse(run.told(run.seat_plan.findings))
    if settings.mode == "release":
        refuse(run.told(cannot_undo(run)))
        run.release = rounds_for(run)
        run.outcomes += run.release.outcome()
        run.chunk_list = tuple(c for each in run.release.rounds for c in each.chunks)
    else:
        run.chunk_list = cut_chunks(run.control, run.seat_plan, settings.budget)
    _promise(run)


def _promise(run: Run) -> None:
    """Every seat says what it will hold; too much, on any of them, is refused before a byte moves."""
    mine = promised(run)
    promises = run.control.gather_values("promise", mine.to_json())
    run.promises = {seat: dict(promise) for seat, promise in promises.items()}
    refuse(over_limit(run.promises, run.settings.max_extra_bytes))
    there = 0 if run.settings.mode == "release" else mine.made  # in use by now
    parked = run.parking[2] if run.parked is not None else 0
    left = max(mine.peak - there, 0), max(mine.host - parked, 0)
    if run.device() == "cpu":
        left = (max(mine.peak - there - parked, 0),) * 2
    _check_memory(run, "peak", "the migration", *left)


def _count_source(run: Run) -> frozenset[Key]:
    """Take the source's sums; returns the keys of which only the first holder counts."""
    pairs = [p for p in run.matched.pairs if not p.fill]
    wanted = [Wanted(p.source, p.target.dtype, p.target.key) for p in pairs]
    joined = [(other, spec) for other, spec in run.matched.joined if other.shape == spec.shape]
    wanted += [Wanted(other, spec.dtype, spec.key) for other, spec in joined]
    storage = run.source_storage()
    compared = drift.compare("source", run.control, run.source, storage, wanted, run.workers())
    run.source_sums, others = compared.values[: len(pairs)], compared.values[len(pairs) :]
    taken = dict(zip((pair.target.key for pair in pairs), run.source_sums, strict=True))
    same = {
        other.key
        for (other, spec), own in zip(joined, others, strict=True)
        if taken.get(spec.key) == own
    }
    run.warnings += run.told(_left_by_ties(run, same))
    if isinstance(run.x_source, str | FileSource) and run.source.naming is None:
        refuse(changed_since(str(run.x_source), zip(pairs, run.source_sums, strict=True)))
    if isinstance(run.x_source, str | FileSource):
        refuse(damaged_files(_own_share(run, {pair.source.key for pair in pairs})))
    found = drift.treat(compared, run.source, run.settings.on_drift)
    refuse(run.told(found.fatal))
    run.warnings += run.told(found.warnings)
    run.outcomes += found.outcomes
    return found.first_only


def _own_share(run: Run, keys: Collection[Key]) -> Iterator[FileBuffer]:
    """What this seat reads of the source's files, for all seats, of some keys."""
    own, workers = run.own_source, run.workers()
    if own is None:
        return
    for endpoint, rows in own.files.items():
        if acts_for(run.session.seat, endpoint, workers):
            for buffer in {row.buffer for row in rows if row.key in keys}:
                yield own.buffers[buffer]  # type: ignore[misc]  # of files


def _left_by_ties(run: Run, same: Collection[Key]) -> list[Finding]:
    """What `allow={"tie"}` leaves behind: tensors that differ from the one that the target's tie takes."""
    findings = []
    for other, spec in run.matched.joined:
        if other.key not in same:
            cause = f"the target ties it with {spec.key}, whose values are others, and it is left behind"
            fix = "if it was not meant to be tied, untie it in the target and migrate again"
            findings.append(Finding("tie", str(other.key), cause, fix))
    return findings


def agree(run: Run) -> None:
    """Before the first byte: equal layouts and options, equal message lists at both ends."""
    mine: dict[str, Any] = {
        "options": run.options.digest(),
        "source": run.source.layout.digest(),
        "target": run.target.layout.digest(),
        "pairs": run.seat_plan.pair_digests(),
        "device": run.device(),
    }
    told = run.control.gather_values("agree", mine)
    refuse(checks.disagreements(told))
    devices = {report["device"] for report in told.values()}
    on_cuda = all(device.startswith("cuda") for device in devices)
    run.wire_device = mine["device"] if on_cuda else "cpu"
    if any(report["pairs"] for report in told.values()):
        # in a thread: connecting cannot be interrupted, and a seat may have failed
        run.channel = run.control.during(
            lambda: run.session.channel(run.number, run.wire_device, run.control.left()),
            "connecting the seats",
        )
