"""Seats and sessions: which processes (or threads) take part in a migration, and how they meet.

A seat number is given to a process once and never reused. A `Session` is one seat's view of all seats,
with a store to agree over and a channel to move bytes through.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dynadapt.transport.channels.memory import MemoryChannel, MemoryHub

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

    from dynadapt.protocols import Channel

__all__ = ["Session", "current_session", "in_process_sessions"]


@dataclass(frozen=True, eq=False)
class Session:
    """One seat among `seats`. All of them make the same calls.

    `store(n)` is the store of the n-th call, `channel(n, device, timeout)` a fresh channel of it. `root`
    counts the calls that are closed, so a seat that missed one (it did not call, or its process was
    stopped) meets the others at the next. `leavings` are keys of calls that some seat may not have left yet.
    """

    seat: int
    seats: tuple[int, ...]
    root: Store
    store: Callable[[int], Store]
    channel: Callable[[int, str, float], Channel]
    host: str = field(default_factory=socket.gethostname)
    leavings: list[tuple[Store, list[str]]] = field(default_factory=list)

    def number(self) -> int:
        """The call that is open now."""
        return int(self.root.get("closed")) if self.root.check(["closed"]) else 0

    def close(self, number: int) -> None:
        """Say that a call has its outcome; any seat may, any number of times."""
        self.root.compare_set("closed", str(number) if number else "", str(number + 1))


@dataclass
class _Joined:
    """The store of the world this process is in, and its session there."""

    store: Any
    session: Session


_joined: _Joined | None = None


def current_session() -> Session:
    """The session of this process: the default process group's ranks, or this process alone.

    All ranks of the default group must call it (the first time, seats are given out).
    """
    import torch.distributed as dist

    global _joined
    ready = dist.is_available() and dist.is_initialized()
    store = dist.distributed_c10d._get_default_store() if ready else None
    if _joined is None or _joined.store is not store:
        session = _join(store, dist.get_rank(), dist.get_world_size()) if ready else _alone()
        _joined = _Joined(store, session)
    return _joined.session


def _alone() -> Session:
    return in_process_sessions(1)[0]


def _join(store: Any, rank: int, size: int) -> Session:
    """Give the ranks of a world consecutive seats that this store has never given out before."""
    from torch.distributed.distributed_c10d import PrefixStore

    from dynadapt.transport.channels.process_group import ProcessGroupChannel

    # a connection of its own: whoever waits for a key blocks a store's connection for all threads
    world = PrefixStore("dynadapt", store.clone())
    generation = world.add(f"joins/{rank}", 1)  # the same on every rank: each has joined as often
    if world.compare_set(f"claim/{generation}", "", str(rank)) == str(rank).encode():
        world.set(f"base/{generation}", str(world.add("seats", size) - size))
    world.wait([f"base/{generation}"], timedelta(seconds=60))
    base = int(world.get(f"base/{generation}"))
    seats = tuple(range(base, base + size))
    seat = base + rank

    def fresh(number: int, what: str) -> Store:
        return PrefixStore(f"{base}/{number}/{what}", world)

    def channel(number: int, device: str, timeout: float) -> Channel:
        backend = "nccl" if device.startswith("cuda") else "gloo"
        own: Any = fresh(number, "data")
        return ProcessGroupChannel(own.clone(), seat, seats, backend=backend, timeout=timeout)

    root = PrefixStore(f"{base}", world)
    return Session(seat, seats, root, lambda number: fresh(number, "control"), channel)


def in_process_sessions(
    count: int, seats: Sequence[int] | None = None, hosts: Sequence[str] | None = None
) -> tuple[Session, ...]:
    """Sessions for `count` threads of this process, which meet in memory.

    >>> [session.seat for session in in_process_sessions(3)]
    [0, 1, 2]
    """
    from torch._C._distributed_c10d import HashStore, PrefixStore

    store = HashStore()
    hubs: dict[int, MemoryHub] = {}
    numbers = tuple(seats) if seats is not None else tuple(range(count))

    def session(i: int) -> Session:
        def channel(number: int, device: str, timeout: float) -> Channel:
            return MemoryChannel(hubs.setdefault(number, MemoryHub()), numbers[i])

        return Session(
            numbers[i],
            tuple(sorted(numbers)),
            store,
            lambda number: PrefixStore(f"{number}/control", store),
            channel,
            host=hosts[i] if hosts else "here",
        )

    return tuple(session(i) for i in range(count))
