"""What a change of layout would take on a named cluster: the real plans against a model of its links.

Up to `WHOLE` seats every seat's plan is made and the chunks of all of them run through the links step by
step. Larger worlds are judged by the plans of a sample of seats: each is as fast as its busiest link lets
it be, messages included, and the slowest of them sets the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.errors import DynadaptError
from dynadapt.transport._fluid import run_chunks
from dynadapt.transport.cost import LINKS, Link
from dynadapt.transport.factored import factored_plan, lanes
from dynadapt.transport.plan import EvenHosts, Options
from dynadapt.transport.schedule import CHUNKS_IN_FLIGHT, Slicing, finer, slicing, spread_of
from dynadapt.vps.geometry import mesh_strides, ragged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from dynadapt.vps.mesh_layout import MeshLayout

__all__ = ["CLUSTERS", "Cluster", "Simulation", "simulate"]

WHOLE = 256
"""Seats up to which all plans are made and every pair's transfers are followed."""

SAMPLE = 32
"""Seats that stand for a larger world."""

STAGES = 128
"""Seats of different stages and expert places that are added to the sample."""

FOLLOWED = 128
"""Chunks that are followed; every chunk has the same part of every stream, so they stand for the rest."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts of equally many seats; `near` joins seats of one host, `far` those of two."""

    seats_per_host: int
    near: Link
    far: Link


#: Nominal figures, per seat and one way. `flat-200g` has no fast links within a host.
CLUSTERS: Mapping[str, Cluster] = MappingProxyType(
    {
        "h100": Cluster(8, LINKS["nvlink-h100"], LINKS["infiniband-400g"]),
        "a800": Cluster(8, Link(200e9, 3e-6), LINKS["infiniband-200g"]),
        "flat-200g": Cluster(1, LINKS["infiniband-200g"], LINKS["infiniband-200g"]),
        "ethernet-25g": Cluster(8, LINKS["nvlink-h100"], LINKS["ethernet-25g"]),
    }
)


@dataclass(frozen=True, eq=False)
class Simulation:
    """What was simulated. Per-seat columns follow `seats`, the seats whose plans were made.

    `loads` is (seats, 4) bytes: near in, near out, far in, far out; `messages` (seats, 4) likewise.
    `chunk_bytes` is (seats, chunks), both ways together. `staging` (seats,) bytes is that of two chunks.
    `held` is (seats, 2): bytes of the source's and of the target's rows. `pairs` is (seats, seats) bytes
    from row to column, None for a sample. `starts` and `ends` are seconds, of the first chunks, which
    were followed. `moves` are the most of a seat.
    """

    cluster: Cluster
    world: int
    seats: NDArray[np.int64]
    loads: NDArray[np.float64]
    messages: NDArray[np.int64]
    chunk_bytes: NDArray[np.float64]
    staging: NDArray[np.int64]
    held: NDArray[np.int64]
    resident: NDArray[np.int64]
    minimum: NDArray[np.int64]
    pairs: NDArray[np.float64] | None
    chunks: int
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    moves: int
    budget: int
    seconds: float

    @property
    def sampled(self) -> bool:
        """Whether the seats are a sample of the world."""
        return len(self.seats) < self.world

    @cached_property
    def link_seconds(self) -> NDArray[np.float64]:
        """What each link of each seat needs for its bytes alone, (seats, 4)."""
        found: NDArray[np.float64] = self.loads / _speeds(self.cluster)
        return found

    @property
    def lower_bound(self) -> float:
        """Seconds that the busiest link needs: no schedule can be faster."""
        return float(self.link_seconds.max(initial=0.0))

    @property
    def ratio(self) -> float:
        """Simulated seconds over the lower bound; 1 where nothing moves."""
        return self.seconds / self.lower_bound if self.lower_bound else 1.0

    @property
    def busiest(self) -> tuple[int, str, int]:
        """Seat, link and bytes of the link that sets the lower bound."""
        seat, link = np.unravel_index(int(np.argmax(self.link_seconds)), self.link_seconds.shape)
        names = ("from its host", "to its host", "from other hosts", "to other hosts")
        return int(self.seats[seat]), names[link], int(self.loads[seat, link])

    @property
    def sent(self) -> NDArray[np.float64]:
        """Bytes each seat sends."""
        out: NDArray[np.float64] = self.loads[:, 1] + self.loads[:, 3]
        return out

    @property
    def balance(self) -> float:
        """The most that a seat sends, over the mean."""
        mean = float(self.sent.mean()) if len(self.sent) else 0.0
        return float(self.sent.max()) / mean if mean else 1.0

    @property
    def peak_memory(self) -> int:
        """Bytes of source, target and staging of the seat that has the most, the source kept."""
        return int((self.held.sum(axis=1) + self.staging).max(initial=0))

    def to_json(self) -> dict[str, Any]:
        """The figures as plain JSON values; seconds and bytes."""
        seat, link, amount = self.busiest if len(self.seats) else (-1, "", 0)
        return {
            "world": self.world,
            "planned_seats": len(self.seats),
            "seconds": self.seconds,
            "lower_bound": self.lower_bound,
            "ratio": self.ratio,
            "busiest": {"seat": seat, "link": link, "bytes": amount},
            "bytes_in_worst": int((self.loads[:, 0] + self.loads[:, 2]).max(initial=0)),
            "bytes_out_worst": int(self.sent.max(initial=0)),
            "bytes_in_mean": float((self.loads[:, 0] + self.loads[:, 2]).mean()),
            "minimum_worst": int(self.minimum.max(initial=0)),
            "resident_worst": int(self.resident.max(initial=0)),
            "balance": self.balance,
            "chunks": self.chunks,
            "budget": self.budget,
            "staging": int(self.staging.max(initial=0)),
            "messages_worst": int(self.messages.sum(axis=1).max(initial=0)),
            "peak_memory": self.peak_memory,
            "moves_worst": self.moves,
        }


def simulate(
    source: MeshLayout,
    target: MeshLayout,
    cluster: str | Cluster = "h100",
    *,
    budget: int = 1 << 30,
    seats: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Simulation:
    """Plan a change between two declared layouts of one model and run it on a cluster's links.

    `budget` is the staging bytes of one seat. `seats` chooses whose plans are made; by default all up to
    `WHOLE`, else a sample that has both ends of the world and steps through it. Times leave out the
    planning and the copies inside a seat.

    Raises `DynadaptError`: `unknown-cluster` for a name that is not in `CLUSTERS`, `mesh-order` for
    layouts whose endpoints do not ascend with their places, `model-differs`.
    """
    if isinstance(cluster, str):
        if cluster not in CLUSTERS:
            known = ", ".join(CLUSTERS)
            raise DynadaptError(
                f"cluster {cluster!r} is unknown; known: {known}", reason="unknown-cluster"
            )
        cluster = CLUSTERS[cluster]
    if not (source.ascending and target.ascending):
        raise DynadaptError("the ranks of both layouts have to ascend", reason="mesh-order")
    every = np.union1d(source.order, target.order)
    chosen = every if len(every) <= WHOLE else _sample(every, (source, target))
    if seats is not None:
        chosen = np.array(seats, np.int64)
    over = lanes(source, target)
    if over is None:
        raise DynadaptError("the two layouts are not of one model", reason="model-differs")
    options = Options(budget=budget, hosts=EvenHosts(cluster.seats_per_host, int(every[-1]) + 1))
    count = len(chosen)
    streams: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # per seat: in, then out
    held, other = np.zeros((count, 2), np.int64), np.zeros((count, 2), np.int64)
    moves = 0
    for number, seat in enumerate(chosen.tolist()):
        plan = factored_plan(seat, source, target, options, over)
        moves = max(moves, plan.num_moves)
        other[number] = plan.bytes_resident, plan.minimum
        held[number] = held_bytes(source, seat), held_bytes(target, seat)
        streams += [plan.by_peer(out=False), plan.by_peer(out=True)]
        if progress is not None:
            progress(number + 1, count)
    cut, chunk_bytes = _cut(chosen, streams, budget)
    staging = _staging(chunk_bytes)
    loads, messages = np.zeros((count, 4)), np.zeros((count, 4), np.int64)
    links = []  # of each stream the number of its column
    for number, (peers, sizes) in enumerate(streams):
        at, way = divmod(number, 2)
        far = peers // cluster.seats_per_host != chosen[at] // cluster.seats_per_host
        links.append(way + 2 * far)
        np.add.at(loads[at], links[-1], sizes)
        np.add.at(messages[at], links[-1], cut.slices(sizes))
    pairs: NDArray[np.float64] | None = None
    if count == len(every):
        pairs = np.zeros((count, count))
        for at, (peers, sizes) in enumerate(streams[1::2]):
            pairs[at, np.searchsorted(every, peers)] = sizes
        starts, ends, seconds = _followed(pairs, every, cluster, cut)
    else:
        starts, ends, seconds = _paced(_times(chosen, streams, links, cut, cluster))
    return Simulation(
        cluster,
        len(every),
        chosen,
        loads,
        messages,
        chunk_bytes,
        staging,
        held,
        other[:, 0],
        other[:, 1],
        pairs,
        cut.chunks,
        starts,
        ends,
        moves,
        budget,
        seconds,
    )


def _speeds(cluster: Cluster) -> NDArray[np.float64]:
    near, far = cluster.near.bytes_per_second, cluster.far.bytes_per_second
    return np.array([near, near, far, far])


def _latency(cluster: Cluster) -> NDArray[np.float64]:
    near, far = cluster.near.seconds_per_message, cluster.far.seconds_per_message
    return np.array([near, near, far, far])


def _sample(every: NDArray[np.int64], layouts: Sequence[MeshLayout]) -> NDArray[np.int64]:
    """Both ends, steps of no common measure with the mesh, and a seat of each stage and expert place.

    Stages hold different tensors, so one of each (up to `STAGES`) has to be among them.
    """
    kinds = np.zeros((len(every), 0), np.int64)
    for layout in layouts:
        places = layout.places(every)
        strides = mesh_strides(layout.axes)
        for axis in {"pp", "ep"} & set(layout.axes):
            at = np.where(places < 0, -1, places // strides[axis] % layout.axes[axis])
            kinds = np.column_stack([kinds, at])
    firsts = np.zeros(0, np.int64)
    if kinds.shape[1]:
        firsts = np.unique(kinds, axis=0, return_index=True)[1]
        firsts = firsts[np.unique(np.linspace(0, len(firsts) - 1, STAGES).astype(np.int64))]
    steps = np.linspace(0, len(every) - 1, SAMPLE).astype(np.int64)
    steps[1:-1] += np.arange(1, SAMPLE - 1) * 7 % 13
    found: NDArray[np.int64] = every[
        np.unique(np.concatenate([firsts, np.minimum(steps, len(every) - 1)]))
    ]
    return found


def held_bytes(layout: MeshLayout, seat: int) -> int:
    """Bytes of one seat's rows."""
    place = layout.place(seat)
    return 0 if place is None else sum(stack.held_bytes(place) for stack in layout.stacks)


_Stream = tuple["NDArray[np.int64]", "NDArray[np.int64]"]


def _slices(
    seat: int, way: int, streams: _Stream, cut: Slicing
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """All slices of a seat's streams of one way: whose stream, in which chunk, how many bytes."""
    peers, sizes = streams
    own = cut.slices(sizes)
    me = np.full_like(peers, seat)
    spread = spread_of(me, peers) if way else spread_of(peers, me)
    whose, which = ragged(own)
    return whose, cut.chunk_of(which, own[whose], spread[whose]), (sizes / own)[whose]


def _cut(
    seats: NDArray[np.int64], streams: Sequence[_Stream], budget: int
) -> tuple[Slicing, NDArray[np.float64]]:
    """The cut that the seats would agree on, and (seats, chunks) bytes of each seat, both ways."""
    both = [int(a[1].sum() + b[1].sum()) for a, b in zip(streams[::2], streams[1::2], strict=True)]
    cut = slicing(both, budget)
    while True:
        held = np.zeros((len(seats), cut.chunks))
        for at, seat in enumerate(seats.tolist()):
            for way in (0, 1):
                _, chunk, each = _slices(seat, way, streams[2 * at + way], cut)
                held[at] += np.bincount(chunk, each, cut.chunks)
        most = int(_staging(held).max(initial=0))
        if most <= budget or cut.shortest == 1:
            return cut, held
        cut = finer(cut, most, budget)


def _staging(chunk_bytes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Bytes of each seat's two largest chunks, were they neighbours."""
    most: NDArray[np.float64] = chunk_bytes.max(axis=1, initial=0.0)
    return np.ceil(most * CHUNKS_IN_FLIGHT).astype(np.int64)


def _times(
    seats: NDArray[np.int64],
    streams: Sequence[_Stream],
    links: Sequence[NDArray[np.int64]],
    cut: Slicing,
    cluster: Cluster,
) -> NDArray[np.float64]:
    """(seats, links, chunks) seconds of each link, a message's own time included."""
    speeds, latency = _speeds(cluster), _latency(cluster)
    found = np.zeros((len(seats), 4, cut.chunks))
    for number, (stream, link) in enumerate(zip(streams, links, strict=True)):
        at, way = divmod(number, 2)
        whose, chunk, each = _slices(int(seats[at]), way, stream, cut)
        own = link[whose]
        np.add.at(found[at], (own, chunk), each / speeds[own] + latency[own])
    return found


def _paced(
    times: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Chunks in twos, each two as slow as the busiest link of any seat; (seats, links, chunks) seconds."""
    count = times.shape[2]
    twos = np.add.reduceat(times, np.arange(0, count, CHUNKS_IN_FLIGHT), axis=2)
    took = twos.max(axis=(0, 1), initial=0.0)
    ends = np.cumsum(took)
    which = np.arange(count) // CHUNKS_IN_FLIGHT
    return (ends - took)[which], ends[which], float(ends[-1])


def _followed(
    pairs: NDArray[np.float64], every: NDArray[np.int64], cluster: Cluster, cut: Slicing
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Start and end of the first chunks, and the seconds of all."""
    hosts = every // cluster.seats_per_host
    near = hosts[:, None] == hosts
    speeds = np.where(near, cluster.near.bytes_per_second, cluster.far.bytes_per_second)
    one = np.stack([(pairs / speeds).sum(0), (pairs / speeds).sum(1)]).max() / cut.chunks
    if not one:
        return np.zeros(0), np.zeros(0), 0.0
    followed = min(cut.chunks, FOLLOWED)
    run = run_chunks(
        _amounts(pairs, every, cut, followed),
        near,
        cluster.near.bytes_per_second,
        cluster.far.bytes_per_second,
        cluster.far.seconds_per_message,
        one / 16,
    )
    return run.start, run.end, float(run.seconds * cut.chunks / followed)


def _amounts(
    pairs: NDArray[np.float64], every: NDArray[np.int64], cut: Slicing, followed: int
) -> NDArray[np.float32]:
    """(chunks, seats, seats) bytes of the first chunks, cut as `schedule.chunks` cuts."""
    found = np.zeros((followed, *pairs.shape), np.float32)
    source, target = np.nonzero(pairs)
    sizes = pairs[source, target]
    slices = cut.slices(sizes.astype(np.int64))
    whose, which = ragged(np.minimum(slices, -(-followed * slices // cut.chunks) + 1))
    spread = spread_of(every[source], every[target])
    at = cut.chunk_of(which, slices[whose], spread[whose])
    here = at < followed
    whose, at = whose[here], at[here]
    np.add.at(found, (at, source[whose], target[whose]), (sizes / slices)[whose])
    return found
