"""Which source key serves which target key, and everything that does not fit."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import TYPE_CHECKING

from dynadapt.errors import Finding
from dynadapt.transport.plan import Match, Options, Pair
from dynadapt.vps.keys import Key, KeySpec, itemsize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["match"]

HINTS = 8
"""Findings that get the nearest names: looking for them costs time, and a wrong model has thousands."""


def match(source: Sequence[KeySpec], target: Sequence[KeySpec], options: Options) -> Match:
    """Pair the keys of two layouts. Pure; the same on every seat. All findings together.

    A tied tensor is found by any of its names. A source that keeps no such state (`none`, `zero`) fills
    the target's with zeros. Nothing of the source may be left behind unless `allow` has `"extra"`.

    >>> spec = KeySpec(Key("w", "param"), (2,), "float32")
    >>> match([spec], [spec], Options()).findings
    ()
    """
    found = _by_any_name(source)
    used: set[Key] = set()
    pairs: list[Pair] = []
    findings: list[Finding] = []
    notes: list[tuple[str, str]] = []
    joined: list[tuple[KeySpec, KeySpec]] = []
    for spec in target:
        if spec.derived:
            continue
        served = _serving(spec, found) or _of_frozen(spec, found)
        if served is None or served.derived:
            findings += _missing(spec, source, options, notes, len(findings) < HINTS)
            continue
        findings += _differences(served, spec, options)
        others = _joined(served, spec, found)
        findings += _ties(served, spec, others, options, used)
        joined += [
            (other, spec) for other in others.values() if spec.numel and other.presence == "present"
        ]
        used.update(other.key for other in others.values())
        used.add(served.key)
        if spec.trainable and not served.trainable and spec.key.slot == "param":
            notes.append((str(spec.key), "frozen in the source: its state starts as a new one"))
        if not spec.numel or spec.presence == "none":
            if served.presence == "present" and spec.presence == "none":
                findings.append(
                    Finding(
                        "absent-target",
                        str(spec.key),
                        "the source holds this state and the target has no place for it",
                        "use the same optimizer class in the target",
                    )
                )
            continue
        fill = served.presence != "present"
        if fill:
            notes.append((str(spec.key), "never made in the source; zeros in the target"))
        pairs.append(Pair(served, spec, fill))
    extra = _extra(source, target, used)
    left: tuple[tuple[str, str], ...] = ()
    if "extra" in options.allow:
        left = tuple((finding.where, finding.cause) for finding in _by_tensor(extra))
    else:
        findings += extra
    return Match(tuple(pairs), tuple(_by_tensor(findings)), tuple(notes), left, tuple(joined))


def _by_tensor(findings: Iterable[Finding]) -> Iterator[Finding]:
    """One finding a tensor and reason: what is wrong with a weight is wrong with all its states.

    >>> [str(f) for f in _by_tensor([Finding("shape", "w/param", "a"), Finding("shape", "w/exp_avg", "a")])]
    ['w/{param, exp_avg}: a [shape]']
    """
    slots: dict[tuple[str, str], list[str]] = {}
    first: dict[tuple[str, str], Finding] = {}
    for finding in sorted(findings, key=lambda f: not f.where.endswith("/param")):
        name, _, slot = finding.where.rpartition("/")
        known = slots.setdefault((finding.reason, name), [])
        first.setdefault((finding.reason, name), finding)
        if slot not in known:
            known.append(slot)
    for (reason, name), finding in first.items():
        own = slots[reason, name]
        where = f"{name}/{{{', '.join(own)}}}" if len(own) > 1 else finding.where
        yield replace(finding, where=where)


def _by_any_name(specs: Iterable[KeySpec]) -> dict[Key, KeySpec]:
    found: dict[Key, KeySpec] = {}
    for spec in specs:
        for name in (spec.key.name, *spec.aliases):
            found[Key(name, spec.key.slot)] = spec
    return found


def _serving(spec: KeySpec, found: Mapping[Key, KeySpec]) -> KeySpec | None:
    for name in (spec.key.name, *spec.aliases):
        served = found.get(Key(name, spec.key.slot))
        if served is not None:
            return served
    return None


def _of_frozen(spec: KeySpec, found: Mapping[Key, KeySpec]) -> KeySpec | None:
    """The state, which is none, of a parameter that the source has and does not train."""
    if spec.kind != "state" or spec.key.slot.startswith("extra:"):
        return None
    for name in (spec.key.name, *spec.aliases):
        param = found.get(Key(name, "param"))
        if param is not None and not param.trainable:
            key = Key(param.key.name, spec.key.slot)
            return replace(spec, key=key, presence="none", aliases=param.aliases)
    return None


def _nearest(spec: KeySpec, others: Sequence[KeySpec]) -> str:
    """The most similar names of the same slot, as the end of a sentence."""
    names = [str(other.key) for other in others if other.key.slot == spec.key.slot]
    near = difflib.get_close_matches(str(spec.key), names, 3)
    return f"; nearest: {', '.join(near)}" if near else ""


def _missing(
    spec: KeySpec,
    source: Sequence[KeySpec],
    options: Options,
    notes: list[tuple[str, str]],
    hints: bool,
) -> list[Finding]:
    if spec.presence == "none":
        return []
    if spec.kind == "transient" or "missing" in options.allow:
        notes.append((str(spec.key), "not in the source; the target keeps its own"))
        return []
    hint = _nearest(spec, source) if hints else ""
    return [
        Finding(
            "missing-key",
            str(spec.key),
            f"the target needs it and the source does not hold it{hint}",
            'use the same model on both sides, or allow={"missing"} to keep the target\'s own',
        )
    ]


def _extra(source: Sequence[KeySpec], target: Sequence[KeySpec], used: set[Key]) -> list[Finding]:
    findings: list[Finding] = []
    frozen = {
        name
        for spec in target
        if spec.key.slot == "param" and not spec.trainable
        for name in (spec.key.name, *spec.aliases)
    }
    for spec in source:
        idle = spec.key in used or spec.derived or spec.kind == "transient" or not spec.numel
        if idle or spec.presence != "present":
            continue
        cause = "the source holds it and the target has no place for it"
        fix = (
            'use the same model and optimizer on both sides, or allow={"extra"} to leave it behind'
        )
        if spec.kind == "state" and frozen.intersection((spec.key.name, *spec.aliases)):
            cause = "the source trains this parameter, in the target it is frozen and has no state"
            fix = 'freeze the same parameters on both sides, or allow={"extra"} to leave it behind'
        elif len(findings) < HINTS:
            cause += _nearest(spec, target)
        findings.append(Finding("extra-key", str(spec.key), cause, fix))
    return findings


def _family(dtype: str) -> str:
    if dtype == "bool":
        return "bool"
    if dtype.startswith(("int", "uint")):
        return "integer"
    if dtype == "float8_e8m0fnu":
        return "scale"  # powers of two only: not every other float type can hold them
    return "complex" if dtype.startswith("complex") else "float"


def _differences(source: KeySpec, target: KeySpec, options: Options) -> list[Finding]:
    findings = []
    if source.shape != target.shape:
        findings.append(
            Finding(
                "shape",
                str(target.key),
                f"shape {list(source.shape)} in the source and {list(target.shape)} in the target",
                "use the same model on both sides",
            )
        )
    if source.dtype == target.dtype or source.presence != "present":
        return findings
    narrows = itemsize(target.dtype) <= itemsize(source.dtype)
    if _family(source.dtype) != _family(target.dtype) or _family(source.dtype) != "float":
        findings.append(
            Finding(
                "dtype",
                str(target.key),
                f"{source.dtype} in the source and {target.dtype} in the target",
                "only floating-point tensors may change their dtype",
            )
        )
    elif narrows and options.narrow == "refuse":
        findings.append(
            Finding(
                "narrowing",
                str(target.key),
                f"{source.dtype} in the source would become {target.dtype} in the target",
                "keep the dtype in the target, or let narrow be 'if-exact' or 'allow'",
            )
        )
    return findings


def _joined(source: KeySpec, target: KeySpec, found: Mapping[Key, KeySpec]) -> dict[str, KeySpec]:
    """Tensors of the source that the target ties with the one that serves it, by one name each."""
    others: dict[Key, tuple[str, KeySpec]] = {}
    for name in target.aliases:
        other = found.get(Key(name, target.key.slot))
        if other is not None and other.key != source.key:
            others.setdefault(other.key, (name, other))
    return dict(others.values())


def _ties(
    source: KeySpec,
    target: KeySpec,
    others: Iterable[str],
    options: Options,
    used: set[Key],
) -> list[Finding]:
    """A tie on one side only: two values would become one, or one tensor two that drift apart."""
    findings = []
    if source.key in used and "tie" not in options.allow:
        findings.append(
            Finding(
                "tie",
                str(target.key),
                f"the source ties it with {source.key.name}, the target keeps two tensors",
                "tie them again in the target, before its optimizer is made (parallelize_module "
                "unties, and so do FSDP units that have only one of them); name them in "
                "TrainState(tied=...) if they lie on different pipeline stages; or "
                'allow={"tie"} to give both the same values',
            )
        )
    if "tie" not in options.allow:
        findings += [
            Finding(
                "tie",
                str(target.key),
                f"the target ties it with {name}, the source keeps two tensors",
                "re-tie the source model, or name them in TrainState(tied=...) if they lie on "
                f'different pipeline stages; or allow={{"tie"}} to take {source.key.name}',
            )
            for name in others
        ]
    return findings
