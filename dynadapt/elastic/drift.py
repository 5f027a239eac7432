"""Copies that should be equal and are not: replicas that drifted, derived copies that are stale.

`on_drift` says what to do about those of a source. Replicas of parameters and states: `"error"` refuses,
`"warn"` goes on with the first holder's and warns, `"take-first"` does the same because it was wanted,
so it is an outcome. Buffers drift in healthy jobs (each rank has seen other data) and never refuse; nor
do stale derived copies, since their masters are what moves. In a target, after `finish`, both are errors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dynadapt.errors import Finding
from dynadapt.protocols import Outcome
from dynadapt.transport.certify import count, counted_parts
from dynadapt.transport.hashing import Wanted
from dynadapt.transport.locate import LIMIT, Claim, Contest, first_differences
from dynadapt.vps.box import Box
from dynadapt.vps.keys import Key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynadapt.elastic.side import Side
    from dynadapt.transport.control import Control
    from dynadapt.transport.executor import Storage

__all__ = ["Compared", "Drift", "compare", "treat"]

Twins = tuple[tuple[Wanted, Wanted], ...]


@dataclass(frozen=True)
class Compared:
    """The sums that were wanted of one side, and by key what is not equal in it."""

    values: tuple[int, ...]
    replicas: dict[Key, tuple[Finding, ...]]
    stale: dict[Key, tuple[Finding, ...]]


def compare(
    name: str,
    control: Control,
    side: Side,
    storage: Storage,
    wanted: Sequence[Wanted],
    workers: Sequence[int],
) -> Compared:
    """Take sums of a side, compare its replicas and its derived copies. All seats call it."""
    twins = _derived(side)
    every = [*wanted, *(w for two in twins for w in two)]
    sums = count(name, control, side.layout, storage, every, workers)
    derived = {copy.spec.key for copy, _ in twins}
    values = sums.values[len(wanted) :]
    odd = [two for i, two in enumerate(twins) if values[2 * i] != values[2 * i + 1]]
    stale = _placed(name, control, side, storage, odd, workers) if odd else {}
    for key, findings in sums.drifted.items():
        if key in derived:  # one replica of the copy does not follow the master
            told = tuple(replace(f, reason="stale-copy", fix=_FIX) for f in findings)
            stale[key] = (*stale.get(key, ()), *told)
    replicas = {key: found for key, found in sums.drifted.items() if key not in derived}
    return Compared(sums.values[: len(wanted)], replicas, stale)


_FIX = "the master is what counts; a step makes the copy anew"


def _derived(side: Side) -> Twins:
    """Per derived copy that has rows: its own sum, and its master's as the copy should have it."""
    found = []
    for spec in side.layout.keys:
        master = side.layout.by_name.get(Key(spec.key.name, "param"))
        if not spec.derived or not spec.numel or master is None:
            continue
        if side.layout.holders(spec.key, Box.whole(spec.shape)):
            copy = Wanted(spec, spec.dtype, spec.key, any_nan=True)
            found.append((copy, replace(copy, spec=master)))
    return tuple(found)


def _placed(
    name: str,
    control: Control,
    side: Side,
    storage: Storage,
    odd: Sequence[tuple[Wanted, Wanted]],
    workers: Sequence[int],
) -> dict[Key, tuple[Finding, ...]]:
    """For each stale copy where it first differs from its master, on whose seat, and both values."""
    contests = [
        Contest(
            Box.whole(two[0].spec.shape),
            tuple(Claim(w, counted_parts(side.layout, w.spec.key, w.spec.shape)) for w in two),
        )
        for two in odd[:LIMIT]
    ]
    places = first_differences(f"{name}/stale", control, storage, contests, workers)
    found: dict[Key, tuple[Finding, ...]] = {}
    for number, (copy, _) in enumerate(odd):
        key, place = copy.spec.key, places[number] if number < len(places) else None
        if place is None:
            found[key] = (Finding("stale-copy", str(key), "differs from its master", _FIX),)
            continue
        parts = contests[number].claims[0].parts
        seat = next((e for e, box in parts if _within(place.at, box)), -1)
        cause = f"holds {place.values[0]} on seat {seat}, and its master {place.values[1]}"
        found[key] = (Finding("stale-copy", f"{key} {place.place}", cause, _FIX),)
    return found


def _within(at: Sequence[int], box: Box) -> bool:
    return all(a <= x < b for a, x, b in zip(box.lo, at, box.hi, strict=True))


@dataclass(frozen=True)
class Drift:
    """What is to be done about a source: what refuses, what is told, and whose first holder counts."""

    fatal: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    first_only: frozenset[Key] = frozenset()


def treat(compared: Compared, side: Side, on_drift: str) -> Drift:
    """What `on_drift` makes of a source's differences.

    Sums of replicas that differ count the first holder only, as the plan then does.
    """
    fatal: list[Finding] = []
    warnings: list[Finding] = []
    outcomes: list[Outcome] = []
    first: set[Key] = set()
    for key, findings in compared.replicas.items():
        forgiven = side.layout.by_name[key].kind in {"buffer", "transient"}
        if on_drift == "error" and not forgiven:
            fatal += findings
            continue
        first.add(key)
        if on_drift == "take-first":
            note = f"{findings[0].cause} at {findings[0].where}; took the first endpoint's"
            outcomes.append(Outcome(str(key), "derived", note))
        else:
            taken = "the first endpoint's was taken; make them equal before the next migration"
            warnings += [replace(finding, fix=taken) for finding in findings]
    for key, findings in compared.stale.items():
        if on_drift == "take-first":
            note = f"stale in the source ({findings[0].where}); made from the master in the target"
            outcomes.append(Outcome(str(key), "derived", note))
        else:
            warnings += findings
    return Drift(tuple(fatal), tuple(warnings), tuple(outcomes), frozenset(first))
