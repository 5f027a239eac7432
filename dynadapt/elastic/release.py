"""`mode="release"`: the source gives its memory back while its state moves, and can still be given back.

The keys move in rounds. After a round every seat hashes what left it and what was placed in it, the
latter cast back to the source's dtype: equal sums prove that the target's rows hold the source's bits,
and only then is a source buffer freed, all of whose rows have been proven so. From then on the target is
what the source is restored from (`giveback`). What the target could not give back is never freed:

- a buffer with rows that do not move: derived copies, keys that `allow={"extra"}` leaves behind;
- a buffer with replicas that drifted: the target has the first holder's bits only;
- memory that torch does not own, or that two buffers share.

Bits of a buffer that belong to no row (padding) are kept aside. A cast that may lose bits
(`narrow="allow"`) and a target in files are refused: `cannot-undo`.

The target's memory comes as the source's goes: states are made without memory (`deferred`), target
buffers that will be overwritten whole are emptied before the first round, and each is made whole for
the first round that writes to it. So the peak is near the larger of the two states, plus staging; with
one buffer for everything, as DeepSpeed has for each slot, there is nothing to gain.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from dynadapt.elastic import parked
from dynadapt.elastic.cutting import cut_chunks
from dynadapt.elastic.deferred import gives_back, zero
from dynadapt.elastic.gaps import gaps
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import Outcome, TrainState
from dynadapt.transport.executor import Moved, execute, staging_needed
from dynadapt.transport.hashing import Wanted, hash_of
from dynadapt.transport.weights import MASK
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from dynadapt.elastic.run import Run
    from dynadapt.protocols import Buffer, Described
    from dynadapt.transport.executor import Storage
    from dynadapt.transport.plan import Match, Pair, SeatPlan
    from dynadapt.transport.schedule import Chunk
    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import Row

__all__ = ["Release", "Round", "cannot_undo", "move", "rounds_for", "settle", "shared_with"]

ROUNDS = 24
"""Rounds at most: each costs all seats a meeting, and what it moves is held twice."""

SMALL = 64 << 10
"""Bytes, over all seats, that are not worth a round of their own."""


@dataclass(frozen=True)
class Round:
    """The keys of one round, and this seat's part in it."""

    keys: tuple[Key, ...]
    plan: SeatPlan
    chunks: tuple[Chunk, ...]


@dataclass
class Release:
    """One seat's rounds, which buffer goes and comes when, and what has gone already."""

    rounds: tuple[Round, ...]
    source: Mapping[str, Buffer]
    target: Mapping[str, Buffer]
    frees: dict[int, list[str]] = field(default_factory=dict)
    fills: dict[int, list[str]] = field(default_factory=dict)
    empties: list[str] = field(default_factory=list)
    deferred: dict[str, tuple[torch.UntypedStorage, int]] = field(default_factory=dict)
    blank: frozenset[str] = frozenset()
    stays: dict[str, str] = field(default_factory=dict)
    gaps: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    freed: dict[str, int] = field(default_factory=dict)
    aside: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def begin(self) -> None:
        """Empty what will be overwritten whole."""
        for name in self.empties:
            self.target[name].free()

    def fill(self, number: int) -> None:
        """Give memory to the target buffers that a round writes to first."""
        for name in self.fills.get(number, ()):
            if name not in self.deferred:
                self.target[name].refill()
                continue
            storage, nbytes = self.deferred[name]
            storage.resize_(nbytes)
            if name in self.blank:
                zero(storage)

    def free(self, number: int) -> None:
        """Free the source buffers of which nothing is needed after a round; padding is kept aside."""
        for name in self.frees.get(number, ()):
            flat = self.source[name].tensor()
            self.aside[name] = [flat[a:b].clone() for a, b in self.gaps[name]]
            self.freed[name] = number
            del flat
            self.source[name].free()

    def put_back(self, name: str) -> None:
        """Restore what belongs to no row of a buffer that is whole again."""
        flat = self.source[name].tensor()
        for (a, b), kept in zip(self.gaps[name], self.aside.pop(name), strict=True):
            flat[a:b].copy_(kept)
        del self.freed[name]

    def whole_target(self) -> None:
        """After a failure: what was emptied of a target that had it is there again, as zeros."""
        for name in self.empties:
            try:
                self.target[name].tensor()
            except RuntimeError:
                self.target[name].refill()
                self.target[name].tensor().zero_()

    def peak(
        self,
        matched: Match,
        source: Storage,
        target: Storage,
        device: str,
        made: int,
        scratch: int,
    ) -> tuple[int, int]:
        """The most beyond what was held before, and the staging it includes: the rounds, one by one.

        `made` is what `prepare` has made, of which what is deferred has no memory yet.
        """
        held = made - sum(nbytes for _, nbytes in self.deferred.values())
        start = held + scratch
        held -= _bytes(self.target[name] for name in self.empties)
        most, staged = start, 0
        for number, each in enumerate(self.rounds):
            held += sum(map(self._size, self.fills.get(number, ())))
            staging = staging_needed(each.chunks, matched, source, target, device)
            staged = max(staged, staging)
            most = max(most, held + max(staging, scratch))
            for name in self.frees.get(number, ()):
                held += sum(b - a for a, b in self.gaps[name]) * itemsize(self.source[name].dtype)
                most = max(most, held)
                held -= _bytes([self.source[name]])
        return max(most, held + scratch), staged

    def _size(self, name: str) -> int:
        """Bytes of a target buffer; one without memory does not know what follows its last row."""
        return self.deferred[name][1] if name in self.deferred else _bytes([self.target[name]])

    def outcome(self) -> tuple[Outcome, ...]:
        """What stayed until the commit, and why."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.stays.items():
            by_reason.setdefault(why, []).append(name)
        return tuple(
            Outcome(
                "release",
                "kept",
                f"{_bytes(self.source[n] for n in names):,} bytes until the commit: {why} "
                f"({', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''})",
            )
            for why, names in sorted(by_reason.items())
        )


def _bytes(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.numel * itemsize(buffer.dtype) for buffer in buffers)


def cannot_undo(run: Run) -> list[Finding]:
    """What could not be moved back from the target; the same on every seat."""
    found = []
    if any(endpoint < 0 for endpoint in run.target.layout.endpoints):
        cause = "the target is in files, and a source is not restored from them"
        found.append(Finding("cannot-undo", "target", cause, "use mode='keep' or 'park'"))
    for pair in run.matched.pairs if run.settings.narrow == "allow" else ():
        loses = itemsize(pair.target.dtype) <= itemsize(pair.source.dtype)
        if not pair.fill and pair.source.dtype != pair.target.dtype and loses:
            cause = f"{pair.source.dtype} would become {pair.target.dtype}, which may lose bits"
            fix = "narrow='if-exact', or mode='keep' or 'park'"
            found.append(Finding("cannot-undo", str(pair.target.key), cause, fix))
    return found


def rounds_for(run: Run) -> Release:
    """Cut the move into rounds. All seats call it, once the whole plan is known."""
    number_of = _numbers(run.matched)
    count = max(number_of.values(), default=-1) + 1
    rounds = []
    for number in range(count):
        keys = tuple(key for key, own in number_of.items() if own == number)
        wanted = frozenset(keys)
        part = replace(
            run.seat_plan,
            moves=tuple(m for m in run.seat_plan.moves if m.key in wanted),
            fills=tuple(f for f in run.seat_plan.fills if f[1] in wanted),
        )
        chunks = cut_chunks(run.control, part, run.settings.budget, f"round {number}")
        rounds.append(Round(keys, part, chunks))
    own_source = {} if run.own_source is None else run.own_source.buffers
    own_target = {} if run.own_target is None else run.own_target.buffers
    found = Release(tuple(rounds), own_source, own_target, deferred=run.deferred)
    if run.own_source is not None and not run.source.readers:
        _plan_source(run, found, number_of, run.source.canonical(run.own_source.rows))
    if run.own_target is not None:
        _plan_target(run, found, number_of, run.target.canonical(run.own_target.rows))
    return found


def _numbers(matched: Match) -> dict[Key, int]:
    """The round of each target key: all slots of a name in one, about equal bytes in each."""
    share = max(matched.total // ROUNDS, SMALL)
    found: dict[Key, int] = {}
    number = held = 0
    last = ""
    for pair in matched.pairs:
        key = pair.target.key
        if held >= share and key.name != last:
            number, held = number + 1, 0
        found[key] = number
        last = key.name
        held += 0 if pair.fill else pair.target.numel * itemsize(pair.wire)
    return found


def _by_buffer(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.buffer, []).append(row)
    return found


def _plan_source(
    run: Run, found: Release, number_of: Mapping[Key, int], rows: Iterable[Row]
) -> None:
    """When each source buffer may go, or why it stays."""
    by_buffer = _by_buffer(rows)
    shared = _shared(found.source)
    for name, buffer in found.source.items():
        own = by_buffer.get(name, [])
        pairs = [p for row in own for p in run.matched.by_source.get(row.key, ())]
        served = {pair.source.key for pair in pairs}
        holes = gaps(own, buffer.numel)
        if any(row.key not in served for row in own) or not own:
            found.stays[name] = "it has rows that do not move"
        elif served & run.options.first_only:
            found.stays[name] = "its replicas differ"
        elif name in shared:
            found.stays[name] = "it shares its memory"
        elif not gives_back(buffer):
            found.stays[name] = "torch does not own its memory, or has given it to a numpy array"
        elif holes is None or 2 * sum(b - a for a, b in holes) > buffer.numel:
            found.stays[name] = "too much of it belongs to no tensor"
        else:
            found.gaps[name] = holes
            last = max(number_of[pair.target.key] for pair in pairs)
            found.frees.setdefault(last, []).append(name)


def _plan_target(
    run: Run, found: Release, number_of: Mapping[Key, int], rows: Iterable[Row]
) -> None:
    """When each target buffer without memory is made whole; more are emptied if all is overwritten."""
    by_buffer = _by_buffer(rows)
    waiting = run.deferred
    whole = {name: b for name, b in found.target.items() if name not in waiting}
    shared = _shared(whole)
    blank = set()
    for name, buffer in found.target.items():
        own = by_buffer.get(name, [])
        written = bool(own) and all(row.key in number_of for row in own)
        numel = (
            found.deferred[name][1] // itemsize(buffer.dtype) if name in waiting else buffer.numel
        )
        covered = written and gaps(own, numel) == ()
        first = min((number_of[row.key] for row in own), default=0) if written else 0
        if name in waiting:
            found.fills.setdefault(first, []).append(name)
            if not covered:
                blank.add(name)
        elif covered and name not in shared and gives_back(buffer):
            found.empties.append(name)
            found.fills.setdefault(first, []).append(name)
    found.blank = frozenset(blank)


def _shared(buffers: Mapping[str, Buffer]) -> set[str]:
    """Buffers whose storage another one is over, too."""
    by_storage: dict[int, list[str]] = {}
    for name, buffer in buffers.items():
        by_storage.setdefault(buffer.tensor().untyped_storage()._cdata, []).append(name)
    return {name for names in by_storage.values() if len(names) > 1 for name in names}


def move(run: Run, release: Release) -> Moved:
    """All rounds. A source buffer goes when a round has been proven on every seat."""
    total = Moved()
    release.begin()
    source, target = run.source_storage(), run.target_storage()
    for number, each in enumerate(release.rounds):
        release.fill(number)
        part = execute(
            each.plan,
            each.chunks,
            run.matched,
            source,
            target,
            run.channel,
            narrow=run.settings.narrow,
            timeout=run.control.left(),
            device=run.wire_device,
        )
        _add(total, part)
        _prove(run, number, each, source, target)
        if release.frees.get(number):
            run.control.mark("freed")
            release.free(number)
    return total


def _add(total: Moved, part: Moved) -> None:
    names = (
        "received",
        "sent",
        "copied",
        "read",
        "written",
        "filled",
        "direct",
        "chunks",
        "seconds",
    )
    for name in names:
        setattr(total, name, getattr(total, name) + getattr(part, name))
    total.peak_staging = max(total.peak_staging, part.peak_staging)


def _prove(run: Run, number: int, each: Round, source: Storage, target: Storage) -> None:
    """What was placed, in the source's dtype, is what left: by key, over all seats."""
    me = run.session.seat
    place = {key: i for i, key in enumerate(each.keys)}
    sums = [[0] * len(place), [0] * len(place)]
    for item in each.plan.moves:
        pair: Pair = run.matched.by_target[item.key]
        at = place[item.key]
        if item.source == me:
            want = Wanted(pair.source, pair.source.dtype, item.key)
            sums[0][at] += hash_of(source, me, want, item.box)
        if item.target == me:
            want = Wanted(pair.target, pair.source.dtype, item.key)
            sums[1][at] += hash_of(target, me, want, item.box)
    words = np.array([[value & MASK for value in way] for way in sums], np.uint64)
    left, placed = run.control.combine(f"round {number}/proof", words, np.add)
    wrong = [each.keys[i] for i in np.flatnonzero(left != placed).tolist()]
    if wrong:
        cause = "what was placed in the target is not, bit for bit, what left the source"
        raise Refused([Finding("certificate", str(key), cause) for key in wrong])


def settle(run: Run) -> None:
    """After the commit: the source is gone, whatever of it had stayed."""
    if run.own_source is None or run.release is None or run.source.readers:
        return
    for buffer in run.own_source.buffers.values():
        buffer.free()
    parked.left(TrainState.of(run.x_source).model, run.own_source.buffers)


def shared_with(source: Described, target: Described) -> list[Finding]:
    """What must not be taken from a source, because a target of the same seat uses it, too."""
    known = {
        buffer.tensor().untyped_storage()._cdata: name for name, buffer in target.buffers.items()
    }
    return [
        Finding(
            "bad-argument",
            name,
            f"the target's {known[ident]} lies in the same memory, which cannot be taken away",
            "use mode='keep'",
        )
        for name, buffer in source.buffers.items()
        if (ident := buffer.tensor().untyped_storage()._cdata) in known
    ]
