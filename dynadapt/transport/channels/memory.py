"""The channel between seats that are threads of one process: mailboxes, no copies but the last."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynadapt.errors import ChannelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["MemoryChannel", "MemoryHub"]


@dataclass
class MemoryHub:
    """What the `MemoryChannel`s of one migration share.

    >>> hub = MemoryHub()
    >>> MemoryChannel(hub, 0).post([], []).wait(1.0)
    """

    lock: threading.Condition = field(default_factory=threading.Condition)
    boxes: dict[tuple[int, int], deque[torch.Tensor]] = field(default_factory=dict)
    broken_by: int | None = None


class MemoryChannel:
    """One seat's end. A send is buffered by reference, so the sender waits until it was taken."""

    def __init__(self, hub: MemoryHub, seat: int) -> None:
        self._hub, self._seat = hub, seat

    def post(
        self,
        receives: Sequence[tuple[int, torch.Tensor]],
        sends: Sequence[tuple[int, torch.Tensor]],
    ) -> _Posted:
        """See `protocols.Channel.post`."""
        with self._hub.lock:
            for peer, tensor in sends:
                self._hub.boxes.setdefault((self._seat, peer), deque()).append(tensor)
            self._hub.lock.notify_all()
        return _Posted(self._hub, self._seat, list(receives), list(sends))

    def close(self) -> None:
        """Nothing to give back."""

    def abort(self) -> None:
        """Wake every peer with an error."""
        with self._hub.lock:
            self._hub.broken_by = self._seat
            self._hub.lock.notify_all()


@dataclass
class _Posted:
    hub: MemoryHub
    seat: int
    receives: list[tuple[int, torch.Tensor]]
    sends: list[tuple[int, torch.Tensor]]

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for peer, tensor in self.receives:
            taken = self._take(peer, deadline)
            if taken.numel() != tensor.numel():
                raise ChannelError(
                    f"seat {peer} sent {taken.numel()} bytes where {tensor.numel()} were expected",
                    peer=peer,
                )
            tensor.copy_(taken)
        with self.hub.lock:
            self.hub.lock.notify_all()
            for peer, tensor in self.sends:
                box = self.hub.boxes[self.seat, peer]
                self._until(lambda t=tensor, b=box: all(t is not x for x in b), peer, deadline)

    def _take(self, peer: int, deadline: float) -> torch.Tensor:
        with self.hub.lock:
            box = self.hub.boxes.setdefault((peer, self.seat), deque())
            self._until(lambda: bool(box), peer, deadline)
            taken = box.popleft()
            self.hub.lock.notify_all()
            return taken.clone()

    def _until(self, ready: object, peer: int, deadline: float) -> None:
        assert callable(ready)
        while not ready():
            if self.hub.broken_by is not None:
                raise ChannelError(f"seat {self.hub.broken_by} broke the channel", peer=peer)
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChannelError(f"seat {peer} did not answer in time", peer=peer)
            self.hub.lock.wait(min(0.1, left))
