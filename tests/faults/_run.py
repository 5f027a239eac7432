"""Runs faults, one after another in each of a few worlds of four ranks at once.

A world in which a rank was killed, or hung, is ended; the next fault starts a new one, which takes a
moment (`tests._forks`). Most of the time is spent waiting for timeouts, so several worlds fit two cores.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from tests import _ranks
from tests.faults._fault import WORLD
from tests.faults._judge import Verdict, judge
from tests.faults._scene import suffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.faults._fault import Fault

__all__ = ["run_faults"]

LIMIT = 120.0
"""Seconds after which a fault has hung: many times what the slowest takes."""


def run_faults(
    faults: Iterable[Fault], lanes: int = 2, tell: Callable[[Verdict], None] = lambda _: None
) -> list[Verdict]:
    """The verdicts, in the order of the faults. `tell` is called with each when it is there."""
    waiting: queue.SimpleQueue[tuple[int, Fault]] = queue.SimpleQueue()
    for item in enumerate(faults):
        waiting.put(item)
    found: dict[int, Verdict] = {}
    broken: list[BaseException] = []

    def lane() -> None:
        try:
            with _ranks.spawn_fresh(WORLD) as pool:
                while not broken:
                    try:
                        number, fault = waiting.get_nowait()
                    except queue.Empty:
                        return
                    found[number] = _one(pool, fault)
                    tell(found[number])
        except BaseException as error:
            broken.append(error)

    threads = [threading.Thread(target=lane) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if broken:
        raise broken[0]
    return [found[number] for number in sorted(found)]


def _one(pool: _ranks.Pool, fault: Fault) -> Verdict:
    pool.start(suffer, fault)
    outcomes = pool.outcomes(LIMIT, grace=30)
    if any(outcome.error is not None for outcome in outcomes):
        pool.close()
    return judge(fault, outcomes)
