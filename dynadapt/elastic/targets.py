"""What the word after `--to` means: a format, a layout, or both."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dynadapt.elastic.sizes import size_of
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import FileTarget
from dynadapt.registry import format_names
from dynadapt.transport.casts import CASTABLE
from dynadapt.vps.keys import SHORT_DTYPES
from dynadapt.vps.spec import AXES, KINDS, LayoutSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["file_options", "proved", "target_of"]

_DEFAULT = dict.fromkeys(("zero0", "zero1", "zero2", "zero3"), "deepspeed")
"""The format of a kind of layout, where none is named."""

_JOBS = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2", "fsdp1")

WRITTEN: Mapping[str, tuple[str, ...]] = {
    "deepspeed": ("zero0", "zero1", "zero2", "zero3"),
    "universal": (),
    "dcp": ("fsdp2", "hsdp", "fsdp1", "ddp"),
    "safetensors": (),
    "torch": (),
    "trainer": _JOBS,
    "accelerate": _JOBS,
}
"""The kinds of layouts that each format of our own is written in; none: it is the same for any ranks."""

_LOADERS = {f"universal/{kind}" for kind in ("zero1", "zero2", "zero3")}
"""A universal checkpoint for the loaders of one stage: none has all that another asks for."""

READ_ONLY = {"fsdp", "megatron"}


def target_of(path: str | Path, spec: str, options: Mapping[str, Any] | None = None) -> FileTarget:
    """A target from text: `universal`, `zero3:dp=4`, or `deepspeed/zero3:dp=4`.

    Raises `Refused` (`bad-spec`).

    >>> target = target_of("out", "zero3:dp=4")
    >>> target.format, str(target.layout)
    ('deepspeed', 'zero3:dp=4')
    >>> target_of("out", "universal/zero3").options
    {'loader': 'zero3'}
    """
    known = format_names()
    text = spec.strip()
    if text in known:
        return FileTarget(str(path), text, None, options=dict(options or {}))
    if text in _LOADERS:
        loader = text.partition("/")[2]
        return FileTarget(
            str(path), "universal", None, options={**(options or {}), "loader": loader}
        )
    head, colon, settings = text.partition(":")
    if not colon and "/" not in text and text not in KINDS:
        near = difflib.get_close_matches(text, (*known, *KINDS), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        cause = f"is neither a format ({', '.join(_written(known))}) nor a layout{hint}"
        raise Refused([Finding("bad-spec", text, cause, "write e.g. zero3:dp=4 or safetensors")])
    if head in known:
        cause = f"{head} is a format, and what stands after the colon is of a layout"
        kinds = (f"{head}/{kind}:{settings}" for kind in WRITTEN.get(head, ())[:1])
        raise Refused([Finding("bad-spec", text, cause, f"write {' or '.join([head, *kinds])}")])
    layout = LayoutSpec.parse(text)
    named = layout.format or _DEFAULT.get(layout.kind)
    if named is None:
        cause, fix = _formless(layout)
        raise Refused([Finding("bad-spec", text, cause, fix)])
    if named not in known:
        fix = f"known: {', '.join(_written(known))}; write FORMAT/{layout.kind}:..."
        raise Refused([Finding("bad-spec", text, f"no format is called {named!r}", fix)])
    if WRITTEN.get(named) == ():
        cause = f"{named} is the same for any number of ranks, and has no layout"
        forms = [each for each in (*sorted(_LOADERS), named) if each in head]
        raise Refused([Finding("bad-spec", text, cause, f"write {forms[0]}")])
    if not any(each.partition("=")[0] in AXES for each in settings.split(",")):
        cause = "does not say for how many ranks: dp=N is missing"
        fix = f"write e.g. {head}:{','.join(['dp=4', *filter(None, [settings])])}"
        raise Refused([Finding("bad-spec", text, cause, fix)])
    return FileTarget(str(path), named, layout, options=dict(options or {}))


def _written(known: Sequence[str]) -> list[str]:
    return [name for name in known if name not in READ_ONLY]


def _formless(layout: LayoutSpec) -> tuple[str, str]:
    """What is wrong with a layout that no format is meant by, and the formats that are written in it."""
    cut = [axis for axis in layout.axes if axis not in {"dp", "rep"}]
    axes = {axis: n for axis, n in layout.axes.items() if axis not in cut} or {"dp": 2}
    wanted = replace(layout, axes=axes, options={})
    formats = [name for name, kinds in WRITTEN.items() if layout.kind in kinds]
    fix = f"write {', '.join(f'{name}/{wanted}' for name in formats)}"
    if not cut:
        return f"{layout.kind} needs a format", fix
    cause = f"no format is written in parts of {', '.join(cut)}"
    return cause, f"{fix}: a job of any layout loads it by dynadapt.load"


def proved(target: FileTarget) -> FileTarget:
    """A target whose options it can have; raises `Refused` (`bad-argument`)."""
    kind = target.layout.kind if target.layout is not None else target.format
    masters = kind.startswith("zero") or kind in {"deepspeed", "universal"}
    if masters and target.options.get("dtype") not in {None, "float32"}:
        cause = f"the masters of {target.layout or target.format} are float32"
        fix = "leave --dtype (dtype=) out; what the model computes in SPEC says: zero3:dp=4,dtype=bfloat16"
        where = f"--dtype (dtype=) {target.options['dtype']}"
        raise Refused([Finding("bad-argument", where, cause, fix)])
    return target


def file_options(
    dtype: str | None = None,
    keep_dtype: Sequence[str] = (),
    max_shard_size: int | str | None = None,
) -> dict[str, Any]:
    """What a user may say of files of weights; raises `Refused` (`bad-argument`).

    >>> file_options("bfloat16", max_shard_size="1GiB")
    {'max_shard_size': 1073741824, 'dtype': 'bfloat16', 'keep_dtype': ()}
    """
    if keep_dtype and dtype is None:
        cause = "leaves names alone that --dtype (dtype=) would change, and there is none"
        raise Refused([Finding("bad-argument", "--keep-dtype (keep_dtype=)", cause, "give both")])
    options: dict[str, Any] = {}
    if max_shard_size is not None:
        options["max_shard_size"] = size_of(max_shard_size)
    if dtype is not None:
        known = SHORT_DTYPES.get(dtype, dtype)
        if known not in CASTABLE:
            cause = "floats are written as no such dtype"
            fix = f"one of {', '.join(sorted(CASTABLE))}"
            raise Refused([Finding("bad-argument", f"dtype {dtype}", cause, fix)])
        options |= {"dtype": known, "keep_dtype": tuple(keep_dtype)}
    return options
