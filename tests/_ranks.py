"""Pools of real gloo ranks for tests.

A rank is forked from an interpreter that has imported the frameworks (`_forks`), which costs a tenth
of a second; using it costs milliseconds. So all tests of one world size share a warm pool, and between
two runs every worker is put back to how it started. Tests that kill ranks take a pool of their own from
`spawn_fresh`.

The rules that make this safe:

- The store lives in the parent, so any rank may die.
- Every run gets a new default group, so nothing that an earlier run left in a group survives.
- A pool in which a run failed is ended, and its next run starts new workers.
- Workers leave by `os._exit`: gloo sometimes aborts in an interpreter's normal shutdown.
- Everything private to torch or DeepSpeed that tests have to reset is in `_reset`.
"""

from __future__ import annotations

from tests._forks import end_parents
from tests._pool import Outcome, Pool, RanksFailedError
from tests._reset import reset_deepspeed
from tests._worker import GROUP_TIMEOUT, HOST, ROOT, allow_fp16, at_reset, store, taken_for_fused

__all__ = [
    "GROUP_TIMEOUT",
    "HOST",
    "ROOT",
    "Outcome",
    "Pool",
    "RanksFailedError",
    "allow_fp16",
    "at_reset",
    "close_pools",
    "pool",
    "reset_deepspeed",
    "spawn_fresh",
    "store",
    "taken_for_fused",
]

_pools: dict[int, Pool] = {}


def pool(world_size: int) -> Pool:
    """The warm pool of that many ranks, shared by the whole test session."""
    return _pools.setdefault(world_size, Pool(world_size))


def spawn_fresh(world_size: int) -> Pool:
    """A pool of its own for a test that breaks ranks; use it in a `with` statement.

    `start`, then `kill(rank)` (or let a rank `os._exit`), then `outcomes` for what the survivors
    answered.
    """
    return Pool(world_size)


def close_pools() -> None:
    """End the warm pools and what they are forked from."""
    for each in _pools.values():
        each.close()
    _pools.clear()
    end_parents()
