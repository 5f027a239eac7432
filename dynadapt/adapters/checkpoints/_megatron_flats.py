"""Whose elements lie where in the flats of Megatron's distributed optimizer, saved as it has them in memory.

A bucket has the parameters of one rank of the model one after another, the last first, each from a
multiple of 64 elements on. The checkpoint does not say which; but the masters among the flats, rounded,
are the weights that it has by name, so every parameter is found by its values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from dynadapt.adapters.checkpoints._rows import rows_of_span
from dynadapt.errors import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from dynadapt.vps.box import Box
    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import Row

__all__ = ["SAMPLE", "Flat", "Piece", "Weight", "about", "placed", "rows_in"]

ALIGNED = 64
"""Elements between two places where a parameter may begin."""

FEW = 8
"""First elements by which parameters are looked up."""

SAMPLE = 64
"""Elements that are compared at the beginning, in the middle and at the end."""


@dataclass(frozen=True)
class Piece:
    """Elements `[start, stop)` of a flat: where they begin in a buffer of a file."""

    start: int
    stop: int
    file: str
    buffer: str
    at: int


@dataclass
class Flat:
    """The flats of one bucket by slot, each in pieces; `group` is the part of the model that it is of."""

    name: str
    group: str
    slots: dict[str, list[Piece]] = field(default_factory=dict)


@dataclass(frozen=True)
class Weight:
    """One rank's box of a parameter, and its elements as the checkpoint has them by name."""

    name: str
    box: Box
    dtype: str
    bits: NDArray[np.void]


class _Masters:
    """The elements of a flat of masters, piece by piece."""

    def __init__(self, pieces: Sequence[Piece], arrays: Mapping[str, NDArray[np.float32]]) -> None:
        self.pieces = sorted(pieces, key=lambda piece: piece.start)
        self.starts = [piece.start for piece in self.pieces]
        self.numel = max((piece.stop for piece in pieces), default=0)
        self._arrays = arrays

    def take(self, start: int, stop: int) -> NDArray[np.float32]:
        """Elements as they are; fewer where some are in no file."""
        first = max(int(np.searchsorted(self.starts, start, "right")) - 1, 0)
        found = []
        for piece in self.pieces[first:]:
            if piece.start >= stop:
                break
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                begin = piece.at + low - piece.start
                found.append(self._arrays[piece.buffer][begin : begin + high - low])
        return np.concatenate(found) if found else np.zeros(0, np.float32)


def placed(
    flats: Sequence[Flat],
    master: str,
    weights: Sequence[Weight],
    arrays: Mapping[str, NDArray[np.float32]],
    order: Sequence[str],
) -> tuple[list[tuple[Flat, int, Weight]], list[Finding]]:
    """For every parameter in a flat: the flat, its first element, and which it is.

    `order` are names as the model has them, by which parameters of equal values are told apart. Findings:
    `ambiguous-order`.
    """
    place = {name: i for i, name in enumerate(order)}
    index: dict[tuple[str, bytes], list[Weight]] = {}
    for weight in weights:
        index.setdefault((weight.dtype, weight.bits[:FEW].tobytes()), []).append(weight)
    lengths = {(w.dtype, min(FEW, w.bits.size)) for w in weights}
    found: list[tuple[Flat, int, Weight]] = []
    used: set[tuple[str, str, Box]] = set()
    for flat in flats:
        masters = _Masters(flat.slots.get(master, ()), arrays)
        at = base = 0
        while at < masters.numel:
            # The next bucket of several begins at once, and so does the other half of a gated weight.
            aligned = [begin + -(-(at - begin) // ALIGNED) * ALIGNED for begin in (base, 0)]
            fitting: list[Weight] = []
            for start in dict.fromkeys((*aligned, at)):
                alike = [
                    weight
                    for dtype, few in lengths
                    for weight in index.get(
                        (dtype, _bits(masters.take(start, start + few), dtype)), ()
                    )
                    if (flat.group, weight.name, weight.box) not in used
                ]
                fitting = [weight for weight in alike if _fits(masters, start, weight)]
                if fitting:
                    base, at = (base if start in aligned else start), start
                    break
            known = [weight for weight in fitting if _place(weight, place) is not None]
            if len(fitting) > 1 and len(known) == len(fitting):
                fitting = [max(known, key=lambda w: (_place(w, place), w.box))]
            if len(fitting) != 1:
                return found, [_lost(flat, at, fitting)]
            used.add((flat.group, fitting[0].name, fitting[0].box))
            found.append((flat, at, fitting[0]))
            at += fitting[0].box.volume
    return found, []


def rows_in(
    pieces: Sequence[Piece], at: int, weight: Weight, key: Key
) -> Iterator[tuple[str, Row]]:
    """The rows of a parameter whose box begins at element `at` of a flat, with their files."""
    stop = at + weight.box.volume
    for piece in pieces:
        low, high = max(at, piece.start), min(stop, piece.stop)
        if low >= high:
            continue
        begin = piece.at + low - piece.start
        shape = weight.box.shape
        for row in rows_of_span(key, shape, low - at, high - at, piece.buffer, begin):
            box = row.box.shifted((0,) * len(shape), weight.box.lo)
            yield piece.file, replace(row, box=box)


def _place(weight: Weight, place: Mapping[str, int]) -> tuple[int, int, int] | None:
    """Where a parameter stands in the user's order: a block of layers, the layer, and inside it.

    A name of layers that lie together stands for one of each.
    """
    head, found, tail = weight.name.partition("layers.")
    layer, _, rest = tail.partition(".")
    if not found:
        own = place.get(weight.name)
        return None if own is None else (own, 0, 0)
    block = f"{head}layers."
    begin = min((at for name, at in place.items() if name.startswith(block)), default=0)
    number = int(layer) if layer.isdecimal() else weight.box.lo[0] if weight.box.lo else 0
    inside = rest if layer.isdecimal() else tail
    own = place.get(weight.name, place.get(f"{block}{number}.{inside}"))
    return None if own is None else (begin, number, own)


def _lost(flat: Flat, at: int, fitting: Sequence[Weight]) -> Finding:
    cause = f"has from element {at:,} on the values of no parameter that is there by name"
    if fitting:
        names = ", ".join(f"{weight.name} {weight.box}" for weight in fitting[:3])
        cause = f"has from element {at:,} on values that several parameters have: {names}"
    fix = (
        "give the model's order, --order FILE (order=), or load it in Megatron and save it with "
        "--dist-ckpt-optim-fully-reshardable"
    )
    return Finding("ambiguous-order", flat.name, cause, fix)


def _fits(masters: _Masters, at: int, weight: Weight) -> bool:
    """Whether elements from `at` on, rounded, are a weight's: some at both ends and in the middle."""
    numel = weight.bits.size
    if at + numel > masters.numel:
        return False
    for start in {0, max(numel // 2 - SAMPLE // 2, 0), max(numel - SAMPLE, 0)}:
        stop = min(start + SAMPLE, numel)
        if (
            _bits(masters.take(at + start, at + stop), weight.dtype)
            != weight.bits[start:stop].tobytes()
        ):
            return False
    return True


def _bits(values: NDArray[np.float32], dtype: str) -> bytes:
    """Single-precision elements as another dtype has them, rounded to nearest even.

    >>> _bits(np.array([1.00390625], "f4"), "bfloat16").hex()
    '803f'
    """
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16).tobytes()
    if dtype == "float16":
        return values.astype(np.float16).tobytes()
    return values.tobytes()


def about(bits: NDArray[np.void], dtype: str, masters: NDArray[np.float32]) -> bool:
    """Whether most of some weights are their masters, but for rounding.

    >>> about(np.array([0x3F80, 0x4000], "u2"), "bfloat16", np.array([1.001, 2.0], "f4"))
    True
    """
    if dtype == "bfloat16":
        weights = (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif dtype in {"float16", "float32"}:
        weights = bits.astype(np.float32)
    else:
        return True
    if masters.dtype != np.float32 or not weights.size:
        return True
    with np.errstate(invalid="ignore", over="ignore"):
        near = abs(weights - masters) <= 0.15 * abs(masters) + 0.01 * abs(weights).max()
    return bool(near.mean() > 0.5)
