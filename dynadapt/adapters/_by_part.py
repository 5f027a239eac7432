"""Param groups and schedulers of seats, or files, that have parts of a model: united into the whole one's.

A pipeline stage's optimizer has the stage's parameters only, and a group may exist on some stages. Groups
of two seats are one group if their hyperparameters are equal, the n-th of those on the one and on the
other; what a scheduler keeps per group follows them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding
from dynadapt.protocols import PER_GROUP, AuxItem
from dynadapt.vps import wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynadapt.vps.keys import KeySpec

__all__ = ["United", "numbered", "united"]

_MISSING = object()
_Ident = tuple[bytes, int]


@dataclass(frozen=True)
class United:
    """The items of the whole model, and for each seat the numbers that its groups have there."""

    aux: Mapping[str, AuxItem] = field(default_factory=dict)
    groups: Mapping[int, Sequence[int]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


def united(told: Mapping[str, Mapping[int, Any]], prefix: str = "") -> United:
    """Unite what seats told of their parts of one model: path -> seat -> value.

    `prefix` is what the model's names and paths begin with, where it is one of several.

    >>> a = [{"names": ["0.w"], "hyper": {"lr": 1}}, {"names": ["0.b"], "hyper": {"lr": 2}}]
    >>> b = [{"names": ["1.b"], "hyper": {"lr": 2}}]
    >>> whole = united({"param_groups": {0: a, 1: b}})
    >>> whole.groups, [group["names"] for group in whole.aux["param_groups"].value]
    ({0: [0, 1], 1: [1]}, [['0.w'], ['0.b', '1.b']])
    """
    if "param_groups" not in told:
        return United()
    value, groups = _groups(told["param_groups"])
    findings = _in_two(value, f"{prefix}param_groups")
    aux = {f"{prefix}param_groups": AuxItem(f"{prefix}param_groups", value)}
    for name, by_seat in told.items():
        if name == "param_groups":
            continue
        path = f"{prefix}{name}"
        if len(by_seat) != len(groups):
            absent = min(groups.keys() - by_seat.keys())
            findings.append(_disagree(path, f"seat {absent} has none"))
            continue
        whole: Any = _MISSING
        for seat, own in by_seat.items():
            whole = _merged(whole, _spread(own, groups[seat], len(value)), path, findings)
        aux[path] = AuxItem(path, whole)
    return United(aux, groups, tuple(findings))


def numbered(
    specs: Mapping[int, Sequence[KeySpec]], whole: United, prefix: str = ""
) -> dict[int, tuple[KeySpec, ...]]:
    """The seats' keys with the whole model's group numbers, and with orders that are indices again.

    Those of other models, whose names do not begin with `prefix`, stay as they are.
    """
    kinds = ({"parameter", "state"}, {"buffer", "transient"})
    index: list[dict[int, int]] = []
    for kind in kinds:
        every = (spec for own in specs.values() for spec in own if spec.kind in kind)
        orders = {spec.order for spec in every if spec.key.name.startswith(prefix)}
        index.append({order: number for number, order in enumerate(sorted(orders))})
    return {
        seat: tuple(
            replace(
                spec,
                order=index[spec.kind in kinds[1]][spec.order],
                group=whole.groups[seat][spec.group] if spec.group >= 0 else -1,
            )
            if spec.key.name.startswith(prefix)
            else spec
            for spec in own
        )
        for seat, own in specs.items()
    }


def _groups(told: Mapping[int, Any]) -> tuple[list[dict[str, Any]], dict[int, list[int]]]:
    order: list[_Ident] = []
    names: dict[_Ident, dict[str, None]] = {}
    hypers: dict[_Ident, Any] = {}
    own: dict[int, list[_Ident]] = {}
    for seat, groups in sorted(told.items()):
        own[seat] = _idents(groups)
        for at, (ident, group) in enumerate(zip(own[seat], groups, strict=True)):
            if ident not in names:
                order.insert(_place(order, own[seat], at), ident)
                names[ident] = {}
                hypers[ident] = group["hyper"]
            names[ident].update(dict.fromkeys(group["names"]))
    value = [{"names": list(names[ident]), "hyper": hypers[ident]} for ident in order]
    return value, {seat: list(map(order.index, idents)) for seat, idents in own.items()}


def _idents(groups: Sequence[Mapping[str, Any]]) -> list[_Ident]:
    seen: Counter[bytes] = Counter()
    found = []
    for group in groups:
        hyper = wire.encode(group["hyper"])
        found.append((hyper, seen[hyper]))
        seen[hyper] += 1
    return found


def _place(order: Sequence[_Ident], own: Sequence[_Ident], at: int) -> int:
    """Where a new group goes: behind the one before it on its seat, or before the one behind it."""
    if at:
        return order.index(own[at - 1]) + 1
    behind = [order.index(ident) for ident in own[1:] if ident in order]
    return min(behind, default=len(order))


def _in_two(value: Sequence[Mapping[str, Any]], path: str) -> list[Finding]:
    """Parameters that have other hyperparameters on another seat."""
    first: dict[str, int] = {}
    findings = []
    for number, group in enumerate(value):
        for name in group["names"]:
            other = first.setdefault(name, number)
            if other != number:
                a, b = value[other]["hyper"], group["hyper"]
                differing = sorted(k for k in {*a, *b} if a.get(k) != b.get(k))
                what = f"{name} differs in {', '.join(differing)}" if differing else f"{name} moves"
                findings.append(_disagree(path, f"{what} between two seats"))
    return findings


def _spread(value: Any, places: Sequence[int], size: int, key: str = "") -> Any:
    """A seat's scheduler state, with lists of one value a group as long as all groups."""
    if isinstance(value, dict):
        return {k: _spread(v, places, size, str(k)) for k, v in value.items()}
    if isinstance(value, list) and key in PER_GROUP and len(value) == len(places):
        found = [_MISSING] * size
        for place, entry in zip(places, value, strict=True):
            found[place] = entry
        return found
    if isinstance(value, list):
        return [_spread(part, places, size) for part in value]
    return value


def _merged(a: Any, b: Any, where: str, findings: list[Finding]) -> Any:
    if a is _MISSING:
        return b
    if b is _MISSING:
        return a
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return {key: _merged(a[key], b[key], f"{where}/{key}", findings) for key in a}
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [_merged(x, y, f"{where}[{i}]", findings) for i, (x, y) in pairs]
    if wire.encode(a) != wire.encode(b):
        findings.append(_disagree(where, f"is {a!r} on one seat and {b!r} on another"[:200]))
    return a


def _disagree(where: str, cause: str) -> Finding:
    return Finding("ranks-disagree", where, cause, "make it equal on all ranks")
