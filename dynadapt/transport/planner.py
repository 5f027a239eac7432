"""From two layouts to one seat's plan: pure, and local to the seat.

For every target row the source's holders are refined into cells; each cell has one source, chosen by a
rule that any seat can evaluate alone: the target itself if it holds the cell (resident), else a holder
on the target's host, else holder number (ordinal of the target among the targets that want the same
box, plus a rotation by target and by tensor) modulo the holders. A sender evaluates the same rule for
the target rows that overlap its own rows, so both ends have the same list without a message.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from dynadapt.errors import Finding
from dynadapt.transport.factored import factored_plan, lanes_of_match
from dynadapt.transport.plan import SHIFTS, Match, Move, Options, SeatPlan, canonical
from dynadapt.vps.box import atoms
from dynadapt.vps.keys import itemsize
from dynadapt.vps.mesh_layout import MeshLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dynadapt.transport.plan import Pair
    from dynadapt.vps.box import Box
    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import Holder, Layout

__all__ = ["plan_for", "remembered_plan"]

REMEMBERED = 16
"""Plans kept: a job that changes layouts back and forth asks for the same ones."""


def plan_for(
    seat: int, source: Layout, target: Layout, matched: Match, options: Options
) -> SeatPlan:
    """What `seat` has part in when the state goes from `source` to `target`.

    Reads only the seat's own rows and the holders of its own boxes; two declared layouts are planned in
    columns. `minimum` counts the bytes that must cross to this seat: its target elements that it does
    not hold in the source.
    """
    if isinstance(source, MeshLayout) and isinstance(target, MeshLayout):
        plain = not options.first_only and not any(pair.source.local for pair in matched.pairs)
        files = source.order.min() < 0 or target.order.min() < 0
        if plain and not files and source.ascending and target.ascending:
            return _in_columns(seat, source, target, matched, options)
    chooser = _Chooser(source, target, matched, options)
    moves: list[Move] = []
    fills: list[tuple[int, Key, Box]] = []
    findings: list[Finding] = []
    minimum = 0
    for endpoint in _mine(seat, target, options):
        for row in target.rows(endpoint):
            pair = matched.by_target.get(row.key)
            if pair is None:
                continue
            if pair.fill:
                fills.append((endpoint, row.key, row.box))
                continue
            own = list(chooser.moves(pair, row.box, endpoint))
            served = sum(move.box.volume for move in own)
            if served != row.box.volume:
                findings.append(_unserved(row.key, row.box, endpoint, served))
            if endpoint >= 0:
                minimum += chooser.missing(pair, row.box, endpoint) * itemsize(pair.wire)
            moves += (m for m in own if endpoint == seat or (m.source < 0 and endpoint < 0))
    for pair, holder in _served_there(seat, source, target, matched):
        moves += chooser.moves(pair, holder.box, holder.endpoint, seat)
    shapes = {pair.target.key: pair.target.shape for pair in matched.pairs}
    ordered = sorted(moves, key=lambda move: canonical(move, shapes))
    return SeatPlan(seat, tuple(ordered), tuple(fills), minimum, tuple(findings))


_plans: OrderedDict[tuple[int, str, str, str], SeatPlan] = OrderedDict()
_lock = Lock()
"""Seats may be threads."""


def remembered_plan(
    seat: int, source: Layout, target: Layout, matched: Match, options: Options
) -> SeatPlan:
    """`plan_for`, computed once for equal layouts and options, told by their digests.

    `matched` has to be `match` of the layouts' keys under the options, as everywhere.
    """
    at = (seat, source.digest(), target.digest(), options.digest())
    found = _plans.get(at)
    if found is None:
        found = plan_for(seat, source, target, matched, options)
    with _lock:
        _plans[at] = found
        _plans.move_to_end(at)
        while len(_plans) > REMEMBERED:
            _plans.popitem(last=False)
    return found


def _in_columns(
    seat: int, source: MeshLayout, target: MeshLayout, matched: Match, options: Options
) -> SeatPlan:
    """The same plan by way of `factored_plan`."""
    over = lanes_of_match(source, target, matched)
    columns = factored_plan(seat, source, target, options, over)
    moves = [
        Move(spec.key, box, peer, seat, wire)
        for block in columns.receives
        for spec, wire, box, peer in block.moves()
    ]
    moves += [
        Move(spec.key, box, seat, peer, wire)
        for block in columns.sends
        for spec, wire, box, peer in block.moves()
    ]
    filled = {pair.target.key for pair in matched.pairs if pair.fill}
    rows = target.rows(seat) if filled else ()
    fills = tuple((seat, row.key, row.box) for row in rows if row.key in filled)
    shapes = {pair.target.key: pair.target.shape for pair in matched.pairs}
    ordered = sorted(moves, key=lambda move: canonical(move, shapes))
    return SeatPlan(seat, tuple(ordered), fills, columns.minimum, columns.findings)


def _served_there(
    seat: int, source: Layout, target: Layout, matched: Match
) -> Iterator[tuple[Pair, Holder]]:
    """The boxes that others hold in the target and of which this seat holds elements in the source."""
    met: set[tuple[Key, Holder]] = set()
    for row in source.rows(seat):
        for pair in matched.by_source.get(row.key, ()):
            for holder in target.holders(pair.target.key, row.box):
                at = (pair.target.key, holder)
                if holder.endpoint != seat and at not in met:
                    met.add(at)
                    yield pair, holder


def _mine(seat: int, target: Layout, options: Options) -> Iterator[int]:
    """The target endpoints whose rows this seat looks at: itself, and the files it works for."""
    if seat in target.endpoints:
        yield seat
    workers = options.workers
    for endpoint in target.endpoints:
        if endpoint < 0 and workers:
            worker = workers[zlib.crc32(str(endpoint).encode()) % len(workers)]
            if worker == seat:
                yield endpoint


def _unserved(key: Key, box: Box, endpoint: int, served: int) -> Finding:
    return Finding(
        "uncovered",
        f"{key} {box}",
        f"the source holds {served} of the {box.volume} elements that endpoint {endpoint} needs",
        "the source is incomplete: a rank or file of it is missing",
    )


Cells = tuple[tuple["Box", tuple[int, ...]], ...]


class _Chooser:
    """Evaluates the replica rule; remembers the cells of a box, which replicas and other keys share."""

    def __init__(self, source: Layout, target: Layout, matched: Match, options: Options) -> None:
        self._source, self._target, self._options = source, target, options
        self._matched = matched
        self._cells: dict[tuple[tuple[Holder, ...], Box, bool], Cells] = {}

    @cached_property
    def _position(self) -> dict[int, int]:
        return {endpoint: i for i, endpoint in enumerate(self._target.endpoints)}

    def cells(self, pair: Pair, box: Box) -> Cells:
        """Disjoint cells of `box`, each with the sorted source endpoints that hold it."""
        holders = self._source.holders(pair.source.key, box)
        first = pair.source.key in self._options.first_only
        at = (holders, box, first)
        found = self._cells.get(at)
        if found is None:
            clipped = [(h.endpoint, h.box.intersect(box)) for h in holders]
            parts = [(e, b) for e, b in clipped if b is not None]
            found = self._cells[at] = tuple(
                (cell, _distinct((parts[i][0] for i in numbers), first))
                for cell, numbers in atoms(b for _, b in parts)
            )
        return found

    def moves(self, pair: Pair, box: Box, target: int, sender: int | None = None) -> Iterator[Move]:
        """The moves that serve one target row: all, or those of one sender."""
        equal: list[int] | None = None
        wire = pair.wire
        for cell, holders in self.cells(pair, box):
            if sender is not None and sender not in holders:
                continue
            if target in holders:
                chosen = target
            elif pair.source.local:
                continue  # no other rank's value can stand for this rank's own
            elif len(holders) == 1:
                chosen = holders[0]
            else:
                if equal is None:
                    wanted = self._target.holders(pair.target.key, box)
                    equal = sorted({h.endpoint for h in wanted if h.box == box})
                chosen = self._choose(holders, target, equal, pair.target.order % SHIFTS)
            if sender in {None, chosen}:
                yield Move(pair.target.key, cell, chosen, target, wire)

    def _choose(self, holders: tuple[int, ...], target: int, equal: list[int], shift: int) -> int:
        hosts = self._options.hosts
        host = hosts.get(target)
        near = [h for h in holders if host is not None and hosts.get(h) == host] or list(holders)
        needy = [endpoint for endpoint in equal if endpoint not in holders]
        return near[(needy.index(target) + self._position[equal[0]] + shift) % len(near)]

    def missing(self, pair: Pair, box: Box, target: int) -> int:
        """Elements of `box` that `target` does not hold in the source and a seat must send.

        Counted from the layouts alone, not from the moves, so that it can judge them.
        """
        if pair.source.key in self._options.first_only:
            cells = self.cells(pair, box)
            return sum(
                cell.volume for cell, (first,) in cells if first not in {target} and first >= 0
            )
        holders = self._source.holders(pair.source.key, box)
        if any(holder.endpoint < 0 for holder in holders):
            return 0
        own = (h.box.intersect(box) for h in holders if h.endpoint == target)
        return box.volume - sum(part.volume for part in own if part is not None)


def _distinct(endpoints: Iterable[int], first: bool) -> tuple[int, ...]:
    found = tuple(sorted(set(endpoints)))
    return found[:1] if first else found
