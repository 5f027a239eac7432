"""Safetensors files: what their headers say.

The format: 8 bytes with the header's length, a JSON header of dtypes, shapes and byte ranges, the data
(github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding, Refused
from dynadapt.files import mapped
from dynadapt.vps.box import Box, row_major_strides
from dynadapt.vps.keys import itemsize
from dynadapt.vps.layout import Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynadapt.vps.keys import KeySpec

__all__ = ["BUFFERS", "DTYPES", "NAMES", "Header", "header_of", "read_header", "whole_row"]

MAX_HEADER = 100 << 20
BUFFERS = "dynadapt_buffers"
"""In the header's metadata: a JSON list of the names that are buffers, which the format does not say."""
SHARDED = "DCP_SHARDING_INFO"
"""The same: where in its tensor each entry begins, as torch's HuggingFaceStorageWriter puts it there."""

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Header:
    """What a file's header says: tensor -> (dtype, shape, byte offset in the file).

    `offsets` say where what a file has of a tensor begins in it, if it does not have all. `buffers` are
    the names of buffers, None if it does not say them; `aliases` name -> the other names of a tied
    tensor, as safetensors' own `save_model` records them.
    """

    entries: dict[str, tuple[str, tuple[int, ...], int]]
    buffers: frozenset[str] | None
    aliases: dict[str, list[str]]
    offsets: dict[str, tuple[int, ...]]


def read_header(path: str) -> Header:
    """The header of a file; raises `Refused` (`bad-file`)."""
    data = mapped(path)
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > min(len(data) - 8, MAX_HEADER):
            raise ValueError(f"a header of {length:,} bytes in a file of {len(data):,}")
        header = json.loads(bytes(data[8 : 8 + length]), object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise TypeError("the header is no object")
        metadata = dict(header.pop("__metadata__", None) or {})
        told, cut = metadata.get(BUFFERS), json.loads(metadata.get(SHARDED, "{}"))
        offsets = {str(name): tuple(at["saved_offsets"]) for name, at in cut.items()}
        buffers = None if told is None else frozenset(map(str, json.loads(told)))
        found: dict[str, tuple[str, tuple[int, ...], int]] = {}
        spans: list[tuple[int, int]] = []
        for name, entry in header.items():
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
                raise ValueError(f"{name} has a bad shape or place")
            if end - begin != prod(shape) * itemsize(dtype) or 8 + length + end > len(data):
                raise ValueError(f"{name} does not fit its place, or the file is cut short")
            own = offsets.get(name, (0,) * len(shape))
            if len(own) != len(shape) or any(type(n) is not int or n < 0 for n in own):
                raise ValueError(f"{name} has a bad place in its tensor")
            found[name] = (dtype, shape, 8 + length + begin)
            spans.append((begin, end))
        _tiled(spans, len(data) - 8 - length)
    except (
        *(ValueError, KeyError, TypeError, AttributeError),
        *(struct.error, RecursionError),
    ) as error:
        cause = f"is no whole safetensors file: {error!r}"[:300]
        raise Refused([Finding("bad-file", path, cause, "copy it again")]) from error
    aliases: dict[str, list[str]] = {}
    for alias, name in metadata.items():
        if name in found and alias not in found:
            aliases.setdefault(name, []).append(alias)
    return Header(found, buffers, aliases, offsets)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _tiled(spans: list[tuple[int, int]], size: int) -> None:
    """Raises `ValueError` unless tensors lie one after another over all of the data, as the format wants."""
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise ValueError(
                f"bytes {min(at, begin):,} to {max(at, begin):,} are no tensor's or two's"
            )
        at = end
    if at != size:
        raise ValueError(f"its tensors end at byte {at:,} of {size:,}")


def whole_row(spec: KeySpec, buffer: str) -> Row:
    """A whole tensor that lies row-major in a buffer of its own."""
    return Row(spec.key, Box.whole(spec.shape), buffer, 0, row_major_strides(spec.shape))


def header_of(specs: Sequence[KeySpec]) -> tuple[bytes, int, dict[str, int]]:
    """The bytes before the data, their number, and where each tensor starts in the file.

    A tied tensor is there once, and its other names are in the metadata.
    """
    buffers = json.dumps([spec.key.name for spec in specs if spec.kind == "buffer"])
    ties = {alias: spec.key.name for spec in specs for alias in spec.aliases}
    entries: dict[str, Any] = {"__metadata__": {**ties, "format": "pt", BUFFERS: buffers}}
    at, places = 0, {}
    for spec in specs:
        places[spec.key.name] = at
        entries[spec.key.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    start = 8 + len(text)
    return (
        struct.pack("<Q", len(text)) + text,
        start,
        {name: start + n for name, n in places.items()},
    )
