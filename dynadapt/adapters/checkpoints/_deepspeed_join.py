"""The parts of a DeepSpeed checkpoint under tensor or pipeline parallelism, put together to one model."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from dynadapt.adapters import _by_part as by_part
from dynadapt.adapters._cut import rows_of_cut
from dynadapt.adapters.checkpoints._deepspeed_cuts import cuts_of
from dynadapt.adapters.checkpoints._deepspeed_files import options_of
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Described
from dynadapt.vps import wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dynadapt.adapters._cut import Cut
    from dynadapt.adapters.checkpoints._deepspeed_geometry import Shapes
    from dynadapt.vps.keys import Key, KeySpec
    from dynadapt.vps.layout import Row

__all__ = ["joined", "whole_of"]


def whole_of(
    parts: Sequence[Described], commons: Sequence[Mapping[str, Any]], shapes: Shapes
) -> list[Described]:
    """The parts of a tensor-parallel model in coordinates of whole parameters; raises `Refused`.

    `commons` are the model states of each rank, `shapes` whole shapes that the user knows.
    """
    params = [
        {s.key.name: s for s in own.specs if s.key.slot == "param" and s.kind == "parameter"}
        for own in parts
    ]
    names = dict.fromkeys(name for own in params for name in own)
    fix = "copy the whole checkpoint"
    lost = [
        Finding("missing-key", name, f"mp_rank {rank} has no part of it", fix)
        for name in names
        for rank, own in enumerate(params)
        if name not in own
    ]
    if lost:
        raise Refused(lost)
    info = options_of(commons[0], "universal_checkpoint_info")
    known = {n: s for name in names for n, s in _under_any(name, params[0][name], shapes)}
    cuts, findings = cuts_of(info, {n: [own[n].shape for own in params] for n in names}, known)
    found = []
    for rank, own in enumerate(parts):
        mine = {name: each[rank] for name, each in cuts.items()}
        findings += _odd(own, mine)
        found.append(own if findings else _placed(own, mine))
    if findings:
        raise Refused(findings)
    return found


def _under_any(name: str, spec: KeySpec, shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A shape that is known under any of a parameter's names."""
    yield from ((name, shapes[each]) for each in (name, *spec.aliases) if each in shapes)


def _odd(own: Described, cuts: Mapping[str, Cut]) -> Iterator[Finding]:
    """States that are not cut as their parameters are."""
    for spec in own.specs:
        cut = cuts.get(spec.key.name)
        if cut is not None and spec.kind in {"parameter", "state"} and spec.shape != cut.local:
            cause = f"its shape {list(spec.shape)} is not its parameter's {list(cut.local)}"
            yield Finding(
                "unsupported-state",
                str(spec.key),
                cause,
                "convert without it: --exclude (exclude=)",
            )


def _placed(own: Described, cuts: Mapping[str, Cut]) -> Described:
    """A part's keys and rows in the whole parameters' shapes; what it has nothing of is left out."""
    specs = []
    for spec in own.specs:
        cut = cuts.get(spec.key.name) if spec.kind != "buffer" else None
        if cut is None:
            specs.append(spec)
        elif prod(cut.local) or not prod(cut.shape):
            specs.append(replace(spec, shape=cut.shape))
    kept = {spec.key: spec.kind for spec in specs}
    files = {
        endpoint: tuple(new for row in rows for new in _moved(row, kept, cuts))
        for endpoint, rows in own.files.items()
    }
    return replace(own, specs=tuple(specs), files=files)


def _moved(row: Row, kept: Mapping[Key, str], cuts: Mapping[str, Cut]) -> Iterator[Row]:
    cut = cuts.get(row.key.name)
    if kept.get(row.key) == "buffer" or (cut is None and row.key in kept):
        yield row
    elif cut is not None and row.key in kept:
        yield from rows_of_cut(row, cut)


def joined(parts: Sequence[Described]) -> Described:
    """Parts of one model as the whole one; raises `Refused` (`ranks-disagree`) with all that differs."""
    findings: list[Finding] = []
    told: dict[str, dict[int, Any]] = {}
    for number, own in enumerate(parts):
        for item in own.aux:
            if item.path in {"param_groups", "scheduler"}:
                told.setdefault(item.path, {})[number] = item.value
    united = by_part.united(told)
    findings += united.findings
    specs: dict[int, Sequence[KeySpec]] = {n: own.specs for n, own in enumerate(parts)}
    if len(united.groups) == len(parts):
        specs = dict(by_part.numbered(specs, united))
    found: dict[Key, KeySpec] = {}
    for number, each in specs.items():
        for spec in each:
            known = found.setdefault(spec.key, spec)
            if _face(known) != _face(spec):
                cause = f"is {_face(known)} before part {number}, where it is {_face(spec)}"
                findings.append(Finding("ranks-disagree", str(spec.key), cause))
    scalars: dict[str, dict[str, int | float]] = {}
    for number, own in enumerate(parts):
        for name, values in own.scalars.items():
            for label, value in values.items():
                if scalars.setdefault(name, {}).setdefault(label, value) != value:
                    cause = f"is {scalars[name][label]} before part {number}, where it is {value}"
                    findings.append(Finding("ranks-disagree", f"{name}/{label}", cause))
    if findings:
        raise Refused(findings)
    files: dict[int, dict[Row, None]] = {}
    for own in parts:
        for endpoint, rows in own.files.items():
            files.setdefault(endpoint, {}).update(dict.fromkeys(rows))
    return Described(
        tuple(found.values()),
        (),
        {name: buffer for own in parts for name, buffer in own.buffers.items()},
        scalars,
        tuple(_items(parts, united)),
        files={endpoint: tuple(rows) for endpoint, rows in files.items()},
        made_by=parts[0].made_by,
    )


def _face(spec: KeySpec) -> tuple[Any, ...]:
    return (spec.shape, spec.dtype, spec.kind, spec.trainable)


def _items(parts: Sequence[Described], united: by_part.United) -> Iterator[AuxItem]:
    """The first part's; what a user's own object has on another part differently is named as lost."""
    yield from united.aux.values()
    for item in parts[0].aux:
        if item.path in united.aux:
            continue
        yield item
        others = [x for own in parts[1:] for x in own.aux if x.path == item.path]
        if any(wire.encode(x.value) != wire.encode(item.value) for x in others):
            yield AuxItem(f"opaque/{item.path} of other ranks", "differs between mp_ranks")
