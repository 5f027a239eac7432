"""The weights of certificates: odd 64-bit numbers drawn from (name, slot, dim, coordinate).

That of a coordinate is the product of those of its digits (10 bits, 12 bits and the rest), from tables made
by splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["MASK", "NONE", "Coords", "coords_of", "key_seed", "outer", "weights_of", "word_weights"]

_LOW, _MIDDLE = 10, 12
"""Bits of the digits of a coordinate: of the lowest, and of the next."""

_FEW = 64
"""Values of the middle digit that are made with those of the lowest."""

_GOLDEN = 0x9E3779B97F4A7C15

_DIRECT = 1 << _LOW
"""Coordinates of one dim that are not taken by their digits, at most; and weights that are made together, as
a tensor comes in pieces that follow one another.
"""

_KEPT = 4 << _LOW
"""Weights that are kept for the next piece, at most: of more all are used at once."""

MASK = (1 << 64) - 1
"""Weights and sums are kept to 64 bits."""


def _odd(salted: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Odd weights, to be read only: splitmix64 of what stands for digit values (`_salted`) and a key."""
    x: NDArray[np.uint64] = salted + np.uint64(seed)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x |= np.uint64(1)
    x.flags.writeable = False
    return x


@lru_cache(maxsize=65536)
def key_seed(name: str, slot: str) -> int:
    """64 bits that stand for a key in its weights.

    >>> key_seed("w", "param") != key_seed("w", "exp_avg")
    True
    """
    data = f"{name}\x00{slot}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _salted(dim: int, digit: int, start: int, stop: int) -> NDArray[np.uint64]:
    """What stands for the digit values `[start, stop)` in the weights of every key."""
    salt = ((dim * 4 + digit + 1) * 0xD1342543DE82EF95 + _GOLDEN) & MASK
    values = np.arange(start, stop, dtype=np.uint64)
    values *= np.uint64(_GOLDEN)
    values += np.uint64(salt)
    return values


def _table(seed: int, dim: int, digit: int, start: int, stop: int) -> NDArray[np.uint64]:
    """Odd weights of the digit values `[start, stop)`."""
    return _odd(_salted(dim, digit, start, stop), seed)


@lru_cache(maxsize=8)
def _first_salted(dim: int) -> NDArray[np.uint64]:
    """The lowest digit's values, the first of the middle one, and the first of the rest."""
    ends = (1 << _LOW, _FEW, 1)
    return np.concatenate([_salted(dim, digit, 0, end) for digit, end in enumerate(ends)])


@lru_cache(maxsize=16)
def _first(seed: int, dim: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Odd weights of the lowest digit's values, and of the first values of all digits above it.

    Made together, as most dims have no more: to make a few takes as long as to make many.
    """
    found = _odd(_first_salted(dim), seed)
    low, middle, top = found[: 1 << _LOW], found[1 << _LOW : -1], found[-1:]
    return low, middle * top


@dataclass(frozen=True, slots=True)
class Coords:
    """Coordinates `[lo, hi)` of a dim, or such values of its lowest digit, or of all digits above that."""

    dim: int
    lo: int
    hi: int
    part: Literal["all", "low", "high", "none"] = "all"

    def __len__(self) -> int:
        return self.hi - self.lo


NONE = Coords(0, 0, 1, "none")
"""Of a tensor without dims."""


def coords_of(dim: int, lo: int, hi: int) -> Iterator[tuple[int, int, tuple[Coords, ...]]]:
    """Coordinates `[lo, hi)` in stretches; a long one by its digits, so that a line of weights serves all."""
    if hi - lo <= _DIRECT:
        yield lo, hi, (Coords(dim, lo, hi),)
        return
    first, last = -(-lo >> _LOW), hi >> _LOW
    start, stop = first << _LOW, last << _LOW
    if start < stop:
        yield start, stop, (Coords(dim, first, last, "high"), Coords(dim, 0, 1 << _LOW, "low"))
    if lo < start:
        yield lo, start, (Coords(dim, lo, start),)
    if stop < hi:
        yield stop, hi, (Coords(dim, stop, hi),)


def weights_of(seed: int, coords: Coords) -> NDArray[np.uint64]:
    """Their odd weights: a view of what their neighbours share."""
    if coords.part == "none":
        return np.ones(1, np.uint64)
    if coords.part == "low":
        return _first(seed, coords.dim)[0][coords.lo : coords.hi]
    start, stop = coords.lo & -_DIRECT, -(-coords.hi & -_DIRECT)
    make = _high if coords.part == "high" else _all
    kept = make if stop - start <= _KEPT else make.__wrapped__
    return kept(seed, coords.dim, start, stop)[coords.lo - start : coords.hi - start]


@lru_cache(maxsize=32)
def _all(seed: int, dim: int, lo: int, hi: int) -> NDArray[np.uint64]:
    """Odd weights of the coordinates `[lo, hi)` of one dim, which begin and end with a lowest digit."""
    low, _ = _first(seed, dim)
    return outer(_high(seed, dim, lo >> _LOW, hi >> _LOW), low)


@lru_cache(maxsize=32)
def _high(seed: int, dim: int, lo: int, hi: int) -> NDArray[np.uint64]:
    """Odd weights of the values `[lo, hi)` of all digits of a coordinate above the lowest."""
    if hi <= _FEW:
        return _first(seed, dim)[1][lo:hi]
    top_lo, top_hi = lo >> _MIDDLE, ((hi - 1) >> _MIDDLE) + 1
    top, base = _table(seed, dim, 2, top_lo, top_hi), top_lo << _MIDDLE
    if top_hi - top_lo == 1:
        return _table(seed, dim, 1, lo - base, hi - base) * top
    return outer(top, _table(seed, dim, 1, 0, 1 << _MIDDLE))[lo - base : hi - base]


def word_weights(seed: int, count: int) -> NDArray[np.uint64]:
    """Odd multipliers of the `count` 32-bit words of one element; the first is 1."""
    weights: NDArray[np.uint64] = _table(seed, 63, 3, 0, count).copy()
    weights[0] = 1
    return weights


def outer(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """All products, flat, those of one element of `a` side by side."""
    return (a[:, None] * b[None, :]).reshape(-1)
