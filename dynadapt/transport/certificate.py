"""Position-sensitive sums of tensors: equal before and after a move, whatever the layouts.

The hash of a key is the sum over its elements of (32-bit word x product over dims of an odd weight of
(name, slot, dim, coordinate)), mod 2^64. A swapped or permuted pair changes it; it can be taken box by
box in any layout and added. Words are signed numbers. Elements narrower than 32 bits are one word, wider
ones are several, each with an odd multiplier of its own (`weights`).

The products are taken as floats of 64 bits, which processors multiply and add by the vector. A weight is
cut into limbs: 128 words of 32 bits times a limb of 16 (or words of 16 times limbs of 32) add up to an
integer of at most 2**53, which floats have exactly, as all are signed; and signed words are what processors
make floats of fastest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import pairwise, product
from math import prod
from threading import local
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.transport.weights import (
    MASK,
    NONE,
    Coords,
    coords_of,
    key_seed,
    outer,
    weights_of,
    word_weights,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from dynadapt.vps.box import Box
    from dynadapt.vps.keys import Key, KeySpec

__all__ = ["VERSION", "fingerprint", "room_for", "weighted_sum"]

VERSION = 2
"""Of the weights: sums of two versions cannot be compared."""

_TERMS = 128
"""Products that are added as floats, at most."""

_SHORT = 64
"""Inner products shorter than this are made longer, by multiplying the weights of two dims."""

_BLOCK, _SLOTS = 1 << 17, 2
"""Words made floats at a time, which stay in the cache, and how often before their memory is written again:
a store to what was written a moment ago waits for it.
"""

_PRODUCT = 1 << 17
"""Words in a product of matrices, at most: OpenBLAS multiplies small matrices as they are, and copies
others.
"""

_SUMS = 1 << 13
"""Sums of products that are weighted at a time."""

_MANY = 1 << 15
"""Coordinates of the first dim whose weights are held at a time."""


def weighted_sum(array: NDArray[Any], box: Box, key: Key) -> int:
    """The hash of one box of a key. `array` has the box's shape, any strides, and a plain dtype.

    Half-precision types numpy lacks come as integers of the same size. Costs one pass.

    >>> from dynadapt.vps.box import Box
    >>> from dynadapt.vps.keys import Key
    >>> x = np.arange(6, dtype=np.float32).reshape(2, 3)
    >>> key = Key("w", "param")
    >>> whole = weighted_sum(x, Box((0, 0), (2, 3)), key)
    >>> halves = [weighted_sum(x[:, :1], Box((0, 0), (2, 1)), key),
    ...           weighted_sum(x[:, 1:], Box((0, 1), (2, 3)), key)]
    >>> whole == sum(halves) % 2**64
    True
    """
    if not box.volume:
        return 0
    seed, total = key_seed(key.name, key.slot), 0
    words = _words(array if box.ndim else array.reshape(1))
    cells = (coords_of(dim, *ends) for dim, ends in enumerate(zip(box.lo, box.hi, strict=True)))
    for cell in product(*map(tuple, cells)):
        index = tuple(slice(a - lo, b - lo) for (a, b, _), lo in zip(cell, box.lo, strict=True))
        dims = tuple(part for _, _, own in cell for part in own) or (NONE,)
        shape = tuple(map(len, dims))
        total += _sum(words[index].reshape(*shape, words.shape[-1]), dims, seed, array.itemsize)
    return total & MASK


def _words(array: NDArray[Any]) -> NDArray[Any]:
    """An array's words as signed integers, those of an element along a dim more."""
    size = array.itemsize
    if size <= 4:
        return array.view(f"i{size}")[..., None]
    if array.strides[-1] != size:
        array = np.ascontiguousarray(array)
    return array.view("<i4").reshape(*array.shape, size // 4)


class _Room(local):
    """Memory of a thread that is used again and again: new memory costs more than what is done in it."""

    def __init__(self) -> None:
        self.used = 0  # bytes, of all
        self.floats = np.empty((_SLOTS, _BLOCK))
        self.sums = np.empty(_SUMS * 4)
        self.whole = np.empty(_SUMS * 4, np.int64)


_room = _Room()


def room_for(words: int) -> int:
    """Bytes that this thread will take for sums of at most so many words at a time, over what it has taken.

    >>> room_for(0)
    0
    """
    blocks, lines = min(words, _SLOTS * _BLOCK), min(-(-words // _SHORT), _SUMS)
    return max(8 * (blocks + 2 * 4 * lines) - _room.used, 0)


@dataclass(frozen=True, slots=True)
class _Line:
    """Weights of the innermost dims, flattened and cut into limbs: those of many stretches of them, that are
    as long as one another, and of the rest.
    """

    many: NDArray[np.float64]
    rest: NDArray[np.float64]
    size: int

    @classmethod
    def of(cls, weights: NDArray[np.uint64], bits: int) -> _Line:
        """A line of odd weights, in signed limbs of so many bits."""
        size, count, half = weights.size, 64 // bits, 1 << (bits - 1)
        raised = weights + np.uint64(sum(half << bits * at for at in range(count)))
        limbs = raised.astype("<u8").view(f"<u{bits // 8}").reshape(size, count).astype("f8")
        limbs -= half
        each = min(size, _TERMS)
        cut = size // each * each
        return cls(limbs[:cut].reshape(-1, each, count), limbs[cut:], size)

    @property
    def shape(self) -> tuple[int, int]:
        """Stretches, and limbs."""
        return len(self.many) + bool(self.rest.size), self.rest.shape[1]

    def apply(self, words: NDArray[np.float64], sums: NDArray[np.float64]) -> None:
        """Add up rows of words, each as long as the line, into `sums`, by stretch, row and limb."""
        count, each, _ = self.many.shape
        most = _PRODUCT // each
        for at in range(0, len(words), most):
            rows, into = words[at : at + most], sums[:, at : at + most]
            cut = rows[:, : count * each].reshape(len(rows), count, each).transpose(1, 0, 2)
            np.matmul(cut, self.many, out=into[:count])
            if self.rest.size:
                np.matmul(rows[:, count * each :], self.rest, out=into[count])


@lru_cache(maxsize=8)
def _line(seed: int, dims: tuple[Coords, ...], size: int) -> tuple[_Line, int]:
    """The innermost dims, their weights multiplied, and how many of the `dims` are not among them."""
    inner = [weights_of(seed, coords) for coords in dims]
    last = word_weights(seed, size // 4) if size > 4 else np.ones(1, np.uint64)
    while inner and last.size < _SHORT:
        last = outer(inner.pop(), last)
    return _Line.of(last, 16 if size >= 4 else 32), len(inner)


def _sum(words: NDArray[Any], dims: tuple[Coords, ...], seed: int, size: int) -> int:
    """The hash of a box of words: cut along its first dims into blocks that fit the cache, and added."""
    first, inner = dims[0], prod(words.shape[1:])
    if len(first) > _MANY:
        cuts = [*range(first.lo, first.hi, _MANY), first.hi]
        parts = [replace(first, lo=lo, hi=hi) for lo, hi in pairwise(cuts)]
        return sum(
            _sum(words[p.lo - first.lo : p.hi - first.lo], (p, *dims[1:]), seed, size)
            for p in parts
        )
    own = weights_of(seed, first)
    if inner > _BLOCK:
        slabs = zip(own, words, strict=True)
        return sum(int(w) * _sum(slab, dims[1:], seed, size) for w, slab in slabs) & MASK
    line, left = _line(seed, dims[1:], size)
    between = [weights_of(seed, coords) for coords in dims[1 : left + 1]]
    each = inner // line.size  # lines of one coordinate of the first dim
    most, total = max(_SUMS // (each * line.shape[0]), 1), 0
    for at in range(0, len(words), most):
        sums = _line_sums(words[at : at + most], line)
        total += _weighted(sums, reduce(outer, between, own[at : at + most]))
    return total & MASK


def _line_sums(words: NDArray[Any], line: _Line) -> NDArray[np.float64]:
    """The sums of all lines, by stretch of the line, line and limb."""
    inner = prod(words.shape[1:])
    each, rows = inner // line.size, _BLOCK // inner
    shape = line.shape[0], len(words) * each, line.shape[1]
    sums = _room.sums[: prod(shape)].reshape(shape)
    _room.used += room_for(words.size)
    for number, at in enumerate(range(0, len(words), rows)):
        part = words[at : at + rows]
        floats = _room.floats[number % _SLOTS, : part.size]
        np.copyto(floats.reshape(part.shape), part)
        line.apply(floats.reshape(-1, line.size), sums[:, at * each : (at + len(part)) * each])
    return sums


def _weighted(sums: NDArray[np.float64], weights: NDArray[np.uint64]) -> int:
    """All lines' sums by their weights, the limbs put together."""
    whole = _room.whole[: sums.size].reshape(sums.shape)
    np.copyto(whole, sums, casting="unsafe")
    found = weights @ np.add.reduce(whole, axis=0).view(np.uint64)
    return sum(int(value) << 64 // len(found) * at for at, value in enumerate(found))


def fingerprint(specs: Iterable[KeySpec], sums: Mapping[Key, int]) -> str:
    """One 128-bit number, in hex, of a whole state: layout-free, and equal for equal states.

    Mixes name, slot, dtype and shape of every key that a checkpoint would hold with its sum. Derived
    copies and non-persistent buffers are left out; a state that was never made counts as zeros.
    """
    state = hashlib.blake2b(digest_size=16)
    for spec in sorted(specs, key=lambda s: s.key):
        if spec.derived or spec.kind == "transient":
            continue
        line = f"{spec.key.name}\x00{spec.key.slot}\x00{spec.dtype}\x00{list(spec.shape)}\x00"
        state.update(line.encode() + sums.get(spec.key, 0).to_bytes(8, "little"))
    return state.hexdigest()
