"""Position-sensitive sums of tensors: equal before and after a move, whatever the layouts.

The hash of a key is the sum over its elements of (32-bit word x product over dims of an odd weight of
(name, slot, dim, coordinate)), mod 2^64. A swapped or permuted pair changes it; it can be taken box by
box in any layout and added. Elements narrower than 32 bits are one zero-extended word, wider ones are
several words, each with an odd multiplier of its own. Weights come from two base-4096 digits of the
coordinate through tables made by splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from dynadapt.vps.box import Box
    from dynadapt.vps.keys import Key, KeySpec

__all__ = ["fingerprint", "key_seed", "weighted_sum", "word_weights"]

_MASK = (1 << 64) - 1
_DIGIT = 12
_BLOCK = 1 << 17
"""Elements hashed at a time: the widened words stay in the cache."""


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
        return mixed


@lru_cache(maxsize=65536)
def key_seed(name: str, slot: str) -> int:
    """64 bits that stand for a key in its weights.

    >>> key_seed("w", "param") != key_seed("w", "exp_avg")
    True
    """
    data = f"{name}\x00{slot}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _table(seed: int, dim: int, digit: int, start: int, stop: int) -> NDArray[np.uint64]:
    """Odd weights of the digit values `[start, stop)`."""
    salt = (seed + (dim * 4 + digit + 1) * 0xD1342543DE82EF95) & _MASK
    values = np.arange(start, stop, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = _splitmix(values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt))
        odd: NDArray[np.uint64] = mixed | np.uint64(1)
        return odd


def _dim_weights(seed: int, dim: int, lo: int, hi: int) -> NDArray[np.uint64]:
    """Odd weights of the coordinates `[lo, hi)` of one dim."""
    high_lo, high_hi = lo >> _DIGIT, ((hi - 1) >> _DIGIT) + 1
    low = _table(seed, dim, 0, 0, 1 << _DIGIT)
    high = _table(seed, dim, 1, high_lo, high_hi)
    if high_hi - high_lo == 1:
        one: NDArray[np.uint64] = low[lo - (high_lo << _DIGIT) : hi - (high_lo << _DIGIT)] * high[0]
        return one
    x = np.arange(lo, hi, dtype=np.int64)
    weights: NDArray[np.uint64] = low[x & ((1 << _DIGIT) - 1)] * high[(x >> _DIGIT) - high_lo]
    return weights


def word_weights(seed: int, count: int) -> NDArray[np.uint64]:
    """Odd multipliers of the `count` 32-bit words of one element; the first is 1."""
    weights = _table(seed, 63, 2, 0, count)
    weights[0] = 1
    return weights


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
    seed = key_seed(key.name, key.slot)
    weights = [
        _dim_weights(seed, dim, low, high)
        for dim, (low, high) in enumerate(zip(box.lo, box.hi, strict=True))
    ]
    return _sum(array, weights, seed)


def _sum(array: NDArray[Any], weights: Sequence[NDArray[np.uint64]], seed: int) -> int:
    if not array.ndim:
        return _block(array.reshape(1), [np.ones(1, np.uint64)], seed)
    inner = prod(array.shape[1:])
    if array.size <= _BLOCK:
        return _block(array, weights, seed)
    total = 0
    if inner > _BLOCK:
        for i in range(array.shape[0]):
            total += int(weights[0][i]) * _sum(array[i], weights[1:], seed)
        return total & _MASK
    rows = max(_BLOCK // inner, 1)
    for at in range(0, array.shape[0], rows):
        part = [weights[0][at : at + rows], *weights[1:]]
        total += _block(array[at : at + rows], part, seed)
    return total & _MASK


def _block(array: NDArray[Any], weights: Sequence[NDArray[np.uint64]], seed: int) -> int:
    """The hash of a block that fits the cache: widen to 64-bit words, then reduce dim by dim."""
    flat = np.ascontiguousarray(array).reshape(-1)
    size = flat.dtype.itemsize
    if size <= 4:
        words = flat.view(f"u{size}").astype(np.uint64)
        dims = list(weights)
    else:
        words = flat.view("<u4").astype(np.uint64)
        dims = [*weights, word_weights(seed, size // 4)]
    inner = dims.pop()
    while dims and inner.size < 512:  # few, long inner products are fast, many short ones are not
        inner = (dims.pop()[:, None] * inner[None, :]).reshape(-1)
    column = np.einsum("ij,j->i", words.reshape(-1, inner.size), inner)
    while dims:
        last = dims.pop()
        column = np.einsum("ij,j->i", column.reshape(-1, last.size), last)
    return int(column[0])


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
