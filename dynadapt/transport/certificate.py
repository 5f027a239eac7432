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
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from threading import local
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from dynadapt.vps.box import Box
    from dynadapt.vps.keys import Key, KeySpec

__all__ = ["MASK", "fingerprint", "key_seed", "weighted_sum", "word_weights"]

MASK = (1 << 64) - 1
"""Sums are kept to 64 bits."""

_DIGIT = 12
_BLOCK = 1 << 19
"""Words hashed at a time: what is made of them stays in the cache."""

_NARROW = 1 << 17
"""The same of words of 16 bits and less, which are hashed as floats of 64 bits."""

_LONG = 1 << 14
"""Coordinates of one dim whose weights are made at once, at most."""

_SHARED = 1024
"""Weights that are made together: a tensor comes in pieces that follow one another."""

_HALF = np.uint64(32)
_LIMBS = np.array([1 << 16 * i for i in range(4)], np.uint64)

_MANY = 8
"""Rows from which on a product of matrices is worth it."""

_SHORT, _SHORTEST, _LINE = 512, 64, 1 << 15
"""Inner products shorter than this are made longer, by multiplying the weights of two dims: if that makes
no more than so many weights, or if they are shorter than the second number."""


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


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
    salt = (seed + (dim * 4 + digit + 1) * 0xD1342543DE82EF95) & MASK
    values = np.arange(start, stop, dtype=np.uint64)
    values *= np.uint64(0x9E3779B97F4A7C15)
    values += np.uint64(salt)
    values = _splitmix(values)
    values |= np.uint64(1)
    return values


@dataclass(frozen=True, slots=True)
class _Span:
    """Coordinates `[lo, hi)` of a dim, or such values of one of their digits."""

    dim: int
    lo: int
    hi: int
    digit: int | None = None


def _spans(dim: int, lo: int, hi: int) -> Iterator[tuple[int, int, tuple[_Span, ...]]]:
    """Coordinates `[lo, hi)` in stretches; a long one by its digits, whose weights are few."""
    first, last = -(-lo >> _DIGIT), hi >> _DIGIT
    start, stop = first << _DIGIT, last << _DIGIT
    if hi - lo <= _LONG:
        yield lo, hi, (_Span(dim, lo, hi),)
        return
    yield start, stop, (_Span(dim, first, last, 1), _Span(dim, 0, 1 << _DIGIT, 0))
    if lo < start:
        yield lo, start, (_Span(dim, lo, start),)
    if stop < hi:
        yield stop, hi, (_Span(dim, stop, hi),)


def _weights(seed: int, span: _Span) -> NDArray[np.uint64]:
    """Odd weights of a span: a view of what its neighbours share."""
    if span.digit is not None:
        return _table(seed, span.dim, span.digit, span.lo, span.hi)
    start, stop = span.lo // _SHARED * _SHARED, -(-span.hi // _SHARED) * _SHARED
    return _shared(seed, span.dim, start, stop)[span.lo - start : span.hi - start]


@lru_cache(maxsize=32)
def _shared(seed: int, dim: int, lo: int, hi: int) -> NDArray[np.uint64]:
    """Odd weights of the coordinates `[lo, hi)` of one dim."""
    high_lo, high_hi = lo >> _DIGIT, ((hi - 1) >> _DIGIT) + 1
    high = _table(seed, dim, 1, high_lo, high_hi)
    base = high_lo << _DIGIT
    if high_hi - high_lo == 1:
        return _table(seed, dim, 0, lo - base, hi - base) * high
    low = _table(seed, dim, 0, 0, 1 << _DIGIT)
    return _outer(high, low)[lo - base : hi - base]


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
    seed, total = key_seed(key.name, key.slot), 0
    if not box.ndim:
        return int(_line(seed, (), array.itemsize)[0].apply(array.reshape(1))[0])
    cells = (_spans(dim, *ends) for dim, ends in enumerate(zip(box.lo, box.hi, strict=True)))
    for cell in product(*map(tuple, cells)):
        index = tuple(slice(a - lo, b - lo) for (a, b, _), lo in zip(cell, box.lo, strict=True))
        spans = tuple(span for _, _, own in cell for span in own)
        shape = tuple(span.hi - span.lo for span in spans)
        total += _sum(array[index].reshape(shape), spans, seed)
    return total & MASK


class _Room(local):
    """Memory of a thread that is used again and again: new memory costs more than what is done in it."""

    def __init__(self) -> None:
        self.wide = np.empty(_BLOCK, np.uint64)
        self.floats = self.wide.view(np.float64)
        self.own = np.empty(_BLOCK * 4, np.uint8)


_room = _Room()


class _Line:
    """Weights of the innermost dims, flattened, in the form in which they are applied fastest."""

    __slots__ = ("_even", "_limbs", "_odd", "_size", "_weights")

    def __init__(self, weights: NDArray[np.uint64], size: int) -> None:
        self._weights, self._size = weights, size
        self._even: NDArray[np.uint64] | None = None
        self._limbs: NDArray[np.float64] | None = None
        if size == 4 and not weights.size % 2:
            self._even = np.ascontiguousarray(weights[0::2])
            self._odd = weights[1::2] - (self._even << np.uint64(32))
        if size < 4 and weights.size <= _LINE:
            self._limbs = weights.astype("<u8").view("<u2").reshape(-1, 4).astype(np.float64)

    def times(self, weights: NDArray[np.uint64]) -> _Line:
        """The same of one dim more."""
        return _Line(_outer(weights, self._weights), self._size)

    def __len__(self) -> int:
        return self._weights.size

    def apply(self, array: NDArray[Any]) -> NDArray[np.uint64]:
        """Sums of the stretches of an array, row-major, that are as long as the weights.

        Two 32-bit words are one 64-bit number `v = first + 2**32 * second`, so mod 2^64 the weights
        `a` and `b` of the two are `v * a + (v >> 32) * (b - 2**32 * a)`, and nothing is widened.

        Words of 16 bits and less are multiplied, as floats, by the four 16-bit limbs of each weight: a sum
        of 2**15 such products is an integer below 2**53, which floats have exactly.
        """
        if not array.flags.c_contiguous:
            own = _room.own[: array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(own, array)
            array = own
        flat = array.reshape(-1)
        if self._even is not None and flat.view(np.uint64).flags.aligned:
            pairs = flat.view(np.uint64).reshape(-1, self._even.size)
            total = _dot(pairs, self._even)  # first: the shift would not wait for memory as well
            second = _room.wide[: pairs.size].reshape(pairs.shape)
            np.right_shift(pairs, _HALF, out=second)
            total += _dot(second, self._odd)
            return total
        words = flat.view(f"u{self._size}").reshape(-1, self._weights.size)
        if self._limbs is None or len(words) < _MANY:
            wide = _room.wide[: words.size].reshape(words.shape)
            np.copyto(wide, words)
            return _dot(wide, self._weights)
        floats = _room.floats[: words.size].reshape(words.shape)
        np.copyto(floats, words)
        found: NDArray[np.uint64] = (floats @ self._limbs).astype(np.uint64) @ _LIMBS
        return found


@lru_cache(maxsize=8)
def _line(seed: int, spans: tuple[_Span, ...], size: int) -> tuple[_Line, int]:
    """The innermost dims, their weights multiplied, and how many of the `spans` are not among them."""
    dims = [_weights(seed, span) for span in spans]
    last = word_weights(seed, size // 4) if size > 4 else np.ones(1, np.uint64)
    while dims and last.size < _SHORT:
        if last.size >= _SHORTEST and last.size * dims[-1].size > _LINE:
            break
        last = _outer(dims.pop(), last)
    return _Line(last, min(size, 4)), len(dims)


def _sum(array: NDArray[Any], spans: tuple[_Span, ...], seed: int) -> int:
    """The hash of a box: cut along its first dims into blocks that fit the cache, and added."""
    first, inner = _weights(seed, spans[0]), prod(array.shape[1:]) * max(array.itemsize // 4, 1)
    if inner > _BLOCK:
        slabs = zip(first, array, strict=True)
        return sum(int(w) * _sum(slab, spans[1:], seed) for w, slab in slabs) & MASK
    line, left = _line(seed, spans[1:], array.itemsize)
    short = not left and len(line) < _SHORT
    outer = [_weights(seed, span) for span in spans[left:0:-1]]
    rows = max((_BLOCK if array.itemsize >= 4 else _NARROW) // inner, 1)
    total = 0
    for at in range(0, array.shape[0], rows):
        part, own = array[at : at + rows], first[at : at + rows]
        if short:
            total += int(line.times(own).apply(part)[0])
            continue
        sums = line.apply(part)
        for weight in outer:
            sums = sums.reshape(-1, weight.size) @ weight
        total += int(sums @ own)
    return total & MASK


def _dot(rows: NDArray[np.uint64], weights: NDArray[np.uint64]) -> NDArray[np.uint64]:
    found: NDArray[np.uint64] = np.einsum("ij,j->i", rows, weights)
    return found


def _outer(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """All products, flat, those of one element of `a` side by side."""
    return (a[:, None] * b[None, :]).reshape(-1)


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
