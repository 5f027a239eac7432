"""Processes that are forked to work: what becomes of them, and of who waits for them, when one is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from dynadapt.transport.forks import ForkLost, Forks
from dynadapt.transport.progress import TELL
from dynadapt.transport.watch import Watch


def _in_a_fork(what: Any) -> int:
    """What it gives, in a fork of this process: one that has torch, and many threads, should not fork on."""
    pid = os.fork()
    if not pid:
        code = 70
        try:
            signal.alarm(60)  # it would wait for ever
            code = what()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("word", [b"", b"\0\0\1\0begun"])
def test_one_that_is_killed_as_it_speaks_keeps_nobody_waiting(word: bytes) -> None:
    def job() -> int:
        forks = Forks()

        def work(item: int) -> None:
            if item:
                while True:
                    forks.bytes(TELL)
            with forks._turn:
                os.write(forks._tells.fileno(), word)
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with Watch() as watch:
                forks.run(work, [0, 1], 3, watch)
        except ForkLost:
            return sum(fork.is_alive() for fork in forks._context.made)
        return 71

    assert _in_a_fork(job) == 0


def test_none_that_a_fork_is_made_in_hears_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes before the fork knows what it is, and is its parent's alone."""

    def job() -> int:
        fork = os.fork

        def late() -> int:
            pid = fork()
            if not pid:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGTERM)
            return pid

        monkeypatch.setattr(os, "fork", late)
        with Watch() as watch:
            return sum(Forks().run(int, ["0", "0"], 2, watch))

    assert _in_a_fork(job) == 0
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_interrupt_while_forks_are_made_ends_them() -> None:
    def job() -> int:
        forks = Forks()

        def work(_: int) -> None:
            while not forks.is_set():
                pass

        try:
            with forks.begun(work, [0, 1], 2):
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            return sum(fork.is_alive() for fork in forks._context.made)

    assert _in_a_fork(job) == 0


def test_forks_are_ended_where_not_all_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of processes may be reached at any of them."""

    def job() -> int:
        fork, left = os.fork, iter(range(2))

        def limited() -> int:
            if next(left, None) is None:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return fork()

        monkeypatch.setattr(os, "fork", limited)
        forks = Forks()
        try:
            with Watch() as watch:
                forks.run(int, ["0"] * 9, 7, watch)
        except ForkLost:
            for made in forks._context.made[:2]:
                made.join()
            return 0
        return 71

    assert _in_a_fork(job) == 0
