"""What has to hold before and after a move, as findings: pure functions, the same on every seat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.errors import Finding
from dynadapt.protocols import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dynadapt.elastic.side import Scalars, Side
    from dynadapt.protocols import AuxItem, Described
    from dynadapt.transport.plan import Pair

__all__ = [
    "disagreements",
    "files_unreachable",
    "groups_differ",
    "held_differently",
    "no_memory",
    "optimizers_differ",
    "scalars_differ",
    "steps_differ",
    "sums_differ",
]


def steps_differ(scalars: Scalars, flat_step: bool, allow: Collection[str]) -> list[Finding]:
    """A target with one step per flat buffer needs equal steps, unless `allow` has "step".

    >>> steps_differ({"a": {"step": 1}, "b": {"step": 2}}, True, ())[0].reason
    'step'
    """
    steps = {n: v["step"] for n, v in scalars.items() if "step" in v}
    if not flat_step or "step" in allow or len(set(steps.values())) <= 1:
        return []
    low, high = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
    return [
        Finding(
            "step",
            "optimizer",
            f"{low} is at step {steps[low]:g} and {high} at step {steps[high]:g}, and the target "
            "keeps one step for many parameters",
            'allow={"step"} takes the largest step',
        )
    ]


def optimizers_differ(
    source: Mapping[str, AuxItem], target: Mapping[str, AuxItem], allow: Collection[str]
) -> list[Finding]:
    """The target would start afresh, or use the source's state by another rule.

    With "extra" and "missing" allowed, each side keeps what the other does not know.
    """
    here, there = target.get("optimizer"), source.get("optimizer")
    if here is None or {"extra", "missing"} <= set(allow):
        return []
    if there is None:
        cause = "the target has an optimizer and the source has none"
        fix = 'pass the source with its optimizer, or allow={"missing"} to start it afresh'
        missing = Finding("missing-key", "optimizer", cause, fix)
        return [] if "missing" in allow else [missing]
    if here.value == there.value:
        return []
    cause = f"{there.value} in the source, {here.value} in the target"
    fix = "use the same optimizer class in the target"
    return [Finding("optimizer-class", "optimizer", cause, fix)]


def no_memory(own: Described | None) -> list[Finding]:
    """Tensors of a source that are on the meta device, a finding each: they have no values."""
    if own is None:
        return []
    keys = {row.key for row in own.rows if own.buffers[row.buffer].device == "meta"}
    cause = "it is on the meta device and has no value"
    fix = "pass a model with memory as the source"
    return [Finding("not-materialised", str(key), cause, fix) for key in sorted(keys)]


def scalars_differ(source: Scalars, after: Scalars) -> list[Finding]:
    """Scalars that this seat's target holds and that are not the source's."""
    return [
        Finding(
            "certificate",
            f"{name}/{label}",
            f"is {after[name][label]} in the target and {value} in the source",
        )
        for name, values in source.items()
        for label, value in values.items()
        if label in after.get(name, {}) and after[name][label] != value
    ]


def groups_differ(
    source: Mapping[str, AuxItem], after: Mapping[str, AuxItem]
) -> tuple[list[Finding], list[Outcome]]:
    """Hyperparameters, by parameter name, that both sides have and that are not equal.

    One that the target keeps in single precision is told, and no error.
    """
    given, has = _hyper(source.get("param_groups")), _hyper(after.get("param_groups"))
    findings: list[Finding] = []
    told: list[Outcome] = []
    for name in sorted(given.keys() & has.keys()):
        for key in sorted(given[name].keys() & has[name].keys()):
            wanted, found = _listed(given[name][key]), _listed(has[name][key])
            if wanted == found or wanted != wanted:
                continue
            if _listed(wanted, single=True) == found:
                note = f"{wanted} in the source, kept in single precision"
                told.append(Outcome(f"{name}/{key}", "derived", note))
                continue
            cause = f"is {found} in the target and {wanted} in the source"
            findings.append(Finding("certificate", f"{name}/{key}", cause))
    return findings, told


def _hyper(item: AuxItem | None) -> dict[str, dict[str, Any]]:
    groups = [] if item is None else item.value
    return {name: group["hyper"] for group in groups for name in group["names"]}


def _listed(value: Any, *, single: bool = False) -> Any:
    """A hyperparameter in one form: tuples as lists; with `single`, floats rounded."""
    if isinstance(value, list | tuple):
        return [_listed(part, single=single) for part in value]
    if isinstance(value, dict):
        return {key: _listed(part, single=single) for key, part in value.items()}
    return float(np.float32(value)) if single and isinstance(value, float) else value


def disagreements(told: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """What seats that should agree told: equal values, and equal message lists at both ends."""
    names = [name for name in next(iter(told.values())) if name not in {"pairs", "device"}]
    findings = [
        Finding("ranks-disagree", name, "is not equal on all seats", "pass equal arguments")
        for name in names
        if len({repr(report[name]) for report in told.values()}) > 1
    ]
    for seat, report in told.items():
        for name, digest in report.get("pairs", {}).items():
            peer, way = int(name[:-1]), name[-1]
            other = told[peer]["pairs"].get(f"{seat}{'<' if way == '>' else '>'}")
            if other != digest:
                where = f"seat {seat} {way} seat {peer}"
                findings.append(Finding("plans-differ", where, "message lists differ"))
    return findings


def held_differently(before: Described | None, after: Described | None) -> list[Finding]:
    """`finish` must not have changed who holds what."""
    old = {(row.key, row.box) for row in before.rows} if before is not None else set()
    new = {(row.key, row.box) for row in after.rows} if after is not None else set()
    return [
        Finding("certificate", f"{key} {box}", "is held differently after finish")
        for key, box in sorted(old ^ new)
    ]


def sums_differ(pairs: Sequence[Pair], should: Sequence[int], has: Sequence[int]) -> list[Finding]:
    """Keys whose target sum is not their source's."""
    return [
        Finding(
            "certificate",
            str(pair.target.key),
            f"the target's sum {b:016x} is not the source's {a:016x}",
            "the source is intact; please report this",
        )
        for pair, a, b in zip(pairs, should, has, strict=True)
        if a != b and not pair.target.local
    ]


def files_unreachable(source: Side, target: Side) -> list[Finding]:
    """A live seat reads and writes the other side's files itself, so it has to know them."""
    found = []
    for side, other, what in ((source, target, "source"), (target, source, "target")):
        for seat in other.layout.endpoints if side.readers else ():
            if seat >= 0 and seat not in side.readers:
                cause = f"it works on the {what}'s files and passed no path"
                fix = f"pass the {what} on every rank"
                found.append(Finding("files-unreachable", f"seat {seat}", cause, fix))
    if source.readers and target.readers and not {*source.readers}.intersection(target.readers):
        cause = "no seat passed both paths"
        found.append(Finding("files-unreachable", "all seats", cause, "pass both on some rank"))
    return found
