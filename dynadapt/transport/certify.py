"""Sums of a whole side of a migration: every element counted once, replicas compared cell by cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dynadapt.errors import Finding
from dynadapt.transport.hashing import Wanted, acts_for, hash_of
from dynadapt.transport.locate import LIMIT, Claim, Contest, FirstDifference, first_differences
from dynadapt.transport.weights import MASK, key_seed
from dynadapt.vps.box import Box, atoms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynadapt.transport.control import Control
    from dynadapt.transport.executor import Storage
    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import Holder, Layout

__all__ = ["Sums", "Wanted", "count", "counted_parts"]


@dataclass(frozen=True)
class Sums:
    """The sums in the order they were wanted, and the keys whose replicas differ, as findings."""

    values: tuple[int, ...]
    drifted: dict[Key, tuple[Finding, ...]]


def count(
    name: str,
    control: Control,
    layout: Layout,
    storage: Storage,
    wanted: Sequence[Wanted],
    workers: Sequence[int],
) -> Sums:
    """Hash this seat's part of one side, add over the seats, compare replicas. All seats call it.

    Elements that several endpoints hold are counted once, for the lowest endpoint; the others' hashes
    of the same cell must be equal, else the key is in `drifted` with the seats and boxes named.
    """
    counted, drift = [0] * len(wanted), [0] * len(wanted)
    own: dict[int, list[tuple[int, int, int]]] = {}
    known: dict[tuple[Holder, ...], tuple[tuple[Box, list[int]], ...]] = {}
    for number, want in enumerate(wanted):
        whole = Box.whole(want.spec.shape)
        holders = layout.holders(want.spec.key, whole)
        mine = {h.endpoint for h in holders if acts_for(control.seat, h.endpoint, workers)}
        if not mine:
            continue
        cells = known.get(holders)
        if cells is None:  # the states of a parameter are mostly split as it is
            cells = known[holders] = tuple(
                (cell, sorted({holders[i].endpoint for i in at}))
                for cell, at in atoms(h.box for h in holders)
            )
        for cell_number, (cell, endpoints) in enumerate(cells):
            for endpoint in mine.intersection(endpoints):
                value = hash_of(storage, endpoint, want, cell)
                own.setdefault(number, []).append((cell_number, endpoint, value))
                first = endpoint == endpoints[0]
                if first or want.spec.local:
                    counted[number] += value
                if len(endpoints) > 1 and not want.spec.local:
                    drift[number] += value * _drift_weight(cell_number, endpoint, endpoints)
    words = np.array([total & MASK for total in (*counted, *drift)], np.uint64)
    both = control.combine(f"{name}/sums", words, np.add)
    values = tuple(int(total) for total in both[: len(wanted)])
    suspects = [i for i in range(len(wanted)) if int(both[len(wanted) + i])]
    drifted = (
        _name_drift(name, control, layout, storage, wanted, workers, suspects, own)
        if suspects
        else {}
    )
    return Sums(values, drifted)


def _name_drift(
    name: str,
    control: Control,
    layout: Layout,
    storage: Storage,
    wanted: Sequence[Wanted],
    workers: Sequence[int],
    suspects: list[int],
    own: dict[int, list[tuple[int, int, int]]],
) -> dict[Key, tuple[Finding, ...]]:
    """More rounds, only where the sums say that replicas differ: which cell, which endpoints, where."""
    reports = control.gather_values(
        f"{name}/drift", [[i, [list(t) for t in own.get(i, [])]] for i in suspects]
    )
    split: list[tuple[Wanted, Box, list[list[int]]]] = []
    for i in suspects:
        want = wanted[i]
        cells = atoms(h.box for h in layout.holders(want.spec.key, Box.whole(want.spec.shape)))
        by_cell: dict[int, dict[int, list[int]]] = {}
        for report in reports.values():
            for at, entries in report:
                for cell, endpoint, value in entries if at == i else ():
                    by_cell.setdefault(cell, {}).setdefault(value, []).append(endpoint)
        for cell, values in sorted(by_cell.items()):
            if len(values) > 1:
                split.append((want, cells[cell][0], sorted(map(sorted, values.values()))))
    contests = [
        Contest(box, tuple(Claim(want, ((seats[0], box),)) for seats in sides))
        for want, box, sides in split[:LIMIT]
    ]
    found = first_differences(f"{name}/drift", control, storage, contests, workers)
    places = [*found, *[None] * (len(split) - len(found))]
    drifted: dict[Key, list[Finding]] = {}
    for (want, box, sides), place in zip(split, places, strict=True):
        drifted.setdefault(want.spec.key, []).append(_differs(want, box, sides, place))
    return {key: tuple(findings) for key, findings in drifted.items()}


def _differs(
    want: Wanted, box: Box, sides: list[list[int]], place: FirstDifference | None
) -> Finding:
    """One cell whose holders disagree: the first coordinate, and who holds what there."""
    fix = (
        "find out why they drifted, or go on with the first holder's: "
        'on_drift="warn", or "take-first" to want it so'
    )
    if place is None:
        seats = " / ".join(str(seats) for seats in sides)
        cause = f"its replicas differ between endpoints {seats}"
        return Finding("replicas-differ", f"{want.spec.key} {box}", cause, fix)
    versions = "; ".join(
        f"{text} on endpoint{'s' if len(seats) > 1 else ''} {', '.join(map(str, seats))}"
        for seats, text in zip(sides, place.values, strict=True)
    )
    where = f"{want.spec.key} {place.place}"
    return Finding("replicas-differ", where, f"its replicas differ in {box}: {versions}", fix)


def _drift_weight(cell: int, endpoint: int, endpoints: Sequence[int]) -> int:
    """Weights that add up to 0 over the holders of a cell, so equal hashes add up to 0.

    Each holder after the first has a number of its own: two that drift by opposite amounts are seen.
    """
    weights = [key_seed(str(cell), str(other)) | 1 for other in range(1, len(endpoints))]
    place = endpoints.index(endpoint)
    return weights[place - 1] if place else -sum(weights)


def counted_parts(layout: Layout, key: Key, shape: Sequence[int]) -> tuple[tuple[int, Box], ...]:
    """Every cell of a key once, with the endpoint that it is counted for."""
    holders = layout.holders(key, Box.whole(shape))
    return tuple(
        (min(holders[i].endpoint for i in at), cell) for cell, at in atoms(h.box for h in holders)
    )
