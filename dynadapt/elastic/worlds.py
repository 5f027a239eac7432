"""Seats and sessions: which processes (or threads) take part in a migration, and how they meet.

A seat number is given to a process once and never reused. A `Session` is one seat's view of all seats,
with a store to agree over and a channel to move bytes through.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynadapt.transport.channels.memory import MemoryChannel, MemoryHub

if TYPE_CHECKING:
    import torch.distributed as dist

    from dynadapt.protocols import Channel

__all__ = ["Session", "current_session", "in_process_sessions"]


@dataclass(frozen=True, eq=False)
class Session:
    """One seat among `seats`. All of them call the same migrations in the same order.

    `store(n)` is a fresh store for the n-th migration, `channel(n, device, timeout)` a fresh channel.
    `backends` says which device kinds the channel can take messages on.
    """

    seat: int
    seats: tuple[int, ...]
    store: Callable[[int], dist.Store]
    channel: Callable[[int, str, float], Channel]
    host: str = field(default_factory=socket.gethostname)
    counter: Any = field(default_factory=lambda: itertools.count())


_joined: dict[str, Session] = {}


def current_session() -> Session:
    """The session of this process: the default process group's ranks, or this process alone.

    All ranks of the default group must call it (the first time, seats are given out).
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        if "alone" not in _joined:
            _joined["alone"] = in_process_sessions(1)[0]
        return _joined["alone"]
    store = dist.distributed_c10d._get_default_store()
    ident = f"{id(dist.distributed_c10d._get_default_group())}"
    if ident not in _joined:
        _joined.clear()
        _joined[ident] = _join(store, dist.get_rank(), dist.get_world_size())
    return _joined[ident]


def _join(store: dist.Store, rank: int, size: int) -> Session:
    """Give the ranks of a world consecutive seats that this store has never given out before."""
    import torch.distributed as dist

    from dynadapt.transport.channels.process_group import ProcessGroupChannel

    world = dist.PrefixStore("dynadapt", store)
    if rank == 0:
        base = world.add("seats", size) - size
        world.set(f"world/{size}/{base}", b"")
        world.set("base", str(base))
    base = int(world.get("base"))
    seats = tuple(range(base, base + size))
    seat = base + rank

    def fresh(number: int, what: str) -> dist.Store:
        return dist.PrefixStore(f"{base}/{number}/{what}", world)

    def channel(number: int, device: str, timeout: float) -> Channel:
        backend = "nccl" if device.startswith("cuda") else "gloo"
        return ProcessGroupChannel(
            fresh(number, "data"), seat, seats, backend=backend, timeout=timeout
        )

    return Session(seat, seats, lambda number: fresh(number, "control"), channel)


def in_process_sessions(
    count: int, seats: Sequence[int] | None = None, hosts: Sequence[str] | None = None
) -> tuple[Session, ...]:
    """Sessions for `count` threads of this process, which meet in memory.

    >>> [session.seat for session in in_process_sessions(3)]
    [0, 1, 2]
    """
    from torch.distributed import HashStore, PrefixStore

    store = HashStore()
    hubs: dict[int, MemoryHub] = {}
    numbers = tuple(seats) if seats is not None else tuple(range(count))

    def session(i: int) -> Session:
        def channel(number: int, device: str, timeout: float) -> Channel:
            return MemoryChannel(hubs.setdefault(number, MemoryHub()), numbers[i])

        return Session(
            numbers[i],
            tuple(sorted(numbers)),
            lambda number: PrefixStore(f"{number}/control", store),
            channel,
            host=hosts[i] if hosts else "here",
        )

    return tuple(session(i) for i in range(count))
