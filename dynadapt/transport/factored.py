"""The planner for declared layouts: the same moves as `planner`, in columns, shared by like tensors.

Tensors that go from one stack of the source to one of the target at the same pins move alike: their
pieces are computed once (or, in flat buffers that they share, in one vectorised pass), and who sends is
decided for whole columns. The cost is the families and the seat's own pieces, not the tensors nor the
world: that is what makes a plan for a hundred thousand ranks a matter of milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dynadapt.errors import Finding
from dynadapt.transport._replicas import Replicas
from dynadapt.vps.box import Box
from dynadapt.vps.geometry import ragged
from dynadapt.vps.keys import itemsize, wire_dtype
from dynadapt.vps.model_shape import FamilySpecs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dynadapt.transport.plan import Match, Options
    from dynadapt.vps.geometry import Flats, Pieces
    from dynadapt.vps.keys import KeySpec
    from dynadapt.vps.mesh_layout import MeshLayout, Stack

__all__ = ["Block", "FactoredPlan", "Lane", "factored_plan", "lanes", "lanes_of_match"]


class Lane(NamedTuple):
    """Tensors that go from one stack to another: members of both, and per state the specs and wire.

    `source_members` and `target_members` are (tensors,) int64, or None for all in order.
    """

    source: Stack
    target: Stack
    source_members: NDArray[np.int64] | None
    target_members: NDArray[np.int64] | None
    states: tuple[tuple[Sequence[KeySpec], str], ...]

    @property
    def bytes_per_element(self) -> int:
        """Wire bytes of one element, all states together."""
        return sum(itemsize(wire) for _, wire in self.states)


@dataclass(frozen=True, eq=False)
class Block:
    """Moves of many tensors in columns, for one seat and one direction.

    `members` (tensors,) are numbers in the target stack. `lo`, `hi` (moves, ndim) are the boxes and
    `peer` (moves,) the other end, the seat itself for what is resident. `tensor` (moves,) is the index
    into `members`; None says that every member moves just so.
    """

    lane: Lane
    members: NDArray[np.int64]
    tensor: NDArray[np.int64] | None
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    peer: NDArray[np.int64]

    @cached_property
    def volumes(self) -> NDArray[np.int64]:
        """Elements of each move."""
        found: NDArray[np.int64] = np.prod(self.hi - self.lo, axis=1)
        return found

    @cached_property
    def nbytes(self) -> NDArray[np.int64]:
        """Wire bytes of each move, over all states, and over all members where they share it."""
        times = len(self.members) if self.tensor is None else 1
        return self.volumes * (times * self.lane.bytes_per_element)

    def moves(self) -> Iterator[tuple[KeySpec, str, Box, int]]:
        """Every move on its own: the target's spec, the wire dtype, the box, the peer."""
        boxes = [
            Box(tuple(low), tuple(high))
            for low, high in zip(self.lo.tolist(), self.hi.tolist(), strict=True)
        ]
        peers, members = self.peer.tolist(), self.members.tolist()
        for specs, wire in self.lane.states:
            if self.tensor is None:
                for member in members:
                    spec = specs[member]
                    yield from ((spec, wire, b, p) for b, p in zip(boxes, peers, strict=True))
            else:
                for at, box, peer in zip(self.tensor.tolist(), boxes, peers, strict=True):
                    yield specs[members[at]], wire, box, peer

    @property
    def num_moves(self) -> int:
        """Boxes that move, counted for every tensor and state."""
        times = len(self.members) if self.tensor is None else 1
        return len(self.peer) * times * len(self.lane.states)


@dataclass(frozen=True, eq=False)
class FactoredPlan:
    """All that one seat has part in; `minimum` is the bytes that must cross to it, by the layouts alone."""

    seat: int
    receives: tuple[Block, ...]
    sends: tuple[Block, ...]
    minimum: int
    findings: tuple[Finding, ...] = ()

    @cached_property
    def bytes_in(self) -> int:
        """Wire bytes this seat receives."""
        return sum(int(block.nbytes[block.peer != self.seat].sum()) for block in self.receives)

    @cached_property
    def bytes_out(self) -> int:
        """Wire bytes this seat sends."""
        return sum(int(block.nbytes.sum()) for block in self.sends)

    @cached_property
    def bytes_resident(self) -> int:
        """Bytes that the seat needs and holds."""
        return sum(int(block.nbytes[block.peer == self.seat].sum()) for block in self.receives)

    @cached_property
    def num_moves(self) -> int:
        """Moves in and out, resident ones included."""
        return sum(block.num_moves for block in (*self.receives, *self.sends))

    def by_peer(self, out: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The peers of one direction, ascending, and the bytes with each; residents left out."""
        blocks = self.sends if out else self.receives
        if not blocks:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        peers = np.concatenate([block.peer for block in blocks])
        sizes = np.concatenate([block.nbytes for block in blocks])
        own = peers != self.seat
        found, which = np.unique(peers[own], return_inverse=True)
        return found, np.bincount(which, sizes[own], len(found)).astype(np.int64)


def lanes(source: MeshLayout, target: MeshLayout) -> list[Lane] | None:
    """Pair the stacks of two layouts of one `ModelShape`; None where they are of another kind.

    States are paired by slot; a slot that one side lacks is left out (`match` judges that).
    """
    families: dict[str, Stack] = {}
    for stack in source.stacks:
        first = stack.specs[0]
        if not isinstance(first, FamilySpecs):
            return None
        families[first.family.digest] = stack
    found = []
    for stack in target.stacks:
        first = stack.specs[0]
        if not isinstance(first, FamilySpecs):
            return None
        served = families.get(first.family.digest)
        if served is None or len(served) != len(stack):
            return None
        own = {_slot(specs): specs for specs in served.specs}
        states = [
            (specs, wire_dtype(_dtype(own[_slot(specs)]), _dtype(specs)))
            for specs in stack.specs
            if _slot(specs) in own
        ]
        found.append(Lane(served, stack, None, None, tuple(states)))
    return found


def _slot(specs: Sequence[KeySpec]) -> str:
    return specs.state.slot if isinstance(specs, FamilySpecs) else specs[0].key.slot


def _dtype(specs: Sequence[KeySpec]) -> str:
    return specs.dtype if isinstance(specs, FamilySpecs) else specs[0].dtype


def lanes_of_match(source: MeshLayout, target: MeshLayout, matched: Match) -> list[Lane]:
    """The same for any two declared layouts, pair by pair; fills are left out."""
    groups: dict[tuple[int, int, int, str], tuple[Lane, list[int], list[int]]] = {}
    for pair in matched.pairs:
        if pair.fill:
            continue
        own, member, _ = source.where[pair.source.key]
        other, number, _ = target.where[pair.target.key]
        slots = len(other.specs) > 1
        slot = next((i for i, s in enumerate(other.specs) if slots and s[number] == pair.target), 0)
        lane = Lane(own, other, None, None, ((other.specs[slot], pair.wire),))
        _, mine, theirs = groups.setdefault((id(own), id(other), slot, pair.wire), (lane, [], []))
        mine.append(member)
        theirs.append(number)
    return [
        lane._replace(source_members=np.array(mine), target_members=np.array(theirs))
        for lane, mine, theirs in groups.values()
    ]


def factored_plan(
    seat: int,
    source: MeshLayout,
    target: MeshLayout,
    options: Options,
    over: Sequence[Lane] | None = None,
) -> FactoredPlan:
    """What `seat` has part in, from two declared layouts whose meshes are in ascending order.

    Pure. `over` defaults to `lanes(source, target)`, for layouts of one `ModelShape`.

    Raises `ValueError` where the layouts are not of one model and `over` is not given.
    """
    if over is None:
        over = lanes(source, target)
        if over is None:
            raise ValueError("the layouts are not of one ModelShape: pass the lanes of their match")
    replicas = Replicas(source, target, options.hosts)
    here, there = source.place(seat), target.place(seat)
    receives: list[Block] = []
    sends: list[Block] = []
    findings: list[Finding] = []
    minimum = 0
    for lane in over:
        if there is not None:
            for part in _parts(lane, there, incoming=True):
                block, lost = _receive(seat, there, part, replicas)
                receives.append(block)
                findings += lost
                minimum += _missing(here, there, part)
        if here is not None:
            for part in _parts(lane, here, incoming=False):
                block = _send(seat, here, part, replicas)
                if len(block.peer):
                    sends.append(block)
    return FactoredPlan(seat, tuple(receives), tuple(sends), minimum, tuple(findings))


class _Part(NamedTuple):
    """Members of a lane with the same pins on both sides; offsets None where all boxes are alike."""

    lane: Lane
    members: NDArray[np.int64]
    source_pin: int
    target_pin: int
    source_flats: Flats | None
    target_flats: Flats | None

    @property
    def alike(self) -> bool:
        return self.source_flats is None and self.target_flats is None


def _parts(lane: Lane, place: int, incoming: bool) -> Iterator[_Part]:
    """The members that a place holds in the target (`incoming`) or the source, by the other side's pin."""
    source, target = lane.source, lane.target
    mine, other = (target, source) if incoming else (source, target)
    picked = [lane.source_members, lane.target_members]
    own_of, other_of = (picked[1], picked[0]) if incoming else (picked[0], picked[1])
    pins = mine.pins if own_of is None else mine.pins[own_of]
    at = np.flatnonzero(pins == mine.geometry.pinned(place))
    if not len(at):
        return
    others = at if other_of is None else other_of[at]
    other_pins = other.pins[others]
    kinds = [int(other_pins[0])]
    if other_pins.min() != other_pins.max():
        kinds = np.unique(other_pins).tolist()
    own_pin = int(pins[at[0]])
    for pin in kinds:
        chosen = at if len(kinds) == 1 else at[other_pins == pin]
        in_source = chosen if picked[0] is None else picked[0][chosen]
        in_target = chosen if picked[1] is None else picked[1][chosen]
        yield _Part(
            lane,
            in_target,
            pin if incoming else own_pin,
            own_pin if incoming else pin,
            None if source.flats is None else source.flats.take(in_source),
            None if target.flats is None else target.flats.take(in_target),
        )


def _queries(
    stack: Stack, place: int, flats: Flats | None, part: _Part
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64], NDArray[np.int64]]:
    """What a place holds of a part: which tensor (None where all are alike), and the boxes."""
    held = stack.geometry.held(place, flats, 1 if part.alike else len(part.members))
    return None if part.alike else held.query, held.lo, held.hi


def _meet(
    stack: Stack,
    flats: Flats | None,
    tensor: NDArray[np.int64] | None,
    lo: NDArray[np.int64],
    hi: NDArray[np.int64],
) -> Pieces:
    return stack.geometry.meet(
        lo, hi, None if flats is None or tensor is None else flats.take(tensor)
    )


def _receive(seat: int, place: int, part: _Part, replicas: Replicas) -> tuple[Block, list[Finding]]:
    lane = part.lane
    tensor, lo, hi = _queries(lane.target, place, part.target_flats, part)
    found = _meet(lane.source, part.source_flats, tensor, lo, hi)
    low = np.maximum(found.lo, lo[found.query])
    high = np.minimum(found.hi, hi[found.query])
    peer = replicas.senders(seat, lane, found.place + part.source_pin)
    which = None if tensor is None else tensor[found.query]
    block = Block(lane, part.members, which, low, high, peer)
    wanted = int(np.prod(hi - lo, axis=1).sum())
    served = int(block.volumes.sum())
    return block, [_unserved(block, wanted, served, seat)] if wanted != served else []


def _unserved(block: Block, wanted: int, served: int, seat: int) -> Finding:
    name = str(block.lane.states[0][0][int(block.members[0])].key)
    more = f" and {len(block.members) - 1} more" if len(block.members) > 1 else ""
    return Finding(
        "uncovered",
        f"{name}{more}",
        f"the source holds {served} of the {wanted} elements that endpoint {seat} needs",
        "the source is incomplete: a rank or file of it is missing",
    )


def _send(seat: int, place: int, part: _Part, replicas: Replicas) -> Block:
    lane = part.lane
    tensor, lo, hi = _queries(lane.source, place, part.source_flats, part)
    found = _meet(lane.target, part.target_flats, tensor, lo, hi)
    piece, peer = replicas.receivers(seat, lane, found.place + part.target_pin)
    query = found.query[piece]
    low = np.maximum(found.lo[piece], lo[query])
    high = np.minimum(found.hi[piece], hi[query])
    which = None if tensor is None else tensor[query]
    return Block(lane, part.members, which, low, high, peer)


def _missing(here: int | None, there: int, part: _Part) -> int:
    """Bytes of a part that a place of the target needs and its seat does not hold in the source."""
    lane = part.lane
    tensor, lo, hi = _queries(lane.target, there, part.target_flats, part)
    times = (len(part.members) if part.alike else 1) * lane.bytes_per_element
    total = int(np.prod(hi - lo, axis=1).sum())
    if here is None or part.source_pin != lane.source.geometry.pinned(here):
        return total * times
    other, low, high = _queries(lane.source, here, part.source_flats, part)
    if tensor is None or other is None:
        own, theirs = (each.reshape(-1) for each in np.indices((len(lo), len(low))))
    else:  # boxes of one tensor stand together on both sides
        counts = np.bincount(other, minlength=len(part.members))
        own, number = ragged(counts[tensor])
        theirs = (np.cumsum(counts) - counts)[tensor[own]] + number
    common = np.minimum(hi[own], high[theirs]) - np.maximum(lo[own], low[theirs])
    return (total - int(np.prod(np.maximum(common, 0), axis=1).sum())) * times
