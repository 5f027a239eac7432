"""The channel over a process group of its own: gloo for host memory, NCCL for CUDA, by the same code.

On one host a seat reads the other's memory itself where it may (`_same_host`): the sender tells where its
bytes lie, the receiver tells when it has them. All else goes through the group's connections.

The group is opened over the seats of one migration on a store prefix of its own and thrown away after
it. A timeout or a dead peer breaks this group and no other: gloo groups are unusable after a timed-out
transfer, which is why the training group is never used for data.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynadapt.errors import ChannelError, DynadaptError
from dynadapt.transport.channels._same_host import CARD, Nonce, can_read, read_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from torch.distributed.distributed_c10d import Store

__all__ = ["ProcessGroupChannel"]

_TAGS = 1 << 24
_NEVER = _TAGS + 1
"""A tag that no message has."""

_TAKEN = 2 * _TAGS
"""Added to the tags of the messages that say that bytes were taken: they keep their own order."""

Message = tuple[int, torch.Tensor]
"""A peer's seat and a contiguous 1-D uint8 tensor."""


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
        self._nonce = Nonce()
        self._readable: dict[int, int] = {}
        self._readers: set[int] = set()
        if backend == "gloo" and len(seats) > 1:
            self._look_around(timeout)

    def _look_around(self, timeout: float) -> None:
        """Find out with every seat on this host whose memory this one can read, and who can read its own."""
        cards = torch.frombuffer(bytearray(self._nonce.card()), dtype=torch.uint8)
        every = [torch.empty(CARD, dtype=torch.uint8) for _ in self._rank_of]
        try:
            self._group.allgather([every], [cards]).wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise ChannelError(f"cannot connect the seats: {error}") from error
        host = bytes(cards[:16].tolist())
        near = {
            seat: bytes(card.tolist())
            for seat, card in zip(sorted(self._rank_of), every, strict=True)
            if seat != self._seat and any(host) and bytes(card[:16].tolist()) == host
        }
        self._readable = {peer: number for peer, card in near.items() if (number := can_read(card))}
        mine = {peer: _byte(peer in self._readable) for peer in near}
        theirs = {peer: _byte() for peer in near}
        self._post(theirs.items(), mine.items()).wait(timeout)
        self._readers = {peer for peer, told in theirs.items() if int(told)}

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> _Exchange:
        """See `protocols.Channel.post`."""
        taken = _by_peer(receives, self._readable)
        given = _by_peer(sends, self._readers)
        places = {
            peer: np.array([[t.data_ptr(), t.numel()] for t in tensors], np.int64)
            for peer, tensors in given.items()
        }
        told = {peer: np.zeros((len(tensors), 2), np.int64) for peer, tensors in taken.items()}
        answers = {peer: _byte() for peer in given}
        return _Exchange(
            self,
            taken=taken,
            told=told,
            held=(receives, sends, places, answers),
            notes=self._post(_as_bytes(told), _as_bytes(places)),
            answers=self._post(answers.items(), (), shift=_TAKEN),
            others=self._post(
                [(peer, tensor) for peer, tensor in receives if peer not in taken],
                [(peer, tensor) for peer, tensor in sends if peer not in given],
            ),
        )

    def take(self, peer: int, there: NDArray[np.int64], into: Sequence[torch.Tensor]) -> None:
        """Read what a peer on this host has told the places of."""
        here = np.array([[tensor.data_ptr(), tensor.numel()] for tensor in into], np.int64)
        if not np.array_equal(there[:, 1], here[:, 1]):
            sizes = f"{there[:, 1].tolist()} bytes where {here[:, 1].tolist()} were expected"
            raise ChannelError(f"seat {peer} sent {sizes}"[:300], peer=peer)
        try:
            read_memory(self._readable[peer], there, here)
        except OSError as error:
            cause = f"the memory of seat {peer} cannot be read any more: {error}"
            raise ChannelError(cause, peer=peer) from error

    def say_taken(self, peers: Iterable[int]) -> _Posted:
        """Tell peers that their bytes have been read."""
        return self._post((), [(peer, _byte(True)) for peer in peers], shift=_TAKEN)

    def _post(
        self, receives: Iterable[Message], sends: Iterable[Message], shift: int = 0
    ) -> _Posted:
        receives, sends = list(receives), list(sends)
        works: list[tuple[int, str, Any]] = []
        batch = self._backend == "nccl" and (receives or sends)
        device = (receives or sends)[0][1].device if batch else None
        try:
            if batch:
                self._group._start_coalescing(device)
            for peer, tensor in receives:
                tag = self._tag(f"<{shift}", peer) + shift
                work = self._group.recv([tensor], self._rank_of[peer], tag)
                works.append((peer, "receive from", work))
            for peer, tensor in sends:
                tag = self._tag(f">{shift}", peer) + shift
                work = self._group.send([tensor], self._rank_of[peer], tag)
                works.append((peer, "send to", work))
            if batch:
                works = [(-1, "exchange with", self._group._end_coalescing(device))]
        except RuntimeError as error:
            raise ChannelError(f"cannot post: {error}") from error
        return _Posted(works, sends)

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
                group.recv([_byte()], peer, _NEVER).wait(timedelta(milliseconds=1))


@dataclass
class _Exchange:
    """One batch: what is read from the memory of seats on this host, and what comes by connections."""

    channel: ProcessGroupChannel
    taken: dict[int, list[torch.Tensor]]
    told: dict[int, NDArray[np.int64]]
    held: Any
    notes: _Posted
    answers: _Posted
    others: _Posted

    def wait(self, timeout: float) -> None:
        """See `protocols.Posted.wait`. What a peer reads stays in place until it says so."""
        deadline = time.monotonic() + timeout
        self.notes.wait(timeout)
        for peer, into in self.taken.items():
            self.channel.take(peer, self.told[peer], into)
        said = self.channel.say_taken(self.taken)
        for posted in (self.others, self.answers, said):
            posted.wait(deadline - time.monotonic())


@dataclass
class _Posted:
    works: list[tuple[int, str, Any]]
    held: Any = field(repr=False)

    def wait(self, timeout: float) -> None:
        for peer, what, work in self.works:
            try:
                done = work.wait(timedelta(seconds=max(timeout, 0.001)))
            except RuntimeError as error:
                raise ChannelError(f"{what} seat {peer} failed: {error}", peer=peer) from error
            if done is False:
                raise ChannelError(f"{what} seat {peer} did not end in {timeout:g} s", peer=peer)


def _by_peer(messages: Sequence[Message], peers: Iterable[int]) -> dict[int, list[torch.Tensor]]:
    """Those of some peers, in order."""
    found: dict[int, list[torch.Tensor]] = {}
    for peer, tensor in messages:
        if peer in peers:
            found.setdefault(peer, []).append(tensor)
    return found


def _as_bytes(arrays: dict[int, NDArray[np.int64]]) -> list[Message]:
    """Messages that share the arrays' memory."""
    return [
        (peer, torch.from_numpy(array).view(-1).view(torch.uint8)) for peer, array in arrays.items()
    ]


def _byte(value: bool = False) -> torch.Tensor:
    return torch.full((1,), int(value), dtype=torch.uint8)


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
