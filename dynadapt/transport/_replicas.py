"""The replica rule of `planner`, for columns: who sends a piece, and whom a holder of it serves.

A place of the source is told by its `fixed` number alone: all places with the same one are replicas.
So "does this seat hold the piece" is a comparison of integers, and no list of holders is searched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dynadapt.transport.plan import EvenHosts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from dynadapt.transport.factored import Lane
    from dynadapt.vps.mesh_layout import MeshLayout

__all__ = ["Replicas"]


class Replicas:
    """Answers for two layouts whose endpoints ascend with their places."""

    def __init__(self, source: MeshLayout, target: MeshLayout, hosts: Mapping[int, str]) -> None:
        self._source, self._target, self._hosts = source, target, hosts
        self._names: dict[str, int] = {}

    def senders(
        self, seat: int, lane: Lane, fixed: NDArray[np.int64], shift: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Who sends each piece to `seat`; `fixed` (pieces,) is its holders' number in the source.

        `shift` (pieces,) is the turn of the piece's tensor.
        """
        own, other = lane.source.geometry, lane.target.geometry
        order = self._source.order
        if len(own.replicas) == 1:
            return order[fixed]
        mine = self._fixed(lane, np.array([seat]))[0]
        place = self._target.place(seat)
        assert place is not None
        first = int(other.fixed(np.array([place]))[0])
        equal = self._target.order[first + other.replicas]
        before = equal[equal < seat]
        ordinal = len(before) - _count(self._fixed(lane, before), fixed)
        turn = ordinal + first + shift
        chosen = order[fixed + own.replicas[turn % len(own.replicas)]]
        near = self._on_host(seat)
        if len(near):
            held = self._fixed(lane, near) == fixed[:, None]
            counts = held.sum(1)
            wanted = turn % np.maximum(counts, 1) + 1
            which = np.argmax(np.cumsum(held, axis=1) == wanted[:, None], axis=1)
            chosen = np.where(counts > 0, near[which], chosen)
        return np.where(fixed == mine, seat, chosen)

    def receivers(
        self,
        seat: int,
        lane: Lane,
        places: NDArray[np.int64],
        shift: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Whom `seat` serves: the piece, and the endpoint; `places` (pieces,) is where each goes."""
        own, other = lane.source.geometry, lane.target.geometry
        place = self._source.place(seat)
        assert place is not None
        mine = int(own.fixed(np.array([place]))[0])
        equal = self._target.order[places[:, None] + other.replicas]
        shape = equal.shape
        needy = (self._fixed(lane, equal.reshape(-1)) != mine).reshape(shape)
        if len(own.replicas) > 1:
            turn = np.cumsum(needy, axis=1) - 1 + (places + shift)[:, None]
            holders = self._source.order[mine + own.replicas]
            number = int(np.searchsorted(holders, seat))
            serves = turn % len(holders) == number
            serves &= needy
            if self._hosts:
                hosts = self._host(holders)
                me = hosts[number]
                near = int((hosts[:number] == me).sum())
                theirs = self._host(equal.reshape(-1)).reshape(shape)
                counts = np.where(theirs >= 0, _count(hosts, theirs.reshape(-1)).reshape(shape), 0)
                close = (theirs == me) & (turn % np.maximum(counts, 1) == near)
                serves = needy & np.where(counts > 0, close, serves)
            needy = serves
        piece, which = np.nonzero(needy)
        return piece, equal[piece, which]

    def _fixed(self, lane: Lane, endpoints: NDArray[np.int64]) -> NDArray[np.int64]:
        """The source's number of what each endpoint holds of a lane; -1 where it is not in the source."""
        places = self._source.places(endpoints)
        return np.where(places >= 0, lane.source.geometry.fixed(places), -1)

    def _host(self, endpoints: NDArray[np.int64]) -> NDArray[np.int64]:
        """A number for each endpoint's host, -1 where it is not known."""
        if isinstance(self._hosts, EvenHosts):
            return self._hosts.numbers(endpoints)
        names = [self._hosts.get(int(endpoint)) for endpoint in endpoints]
        known = self._names
        return np.array([-1 if n is None else known.setdefault(n, len(known)) for n in names])

    def _on_host(self, seat: int) -> NDArray[np.int64]:
        """The source's endpoints on a seat's host, ascending; none where it is not known."""
        if not self._hosts:
            return np.zeros(0, np.int64)
        order = self._source.order
        if isinstance(self._hosts, EvenHosts):
            low, high = self._hosts.around(seat)
            return order[np.searchsorted(order, low) : np.searchsorted(order, high)]
        host = self._host(np.array([seat]))[0]
        return order[self._host(order) == host] if host >= 0 else order[:0]


def _count(among: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each wanted number is among the others."""
    ordered = np.sort(among)
    return np.searchsorted(ordered, wanted, "right") - np.searchsorted(ordered, wanted, "left")
