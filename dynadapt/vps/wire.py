"""The wire form: one versioned JSON header, then raw little-endian arrays. Never a pickle.

    b"DYNA" | u32 version | u64 header length | header JSON | array bytes, 8-byte aligned

Everything that crosses between seats or lies in a file goes through here: key specs, rows, scalars,
aux values. A reader checks every length before it allocates.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.errors import DynadaptError
from dynadapt.vps.box import MAX_DIMS, Box
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "VERSION",
    "WireError",
    "decode",
    "decode_rows",
    "decode_specs",
    "encodable",
    "encode",
    "encode_rows",
    "encode_specs",
]

MAGIC = b"DYNA"
VERSION = 1
_HEAD = struct.Struct("<4sIQ")
_NAMES = frozenset({str, bool, type(None)})
_SCALARS = frozenset({str, int, bool, type(None)})


class WireError(DynadaptError):
    """Bytes that are not a message of this version; `reason` is `wire-<what>`."""


def _plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf" and dtype.itemsize <= 8


def encodable(value: Any) -> bool:
    """Whether `encode` can carry a value: plain Python values, numpy numbers and arrays.

    >>> encodable({"lr": 0.1, "betas": (0.9, 0.95)}), encodable(object())
    (True, False)
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return True
    if isinstance(value, list | tuple):
        return all(map(encodable, value))
    if isinstance(value, dict):
        return all(isinstance(k, str | int) for k in value) and all(map(encodable, value.values()))
    return isinstance(value, np.ndarray | np.generic) and _plain(value.dtype)


def encode(value: Any) -> bytes:
    """One message of a value.

    >>> decode(encode({"a": (1, 2.5), "b": b"x"}))
    {'a': (1, 2.5), 'b': b'x'}
    """
    arrays: list[bytes] = []
    offset = 0

    def lower(item: Any) -> Any:
        nonlocal offset
        if isinstance(item, np.generic):
            item = item.item()
        if item is None or isinstance(item, bool | str):
            return item
        if isinstance(item, int):
            return item if -(2**53) < item < 2**53 else {"$int": str(item)}
        if isinstance(item, float):
            return {"$float": item.hex()}
        if isinstance(item, list):
            if _NAMES.issuperset(map(type, item)):
                return item
            return [lower(part) for part in item]
        if isinstance(item, tuple):
            return {"$tuple": [lower(part) for part in item]}
        if isinstance(item, dict):
            return {"$dict": [[lower(k), lower(v)] for k, v in item.items()]}
        if isinstance(item, bytes):
            data, shape, dtype = item, [len(item)], "bytes"
        elif isinstance(item, np.ndarray) and _plain(item.dtype):
            dtype = item.dtype.newbyteorder("<").str
            data = np.ascontiguousarray(item, dtype).tobytes()
            shape = list(item.shape)
        else:
            raise WireError(f"cannot encode a {type(item).__name__}", reason="wire-type")
        at = offset
        arrays.append(data + bytes(-len(data) % 8))
        offset += len(arrays[-1])
        return {"$array": [dtype, shape, at]}

    header = (_exact(value) or _dumps(lower(value))).encode()
    header += b" " * (-len(header) % 8)
    return _HEAD.pack(MAGIC, VERSION, len(header)) + header + b"".join(arrays)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _exact(value: Any) -> str | None:
    """The header of a value that JSON gives back as it was, such as key specs; None for any other.

    Written, read and compared in C, it costs a tenth of a walk through thousands of small values.
    """
    if not isinstance(value, dict | list):
        return None
    try:
        text = _dumps({"$json": value})
        return text if json.loads(text)["$json"] == value else None
    except (TypeError, ValueError, RecursionError):
        return None


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The value of one message; raises `WireError` for anything else."""
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise WireError(f"{len(view)} bytes is too short", reason="wire-short")
    magic, version, length = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise WireError("not a dynadapt message", reason="wire-magic")
    if version != VERSION:
        raise WireError(
            f"version {version}, this package reads version {VERSION}", reason="wire-version"
        )
    if length > len(view) - _HEAD.size:
        raise WireError("the header is cut off", reason="wire-short")
    try:
        header = json.loads(
            bytes(view[_HEAD.size : _HEAD.size + length]), parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise WireError(f"the header is not JSON: {error}", reason="wire-json") from None
    body = view[_HEAD.size + length :]
    try:
        return _lift(header, body)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"malformed value: {error}", reason="wire-form") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _lift(item: Any, body: memoryview) -> Any:
    if isinstance(item, list):
        if _SCALARS.issuperset(map(type, item)):
            return item
        return [_lift(part, body) for part in item]
    if not isinstance(item, dict):
        return item
    ((tag, inner),) = item.items()
    if tag == "$json":
        return inner
    if tag == "$int":
        return int(inner)
    if tag == "$float":
        return float.fromhex(inner)
    if tag == "$tuple":
        return tuple(_lift(part, body) for part in inner)
    if tag == "$dict":
        return {_lift(k, body): _lift(v, body) for k, v in inner}
    if tag != "$array":
        raise ValueError(f"unknown tag {tag!r}")
    dtype, shape, at = inner
    if any(not isinstance(n, int) or n < 0 for n in (*shape, at)):
        raise ValueError("negative size")
    kind = np.dtype("u1") if dtype == "bytes" else np.dtype(dtype)
    if not _plain(kind):
        raise ValueError(f"dtype {dtype!r}")
    count = int(np.prod([int(n) for n in shape], dtype=object))
    if at + count * kind.itemsize > len(body):
        raise ValueError("an array is cut off")
    array = np.frombuffer(body, kind, count, at).reshape(shape)
    return array.tobytes() if dtype == "bytes" else array.copy()


def encode_specs(specs: Iterable[KeySpec]) -> list[dict[str, Any]]:
    """Key specs as plain values."""
    return [
        {
            "key": list(spec.key),
            "shape": list(spec.shape),
            "dtype": spec.dtype,
            "kind": spec.kind,
            "trainable": spec.trainable,
            "derived": spec.derived,
            "presence": spec.presence,
            "order": spec.order,
            "group": spec.group,
            "aliases": list(spec.aliases),
            "local": spec.local,
        }
        for spec in specs
    ]


def decode_specs(items: Sequence[dict[str, Any]]) -> tuple[KeySpec, ...]:
    """The inverse of `encode_specs`; raises `WireError` for anything else."""
    try:
        return tuple(
            KeySpec(
                **{
                    **item,
                    "key": Key(*item["key"]),
                    "shape": tuple(item["shape"]),
                    "aliases": tuple(item["aliases"]),
                }
            )
            for item in items
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"malformed key: {error}", reason="wire-form") from None


def encode_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows as columns: keys and buffers are tables, coordinates one int64 array per field."""
    keys = sorted({row.key for row in rows})
    buffers = sorted({row.buffer for row in rows})
    key_at = {key: i for i, key in enumerate(keys)}
    buffer_at = {name: i for i, name in enumerate(buffers)}
    flat: list[int] = []
    for row in rows:
        flat += (key_at[row.key], buffer_at[row.buffer], row.offset, row.box.ndim)
        flat += (*row.box.lo, *row.box.hi, *row.strides)
    return {
        "keys": [list(key) for key in keys],
        "buffers": buffers,
        "rows": np.array(flat, np.int64),
    }


def decode_rows(item: dict[str, Any]) -> tuple[Row, ...]:
    """The inverse of `encode_rows`; raises `WireError` for anything else."""
    try:
        keys = [Key(*key) for key in item["keys"]]
        buffers = dict(enumerate(item["buffers"]))
        flat = item["rows"].tolist()
        rows: list[Row] = []
        boxes: dict[tuple[int, ...], Box] = {}  # a model has many tensors and few shapes
        at = 0
        while at < len(flat):
            key, buffer, offset, ndim = flat[at : at + 4]
            if not 0 <= ndim <= MAX_DIMS or key < 0:
                raise ValueError(f"row of {ndim} dims of key {key}")
            at += 4
            edges, strides = (
                tuple(flat[at : at + 2 * ndim]),
                tuple(flat[at + 2 * ndim : at + 3 * ndim]),
            )
            at += 3 * ndim
            box = boxes.get(edges)
            if box is None:
                box = boxes[edges] = Box(edges[:ndim], edges[ndim:])
            rows.append(Row(keys[key], box, buffers[buffer], offset, strides))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"malformed row: {error}", reason="wire-form") from None
    return tuple(rows)
