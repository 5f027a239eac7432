"""Bytes between ranks, bytes held by each, and when they move: the other numbers of a picture."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.errors import Finding, Refused
from dynadapt.transport.factored import factored_plan, lanes
from dynadapt.transport.plan import Options
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dynadapt.transport.simulate import Simulation
    from dynadapt.vps.mesh_layout import MeshLayout

__all__ = [
    "MAX_WORLD",
    "Memory",
    "Timeline",
    "Traffic",
    "held_bytes",
    "memory_of",
    "small_enough",
    "traffic_of",
    "traffic_of_plan",
]

#: Ranks that a picture is made for: every one's plan is worked out.
MAX_WORLD = 2048


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes from seat to seat: `matrix` (seats, seats) int64, senders in rows; `stays` (seats,) int64.

    What stays is what a seat needs and holds. `labels` are the seats, or runs of seats once they are
    `grouped`, `per` of them in each; then the matrix's diagonal is what crosses inside a group.
    """

    labels: tuple[str, ...]
    matrix: NDArray[np.int64]
    stays: NDArray[np.int64]
    per: int = 1

    @classmethod
    def of(cls, simulation: Simulation) -> Traffic | None:
        """What a simulation's plans move; None where it made those of a sample only."""
        if simulation.pairs is None:
            return None
        labels = tuple(map(str, simulation.seats.tolist()))
        return cls(labels, simulation.pairs.astype(np.int64), simulation.resident)

    @property
    def moved(self) -> int:
        """Bytes that cross between seats."""
        return int(self.matrix.sum())

    def grouped(self, most: int) -> Traffic:
        """Neighbouring seats taken together, so that there are at most so many rows."""
        count = len(self.labels)
        if count <= most:
            return self
        per = -(-count // most)
        starts = np.arange(0, count, per)
        summed = np.add.reduceat(np.add.reduceat(self.matrix, starts, 0), starts, 1)
        ends = [*starts[1:].tolist(), count]
        labels = [
            self.labels[a] if b - a == 1 else f"{self.labels[a]}-{self.labels[b - 1]}"
            for a, b in zip(starts.tolist(), ends, strict=True)
        ]
        return Traffic(tuple(labels), summed, np.add.reduceat(self.stays, starts), per)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "seats": list(self.labels),
            "bytes": self.matrix.tolist(),
            "stays": self.stays.tolist(),
            "moved": self.moved,
        }


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes of each seat: `columns` has (seats,) int64 for each of `titles`; `what` says of what."""

    seats: tuple[int, ...]
    titles: tuple[str, ...]
    columns: tuple[NDArray[np.int64], ...]
    what: str = "held"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        held = zip(self.titles, self.columns, strict=True)
        return {
            "what": self.what,
            "seats": list(self.seats),
            "columns": [{"title": title, "bytes": each.tolist()} for title, each in held],
        }


@dataclass(frozen=True, eq=False)
class Timeline:
    """When chunks move: `starts`, `ends` (chunks,) seconds, in the order of the schedule.

    They may be the first of `chunks`, which take `seconds` in all. `bound` is the seconds that the
    busiest link needs for its bytes alone. `chunk_bytes` (seats, chunks) is what each seat sends and
    receives in each chunk, where that is known.
    """

    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    chunks: int
    seconds: float
    bound: float | None = None
    chunk_bytes: NDArray[np.float64] | None = None
    title: str = "schedule"

    @classmethod
    def of(cls, simulation: Simulation, title: str = "schedule") -> Timeline:
        """The schedule of a simulation."""
        own = simulation
        known = own.chunk_bytes[:, : len(own.ends)]
        return cls(own.starts, own.ends, own.chunks, own.seconds, own.lower_bound, known, title)

    @property
    def shown(self) -> str:
        """How many chunks there are, and how many of them have times."""
        own = len(self.ends)
        if own == self.chunks == 1:
            return "1 chunk"
        return f"{own} chunks" if own == self.chunks else f"the first {own} of {self.chunks} chunks"

    @property
    def busiest(self) -> NDArray[np.float64] | None:
        """(chunks,) bytes of the seat that has most of each chunk."""
        if self.chunk_bytes is None:
            return None
        found: NDArray[np.float64] = self.chunk_bytes.max(axis=0, initial=0)
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        busiest = self.busiest
        return {
            "title": self.title,
            "chunks": self.chunks,
            "seconds": self.seconds,
            "bound": self.bound,
            "starts": self.starts.tolist(),
            "ends": self.ends.tolist(),
            "busiest": None if busiest is None else busiest.tolist(),
        }


def traffic_of(source: MeshLayout, target: MeshLayout, options: Options | None = None) -> Traffic:
    """The bytes that a change between two layouts of one model moves, from every seat's own plan.

    Raises `Refused` (reason `too-large`) above `MAX_WORLD` ranks, (reason `model-differs`) for layouts
    of two models.

    >>> from dynadapt.vps.declare import declare
    >>> from dynadapt.vps.model_shape import ModelShape, Named, State
    >>> model, states = ModelShape.of([Named("w", (4, 6))]), [State("param")]
    >>> traffic_of(*(declare(s, model, states=states) for s in ("zero3:dp=2", "ddp:dp=2"))).matrix.tolist()
    [[0, 48], [48, 0]]
    """
    over = lanes(source, target)
    if over is None:
        cause = "they are not of one model"
        raise Refused([Finding("model-differs", "the two layouts", cause, "declare both of one")])
    seats = sorted({*source.endpoints, *target.endpoints})
    small_enough(len(seats))
    number = {seat: at for at, seat in enumerate(seats)}
    matrix, stays = np.zeros((len(seats), len(seats)), np.int64), np.zeros(len(seats), np.int64)
    for seat, at in number.items():
        plan = factored_plan(seat, source, target, options or Options(), over)
        peers, sizes = plan.by_peer(out=False)
        matrix[[number[peer] for peer in peers.tolist()], at] = sizes
        stays[at] = plan.bytes_resident
    return Traffic(tuple(map(str, seats)), matrix, stays)


def traffic_of_plan(plan: Mapping[str, Any], where: str = "plan") -> Traffic:
    """The same from what `PlanReport.to_json()` wrote; files, whose numbers are negative, are left out.

    Raises `Refused` (reason `bad-plan`) for anything else.
    """
    try:
        seats = sorted(int(each["seat"]) for each in plan["seats"])
        number = {seat: at for at, seat in enumerate(seats)}
        matrix = np.zeros((len(seats), len(seats)), np.int64)
        stays = np.zeros(len(seats), np.int64)
        for each in plan["seats"]:
            at = number[each["seat"]]
            for move in each["moves"]:
                if move["target"] != each["seat"]:
                    continue
                if move["source"] == each["seat"]:
                    size = prod(b - a for a, b in zip(move["lo"], move["hi"], strict=True))
                    stays[at] += size * itemsize(move["dtype"])
                elif move["source"] in number:
                    matrix[number[move["source"]], at] += move["bytes"]
    except (KeyError, TypeError, ValueError) as error:
        cause = f"is not a plan as plan(...).to_json() writes it: {error!r}"
        raise Refused([Finding("bad-plan", where, cause)]) from error
    return Traffic(tuple(map(str, seats)), matrix, stays)


def held_bytes(layout: MeshLayout) -> dict[int, int]:
    """Bytes of each endpoint's rows, all states together.

    Raises `Refused` (reason `too-large`) above `MAX_WORLD` ranks.
    """
    places = np.arange(len(layout.order))
    small_enough(len(places))
    total = np.zeros(len(places), np.int64)
    for stack in layout.stacks:
        alike = stack.geometry.fixed(places)
        _, firsts, whose = np.unique(alike, return_index=True, return_inverse=True)
        own = np.array([stack.held_bytes(int(place)) for place in firsts], np.int64)
        total += own[whose]
    return dict(zip(layout.order.tolist(), total.tolist(), strict=True))


def memory_of(layouts: Sequence[MeshLayout], titles: Sequence[str]) -> Memory:
    """What each seat holds in each of some layouts; 0 where it has no place."""
    each = [held_bytes(layout) for layout in layouts]
    seats = tuple(sorted({seat for held in each for seat in held}))
    columns = tuple(np.array([held.get(seat, 0) for seat in seats], np.int64) for held in each)
    return Memory(seats, tuple(titles), columns)


def small_enough(count: int) -> None:
    """Raises `Refused` (reason `too-large`) for more ranks than a picture is made for."""
    if count > MAX_WORLD:
        cause = f"{count} ranks are more than a picture shows ({MAX_WORLD})"
        raise Refused(
            [Finding("too-large", "layout", cause, "show a smaller world of the same form")]
        )
