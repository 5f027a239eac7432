"""A side of a migration under other names: its layout, steps and param groups by a tensor map, and back.

A map leads from a side's *own* names to the *common* ones, in which both sides meet. Keys, plan, sums and
fingerprints are in common names; adapters are asked in the side's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding, Refused
from dynadapt.protocols import of_models
from dynadapt.vps.keys import Key
from dynadapt.vps.tensor_map import applied, mapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dynadapt.elastic.side import Scalars, Side
    from dynadapt.protocols import AuxItem
    from dynadapt.vps.keys import KeySpec
    from dynadapt.vps.layout import Row
    from dynadapt.vps.tensor_map import Mapped, TensorMap

__all__ = ["Naming", "Own", "renamed"]

_PRESENCE = {"present": 0, "zero": 1, "none": 2}


@dataclass(frozen=True)
class Own:
    """What the other side says, in one side's own names: for `prepare`, `finish` and comparisons."""

    keys: tuple[KeySpec, ...]
    scalars: Scalars
    aux: Mapping[str, AuxItem]


class Naming:
    """What a map made of one side's keys. Raises `Refused` for a map that does not fit them."""

    def __init__(self, side: str, tensor_map: TensorMap, keys: Iterable[KeySpec]) -> None:
        self.side = side
        self.keys = tuple(keys)
        try:
            self.map: Mapped = applied(tensor_map, self.keys)
        except Refused as refused:
            raise Refused(
                replace(finding, where=f"{side}_map: {finding.where}")
                for finding in refused.findings
            ) from None
        by_key = {spec.key: spec for spec in self.map.keys}
        self.common: dict[str, tuple[str, ...]] = {}
        self._owns: dict[str, dict[str, None]] = {}
        for spec in self.keys:
            new = [by_key[key] for key in self.map.became[spec.key]]
            found = tuple(dict.fromkeys(name for n in new for name in (n.key.name, *n.aliases)))
            for name in (spec.key.name, *spec.aliases):
                self.common.setdefault(name, found)
            for name in found:
                self._owns.setdefault(name, {})[spec.key.name] = None

    def rows(self, row: Row) -> list[Row]:
        """A row of this side's own keys, as rows of common ones."""
        return self.map.rows(row)

    def told(self, finding: Finding) -> Finding:
        """A finding whose place is a common name, with the name that the user knows."""
        where, end = finding.where, len(finding.where)
        while (end := where.rfind("/", 0, end)) > 0:
            own = [name for name in self._owns.get(where[:end], ()) if name != where[:end]]
            if own:
                more = f" and {len(own) - 3} more" if len(own) > 3 else ""
                text = f"{where} ({', '.join(own[:3])}{more} in the {self.side})"
                return replace(finding, where=text)
        return finding

    def of(self, other: Side) -> Own:
        """Another side's keys, scalars and aux items in this side's own names.

        What this side has no name for is left out.
        """
        known: dict[str, list[KeySpec]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        scalars: dict[str, Mapping[str, int | float]] = {}
        for spec in other.layout.keys:
            for name in (spec.key.name, *spec.aliases):
                known.setdefault(name, []).append(spec)
                if spec.key.name in other.scalars:
                    scalars[name] = other.scalars[spec.key.name]
                if spec.key.slot in {"param", "buffer"}:
                    shapes[name] = spec.shape
        keys: dict[Key, KeySpec] = {}
        numbers: dict[str, dict[str, int | float]] = {}
        for own in self.keys:
            if own.key.slot not in {"param", "buffer"}:
                continue
            for name in self.common[own.key.name]:
                for spec in known.get(name, ()):
                    key = Key(own.key.name, spec.key.slot)
                    shape = own.shape if spec.shape == shapes.get(name) else spec.shape
                    new = replace(spec, key=key, shape=shape, aliases=own.aliases, order=own.order)
                    old = keys.get(key)
                    if old is None or _PRESENCE[new.presence] < _PRESENCE[old.presence]:
                        keys[key] = new
                given = scalars.get(name, {})
                if given.get("step", 0) >= numbers.get(own.key.name, {}).get("step", 0) and given:
                    numbers[own.key.name] = dict(given)
        aliases = {spec.key.name: spec.aliases for spec in other.layout.keys}

        def owns(name: str) -> Iterable[str]:
            return (n for each in (name, *aliases.get(name, ())) for n in self._owns.get(each, ()))

        aux = _regrouped(other.aux, owns)
        return Own(tuple(sorted(keys.values(), key=lambda spec: spec.key)), numbers, aux)


def renamed(name: str, side: Side, tensor_map: TensorMap | None, allow: Iterable[str] = ()) -> Side:
    """A side in common names. Raises `Refused` where the map does not fit, with the nearest names.

    Tensors that become one have one step: unequal ones are refused unless `allow` has "step".
    """
    if tensor_map is None:
        return side
    naming = Naming(name, tensor_map, side.layout.keys)
    scalars: dict[str, dict[str, int | float]] = {}
    findings = []
    for own, values in side.scalars.items():
        for common in naming.common.get(own, (own,)):
            known = scalars.setdefault(common, dict(values))
            for label in sorted({*known, *values}):
                if known.get(label) == values.get(label) or "step" in allow:
                    continue
                cause = f"its parts have {known.get(label)} and {values.get(label)}"
                fix = 'allow={"step"} takes those of the part that is furthest on'
                findings.append(naming.told(Finding("step", f"{common}/{label}", cause, fix)))
            if values.get("step", 0) > known.get("step", 0):
                scalars[common] = dict(values)
    if findings:
        raise Refused(findings)
    return replace(
        side,
        layout=mapped(side.layout, tensor_map),
        scalars=scalars,
        aux=_regrouped(side.aux, lambda own: naming.common.get(own, (own,))),
        naming=naming,
    )


def _regrouped(
    aux: Mapping[str, AuxItem], names: Callable[[str], Iterable[str]]
) -> Mapping[str, AuxItem]:
    """Aux items whose param groups have other names; raises `Refused` where two groups become one."""
    findings: list[Finding] = []
    items = of_models(aux, "param_groups").values()
    new = {item.path: replace(item, value=_renamed(item, names, findings)) for item in items}
    if findings:
        raise Refused(findings)
    return {**aux, **new}


def _renamed(
    item: AuxItem, names: Callable[[str], Iterable[str]], findings: list[Finding]
) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    home: dict[str, int] = {}
    for number, group in enumerate(item.value):
        members: list[str] = []
        for old in group["names"]:
            for name in names(old):
                first = home.setdefault(name, number)
                if first == number:
                    members.append(name)
                elif item.value[first]["hyper"] != group["hyper"]:
                    cause = f"its parts are in param groups {first} and {number}, which differ"
                    fix = "give both groups the same hyperparameters, or leave the map's rule out"
                    findings.append(Finding("hyper-conflict", name, cause, fix))
        groups.append({**group, "names": list(dict.fromkeys(members))})
    return groups
