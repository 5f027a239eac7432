"""The channel over a process group of its own: gloo for host memory, NCCL for CUDA, by the same code.

The group is opened over the seats of one migration on a store prefix of its own and thrown away after
it. A timeout or a dead peer breaks this group and no other: gloo groups are unusable after a timed-out
transfer, which is why the training group is never used for data.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dynadapt.errors import ChannelError, DynadaptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.distributed_c10d import Store

__all__ = ["ProcessGroupChannel"]

_TAGS = 1 << 24
_NEVER = _TAGS + 1
"""A tag that no message has."""


class ProcessGroupChannel:
    """One seat's end; every seat of `seats` must construct it (it connects).

    `store` must be fresh for this channel. `backend` is "gloo" or "nccl"; `timeout` in seconds bounds
    the connection and every transfer.
    """

    def __init__(
        self,
        store: Store,
        seat: int,
        seats: Sequence[int],
        *,
        backend: str = "gloo",
        timeout: float = 300.0,
    ) -> None:
        self._seat = seat
        self._rank_of = {peer: rank for rank, peer in enumerate(sorted(seats))}
        self._seat_of = {rank: peer for peer, rank in self._rank_of.items()}
        self._backend = backend
        self._group: Any = None
        self._tags: dict[tuple[str, int], int] = {}
        try:
            self._group = _open(backend, store, self._rank_of[seat], len(self._rank_of), timeout)
        except RuntimeError as error:
            raise ChannelError(f"cannot connect the seats: {error}") from error

    def post(
        self,
        receives: Sequence[tuple[int, torch.Tensor]],
        sends: Sequence[tuple[int, torch.Tensor]],
    ) -> _Posted:
        """See `protocols.Channel.post`."""
        works: list[tuple[int, str, Any]] = []
        batch = self._backend == "nccl" and (receives or sends)
        device = (receives or sends)[0][1].device if batch else None
        try:
            if batch:
                self._group._start_coalescing(device)
            for peer, tensor in receives:
                tag = self._tag("<", peer)
                work = self._group.recv([tensor], self._rank_of[peer], tag)
                works.append((peer, "receive from", work))
            for peer, tensor in sends:
                tag = self._tag(">", peer)
                work = self._group.send([tensor], self._rank_of[peer], tag)
                works.append((peer, "send to", work))
            if batch:
                works = [(-1, "exchange with", self._group._end_coalescing(device))]
        except RuntimeError as error:
            raise ChannelError(f"cannot post: {error}") from error
        return _Posted(works)

    def _tag(self, way: str, peer: int) -> int:
        """A number per message of a pair and direction, so that no two transfers can be mixed up."""
        tag = self._tags.get((way, peer), 0)
        self._tags[way, peer] = (tag + 1) % _TAGS
        return tag

    def close(self) -> None:
        """Give the connections back."""
        self._group = None

    def abort(self) -> None:
        """Close the connections at once; peers that wait on this seat fail within a second."""
        group, self._group = self._group, None
        peers = [rank for rank in self._seat_of if rank != self._rank_of[self._seat]]
        if group is None or not peers:
            return
        if self._backend == "nccl":
            with contextlib.suppress(RuntimeError):
                group.abort()
            return
        # gloo's own abort() leaves connections open as long as anything refers to a transfer. What closes
        # them all is a transfer that times out: wait for one that nobody will ever send. On a connection
        # that is broken already it fails at once and closes no other, so each has its turn.
        for peer in peers:
            with contextlib.suppress(RuntimeError):
                group.recv([_one_byte()], peer, _NEVER).wait(timedelta(milliseconds=1))


class _Posted:
    def __init__(self, works: list[tuple[int, str, Any]]) -> None:
        self._works = works

    def wait(self, timeout: float) -> None:
        for peer, what, work in self._works:
            try:
                done = work.wait(timedelta(seconds=max(timeout, 0.001)))
            except RuntimeError as error:
                raise ChannelError(f"{what} seat {peer} failed: {error}", peer=peer) from error
            if done is False:
                raise ChannelError(f"{what} seat {peer} did not end in {timeout:g} s", peer=peer)


def _one_byte() -> torch.Tensor:
    import torch

    return torch.empty(1, dtype=torch.uint8)


def _open(backend: str, store: Store, rank: int, size: int, timeout: float) -> Any:
    limit = timedelta(seconds=timeout)
    if backend == "gloo":
        from torch.distributed import ProcessGroupGloo

        return ProcessGroupGloo(store, rank, size, limit)
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = limit
        return ProcessGroupNCCL(store, rank, size, options)
    raise DynadaptError(f"unknown backend {backend!r}", reason="unknown-backend")
