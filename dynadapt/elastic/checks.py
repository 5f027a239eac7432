"""What has to hold before and after a move, as findings: pure functions, the same on every seat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.adapters._hyper import NOT_HYPER
from dynadapt.elastic.aux_comparison import equal
from dynadapt.errors import Finding
from dynadapt.protocols import Outcome, of_models

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

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


def steps_differ(scalars: Scalars, flat: Collection[str], allow: Collection[str]) -> list[Finding]:
    """A target with one step per flat buffer needs equal steps, unless `allow` has "step".

    `flat` has what the names of such a model begin with, `""` for the only one.

    >>> steps_differ({"a": {"step": 1}, "b": {"step": 2}}, [""], ())[0].reason
    'step'
    >>> steps_differ({"x/a": {"step": 1}, "y/b": {"step": 2}}, ["x/", "y/"], ())
    []
    """
    findings = []
    for prefix in () if "step" in allow else flat:
        own = (name for name in scalars if name.startswith(prefix))
        steps = {name: scalars[name]["step"] for name in own if "step" in scalars[name]}
        if len(set(steps.values())) <= 1:
            continue
        low, high = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        cause = (
            f"{low} is at step {steps[low]:g} and {high} at step {steps[high]:g}, and the target "
            "keeps one step for many parameters"
        )
        fix = 'allow={"step"} takes the largest step'
        findings.append(Finding("step", f"{prefix}optimizer", cause, fix))
    return findings


def optimizers_differ(
    source: Mapping[str, AuxItem],
    target: Mapping[str, AuxItem],
    allow: Collection[str],
    *,
    unsaid: bool = False,
) -> list[Finding]:
    """The target would start afresh, or use the source's state by another rule.

    `unsaid`: the source has states and may not say whose, as files may not; then their names count.
    With "extra" and "missing" allowed, each side keeps what the other does not know.
    """
    findings: list[Finding] = []
    if {"extra", "missing"} <= set(allow):
        return findings
    for here in of_models(target, "optimizer").values():
        there = source.get(here.path)
        if there is None and "missing" not in allow and not unsaid:
            cause = "the target has an optimizer and the source has none"
            fix = 'pass the source with its optimizer, or allow={"missing"} to start it afresh'
            findings.append(Finding("missing-key", here.path, cause, fix))
        elif there is not None and here.value != there.value:
            cause = f"{there.value} in the source, {here.value} in the target"
            fix = "use the same optimizer class in the target"
            findings.append(Finding("optimizer-class", here.path, cause, fix))
    return findings


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
        if label in after.get(name, {}) and not equal(after[name][label], value)
    ]


def groups_differ(
    source: Mapping[str, AuxItem], after: Mapping[str, AuxItem], said: Iterable[Outcome] = ()
) -> tuple[list[Finding], list[Outcome]]:
    """Hyperparameters, by parameter name, that both sides have and that are not equal.

    One that the target keeps in single precision is told, and no error; nor is one that the adapter
    has said it has no place for: an outcome `param_groups/<label>` among `said`.
    """
    parts = (outcome.path.rpartition("/") for outcome in said if outcome.kind != "exact")
    given_up = {label for front, _, label in parts if front.endswith("param_groups")}
    given, has = (_hyper(of_models(aux, "param_groups").values()) for aux in (source, after))
    findings: list[Finding] = []
    told: list[Outcome] = []
    for name in sorted(given.keys() & has.keys()):
        for key in sorted((given[name].keys() & has[name].keys()) - given_up - NOT_HYPER):
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


def _hyper(items: Iterable[AuxItem]) -> dict[str, dict[str, Any]]:
    """By parameter; an adapter whose groups have another form than the documented one has none to compare."""
    groups = (group for item in items for group in item.value)
    known = (group for group in groups if {"names", "hyper"} <= set(group))
    return {name: group["hyper"] for group in known for name in group["names"]}


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
