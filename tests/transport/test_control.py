"""Votes: one outcome for all seats, whoever fails, in whatever way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from dynadapt.errors import ChannelError, Finding, MigrationAborted, Refused
from dynadapt.testing.seats import run_threads
from dynadapt.transport import control as module
from dynadapt.transport.control import Control, PeerFailed, Timeouts

Stores = Callable[[int], Any]
QUICK = Timeouts(vote=0.6, phase=20.0)


@pytest.fixture(params=["hash", "tcp"])
def stores(request: pytest.FixtureRequest) -> Any:
    """`stores(seat)` is a seat's own handle of one fresh store."""
    if request.param == "hash":
        store = HashStore()
        yield lambda seat: PrefixStore("t", store)
        return
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = master.port
    yield lambda seat: PrefixStore("t", TCPStore("127.0.0.1", port, is_master=False))


def outcomes(
    stores: Stores,
    count: int,
    fn: Callable[[Control], Any],
    timeouts: Timeouts = QUICK,
    seats: tuple[int, ...] = (),
) -> list[Any]:
    """What each seat's `fn` returned or raised."""
    every = seats or tuple(range(count))

    def seat(me: int) -> Any:
        control = Control(stores(me), me, every, timeouts)
        try:
            return fn(control)
        except Exception as error:
            return error
        finally:
            control.close()

    return run_threads([lambda me=me: seat(me) for me in range(count)], timeout=30)


def test_phases_without_failure_pass(stores: Stores) -> None:
    def seat(control: Control) -> int:
        for name in ("a", "b", "c"):
            with control.phase(name):
                pass
        return control.seat

    assert outcomes(stores, 4, seat) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_who_is_interrupted_says_so(stores: Stores, kind: type[BaseException]) -> None:
    """It raises what it was given, after a vote: else its next call would meet the others in this one."""

    def seat(control: Control) -> Any:
        try:
            with control.phase("move"):
                if control.seat == 1:
                    raise kind
        except kind:
            return "interrupted"
        return "went on"

    found = outcomes(stores, 3, seat)
    assert found[1] == "interrupted"
    for error in (found[0], found[2]):
        assert isinstance(error, MigrationAborted)
        assert (error.seat, error.phase) == (1, "move")
        assert kind.__name__ in str(error)


def test_one_failure_is_the_same_error_everywhere(stores: Stores) -> None:
    def seat(control: Control) -> None:
        with control.phase("move"):
            if control.seat == 2:
                raise ZeroDivisionError("on seat two")

    found = outcomes(stores, 4, seat)
    assert all(isinstance(error, MigrationAborted) for error in found)
    assert {str(error) for error in found} == {
        "migration aborted in phase 'move' by seat 2: ZeroDivisionError: on seat two"
    }
    assert isinstance(found[2].__cause__, ZeroDivisionError)
    assert {(error.seat, error.phase, error.reason) for error in found} == {(2, "move", "failed")}


def test_all_findings_of_all_seats_come_together(stores: Stores) -> None:
    def seat(control: Control) -> None:
        with control.phase("plan"):
            if control.seat:
                findings = [Finding("shape", f"w{control.seat}", "differs"), Finding("x", "y", "z")]
                raise Refused(findings)

    for error in outcomes(stores, 4, seat):
        assert [finding.where for finding in error.findings] == ["w1", "y", "w2", "w3"]
        assert error.reason == "shape"
        assert error.seat == 1


def test_an_echo_does_not_hide_the_cause(stores: Stores) -> None:
    def seat(control: Control) -> None:
        with control.phase("move"):
            if control.seat == 3:
                raise ValueError("the cause")
            raise ChannelError("seat 3 closed the connection", peer=3)

    for error in outcomes(stores, 4, seat):
        assert error.seat == 3
        assert error.cause == "ValueError: the cause"


def test_who_was_only_told_does_not_hide_who_knows_more(stores: Stores) -> None:
    def seat(control: Control) -> None:
        with control.phase("agree"):
            if control.seat == 2:
                raise ChannelError("cannot connect the seats: no memory")
            raise PeerFailed

    for error in outcomes(stores, 3, seat):
        assert (error.seat, error.reason) == (2, "channel")
        assert "no memory" in str(error)


def test_the_end_of_a_chain_of_waiting_seats_is_blamed(stores: Stores) -> None:
    """Seat 0 waited for 2, who waited for 1, who came too late to find fault with anybody."""
    waited = {0: 2, 2: 1}

    def seat(control: Control) -> None:
        with control.phase("move"):
            if control.seat in waited:
                peer = waited[control.seat]
                raise ChannelError(f"seat {peer} sent nothing", peer=peer)
            control.watch(lambda: False, "waiting")

    for error in outcomes(stores, 3, seat):
        assert (error.seat, error.reason) == (1, "timeout")
        assert error.cause == "seat 1 sent nothing"


def test_a_dead_seat_leads_and_its_victims_errors_follow(stores: Stores) -> None:
    def seat(control: Control) -> None:
        if control.seat == 2:
            control.close()  # no more signs of life
            return
        with control.phase("finish"):
            raise RuntimeError("connection closed by peer")

    for error in outcomes(stores, 3, seat)[:2]:
        assert (error.seat, error.reason) == (2, "seat-lost")
        assert "connection closed by peer" in error.cause


class DiesDeciding:
    """A store whose seat dies before it can write a decision."""

    def __init__(self, store: Any, dies: Callable[[], bool]) -> None:
        self._store, self._dies = store, dies

    def __getattr__(self, name: str) -> Any:
        if name == "compare_set" and self._dies():
            raise SystemExit
        return getattr(self._store, name)


@pytest.mark.parametrize("failing", [False, True])
def test_the_seat_that_decides_may_die(stores: Stores, failing: bool) -> None:
    """All ballots are there, so any seat can decide in its stead, to the same end."""
    victims: list[int] = []
    lock = threading.Lock()

    def seat(me: int) -> Any:
        def dies() -> bool:
            with lock:
                if not victims:
                    victims.append(me)
                return victims == [me]

        control = Control(DiesDeciding(stores(me), dies), me, (0, 1, 2), QUICK)  # type: ignore[arg-type]
        try:
            with control.phase("commit", last=True):
                if failing and me == 1:
                    raise ValueError("no")
        except (MigrationAborted, SystemExit) as error:
            return type(error)
        finally:
            control.close()

    found = run_threads([lambda me=me: seat(me) for me in range(3)], timeout=30)
    survivors = [kind for me, kind in enumerate(found) if me not in victims]
    assert found[victims[0]] is SystemExit
    assert survivors == [MigrationAborted if failing else None] * 2


def test_running_out_of_memory_has_a_reason_of_its_own(stores: Stores) -> None:
    def seat(control: Control) -> None:
        with control.phase("prepare"):
            raise MemoryError("no more")

    assert {error.reason for error in outcomes(stores, 2, seat)} == {"out-of-memory"}


def test_a_seat_that_never_comes_is_lost(stores: Stores) -> None:
    began = time.monotonic()

    def seat(control: Control) -> None:
        with control.phase("describe"):
            pass

    for error in outcomes(stores, 3, seat, seats=(0, 1, 2, 7)):
        assert (error.seat, error.phase, error.reason) == (7, "describe", "seat-lost")
    assert time.monotonic() - began < 8


def test_a_seat_that_dies_in_a_gather_is_lost(stores: Stores) -> None:
    def seat(control: Control) -> None:
        if control.seat == 1:
            control.close()  # no more signs of life, as if its process were gone
            return
        with control.phase("plan"):
            control.gather("x", b"")

    first, _, last = outcomes(stores, 3, seat)
    assert {(error.seat, error.reason) for error in (first, last)} == {(1, "seat-lost")}


def test_a_slow_seat_is_waited_for(stores: Stores) -> None:
    def seat(control: Control) -> str:
        with control.phase("move"):
            if control.seat == 1:
                time.sleep(3 * QUICK.vote)
        return "done"

    assert outcomes(stores, 3, seat) == ["done"] * 3


def test_a_seat_that_is_stuck_is_lost_after_the_phase_timeout(stores: Stores) -> None:
    release = threading.Event()

    def seat(control: Control) -> None:
        with control.phase("move"):
            if control.seat == 1:
                release.wait(10)
        release.set()

    def others(control: Control) -> Any:
        try:
            seat(control)
        finally:
            release.set()

    for error in outcomes(stores, 3, others, Timeouts(vote=5.0, phase=1.0)):
        assert (error.seat, error.reason) == (1, "timeout")


def test_who_waits_in_what_cannot_be_interrupted_hears_of_a_failure(stores: Stores) -> None:
    freed = threading.Event()

    def seat(control: Control) -> int:
        with control.phase("finish"):
            if control.seat == 1:
                raise ValueError("the cause")
            assert control.during(lambda: 7, "what ends") == 7
            control.during(freed.wait, "a gather of others")
        return 0

    try:
        for error in outcomes(stores, 3, seat):
            assert (error.seat, error.cause) == (1, "ValueError: the cause")
    finally:
        freed.set()


def test_a_late_seat_adopts_the_decision(stores: Stores) -> None:
    decided = threading.Event()

    def seat(me: int) -> Any:
        if me == 1:
            decided.wait(20)
        control = Control(stores(me), me, (0, 1), QUICK)
        try:
            with control.phase("describe"):
                pass
        except MigrationAborted as error:
            return str(error)
        finally:
            decided.set()
            control.close()

    first, late = run_threads([lambda: seat(0), lambda: seat(1)])
    assert first is not None
    assert first == late
    assert "seat 1" in late


def test_the_next_phase_is_another_vote(stores: Stores) -> None:
    def seat(control: Control) -> None:
        with control.phase("one"):
            pass
        with control.phase("two"):
            if control.seat == 0:
                raise ValueError("later")

    assert {error.phase for error in outcomes(stores, 3, seat)} == {"two"}


class Losable:
    """A store that can be cut off."""

    def __init__(self, store: Any) -> None:
        self._store, self.lost = store, threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.lost.is_set():
            raise RuntimeError("Connection reset by peer")
        return getattr(self._store, name)


def test_a_lost_store_is_one_kind_of_error() -> None:
    store = Losable(HashStore())

    def seat(control: Control) -> None:
        with control.phase("one"):
            pass
        with control.phase("two"):
            time.sleep(0.2)
            store.lost.set()

    for error in outcomes(lambda _: store, 3, seat):
        assert isinstance(error, MigrationAborted)
        assert (error.phase, error.reason) == ("two", "control-lost")


def test_a_lost_server_is_one_kind_of_error() -> None:
    master = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port = master[0].port
    ready = threading.Barrier(3)

    def seat(control: Control) -> None:
        with control.phase("one"):
            pass
        if ready.wait(10) == 0:
            master.clear()
        ready.wait(10)
        with control.phase("two"):
            pass

    for error in outcomes(lambda _: TCPStore("127.0.0.1", port, is_master=False), 3, seat):
        assert isinstance(error, MigrationAborted), error
        assert error.reason == "control-lost"


def test_gather_brings_every_seats_bytes(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 1000)
    sizes = (0, 1, 1000, 2500)

    def seat(control: Control) -> Any:
        first = control.gather("a", bytes([control.seat]) * sizes[control.seat])
        values = control.gather_values("b", {"seat": control.seat, "x": np.arange(control.seat)})
        control.vote("end")
        return first, [len(v["x"]) for v in values.values()]

    for first, lengths in outcomes(stores, 4, seat):
        assert first == {s: bytes([s]) * n for s, n in enumerate(sizes)}
        assert lengths == [0, 1, 2, 3]


def test_combining_arrays(stores: Stores) -> None:
    def seat(control: Control) -> Any:
        mine = np.array([control.seat, 2**63], np.uint64)
        found = [control.combine(str(how), mine, how) for how in (np.add, np.maximum)]
        control.vote("end")
        return [array.tolist() for array in found]

    assert outcomes(stores, 2, seat) == [[[1, 0], [1, 2**63]]] * 2


def test_a_gather_stops_when_a_seat_has_failed(stores: Stores) -> None:
    def seat(control: Control) -> None:
        with control.phase("plan"):
            if control.seat == 0:
                raise Refused([Finding("shape", "w", "differs")])
            control.gather("x", b"")

    began = time.monotonic()
    for error in outcomes(stores, 3, seat, Timeouts(vote=10, phase=20)):
        assert (error.seat, error.reason) == (0, "shape")
    assert time.monotonic() - began < 5


def test_messages_are_taken_out_of_the_store(stores: Stores) -> None:
    def seat(control: Control) -> None:
        control.gather("x", b"abc")
        control.vote("end")

    assert outcomes(stores, 2, seat) == [None, None]
    store = stores(0)
    assert not any(store.check([f"x/{s}"]) for s in (0, 1))


def test_calls_leave_nothing_behind() -> None:
    """However calls end, the store holds no more than what the last one's latecomers would read."""
    store = HashStore()
    leavings: list[list[Any]] = [[], []]

    def call(number: int, me: int, bad: bool) -> Any:
        own = PrefixStore(f"call{number}", store)
        control = Control(own, me, (0, 1), QUICK, leavings=leavings[me])
        try:
            with control.phase("one"):
                control.gather("x", b"abc")
            with control.phase("two", last=True):
                control.gather("y", b"abc")
                if bad and me == 0:
                    raise ValueError("no")
        except MigrationAborted as error:
            return error.seat
        finally:
            control.close()

    held = []
    for number in range(6):
        bad = number % 3 == 1
        found = run_threads([partial(call, number, me, bad) for me in (0, 1)], timeout=30)
        assert found == ([0, 0] if bad else [None, None])
        held.append(store.num_keys())
    assert held[0] == held[2] == held[3] == held[5]
