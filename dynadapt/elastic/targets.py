"""What the word after `--to` means: a format, a layout, or both."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from dynadapt.elastic.sizes import size_of
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import FileTarget
from dynadapt.registry import format_names
from dynadapt.transport.casts import CASTABLE
from dynadapt.vps.keys import SHORT_DTYPES
from dynadapt.vps.spec import LayoutSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["file_options", "proved", "target_of"]

_DEFAULT = dict.fromkeys(("zero0", "zero1", "zero2", "zero3"), "deepspeed")
"""The format of a kind of layout, where none is named."""

_WHOLE = {"safetensors", "torch", "universal"}
"""Formats that are the same for any number of ranks."""


def target_of(path: str | Path, spec: str, options: Mapping[str, Any] | None = None) -> FileTarget:
    """A target from text: `universal`, `zero3:dp=4`, or `deepspeed/zero3:dp=4`.

    Raises `Refused` (`bad-spec`).

    >>> target = target_of("out", "zero3:dp=4")
    >>> target.format, str(target.layout)
    ('deepspeed', 'zero3:dp=4')
    """
    known = format_names()
    text = spec.strip()
    if text in known:
        return FileTarget(str(path), text, None, options=dict(options or {}))
    if ":" not in text and "/" not in text:
        near = difflib.get_close_matches(text, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        cause = f"is neither a format ({', '.join(known)}) nor a layout{hint}"
        raise Refused([Finding("bad-spec", text, cause, "write e.g. zero3:dp=4 or safetensors")])
    layout = LayoutSpec.parse(text)
    named = layout.format or _DEFAULT.get(layout.kind)
    if named not in known:
        cause = f"no format is called {named!r}" if named else f"{layout.kind} needs a format"
        fix = f"known: {', '.join(known)}; write FORMAT/{layout.kind}:..."
        raise Refused([Finding("bad-spec", text, cause, fix)])
    if named in _WHOLE:
        cause = f"{named} is the same for any number of ranks, and has no layout"
        raise Refused([Finding("bad-spec", text, cause, f"write {named}")])
    return FileTarget(str(path), named, layout, options=dict(options or {}))


def proved(target: FileTarget) -> FileTarget:
    """A target whose options it can have; raises `Refused` (`bad-argument`)."""
    kind = target.layout.kind if target.layout is not None else target.format
    masters = kind.startswith("zero") or kind in {"deepspeed", "universal"}
    if masters and target.options.get("dtype") not in {None, "float32"}:
        cause = f"the masters of {target.layout or target.format} are float32"
        fix = "leave --dtype out; dtype= in SPEC is what the model computes in, as zero3:dp=4,dtype=bfloat16"
        where = f"--dtype {target.options['dtype']}"
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
        cause = "leaves names alone that --dtype would change, and there is none"
        raise Refused([Finding("bad-argument", "--keep-dtype", cause, "give --dtype, too")])
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
