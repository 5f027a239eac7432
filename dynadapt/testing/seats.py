"""Seats as threads: most tests of many ranks need no processes."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, TypeVar

from dynadapt.elastic.worlds import in_process_sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynadapt.elastic.worlds import Session

__all__ = ["run_seats", "run_threads"]

T = TypeVar("T")


def run_seats(
    count: int,
    fn: Callable[[Session], T],
    *,
    seats: Sequence[int] | None = None,
    hosts: Sequence[str] | None = None,
    timeout: float = 60.0,
) -> list[T]:
    """Call `fn(session)` on a thread a seat; the results in seat order, or the first error of any.

    Raises `TimeoutError`, with the stacks of the threads that hang, after `timeout` seconds.

    >>> run_seats(3, lambda session: session.seat)
    [0, 1, 2]
    """
    sessions = in_process_sessions(count, seats, hosts)
    return run_threads([lambda session=s: fn(session) for s in sessions], timeout=timeout)  # type: ignore[misc]


def run_threads(calls: Sequence[Callable[[], T]], *, timeout: float = 60.0) -> list[T]:
    """Call all functions at once; their results in order, or the error that came first.

    >>> run_threads([lambda: 1, lambda: 2])
    [1, 2]
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(i,), name=f"seat-{i}", daemon=True)
        for i in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        # After an error the others may wait for what never comes: they get a little longer, no more.
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.05 if not errors else min(1.0, max(deadline - time.monotonic(), 0.0)))
            if errors and thread.is_alive():
                raise errors[0]
    if errors:
        raise errors[0]
    hanging = [thread for thread in threads if thread.is_alive()]
    if hanging:
        frames = sys._current_frames()
        stacks = [
            f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident or 0]))}"
            for thread in hanging
        ]
        raise TimeoutError(f"no answer in {timeout:g} s from\n" + "\n".join(stacks))
    return [results[number] for number in range(len(calls))]
