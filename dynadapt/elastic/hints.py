"""Why two tensors differ, where it can be told: the usual mistakes, tried one after another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.transport.casts import CASTABLE, cast
from dynadapt.vps.box import Box
from dynadapt.vps.keys import Key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dynadapt.elastic.comparison import Chosen, Difference
    from dynadapt.vps.keys import KeySpec

__all__ = ["LARGEST", "hinted"]

LARGEST = 64 << 20
"""Bytes of a tensor that is still read as a whole to look for a reason."""


def hinted(found: Difference, one: Chosen, two: Chosen) -> Difference:
    """The difference with a hint, if one of the usual reasons explains all of it."""
    name, _, slot = found.key.rpartition("/")
    a = one.names[Key(name, slot)]
    b = next(two.names[Key(n, slot)] for n in (name, *a.aliases) if Key(n, slot) in two.names)
    if max(a.nbytes, b.nbytes) > LARGEST or not (a.numel and b.numel):
        return found
    hint = next(_reasons(a, b, one, two), "")
    return replace(found, hint=hint) if hint else found


def _reasons(a: KeySpec, b: KeySpec, one: Chosen, two: Chosen) -> Iterator[str]:
    x, y = one.read(a, Box.whole(a.shape)), two.read(b, Box.whole(b.shape))
    if a.shape != b.shape:
        if a.shape == b.shape[::-1] and a.dtype == b.dtype and _same(x, y.T):
            yield "transposed: b is a with its dims in the other order"
        elif _longer(x, y) or _longer(y, x):
            more = y[x.shape[0] :] if x.shape[0] < y.shape[0] else x[y.shape[0] :]
            rows = f"one has {more.shape[0]} more rows, {'not all' if more.any() else 'all'} zeros"
            yield f"{'more rows' if more.any() else 'only padding'}: {rows}, and the rest is equal"
        return
    if a.dtype == b.dtype:
        if x.ndim == 2 and x.shape[0] == x.shape[1] and _same(x, y.T):
            yield "transposed"
        for dim in range(x.ndim):
            half, odd = divmod(x.shape[dim], 2)
            if half and not odd and _same(np.roll(x, half, dim), y):
                yield f"permuted halves along dim {dim}: a fused pair in the other order"
        yield from _neighbours(b, y, two, one)
    if {a.dtype, b.dtype} <= CASTABLE:
        for low in ("bfloat16", "float16"):
            rounded = [cast(cast(v, s.dtype, low), low, "float32") for v, s in ((x, a), (y, b))]
            if _same(*rounded):
                yield f"dtype rounding: equal as {low}"
        if _whole_scale(x, y, a, b):
            yield "one is the other times a constant"
    copy = two.names.get(Key(b.key.name, "compute"))
    if copy is not None and copy.dtype in CASTABLE and a.dtype in CASTABLE:
        held = two.read(copy, Box.whole(copy.shape))
        if _same(cast(x, a.dtype, copy.dtype), held):
            yield "stale master: b's computing copy is a's value, its master is not"


def _neighbours(b: KeySpec, y: NDArray[Any], two: Chosen, one: Chosen) -> Iterator[str]:
    """A tensor that has another tensor's value: names mixed up, or a tie that one side lost."""
    if np.all(y == y.flat[0]):
        return  # biases of zeros, norms of ones: as many have
    alike = [
        spec
        for spec in one.layout.keys
        if spec.moves
        and (spec.shape, spec.dtype, spec.key.slot) == (b.shape, b.dtype, b.key.slot)
        and spec.key.name != b.key.name
    ]
    for spec in alike[:64]:
        if _same(one.read(spec, Box.whole(spec.shape)), y):
            yield f"tied copy: b holds what a holds as {spec.key.name}"
            return


def _same(x: NDArray[Any], y: NDArray[Any]) -> bool:
    return x.shape == y.shape and bool(np.array_equal(x, y))


def _longer(x: NDArray[Any], y: NDArray[Any]) -> bool:
    return (
        x.ndim == y.ndim > 0
        and x.shape[0] < y.shape[0]
        and x.shape[1:] == y.shape[1:]
        and x.dtype == y.dtype
        and _same(x, y[: x.shape[0]])
    )


def _whole_scale(x: NDArray[Any], y: NDArray[Any], a: KeySpec, b: KeySpec) -> bool:
    """Whether a constant power of two lies between them: a loss scale that was not taken off."""
    u, v = cast(x, a.dtype, "float64").reshape(-1), cast(y, b.dtype, "float64").reshape(-1)
    used = (u != 0) & (v != 0)
    if used.sum() < 2 or not np.array_equal(u == 0, v == 0):
        return False
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        ratio = v[used] / u[used]
    return bool(ratio[0] != 1 and np.all(ratio == ratio[0]) and np.frexp(ratio[0])[0] == 0.5)
