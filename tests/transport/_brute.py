"""A planner that looks at every element by itself, from rows alone: slow, and without any cleverness."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dynadapt.transport.plan import Move, SeatPlan
    from dynadapt.vps.box import Box
    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import RowLayout

Sources = dict[tuple["Key", int], np.ndarray]
"""Per (key, target endpoint) and element the endpoint it comes from; -1 where it needs nothing."""


def window(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.lo, box.hi))


def by_elements(
    source: RowLayout,
    target: RowLayout,
    pairs: Iterable[tuple[Key, Key]],
    hosts: Mapping[int, str],
) -> Sources:
    """Whom each element comes from, by the rule in words: the seat itself, else a holder on its host, else
    the holders in turn among those seats that want the same box and lack it.
    """
    found: Sources = {}
    for origin, key in pairs:
        shape = target.by_name[key].shape
        held = np.zeros((len(source.endpoints), *shape), bool)
        for number, endpoint in enumerate(source.endpoints):
            for row in source.rows_of(origin, endpoint):
                held[(number, *window(row.box))] = True
        wanting: dict[Box, list[int]] = {}
        for endpoint in target.endpoints:
            for row in target.rows_of(key, endpoint):
                wanting.setdefault(row.box, []).append(endpoint)
        for box, equal in wanting.items():
            equal = sorted(equal)
            first = target.endpoints.index(equal[0]) + target.by_name[key].order % 17
            # elements that the same seats hold have the same answer
            inside = held[(slice(None), *window(box))].reshape(len(held), -1)
            columns, which = np.unique(inside, axis=1, return_inverse=True)
            sets = [[source.endpoints[n] for n in np.flatnonzero(c)] for c in columns.T]
            for endpoint in equal:
                sources = found.setdefault((key, endpoint), np.full(shape, -1))
                sources[window(box)] = np.array(
                    [_choose(endpoint, holders, equal, first, hosts) for holders in sets]
                )[which].reshape(box.shape)
    return found


def _choose(
    endpoint: int, holders: list[int], equal: list[int], first: int, hosts: Mapping[int, str]
) -> int:
    if endpoint in holders:
        return endpoint
    host = hosts.get(endpoint)
    near = [e for e in holders if host is not None and hosts.get(e) == host] or holders
    needy = [e for e in equal if e not in holders]
    return near[(needy.index(endpoint) + first) % len(near)]


def of_moves(moves: Iterable[Move], target: RowLayout) -> Sources:
    """The same from moves; an element that comes twice raises."""
    found: Sources = {}
    for move in moves:
        shape = target.by_name[move.key].shape
        own = found.setdefault((move.key, move.target), np.full(shape, -1))
        part = own[window(move.box)]
        assert (part == -1).all(), f"{move} comes again"
        own[window(move.box)] = move.source
    return found


def same(ours: Sources, theirs: Sources) -> bool:
    ours = {at: own for at, own in ours.items() if (own >= 0).any()}
    theirs = {at: own for at, own in theirs.items() if (own >= 0).any()}
    return ours.keys() == theirs.keys() and all((ours[at] == theirs[at]).all() for at in ours)


def check_plans(plans: Mapping[int, SeatPlan], target: RowLayout, wanted: Sources) -> None:
    """What comes in at each seat is what was wanted, and what goes out is what others get."""
    into = [move for seat, plan in plans.items() for move in plan.moves if move.target == seat]
    assert same(of_moves(into, target), wanted)
    out = [move for plan in plans.values() for move in plan.sends]
    assert sorted(out, key=repr) == sorted((m for m in into if m.over_wire), key=repr)
