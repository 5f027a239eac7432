"""The hash of one box of one key on this seat: what certificates add up and differences are found by."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from dynadapt.torch_dtypes import dtype_name, torch_dtype
from dynadapt.transport._torch import as_words, cast_into
from dynadapt.transport.certificate import room_for, weighted_sum
from dynadapt.transport.weights import MASK
from dynadapt.vps.box import Box
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dynadapt.transport.executor import Storage
    from dynadapt.vps.keys import Key, KeySpec

__all__ = ["PIECE", "Wanted", "acts_for", "hash_of", "scratch_bytes"]

PIECE = 1 << 20
"""Elements that are cast, or copied from a device, at a time."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One sum to take: the elements of a key, cast to `dtype`, weighted as `as_key`.

    `any_nan` counts all NaNs as equal: for copies that a framework cast, whose NaN bits are its own.
    """

    spec: KeySpec
    dtype: str
    as_key: Key
    any_nan: bool = False


def acts_for(seat: int, endpoint: int, workers: Sequence[int]) -> bool:
    """Whether a seat reads for an endpoint: for itself, and for the files that are its share."""
    if endpoint >= 0:
        return endpoint == seat
    return bool(workers) and workers[zlib.crc32(str(endpoint).encode()) % len(workers)] == seat


def hash_of(storage: Storage, endpoint: int, want: Wanted, cell: Box) -> int:
    """The hash of a box that one endpoint holds here."""
    view = storage.view(endpoint, want.spec.key, cell)
    plain = view.device.type == "cpu" and dtype_name(view.dtype) == want.dtype
    if plain and not want.any_nan:
        return weighted_sum(as_words(view), cell, want.as_key)
    total = 0
    for part in _pieces(cell, PIECE):  # a cast or a device copy is made piece by piece
        window = tuple(
            slice(a - base, b - base) for a, b, base in zip(part.lo, part.hi, cell.lo, strict=True)
        )
        cast = torch.empty(part.shape, dtype=torch_dtype(want.dtype))
        cast_into(cast, view[window].to("cpu"))
        if want.any_nan and cast.is_floating_point():
            cast[torch.isnan(cast)] = float("nan")  # one pattern for all
        total += weighted_sum(as_words(cast), part, want.as_key)
    return total & MASK


def _pieces(box: Box, limit: int) -> Iterator[Box]:
    """A box in parts of at most `limit` elements, cut along its first dims."""
    if box.volume <= limit or not box.ndim:
        yield box
        return
    for dim, size in enumerate(box.shape):
        inner = prod(box.shape[dim + 1 :])
        if size > 1:
            rows = max(limit // inner, 1)
            for at in range(box.lo[dim], box.hi[dim], rows):
                lo = (*box.lo[:dim], at, *box.lo[dim + 1 :])
                hi = (*box.hi[:dim], min(at + rows, box.hi[dim]), *box.hi[dim + 1 :])
                yield from _pieces(Box(lo, hi), limit)
            return


def scratch_bytes(specs: Iterable[KeySpec]) -> int:
    """The most that `hash_of` holds at once beside the tensors, for keys like these.

    The room of a sum, and for a cast the cast piece and a mark an element.
    """
    every = tuple(specs)
    most = max((spec.numel * max(itemsize(spec.dtype) // 4, 1) for spec in every), default=0)
    return room_for(most) + (PIECE * 6 if any(spec.derived for spec in every) else 0)
