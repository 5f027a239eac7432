"""What state dicts do not say: which entries are buffers, and in which order parameters stand."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding
from dynadapt.vps.keys import Key, KeySpec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from dynadapt.protocols import FileTarget

__all__ = [
    "as_asked",
    "first_names",
    "leaves",
    "looks_like_buffer",
    "natural",
    "placeholders",
    "tensor_spec",
]

_BUFFERS = re.compile(
    r"(?:^|\.)(?:running_mean|running_var|num_batches_tracked|inv_freq|original_inv_freq"
    r"|position_ids|token_type_ids|attn\.bias|attn\.masked_bias|rotary_emb\.[a-z_]+)$"
)


def looks_like_buffer(name: str, dtype: str) -> bool:
    """Whether an entry is a buffer, where nothing but its name and dtype says so.

    >>> looks_like_buffer("bn.running_mean", "float32"), looks_like_buffer("fc.weight", "float32")
    (True, False)
    """
    whole = dtype == "bool" or dtype.startswith(("int64", "int32", "int16"))
    return whole or bool(_BUFFERS.search(name))


def tensor_spec(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    order: int,
    *,
    buffers: Collection[str] | None = None,
    aliases: Iterable[str] = (),
) -> KeySpec:
    """The spec of a state dict's entry; `buffers` are the names of buffers, if they are known."""
    is_buffer = looks_like_buffer(name, dtype) if buffers is None else name in buffers
    slot, kind = ("buffer", "buffer") if is_buffer else ("param", "parameter")
    return KeySpec(
        Key(name, slot),
        shape,
        dtype,
        kind=kind,  # type: ignore[arg-type]
        trainable=not is_buffer,
        order=order,
        aliases=tuple(sorted(aliases)),
    )


def placeholders(specs: Iterable[KeySpec], where: str) -> list[Finding]:
    """A finding if most of a model's parameters have no elements: what ZeRO-3 leaves in a state dict.

    >>> spec = tensor_spec("fc.weight", (0,), "float32", 0)
    >>> [f.reason for f in placeholders([spec], "model.bin")], placeholders([], "model.bin")
    (['unsupported-format'], [])
    """
    weights = [spec for spec in specs if spec.key.slot == "param"]
    empty = [spec.key.name for spec in weights if spec.shape == (0,)]
    if 2 * len(empty) <= len(weights):
        return []
    cause = (
        f"{len(empty)} of {len(weights)} parameters, {empty[0]} first, have no elements: they are what "
        "ZeRO-3 leaves in the place of weights that lie cut over the ranks"
    )
    fix = "read the folder of DeepSpeed's whole checkpoint, or gather the weights before they are saved"
    return [Finding("unsupported-format", where, cause, fix)]


def first_names(x: FileTarget, params: Iterable[KeySpec]) -> dict[str, str]:
    """Canonical name -> the framework's own, which of a tied parameter is the first, where it is known."""
    at = {name: i for i, name in reversed(list(enumerate((*x.order, *x.called))))}
    return {
        s.key.name: min((s.key.name, *s.aliases), key=lambda name: at.get(name, len(at)))
        for s in params
    }


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key that counts numbers in names: layer 2 before layer 10.

    >>> sorted(["l.10.w", "l.2.w"], key=natural)
    ['l.2.w', 'l.10.w']
    """
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(p)) if p.isdecimal() else (1, p) for p in parts)


def leaves(path: str) -> bool:
    """Whether a path, or a name that becomes part of one, leads out of the folder that it is taken in.

    >>> leaves("h.0/w"), leaves("../w"), leaves("/w")
    (False, True, True)
    """
    return ".." in PurePosixPath(path).parts or path.startswith("/") or "\0" in path


def as_asked(spec: KeySpec, options: Mapping[str, Any]) -> KeySpec:
    """With `options["dtype"]`, floats have that dtype, but for what has a name that matches `keep_dtype`."""
    dtype = options.get("dtype")
    names = (spec.key.name, *spec.aliases)
    kept = any(fnmatchcase(name, glob) for glob in options.get("keep_dtype", ()) for name in names)
    if dtype is None or kept or spec.dtype not in {"float16", "bfloat16", "float32", "float64"}:
        return spec
    return replace(spec, dtype=dtype)
