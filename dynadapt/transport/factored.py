"""The planner for declared layouts: the same moves as `planner`, in columns, shared by like tensors.

Tensors that go from one stack of the source to one of the target at the same pins move alike: their
pieces are computed once (or, in flat buffers that they share, in one vectorised pass), and who sends is
decided for whole columns. The cost is the families and the seat's own pieces, not the tensors nor the
world: that is what makes a plan for a hundred thousand ranks a matter of milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dynadapt.errors import Finding
from dynadapt.transport._replicas import Replicas
from dynadapt.transport.plan import SHIFTS
from dynadapt.vps.box import Box
from dynadapt.vps.geometry import ragged
from dynadapt.vps.keys import itemsize, wire_dtype
from dynadapt.vps.model_shape import FamilySpecs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dynadapt.transport.plan import Match, Options
    from dynadapt.vps.geometry import Flats
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

    `members` (tensors,) are numbers in the target stack. `lo`, `hi` (boxes, ndim) are the boxes, and
    `tensor` (boxes,) the index of each box's tensor in `members`; None says that every member moves
    just so. `box` (moves,) is the box of each move (None: a move a box), `peer` (moves,) the other end,
    the seat itself for what is resident.
    """

    lane: Lane
    members: NDArray[np.int64]
    tensor: NDArray[np.int64] | None
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    box: NDArray[np.int64] | None
    peer: NDArray[np.int64]

    @property
    def volumes(self) -> NDArray[np.int64]:
        """Elements of each move."""
        found: NDArray[np.int64] = np.prod(self.hi - self.lo, axis=1)
        return found if self.box is None else found[self.box]

    @property
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
        which = list(range(len(boxes))) if self.box is None else self.box.tolist()
        peers, members = self.peer.tolist(), self.members.tolist()
        tensors = None if self.tensor is None else self.tensor.tolist()
        for specs, wire in self.lane.states:
            for member in members if tensors is None else [-1]:
                for number, peer in zip(which, peers, strict=True):
                    own = member if tensors is None else members[tensors[number]]
                    yield specs[own], wire, boxes[number], peer

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

    Raises `ValueError` where endpoints do not ascend, or where the layouts are not of one model and
    `over` is not given.
    """
    if not (source.ascending and target.ascending):
        raise ValueError("a mesh's endpoints do not ascend: plan_for looks rows up instead")
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
        if there is not None and (part := _part(lane, there, incoming=True)) is not None:
            pieces = _pieces(part, there)
            peer = replicas.senders(seat, lane, pieces.place, pieces.shift)
            receives += _blocks(part, pieces, np.arange(len(peer)), peer)
            findings += _unserved(part, pieces, seat)
            minimum += _missing(here, there, part)
        if here is not None and (part := _part(lane, here, incoming=False)) is not None:
            pieces = _pieces(part, here)
            number, peer = replicas.receivers(seat, lane, pieces.place, pieces.shift)
            sends += _blocks(part, pieces, number, peer)
    return FactoredPlan(seat, tuple(receives), tuple(sends), minimum, tuple(findings))


class _Part(NamedTuple):
    """The members of a lane that one place holds on one side.

    `group` (members,) numbers those with the same pin on the other side and the same turn among
    replicas; `pins` and `shifts` are those of each group. Flats are None where a side has none.
    """

    lane: Lane
    incoming: bool
    members: NDArray[np.int64]
    group: NDArray[np.int64]
    pins: NDArray[np.int64]
    shifts: NDArray[np.int64]
    source_flats: Flats | None
    target_flats: Flats | None

    @property
    def alike(self) -> bool:
        """Whether all members have the same boxes on both sides."""
        return self.source_flats is None and self.target_flats is None


class _Pieces(NamedTuple):
    """What a place holds of a part, cut where the other side's holders change.

    `tensor` (pieces,) is the member's number, or where all are alike the group's; `place` is the other
    side's number of what holds the piece; `asked` elements the place holds, all members together.
    """

    tensor: NDArray[np.int64]
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    place: NDArray[np.int64]
    shift: NDArray[np.int64]
    asked: int


def _part(lane: Lane, place: int, incoming: bool) -> _Part | None:
    """The members that a place holds in the target (`incoming`) or the source."""
    source, target = lane.source, lane.target
    mine, other = (target, source) if incoming else (source, target)
    picked = [lane.source_members, lane.target_members]
    own_of, other_of = (picked[1], picked[0]) if incoming else (picked[0], picked[1])
    pins = mine.pins if own_of is None else mine.pins[own_of]
    at = np.flatnonzero(pins == mine.geometry.pinned(place))
    if not len(at):
        return None
    in_source, in_target = (at if of is None else of[at] for of in picked)
    pins = other.pins[at if other_of is None else other_of[at]]
    shifts = np.zeros(len(at), np.int64)
    if len(source.geometry.replicas) > 1:
        shifts = target.orders[in_target] % SHIFTS
    kinds, group = np.unique(pins * SHIFTS + shifts, return_inverse=True)
    return _Part(
        lane,
        incoming,
        in_target,
        group,
        kinds // SHIFTS,
        kinds % SHIFTS,
        None if source.flats is None else source.flats.take(in_source),
        None if target.flats is None else target.flats.take(in_target),
    )


def _pieces(part: _Part, place: int) -> _Pieces:
    """Geometry is done once for members that are alike, and then repeated for each group."""
    lane = part.lane
    sides = [(lane.source, part.source_flats), (lane.target, part.target_flats)]
    (mine, own), (other, others) = reversed(sides) if part.incoming else sides
    held = mine.geometry.held(place, own, 1 if part.alike else len(part.members))
    flats = None if others is None else others.take(held.query)
    found = other.geometry.meet(held.lo, held.hi, flats)
    low = np.maximum(found.lo, held.lo[found.query])
    high = np.minimum(found.hi, held.hi[found.query])
    asked = int(np.prod(held.hi - held.lo, axis=1).sum())
    if not part.alike:
        tensor = held.query[found.query]
        group = part.group[tensor]
        where = found.place + part.pins[group]
        return _Pieces(tensor, low, high, where, part.shifts[group], asked)
    count, groups = len(low), len(part.pins)
    group = np.repeat(np.arange(groups), count)
    return _Pieces(
        group,
        np.tile(low, (groups, 1)),
        np.tile(high, (groups, 1)),
        np.tile(found.place, groups) + part.pins[group],
        part.shifts[group],
        asked * groups,
    )


def _blocks(
    part: _Part, pieces: _Pieces, chosen: NDArray[np.int64], peer: NDArray[np.int64]
) -> Iterator[Block]:
    """The chosen pieces with their peers: one block, or one for each group of members alike."""
    if not part.alike:
        if len(chosen):
            each = (part.lane, part.members, pieces.tensor, pieces.lo, pieces.hi)
            yield Block(*each, _or_all(chosen, len(pieces.lo)), peer)
        return
    groups = len(part.pins)
    count = len(pieces.lo) // groups  # the boxes of every group, which are the same
    lo, hi = pieces.lo[:count], pieces.hi[:count]
    borders = np.searchsorted(chosen, np.arange(groups + 1) * count)
    for group, (start, stop) in enumerate(pairwise(borders.tolist())):
        if start < stop:
            own = chosen[start:stop] - group * count
            members = part.members[part.group == group]
            yield Block(part.lane, members, None, lo, hi, _or_all(own, count), peer[start:stop])


def _or_all(chosen: NDArray[np.int64], count: int) -> NDArray[np.int64] | None:
    """None where the choice is every one of `count`, in order."""
    return None if np.array_equal(chosen, np.arange(count)) else chosen


def _unserved(part: _Part, pieces: _Pieces, seat: int) -> Iterator[Finding]:
    served = int(np.prod(pieces.hi - pieces.lo, axis=1).sum())
    if served == pieces.asked:
        return
    name = str(part.lane.states[0][0][int(part.members[0])].key)
    more = f" and {len(part.members) - 1} more" if len(part.members) > 1 else ""
    yield Finding(
        "uncovered",
        f"{name}{more}",
        f"the source holds {served} of the {pieces.asked} elements that endpoint {seat} needs",
        "the source is incomplete: a rank or file of it is missing",
    )


def _missing(here: int | None, there: int, part: _Part) -> int:
    """Bytes of a part that a place of the target needs and its seat does not hold in the source."""
    lane = part.lane
    count = 1 if part.alike else len(part.members)
    needs = lane.target.geometry.held(there, part.target_flats, count)
    total = int(np.prod(needs.hi - needs.lo, axis=1).sum())
    total *= len(part.members) if part.alike else 1
    if here is None:
        return total * lane.bytes_per_element
    has = lane.source.geometry.held(here, part.source_flats, count)
    counts = np.bincount(has.query, minlength=count)  # boxes of one tensor stand together
    own, number = ragged(counts[needs.query])
    theirs = (np.cumsum(counts) - counts)[needs.query[own]] + number
    common = np.minimum(needs.hi[own], has.hi[theirs]) - np.maximum(needs.lo[own], has.lo[theirs])
    common = np.prod(np.maximum(common, 0), axis=1)
    pinned = part.pins[part.group] == lane.source.geometry.pinned(here)
    if part.alike:
        total -= int(common.sum()) * int(pinned.sum())
    else:
        total -= int(common[pinned[needs.query[own]]].sum())
    return total * lane.bytes_per_element
