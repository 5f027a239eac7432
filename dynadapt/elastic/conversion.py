"""From one checkpoint to another: described, laid out, streamed, sealed, read back, renamed.

The source is only read. The target is built in a folder beside its place, which gets the place's name
when everything in it has proved to be right; until then nothing can be taken for whole.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynadapt.elastic.budget import Budget, Effort
from dynadapt.elastic.checkpoint import Checkpoint, open_checkpoint
from dynadapt.elastic.collection import collected_later
from dynadapt.elastic.companions import bring_along
from dynadapt.elastic.conversion_layout import chosen_of, laid_out, left_out
from dynadapt.elastic.conversion_report import ConversionReport
from dynadapt.elastic.journal import Journal, identity, stamps_of
from dynadapt.elastic.place import Place, write_manifest
from dynadapt.elastic.ranks import Ranks, shares
from dynadapt.errors import Finding, Refused
from dynadapt.files import to_disk, unwritable
from dynadapt.transport.certificate import fingerprint
from dynadapt.transport.forks import ForkLost
from dynadapt.transport.progress import Progress, Stopped
from dynadapt.transport.read_back import found_again
from dynadapt.transport.source_sums import damaged
from dynadapt.transport.stream import Streamed, stream
from dynadapt.transport.sums import unlike_replicas
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from dynadapt.elastic.selection import Selection
    from dynadapt.protocols import Described, FileTarget
    from dynadapt.transport.plan import Match, Narrow
    from dynadapt.vps.keys import KeySpec
    from dynadapt.vps.layout import RowLayout

__all__ = ["convert"]


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now


def convert(
    source: Checkpoint,
    target: FileTarget,
    *,
    selection: Selection | None = None,
    narrow: Narrow = "if-exact",
    verify: bool = True,
    force: bool = False,
    resume: bool = False,
    threads: int = 2,
    budget: Budget | None = None,
    ranks: Ranks | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write what `source` holds as `target` says. One process calls it, or each of `ranks`.

    Each rank fills its share of the buffers; rank 0 lays out, seals, verifies and renames. All return its
    report, or raise: what one of them has met, or `rank-lost`, after which `resume` can continue.

    At most so many threads work, fewer if `budget` asks for it. `on_bytes` is called with (bytes done,
    bytes in all) from several threads. Raises `Refused`: `target-exists` unless `force`, `max-memory`, and
    everything that keeps the source from being so written; then there is no target, and an old one is as
    it was. After an interrupt, or if the process is killed, a hidden folder stays, which a call with
    `resume` continues; raises `resume-differs` if that was of something else.
    """
    clock = _Clock()
    place = Place(Path(target.path), force)
    ours, theirs = place.path.resolve(), Path(source.path).resolve()
    if ours == theirs or ours in theirs.parents or theirs in ours.parents:
        cause = "is the source itself, or one lies inside the other"
        raise Refused([Finding("target-exists", str(place.path), cause, "choose another place")])
    own, target, layout = chosen_of(source, target, selection)
    stamps = stamps_of(own)
    what = identity(Path(source.path), own, stamps, target, selection, narrow)
    effort = (threads, budget or Budget(), ranks)
    job = _Job(source, own, layout, target, place, what, stamps, narrow, *effort)
    if ranks is not None and ranks.rank:
        return job.help(clock, verify)
    place.begin(resume=resume)
    try:
        resumed = place.found and resume
        marks = Journal.every(place.aside, what) if resumed else None
    except BaseException:
        place.leave()
        raise
    try:
        report = job.write(clock, marks, verify, on_bytes)
        to_disk(place.data)
        place.settle()
        job.tell(replace(report, target=str(place.path)))
    except Exception as error:
        job.end(error)
        if isinstance(error, ForkLost) or (ranks is not None and ranks.lost):
            place.leave()
        else:
            place.undo()
        if isinstance(error, OSError):
            raise Refused([unwritable(error.filename or place.aside, error)]) from error
        if isinstance(error, ForkLost):
            cause = "a process that worked for it was killed, or could not be made: for want of memory, maybe"
            fix = (
                "--resume (resume=True) goes on; "
                "--max-memory (max_memory=) or --workers 1 (threads=1) take less"
            )
            raise Refused([Finding("worker-lost", str(place.path), cause, fix)]) from error
        if isinstance(error, Stopped) and ranks is not None:
            ranks.check()
        raise
    except BaseException:  # an interrupt: what is there can be continued
        if ranks is not None:
            ranks.vanish()
        if place.settled:
            place.close()
        else:
            place.leave()
        raise
    place.close()
    clock.lap("settle")
    if place.found and not resume:
        cause = "what an ended conversion had left was removed"
        fix = "--resume (resume=True) would have continued it"
        left = Finding("left-over", str(place.aside), cause, fix)
        report = replace(report, warnings=(*report.warnings, left))
    return replace(report, target=str(place.path), seconds=clock.seconds)


@dataclass(frozen=True)
class _Job:
    """A conversion on one process, or on one of several ranks."""

    source: Checkpoint
    own: Described
    layout: RowLayout
    target: FileTarget
    place: Place
    what: Mapping[str, Any]
    stamps: Mapping[str, list[int]]
    narrow: Narrow
    threads: int
    budget: Budget
    ranks: Ranks | None

    def write(
        self,
        clock: _Clock,
        marks: Mapping[str, Progress] | None,
        verify: bool,
        on_bytes: Callable[[int, int], None] | None,
    ) -> ConversionReport:
        """All that one process does, or rank 0 of several."""
        own, layout, ranks = self.own, self.layout, self.ranks
        if ranks is not None:
            ranks.meet(self.place.aside / "ranks")
        work = replace(self.target, path=str(self.place.data), crcs={}, made=None)
        aux = {item.path: item for item in own.aux}
        writer, made, there, matched = laid_out(own, layout, work, self.narrow)
        if ranks is not None:
            ranks.post("laid", [self._digest(made), marks is not None])
        effort = self.budget.effort(self.threads, again=verify)
        clock.lap("prepare")
        try:
            streamed = self._stream(made, there, matched, effort, marks, on_bytes)
        except (ForkLost, Refused):
            self._as_it_was()  # a file that is cut short kills its reader, or is no memory to write from
            raise
        self._as_it_was()
        if verify:
            self._whole(streamed)
        clock.lap("stream")
        work.crcs.update(streamed.crcs)
        with collected_later():
            outcomes = writer.finish(work, layout.keys, own.scalars, aux)
        clock.lap("finish")
        outcomes += left_out(self.source.own, layout, matched)
        warnings = self.source.own.doubts
        if verify:
            keys = {pair.source.key for pair in matched.pairs if not pair.fill}
            warnings += unlike_replicas(layout, own.buffers, keys, self.source.files)  # type: ignore[arg-type]
            _verify(
                str(work.path),
                streamed,
                {pair.target for pair in matched.pairs},
                effort,
                fork=ranks is None and self.budget.forks(streamed.written),
            )
            clock.lap("verify")
        prints = fingerprint(there.keys, streamed.sums)
        outcomes += tuple(
            bring_along(
                Path(self.source.path),
                Path(work.path),
                there.keys,
                dtype=work.options.get("dtype"),
                whole=self.source.format != "safetensors",
            )
        )
        write_manifest(Path(work.path), work, prints, streamed.sums)
        return ConversionReport(
            source=self.source.path,
            target=str(work.path),
            format=work.format,
            bytes_read=streamed.read,
            bytes_written=streamed.written,
            bytes_kept=streamed.kept,
            fingerprint=prints,
            verified=verify,
            seconds=clock.seconds,
            outcomes=outcomes,
            warnings=warnings,
        )

    def help(self, clock: _Clock, verify: bool) -> ConversionReport:
        """What another rank than 0 does: its share of the buffers."""
        ranks = self.ranks
        if ranks is None:
            raise RuntimeError("nobody to help")
        try:
            ranks.meet(self.place.aside / "ranks")
            work = replace(self.target, path=str(self.place.data), crcs={}, made=None, dry=True)
            _, made, there, matched = laid_out(self.own, self.layout, work, self.narrow)
            ((digest, resumed),) = ranks.wait("laid", 0)
            if digest != self._digest(made):
                cause, fix = "has other arguments, or sees other files", "start all ranks alike"
                raise Refused([Finding("ranks-differ", f"rank {ranks.rank}", cause, fix)])
            effort = self.budget.effort(self.threads, again=False)
            marks = Journal.every(self.place.aside, self.what) if resumed else None
            clock.lap("prepare")
            done = self._stream(made, there, matched, effort, marks, None)
            if verify:
                self._whole(done)
            clock.lap("stream")
            ranks.post("filled", done.kept)
            ((told),) = ranks.wait("done", 0)
        except Exception as error:
            ranks.fail(error)
            ranks.part()
            if isinstance(error, Stopped):
                ranks.check()
            raise
        except BaseException:
            ranks.vanish()
            raise
        ranks.part()
        return replace(ConversionReport.from_json(told), seconds=clock.seconds)

    def _stream(
        self,
        made: Described,
        there: RowLayout,
        matched: Match,
        effort: Effort,
        marks: Mapping[str, Progress] | None,
        on_bytes: Callable[[int, int], None] | None,
    ) -> Streamed:
        ranks = self.ranks
        sizes = {n: b.numel * itemsize(b.dtype) for n, b in made.buffers.items()}
        rank, world = (ranks.rank, ranks.world) if ranks is not None else (0, 1)
        share = shares(sizes, world)[rank]
        path = self.place.aside / f"journal-{rank}"
        journal = Journal.goes_on(path, self.what, resume=marks is not None)
        total, done, kept = sum(sizes[name] for name in share), 0, 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes  # a thread may be a piece behind: it is for people
            if on_bytes is not None:
                on_bytes(done, total)

        def rest() -> Mapping[str, Progress]:
            nonlocal kept
            if ranks is not None:
                kept = sum(ranks.wait("filled", *ranks.others))
            return Journal.every(self.place.aside, self.what)

        with closing(journal):
            streamed = stream(
                matched,
                self.layout,
                self.own.buffers,  # type: ignore[arg-type]  # they are files
                there,
                made.buffers,  # type: ignore[arg-type]  # likewise
                narrow=self.narrow,
                threads=effort.threads,
                piece=effort.piece,
                share=set(share) if world > 1 else None,
                rest=rest if world > 1 and not rank else None,
                begun=marks,
                on_bytes=count,
                on_mark=journal.mark,
                stop=ranks.stop if ranks is not None else None,
                fork=ranks is None and self.budget.forks(total),
            )
        streamed.kept += kept
        return streamed

    def _as_it_was(self) -> None:
        """Raises `Refused` (`source-changed`) if somebody wrote to the source meanwhile."""
        now = stamps_of(self.own)
        cause = "was written to, or replaced, as it was read"
        fix = "convert it again when nobody writes it, or a copy"
        changed = [path for path in now if now[path] != self.stamps.get(path)]
        if changed:
            raise Refused([Finding("source-changed", path, cause, fix) for path in changed[:20]])

    def _whole(self, streamed: Streamed) -> None:
        """Raises `Refused` (`certificate`) if what was read had not the check sums in its files."""
        findings = damaged(streamed.taken, self.own.buffers)  # type: ignore[arg-type]  # files
        if findings:
            raise Refused(findings)

    def _digest(self, made: Described) -> str:
        told = [dict(self.what), sorted((name, b.numel) for name, b in made.buffers.items())]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def tell(self, report: ConversionReport) -> None:
        """The other ranks may end."""
        if self.ranks is not None:
            self.ranks.post("done", report.to_json())
            self.ranks.part()

    def end(self, error: Exception) -> None:
        """The other ranks must end."""
        if self.ranks is not None:
            self.ranks.fail(error)
            self.ranks.part()


def _verify(
    path: str, streamed: Streamed, kept: Collection[KeySpec], effort: Effort, *, fork: bool
) -> None:
    """Read the target as anybody would, and compare every dtype, shape and sum with what was meant.

    Where the reader finds a row in just the bytes that were written for it, and these are as they were, its
    sum is known.
    """
    sums = streamed.sums
    with found_again(streamed.stretches, threads=effort.threads, fork=fork) as known_rows:
        back = open_checkpoint(path)
        known = known_rows()
    have, drifted = back.sums(threads=effort.threads, known=known)
    fix = "the disk or this program is at fault; the source is intact"
    findings = [*back.problems(), *(replace(each, fix=fix) for each in drifted)]
    for spec in sorted(kept, key=lambda s: s.key):
        key, found = spec.key, back.layout.by_name.get(spec.key)
        if sums.get(key, 0) != have.get(key, 0):
            cause = f"read back as {have.get(key, 0):016x}, written as {sums.get(key, 0):016x}"
            findings.append(Finding("certificate", str(key), cause, fix))
        elif found is not None and (found.dtype, found.shape) != (spec.dtype, spec.shape):
            cause = (
                f"read back as {found.dtype} {found.shape}, written as {spec.dtype} {spec.shape}"
            )
            findings.append(Finding("certificate", str(key), cause, fix))
    if findings:
        raise Refused(findings)
