"""In which order and which groups the parameters of a target lie, where its source does not say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from dynadapt.elastic.order_files import in_two_groups, named_twice
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import FileSource

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch import nn

    from dynadapt.elastic.checkpoint import Checkpoint
    from dynadapt.elastic.order_files import Groups, Order
    from dynadapt.protocols import AuxItem, Described, FileTarget
    from dynadapt.vps.keys import KeySpec

__all__ = ["arranged", "check_names", "known_of", "like", "source_of"]

MOST = 20
"""Names whose neighbours are looked for."""

_FLAT = {"zero1", "zero2", "zero3", "fsdp1"}
"""Kinds that cut many parameters as one: what lies where depends on the order."""

_BY_ORDER = _FLAT | {"zero0"}
"""Kinds whose states have no names, but numbers."""


def known_of(
    model: str | os.PathLike[str] | nn.Module | None,
    alike: Checkpoint | None = None,
    order: Order = (),
) -> FileSource:
    """What a model says of its checkpoints, without its weights: order, tied names, shapes, buffers.

    `model` is a module, a Hugging Face folder or `config.json`, or a JSON listing; a checkpoint that is
    `alike` says shapes, too, and an `order` that has them before both. Raises as `read_model`.
    """
    own: dict[str, tuple[int, ...]] = {}
    if alike is not None:
        own |= {s.key.name: s.shape for s in alike.keys if s.key.slot == "param"}
    found = FileSource("")
    if model is not None:
        from dynadapt.adapters.model_shapes import said_of

        found = said_of(model)
        own = dict(found.shapes)
    if isinstance(order, Mapping):
        own |= {name: tuple(shape) for name, shape in order.items() if shape is not None}
    return replace(found, shapes=tuple(own.items()))


def source_of(
    path: str | os.PathLike[str],
    order: Order = (),
    groups: Sequence[Sequence[str]] = (),
    known: FileSource | None = None,
) -> str | FileSource:
    """A checkpoint to be read, with what is said of its model; `order` goes before that of `known`."""
    found = replace(
        known or FileSource(""),
        path=os.fspath(path),
        order=tuple(order) or (known.order if known else ()),
        groups=tuple(map(tuple, groups)),
    )
    return found.path if found == FileSource(found.path) else found


class Like(NamedTuple):
    """What asks for a checkpoint's own format and layout, its order, its groups, and what is in none."""

    written: str
    order: tuple[str, ...]
    groups: Groups
    frozen: tuple[str, ...]


def like(found: Checkpoint) -> Like:
    """What a checkpoint says of another of the same model.

    Raises `Refused` (`bad-spec`) for a format that is read only.
    """
    own = found.own
    if not own.written:
        cause = f"is of a format, {found.format}, that is not written"
        raise Refused([Finding("bad-spec", found.path, cause, "say --to (to=)")])
    params = [spec for spec in own.specs if spec.key.slot == "param"]
    order = [s.key.name for s in sorted(params, key=lambda s: s.order)] if own.ordered else []
    frozen = tuple(s.key.name for s in params if not s.trainable)
    return Like(own.written, tuple(order), _of_item(_item(own, "param_groups")), frozen)


def check_names(
    order: Order,
    own: Described,
    before: Callable[[Sequence[str]], Sequence[str]] = tuple,
) -> None:
    """Raises `Refused` with every name of an order that a source lacks (`no-match`), or that is there twice.

    `before` gives the names that some may have had in the source. A model may have more than a checkpoint;
    who writes a list of names means those that are there.
    """
    names = {name for spec in own.specs for name in (spec.key.name, *spec.aliases)}
    findings = named_twice(order)
    for number, name in enumerate(n for n in order if names.isdisjoint(before([n]))):
        near = get_close_matches(name, names, 3) if number < MOST else []
        cause = "stands in the order, and the source has nothing of that name"
        fix = f"did you mean {' or '.join(near)}?" if near else "take it out of the order"
        findings.append(Finding("no-match", name, cause, fix))
    if findings:
        raise Refused(findings)


def _item(own: Described, path: str) -> AuxItem | None:
    return next((item for item in own.aux if item.path == path), None)


def _of_item(item: AuxItem | None) -> Groups:
    return () if item is None else tuple(tuple(group["names"]) for group in item.value)


def arranged(own: Described, target: FileTarget, source: str) -> tuple[Described, FileTarget]:
    """A source and a target that agree on order and groups; raises `Refused` with all that is missing.

    Groups are the target's, else those that its SPEC asks for (`groups=1`, or `decay`: matrices, and
    all else), else the source's.
    """
    params = [spec for spec in own.specs if spec.key.slot == "param"]
    target = _as_configured(own, target)
    kind = target.layout.kind if target.layout is not None else ""
    findings = [*_unordered(own, target, kind, source), *_unknown(target, params)]
    names = {name: spec.key.name for spec in params for name in (spec.key.name, *spec.aliases)}
    target = replace(target, groups=_by_key(target.groups, names))
    findings += in_two_groups(target.groups)
    item = _item(own, "param_groups")
    groups = target.groups or _asked(target, params) or _of_item(item)
    if item is not None and groups != _of_item(item):
        item, unlike = _regrouped(item, groups, names)
        findings += unlike
    if findings:
        raise Refused(findings)
    aux = tuple(item if item is not None and x.path == item.path else x for x in own.aux)
    place = {name: i for i, name in enumerate(target.order)}
    frozen = frozenset(target.frozen if item is None else ())
    specs = tuple(_frozen(_placed(spec, place), frozen) for spec in own.specs)
    return replace(own, specs=specs, aux=aux), replace(target, groups=groups)


_SETTINGS = {
    "zero1": {"round_robin": "round_robin_gradients"},
    "zero2": {"round_robin": "round_robin_gradients"},
    "zero3": {"sub_group_size": "sub_group_size"},
}
"""Options of a layout that DeepSpeed's config sets: what is written must be as the loading job's has it."""


def _as_configured(own: Described, target: FileTarget) -> FileTarget:
    """With the settings of the source's own config where the SPEC does not say others.

    A job mostly goes on with the config that it had, and DeepSpeed does not notice flats in another order.
    """
    behaviour = _item(own, "behaviour")
    known = behaviour.value if behaviour is not None else None
    known = known if isinstance(known, dict) else {}
    config = known.get("config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    copied = any(
        s.key.slot == "compute" or not s.trainable for s in own.specs if s.kind == "parameter"
    )
    precision = known.get("precision")
    told = precision in {"bfloat16", "float16"} and not copied  # stage 3 keeps no copy to tell it
    if target.format == "universal" and told:
        return replace(target, options={"compute": precision, **target.options})
    if target.layout is None or not isinstance(zero, dict):
        return target
    options = dict(target.layout.options)
    for option, setting in _SETTINGS.get(target.layout.kind, {}).items():
        value: Any = zero.get(setting)
        if option not in options and value is True:
            options[option] = "true"
        elif option not in options and type(value) in {int, float} and 1 <= value < 1e15:
            options[option] = str(int(value))
    if target.layout.kind in _SETTINGS and told:
        options.setdefault("dtype", str(precision))
    return replace(target, layout=replace(target.layout, options=options))


def _placed(spec: KeySpec, place: Mapping[str, int]) -> KeySpec:
    at = [place[name] for name in (spec.key.name, *spec.aliases) if name in place]
    return replace(spec, order=min(at)) if at else spec


def _frozen(spec: KeySpec, frozen: Collection[str]) -> KeySpec:
    """Where a source without an optimizer does not say what is trained."""
    is_frozen = spec.kind == "parameter" and any(
        n in frozen for n in (spec.key.name, *spec.aliases)
    )
    return replace(spec, trainable=False) if is_frozen else spec


def _unordered(own: Described, target: FileTarget, kind: str, source: str) -> Iterable[Finding]:
    if kind in _BY_ORDER and not own.ordered and not target.order:
        cause = f"does not say in which order the model has its parameters, on which {kind} depends"
        fix = "give --model CONFIG (model=), --order FILE (order=), or --like (like=) a checkpoint that does"
        yield Finding("no-order", source, cause, fix)


def _unknown(target: FileTarget, params: Sequence[KeySpec]) -> Iterable[Finding]:
    """Names of one side alone."""
    held = {name for spec in params for name in (spec.key.name, *spec.aliases)}
    if target.order:
        order = set(target.order)
        yield from named_twice(target.order)
        for spec in params:
            if order.isdisjoint((spec.key.name, *spec.aliases)):
                cause = "is not in the order that was given"
                yield Finding("no-order", spec.key.name, cause, "list every parameter")
    for name in (n for own in target.groups for n in own):
        if name not in held:
            cause = "a group names it, and the source has no such parameter"
            yield Finding("groups", name, cause, "take it out of the group, or rename it")


def _asked(target: FileTarget, params: Sequence[KeySpec]) -> Groups:
    """The groups of the option `groups`, each in the model's order."""
    how = target.layout.options.get("groups") if target.layout is not None else None
    if how is None:
        return ()
    place = {name: i for i, name in enumerate(target.order)}
    trained = [_placed(spec, place) for spec in params if spec.trainable]
    trained.sort(key=lambda spec: spec.order)
    if how == "1":
        return (tuple(spec.key.name for spec in trained),)
    if how != "decay":
        raise Refused([Finding("bad-spec", f"groups={how}", "is neither 1 nor decay")])
    parts = [[s.key.name for s in trained if (len(s.shape) > 1) is many] for many in (True, False)]
    return tuple(tuple(part) for part in parts if part)


def _by_key(groups: Groups, names: Mapping[str, str]) -> Groups:
    """Groups by the names of the source's keys: a user may list any name of a tied parameter, or all of them.

    A name that the same group has twice stays so: that is a mistake of the list.
    """
    found = []
    for own in groups:
        keys = [names.get(name, name) for name in own]
        first = dict(zip(reversed(keys), reversed(own), strict=True))
        found.append(tuple(k for k, name in zip(keys, own, strict=True) if first[k] == name))
    return tuple(found)


def _regrouped(
    item: AuxItem, groups: Groups, names: Mapping[str, str]
) -> tuple[AuxItem, list[Finding]]:
    """Hyperparameters by the new groups: those that all members had."""
    hyper = {names.get(n, n): group["hyper"] for group in item.value for n in group["names"]}
    value, findings = [], []
    for number, members in enumerate(groups):
        had: list[Any] = []
        for name in members:
            if name in hyper and hyper[name] not in had:
                had.append(hyper[name])
        if len(had) > 1:
            unlike = sorted(k for k in had[0] if any(h.get(k) != had[0][k] for h in had))
            cause = f"its members have different {', '.join(unlike)}"
            fix = "keep the source's groups, or group like with like"
            findings.append(Finding("groups", f"group {number}", cause, fix))
        value.append({"names": list(members), "hyper": had[0] if had else {}})
    left = sorted(set(hyper) - {names.get(name, name) for own in groups for name in own})
    findings += [Finding("groups", n, "is in no group", "list every one in a group") for n in left]
    return replace(item, value=value), findings
