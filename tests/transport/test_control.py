"""Votes: one outcome for all seats, whoever fails, in whatever way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from dynadapt.errors import ChannelError, Finding, MigrationAborted, Refused
from dynadapt.testing.seats import run_threads
from dynadapt.transport import control as module
from dynadapt.transport.control import Control, Timeouts

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
        assert (error.seat, error.reason) == (1, "seat-lost")


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
    assert not any(store.check([f"x/{s}/{i}"]) for s in (0, 1) for i in ("0", "n"))
