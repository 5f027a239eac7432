"""Control between the seats of one migration: votes, small gathers and sums, over one key-value store.

The store (a `TCPStore` that outlives any rank that may leave, or a `HashStore` between threads) is
the only thing used here, so a broken data channel or training group cannot keep seats from agreeing.
A vote has one outcome for all: the last seat to vote, or the first seat to run out of patience, writes
the decision by compare-and-set, and every seat adopts what stands there.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dynadapt.errors import ChannelError, DynadaptError, Finding, MigrationAborted, Refused
from dynadapt.vps import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch.distributed.distributed_c10d import Store

__all__ = ["Control", "Timeouts"]

T = TypeVar("T")

_PIECE = 8 << 20
"""Bytes of one value in the store; longer messages are cut."""

_LOOK = 0.02
"""Seconds between two looks at whether what is waited for can still come."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: `vote`, how long a seat may show no sign of life; `phase`, how long a phase may take."""

    vote: float = 30.0
    phase: float = 300.0


class PeerFailed(DynadaptError):
    """Another seat has failed already; the vote will say which and why."""

    def __init__(self) -> None:
        super().__init__("another seat failed", reason="peer-failed")


class Control:
    """One seat's end of the control of one migration.

    All seats make the same calls in the same order. `store` must be fresh for this migration (a
    `PrefixStore` of its own). `on_outcome` is called before the call's outcome can be seen. `leavings` are
    what earlier calls of these seats left in their stores; what this one leaves is added.

    >>> from torch.distributed import HashStore
    >>> with Control(HashStore(), 0, (0,)).phase("describe"):
    ...     pass
    """

    def __init__(
        self,
        store: Store,
        seat: int,
        seats: Sequence[int],
        timeouts: Timeouts | None = None,
        on_outcome: Callable[[], None] = lambda: None,
        beats: Store | None = None,
        leavings: list[tuple[Store, list[str]]] | None = None,
    ) -> None:
        self.seat = seat
        self.seats = tuple(sorted(seats))
        self.timeouts = timeouts or Timeouts()
        self._store = store
        self._beats = store if beats is None else beats
        self._on_outcome = on_outcome
        self._leavings = leavings if leavings is not None else []
        self._voted = 0
        self._began = time.monotonic()
        self._mine: list[str] = []
        self._kept: list[str] = []
        self._read_by_all = False
        self._stop = threading.Event()
        self._seen: dict[int, tuple[int, float]] = {}
        self._beat = threading.Thread(target=self._heartbeat, daemon=True)
        if beats is None:
            self._beat.start()

    def _heartbeat(self) -> None:
        interval = min(1.0, self.timeouts.vote / 5)
        while not self._stop.wait(interval):
            try:
                self._beats.add(f"beat/{self.seat}", 1)
            except Exception:
                return  # the store is gone; the main thread finds that out by itself

    def again(self, name: str) -> Control:
        """A control of the same seats after a failure of this one, which has to stay open meanwhile.

        Seats that are late for it still count as alive: their heartbeat is this one's.
        """
        from torch.distributed.distributed_c10d import PrefixStore

        store = PrefixStore(name, self._store)
        return Control(
            store,
            self.seat,
            self.seats,
            self.timeouts,
            beats=self._beats,
            leavings=self._leavings,
        )

    def mark(self, name: str) -> None:
        """Leave a mark that all seats see, before doing what it stands for."""
        self._kept.append(f"mark/{name}")
        self._store.set(f"mark/{name}", "1")

    def marked(self, name: str) -> bool:
        """Whether any seat has left the mark; sure after a vote that all living seats took part in."""
        return bool(self._store.check([f"mark/{name}"]))

    @contextmanager
    def phase(self, name: str, *, last: bool = False) -> Iterator[None]:
        """Run a phase and vote on it: leaves normally on all seats or raises the same error on all.

        `last` says that there is no vote after it: its decision is the outcome, as any failure is.
        """
        error: Exception | None = None
        self._began = time.monotonic()
        try:
            yield
        except MigrationAborted:
            raise
        except Exception as caught:
            error = caught
        except (KeyboardInterrupt, SystemExit) as caught:  # it goes on, but not without a word
            with suppress(MigrationAborted):
                self.vote(name, RuntimeError(repr(caught)))
            raise
        self.vote(name, error, last=last)

    def left(self) -> float:
        """Seconds left of this phase; not below 1 ms, so that it can be a timeout."""
        return max(self._began + self.timeouts.phase - time.monotonic(), 0.001)

    def vote(self, name: str, error: Exception | None = None, *, last: bool = False) -> None:
        """Say how this seat fared; returns if all fared well, else raises `MigrationAborted`."""
        number = self._voted
        self._voted += 1
        self._read_by_all = (
            False  # until it is decided: the others may still be at this phase's messages
        )
        place = f"vote/{number}"
        try:
            if error is not None:
                self._store.set("failed", name)
            ballot = json.dumps({"phase": name, "failure": _ballot(error)})
            self._kept.append(f"{place}/{self.seat}")
            self._store.set(f"{place}/{self.seat}", ballot)
            if self._store.add(f"{place}/count", 1) == len(self.seats):
                self._decide(place, name, {}, last)
            decision = self._await_decision(place, name, last)
        except MigrationAborted:
            raise
        except Exception as lost:
            raise MigrationAborted(
                self.seat, name, f"the control store is lost: {lost}", reason="control-lost"
            ) from lost
        self._read_by_all = not decision
        if decision:
            raise _aborted(name, decision) from error
        if number == 0:
            self._clear_leavings()

    def _await_decision(self, place: str, name: str, last: bool) -> Any:
        # longer than a phase may take: a peer that runs into its own limit still gets to say so
        deadline = self._began + self.timeouts.phase + min(self.timeouts.phase / 2, 30.0)
        for _ in self._until(lambda: self._store.check([f"{place}/decision"])):
            late = [s for s in self.seats if not self._store.check([f"{place}/{s}"])]
            silent = [s for s in late if self._is_silent(s)]
            if silent:
                self._decide(place, name, _gone(name, silent))
            elif late and time.monotonic() > deadline:
                self._decide(place, name, _late(name, late, self.timeouts.phase))
            elif not late:  # the seat that should have decided may be gone, its ballot is there
                self._decide(place, name, {}, last)
        return json.loads(self._store.get(f"{place}/decision"))

    def _until(self, done: Callable[[], bool]) -> Iterator[None]:
        """Wait until `done()`; yields at times, for a look at whether it can still come true."""
        looked = time.monotonic()
        pause, longest = 0.0002, min(0.001 * (2 + len(self.seats)), 0.02)
        while not done():
            if time.monotonic() - looked > _LOOK:
                yield
                looked = time.monotonic()
            time.sleep(pause)
            pause = min(pause * 1.2, longest)

    def _read(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are there, at once where the store can."""
        if self._store.has_extended_api():  # type: ignore[attr-defined]
            return list(self._store.multi_get(keys)) if keys else []
        return [self._store.get(key) for key in keys]

    def _is_silent(self, seat: int) -> bool:
        """Whether a seat's heartbeat has not moved for longer than the vote timeout."""
        beat = self._beats.add(f"beat/{seat}", 0)
        now = time.monotonic()
        known = self._seen.get(seat)
        if known is None or known[0] != beat:
            self._seen[seat] = (beat, now)
            return False
        return now - known[1] > self.timeouts.vote

    def _decide(
        self, place: str, name: str, missed: Mapping[int, dict[str, Any]], last: bool = False
    ) -> None:
        """Write the outcome unless another seat was first. `missed` are seats that are not waited for."""
        there = [s for s in self.seats if self._store.check([f"{place}/{s}"])]
        ballots = [json.loads(b) for b in self._read([f"{place}/{seat}" for seat in there])]
        voted = dict(zip(there, ballots, strict=True))
        failures = [(seat, b["failure"]) for seat, b in voted.items() if b["failure"]]
        phases = {seat: ballot["phase"] for seat, ballot in voted.items()}
        if len(set(phases.values())) > 1:
            calls = ", ".join(f"seat {seat} in {phase!r}" for seat, phase in phases.items())
            cause = f"the ranks have called different functions: {calls}"
            failures.append((min(phases), _failure(cause, reason="calls-differ", kind="own")))
        failures += [(seat, failure) for seat, failure in missed.items() if seat not in voted]
        failures.sort(key=lambda failure: failure[0])
        if failures or last:
            self._on_outcome()  # before anybody can see the decision and make the next call
        self._store.compare_set(f"{place}/decision", "", json.dumps(failures))

    def gather(self, name: str, payload: bytes) -> dict[int, bytes]:
        """Every seat's bytes of the same name, by seat. Raises `PeerFailed` if a seat has failed."""
        pieces = [payload[at : at + _PIECE] for at in range(0, len(payload), _PIECE)] or [b""]
        for i, piece in enumerate(pieces[1:], 1):
            self._put(f"{name}/{self.seat}/{i}", piece)
        self._put(f"{name}/{self.seat}", len(pieces).to_bytes(4, "little") + pieces[0])
        others = [seat for seat in self.seats if seat != self.seat]
        self._await([f"{name}/{seat}" for seat in others], others)
        found = {self.seat: payload}
        firsts = self._read([f"{name}/{seat}" for seat in others])
        for seat, first in zip(others, firsts, strict=True):
            count = int.from_bytes(first[:4], "little")
            rest = (self._piece(name, seat, i, count) for i in range(1, count))
            found[seat] = b"".join((first[4:], *rest))
        return dict(sorted(found.items()))

    def _piece(self, name: str, seat: int, number: int, count: int) -> bytes:
        """A later piece of a message: all of them are there before the first, or never come."""
        key = f"{name}/{seat}/{number}"
        if not self._store.check([key]):
            text = f"piece {number} of {count} of seat {seat}'s {name!r} is missing"
            raise wire.WireError(text, reason="wire-short")
        return bytes(self._store.get(key))

    def gather_values(self, name: str, value: Any) -> dict[int, Any]:
        """`gather` of one encodable value a seat."""
        return {s: wire.decode(b) for s, b in self.gather(name, wire.encode(value)).items()}

    def combine(self, name: str, array: NDArray[Any], how: Any) -> NDArray[Any]:
        """Reduce equal-shaped arrays over the seats with a numpy ufunc (`np.add`, `np.maximum`)."""
        parts = [np.asarray(a) for a in self.gather_values(name, array).values()]
        result: NDArray[Any] = how.reduce(np.stack(parts), axis=0)
        return result

    def _put(self, key: str, value: bytes) -> None:
        self._mine.append(key)
        self._store.set(key, value)  # type: ignore[arg-type]

    def _await(self, keys: list[str], seats: Sequence[int]) -> None:
        """Wait for a key a seat, as long as none of the seats has failed."""
        for _ in self._until(lambda: self._store.check(keys)) if keys else ():
            self.look()
            late = [s for k, s in zip(keys, seats, strict=True) if not self._store.check([k])]
            over = time.monotonic() > self._began + self.timeouts.phase
            silent = late if over else [seat for seat in late if self._is_silent(seat)]
            if silent:
                raise ChannelError(f"seat {silent[0]} sent nothing for {keys[0]!r}", peer=silent[0])

    def look(self) -> None:
        """Raise `PeerFailed` if another seat has failed, or this one was given up and voted out."""
        if self._store.check(["failed"]) or self._store.check([f"vote/{self._voted}/decision"]):
            raise PeerFailed

    def watch(self, done: Callable[[], bool], what: str) -> None:
        """Wait until `done()`. Raises as soon as another seat has failed or is gone, or time is up."""
        for _ in self._until(done):
            self.look()
            gone = [seat for seat in self.seats if seat != self.seat and self._is_silent(seat)]
            if gone:
                raise ChannelError(f"seat {gone[0]} is gone: {what}", peer=gone[0])
            if time.monotonic() > self._began + self.timeouts.phase:
                raise ChannelError(f"{what} took longer than {self.timeouts.phase:g} s")

    def during(self, work: Callable[[], T], what: str) -> T:
        """Do what cannot be interrupted, in a thread, and `watch` it."""
        ended: Future[T] = Future()

        def run() -> None:
            try:
                ended.set_result(work())
            except BaseException as error:
                ended.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        self.watch(ended.done, what)
        return ended.result()

    def close(self) -> None:
        """Stop the heartbeat and take this seat's messages out of the store. After the last vote.

        What a seat that comes late still reads has to stay until all seats have left this call: the
        votes, and after a failure the messages before them. It becomes part of `leavings`.
        """
        self._stop.set()
        if self._beat.is_alive():
            self._beat.join(timeout=1.0)
        kept = list(self._kept)
        if self._beats is self._store:
            kept.append(f"beat/{self.seat}")
        if self.seat == self.seats[0]:
            votes = (
                f"vote/{n}/{what}" for n in range(self._voted) for what in ("count", "decision")
            )
            kept += ["failed", *votes]
        if self._read_by_all:
            _delete(self._store, self._mine)
        else:
            kept += self._mine
        self._leavings.append((self._store, kept))

    def _clear_leavings(self) -> None:
        """All seats have met in this call, so they have left those before it."""
        while self._leavings:
            _delete(*self._leavings.pop())


def _delete(store: Store, keys: Sequence[str]) -> None:
    for key in keys:
        try:
            store.delete_key(key)
        except Exception:
            return  # some stores cannot delete, a lost one need not


def _failure(cause: str, *, reason: str, kind: str, peer: int | None = None) -> dict[str, Any]:
    """One seat's failure as it stands in a vote. See `_KINDS`."""
    return {"cause": cause, "reason": reason, "kind": kind, "peer": peer, "findings": []}


def _gone(phase: str, seats: Sequence[int]) -> dict[int, dict[str, Any]]:
    cause = f"no sign of it in phase {phase!r}; its process may be dead or stuck"
    return {seat: _failure(cause, reason="seat-lost", kind="lost") for seat in seats}


def _late(phase: str, seats: Sequence[int], limit: float) -> dict[int, dict[str, Any]]:
    cause = f"its process lives, but did not end phase {phase!r} in {limit:g} s"
    return {seat: _failure(cause, reason="timeout", kind="late") for seat in seats}


_NO_MEMORY = ("can't allocate memory", "can't start new thread")
"""What torch and Python say when memory has run out; a thread needs some for its stack."""


def _ballot(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    findings = error.findings if isinstance(error, Refused) else ()
    reason = error.reason if isinstance(error, DynadaptError) else "failed"
    if isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY):
        reason = "out-of-memory"
    cause = str(error) if isinstance(error, DynadaptError) else f"{type(error).__name__}: {error}"
    kind = "echo" if isinstance(error, ChannelError | PeerFailed) else "own"
    told = _failure(cause, reason=reason, kind=kind, peer=getattr(error, "peer", None))
    return {**told, "findings": [[f.reason, f.where, f.cause, f.fix] for f in findings]}


_KINDS = ("lost", "own", "late", "echo")
"""What a seat's failure is, the likelier the root first: its process is gone; it raised an error of its
own; it is late, perhaps held up by another's error; it waited in vain for another."""


def _aborted(phase: str, failures: list[tuple[int, dict[str, Any]]]) -> MigrationAborted:
    """One error of all causes: the lowest seat of the likeliest kind leads."""
    order = sorted(failures, key=lambda item: (_KINDS.index(item[1]["kind"]), item[0]))
    seat, first = order[0]
    findings = [Finding(*f) for _, ballot in order for f in ballot["findings"]]
    causes = [ballot["cause"] for _, ballot in order if ballot["kind"] != "echo"]
    if first["kind"] in {"lost", "late"}:  # what was wanted of it, as told by one that waited
        causes += [b["cause"] for _, b in order if b["kind"] == "echo" and b["peer"] == seat][:1]
    cause, reason = "\n".join(dict.fromkeys(causes)), first["reason"]
    if first["kind"] == "echo":
        seat, cause, reason = _blamed(order)
    return MigrationAborted(
        seat, phase, cause, findings=findings, reason=None if findings else reason
    )


def _blamed(echoes: Sequence[tuple[int, dict[str, Any]]]) -> tuple[int, str, str]:
    """Seat, cause and reason where all have only waited for one another: who is waited for at the end."""
    blames = {seat: ballot for seat, ballot in echoes if ballot["peer"] not in {None, -1}}
    if not blames:  # one whose connections failed knows more than one that was told of it
        seat, first = min(echoes, key=lambda echo: echo[1]["reason"] == "peer-failed")
        return seat, first["cause"], first["reason"]
    seat = min(blames)
    cause, seen = blames[seat]["cause"], {seat}
    while seat in blames and blames[seat]["peer"] not in seen:
        cause = blames[seat]["cause"]
        seat = blames[seat]["peer"]
        seen.add(seat)
    return seat, cause, "timeout"
