"""Floating-point casts in numpy, also for the types that numpy lacks: bits as torch's casts give them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.files import raw_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CASTABLE", "cast", "same_bits", "same_values"]

#: Between these a cast is known; anything else moves as the bits it is.
CASTABLE = frozenset({"float16", "bfloat16", "float32", "float64"})


_BLOCK = 1 << 17
"""Elements rounded at a time: what is made of them stays in the cache."""

_SIXTEEN, _ONE, _HALF = (np.array(x, "<u4") for x in (16, 1, 0x7FFF))


def cast(array: NDArray[Any], source: str, target: str) -> NDArray[Any]:
    """An array of raw elements of one dtype as another, rounded to the nearest, ties to even.

    Raises `ValueError` for a pair that is not in `CASTABLE`.

    >>> cast(np.array([1.5, -2.0], "<f4"), "float32", "bfloat16")
    array([16320, 49152], dtype=uint16)
    """
    if source == target:
        return array
    if not {source, target} <= CASTABLE:
        raise ValueError(f"no cast from {source} to {target} is known")
    if source == "bfloat16":
        wide = (array.astype("<u4") << np.uint32(16)).view("<f4")
        return wide if target == "float32" else cast(wide, "float32", target)
    if target == "bfloat16":
        with np.errstate(over="ignore", invalid="ignore"):
            return _to_bfloat16(np.asarray(array, "<f4", order="C"))
    with np.errstate(over="ignore", invalid="ignore"):
        if (source, target) == ("float64", "float16"):
            array = array.astype("<f4")  # as torch does, which rounds twice
        narrowed: NDArray[Any] = array.astype(raw_dtype(target))
        return narrowed


def _to_bfloat16(array: NDArray[Any]) -> NDArray[np.uint16]:
    words = array.reshape(-1).view("<u4")
    found = np.empty(words.size, "<u2")
    room = np.empty(min(words.size, _BLOCK), "<u4")
    for at in range(0, words.size, _BLOCK):
        own, part = words[at : at + _BLOCK], found[at : at + _BLOCK]
        greatest = np.maximum.reduce(own.view("<f4"))  # first: it is the fastest to fill the cache
        rounded = room[: own.size]
        np.right_shift(own, _SIXTEEN, rounded)
        np.bitwise_and(rounded, _ONE, rounded)
        np.add(rounded, _HALF, rounded)
        np.add(rounded, own, rounded)
        np.right_shift(rounded, _SIXTEEN, rounded)
        np.copyto(part, rounded, casting="unsafe")  # faster than every other half of the words
        if np.isnan(greatest):  # rounding could carry a NaN into an infinity
            odd = np.flatnonzero(np.isnan(own.view("<f4")))
            part[odd] = (own[odd] >> np.uint32(16)).astype("<u2") | np.uint16(0x40)  # quiet
    return found.reshape(array.shape)


def same_bits(x: NDArray[Any], y: NDArray[Any]) -> bool:
    """Whether two arrays of one dtype have the same bits.

    >>> same_bits(np.array([np.nan]), np.array([np.nan])), same_bits(np.array([0.0]), np.array([-0.0]))
    (True, False)
    """
    if x.flags.c_contiguous and y.flags.c_contiguous and x.nbytes == y.nbytes:
        # The C library's, which holds no lock of the interpreter and makes no array of answers.
        return not _memcmp(x.ctypes.data, y.ctypes.data, x.nbytes)
    return bool(np.array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}")))


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def same_values(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two float arrays of one numpy dtype are equal, NaNs included.

    >>> same_values(np.array([np.nan, 1.0]), np.array([np.nan, 1.0]))
    True
    """
    return bool(np.array_equal(a, b, equal_nan=True))
