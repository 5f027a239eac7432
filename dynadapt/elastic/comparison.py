"""Two checkpoints compared, whatever their formats and layouts: element by element, in one pass.

Nothing is loaded as a whole: both are read through maps, in boxes of at most `PIECE` bytes.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from dynadapt.elastic import hints
from dynadapt.elastic.aux_comparison import aux_differences
from dynadapt.elastic.checkpoint import layout_of
from dynadapt.files import raw_dtype
from dynadapt.transport.casts import CASTABLE, cast, same_bits
from dynadapt.transport.sources import PIECE, Sources, boxes_of, inside
from dynadapt.vps.box import Box, linear_index
from dynadapt.vps.keys import Key, itemsize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from dynadapt.elastic.checkpoint import Checkpoint
    from dynadapt.elastic.selection import Selection
    from dynadapt.protocols import Described
    from dynadapt.vps.keys import KeySpec
    from dynadapt.vps.layout import RowLayout

__all__ = ["Chosen", "Comparison", "Difference", "Tolerance", "compare"]

Verdict = Literal["identical", "rounding", "different", "only-in-a", "only-in-b"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What still counts as equal: `|a - b| <= atol + rtol * |b|`, or at most `ulp` steps apart."""

    rtol: float = 0.0
    atol: float = 0.0
    ulp: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """What is known of one key in two checkpoints.

    `identical` is a verdict on values: of one dtype, on their bits (a NaN's and a zero's sign too).
    `rounding` is one on values that are neighbours in the coarser of both dtypes; `within` says
    that all differences are inside the tolerance that was asked for.
    `first` is the first coordinate, in row-major order, whose values differ; `places` say which file
    holds it on each side, `values` what is there. `ulp` is in steps of the coarser of both dtypes.
    `aliases` are the other names of a tied tensor.
    """

    key: str
    verdict: Verdict
    dtypes: tuple[str, str] = ("", "")
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    count: int = 0
    numel: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int = 0
    first: tuple[int, ...] | None = None
    values: tuple[float, float] = (0.0, 0.0)
    places: tuple[str, str] = ("", "")
    within: bool = False
    hint: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """The key under every name that a tied tensor has."""
        slot = self.key.rpartition("/")[2]
        return self.key, *(f"{name}/{slot}" for name in self.aliases)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what says nothing is left out."""
        found: dict[str, Any] = {"key": self.key, "verdict": self.verdict}
        if self.verdict == "identical":
            return found
        if self.aliases:
            found["aliases"] = list(self.aliases)
        found |= {"dtypes": list(self.dtypes), "shapes": [list(s) for s in self.shapes]}
        if self.first is not None:
            found |= {
                "count": self.count,
                "numel": self.numel,
                "max_abs": _finite(self.max_abs),
                "max_rel": _finite(self.max_rel),
                "max_ulp": self.max_ulp,
                "first": list(self.first),
                "values": [_finite(v) for v in self.values],
                "places": list(self.places),
            }
        if self.hint:
            found["hint"] = self.hint
        return found


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints compared: a `Difference` for every key, and for steps, hyperparameters, the rest.

    `aux` maps a path to the two values that differ.
    """

    tensors: tuple[Difference, ...]
    aux: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    bytes_read: int = 0

    @property
    def same(self) -> bool:
        """Whether nothing differs beyond the tolerance."""
        return not self.aux and all(d.verdict == "identical" or d.within for d in self.tensors)

    def count(self, verdict: Verdict) -> int:
        """Tensors with a verdict."""
        return sum(d.verdict == verdict for d in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain JSON values; identical tensors are counted, not listed."""
        return {
            "same": self.same,
            "counts": {v: self.count(v) for v in get_args(Verdict)},
            "bytes_read": self.bytes_read,
            "tensors": [d.to_json() for d in self.tensors if d.verdict != "identical"],
            "aux": {path: [repr(a), repr(b)] for path, (a, b) in self.aux.items()},
        }


def compare(
    a: Checkpoint,
    b: Checkpoint,
    *,
    selection: Selection | None = None,
    tolerance: Tolerance | None = None,
    ignore_missing: bool = False,
    threads: int = 2,
    on_bytes: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare the states of two checkpoints: tensors, steps, hyperparameters and the rest.

    Derived copies are left out: they follow from their masters. With `ignore_missing` only what both
    hold is compared. Raises `Refused` for files that cannot be read.
    """
    one, two = Chosen(a, selection), Chosen(b, selection)
    pairs, lonely = _pairs(one, two)
    total = sum(s.nbytes + t.nbytes for s, t in pairs)
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if on_bytes is not None:
            on_bytes(done, total)

    run = _Run(one, two, tolerance or Tolerance(), count)
    pairs.sort(key=lambda pair: -pair[0].nbytes)
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda pair: run.tensor(*pair), pairs))
    found = [hints.hinted(d, one, two) if d.verdict == "different" else d for d in found]
    if not ignore_missing:
        found += lonely
    called = {t.key.name: s.key.name for s, t in pairs}  # a tied tensor may go by another name in b
    aux = aux_differences(one.own, two.own, called, ignore_missing)
    return Comparison(tuple(sorted(found, key=lambda d: d.key)), aux, done)


class Chosen:
    """One checkpoint, or the part of it that is meant."""

    def __init__(self, checkpoint: Checkpoint, selection: Selection | None) -> None:
        self.files = checkpoint.files
        self.own: Described = checkpoint.own if selection is None else selection.of(checkpoint.own)
        self.layout: RowLayout = checkpoint.layout if selection is None else layout_of(self.own)
        self.sources = Sources(self.layout, self.own.buffers)
        self.names: dict[Key, KeySpec] = {}
        for spec in self.layout.keys:
            for name in (spec.key.name, *spec.aliases):
                self.names[Key(name, spec.key.slot)] = spec

    def read(self, spec: KeySpec, box: Box) -> NDArray[Any]:
        """The elements of a box, raw; zeros of what its owner never made."""
        if spec.presence != "present":
            return np.zeros(box.shape, raw_dtype(spec.dtype))
        return self.sources.read(spec.key, box)

    def boxes(self, spec: KeySpec, most: int) -> Iterator[Box]:
        """A tensor in boxes of at most `most` elements; each in one row, where no two rows share elements."""
        whole = Box.whole(spec.shape)
        boxes = [row.box for row in self.sources.rows(spec.key, whole)]
        if sum(box.volume for box in boxes) != whole.volume:
            boxes = [whole]
        for box in boxes:
            yield from boxes_of(box, most)

    def place(self, spec: KeySpec, coordinate: tuple[int, ...]) -> str:
        """The file that holds an element, and where in it."""
        if spec.presence != "present":
            return "nothing is held, as before a first step"
        at = Box(coordinate, tuple(x + 1 for x in coordinate))
        row = self.sources.rows(spec.key, at)[0]
        buffer = self.own.buffers[row.buffer]
        byte = buffer.offset + row.offset_of(coordinate) * itemsize(buffer.dtype)  # type: ignore[attr-defined]
        return f"{row.buffer.partition('#')[0]} at byte {byte:,}"


def _pairs(one: Chosen, two: Chosen) -> tuple[list[tuple[KeySpec, KeySpec]], list[Difference]]:
    pairs: list[tuple[KeySpec, KeySpec]] = []
    lonely: list[Difference] = []
    met: set[Key] = set()
    for spec in one.layout.keys:
        if spec.derived:
            continue
        names = (Key(name, spec.key.slot) for name in (spec.key.name, *spec.aliases))
        other = next((two.names[key] for key in names if key in two.names), None)
        if other is None or other.derived:
            lonely.append(_alone(spec, "only-in-a"))
            continue
        met.add(other.key)
        pairs.append((spec, other))
    lonely += [
        _alone(spec, "only-in-b")
        for spec in two.layout.keys
        if not spec.derived and spec.key not in met
    ]
    return pairs, lonely


def _alone(spec: KeySpec, verdict: Verdict) -> Difference:
    return Difference(
        str(spec.key),
        verdict,
        (spec.dtype, spec.dtype),
        (spec.shape, spec.shape),
        numel=spec.numel,
        aliases=spec.aliases,
    )


@dataclass
class _Tally:
    """Differences of one tensor, piece by piece."""

    count: int = 0
    beyond: int = 0
    strange: bool = False
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int = 0
    first: tuple[int, ...] | None = None
    at: int = 0
    values: tuple[float, float] = (0.0, 0.0)


class _Run:
    """Compares one pair of keys after another; one call of `tensor` a thread."""

    def __init__(
        self, one: Chosen, two: Chosen, tolerance: Tolerance, count: Callable[[int], None]
    ) -> None:
        self.one, self.two, self.tolerance, self.count = one, two, tolerance, count

    def tensor(self, a: KeySpec, b: KeySpec) -> Difference:
        """The verdict on one key."""
        known = {
            "dtypes": (a.dtype, b.dtype),
            "shapes": (a.shape, b.shape),
            "numel": a.numel,
            "aliases": tuple(sorted({*a.aliases, b.key.name, *b.aliases} - {a.key.name})),
        }
        if a.shape != b.shape:
            return Difference(str(a.key), "different", **known)  # type: ignore[arg-type]
        tally = _Tally()
        if "present" in (a.presence, b.presence) and a.numel:
            most = max(PIECE // max(itemsize(a.dtype), itemsize(b.dtype)), 1)
            for box in self.one.boxes(a, most):
                x, y = self.one.read(a, box), self.two.read(b, box)
                self.count(x.nbytes + y.nbytes)
                if a.dtype == b.dtype and same_bits(x, y):
                    continue
                small = max(most // 8, 1)  # numbers take much more room than bits
                for part in boxes_of(box, small):
                    at = inside(part, box)
                    self._piece(tally, part, a, b, x[at], y[at])
        if not tally.count:
            return Difference(str(a.key), "identical", **known)  # type: ignore[arg-type]
        verdict: Verdict = "different" if tally.max_ulp > 1 or tally.strange else "rounding"
        first = tally.first or ()
        return Difference(
            str(a.key),
            verdict,
            count=tally.count,
            max_abs=tally.max_abs,
            max_rel=tally.max_rel,
            max_ulp=tally.max_ulp,
            first=first,
            values=tally.values,
            places=(self.one.place(a, first), self.two.place(b, first)),
            within=not tally.beyond,
            **known,  # type: ignore[arg-type]
        )

    def _piece(
        self, tally: _Tally, box: Box, a: KeySpec, b: KeySpec, x: NDArray[Any], y: NDArray[Any]
    ) -> None:
        coarse = min((a.dtype, b.dtype), key=_precision)
        if not {a.dtype, b.dtype} <= CASTABLE:
            differ = x != y if x.dtype == y.dtype else np.ones(x.shape, bool)
            wide = [np.asarray(v, "f8") if v.dtype.kind in "iufb" else differ for v in (x, y)]
            steps = np.zeros(x.shape, np.int64)
            allowed = np.zeros(x.shape, bool)
            tally.strange |= bool(differ.any())
        else:
            ordered = [_ordered(cast(v, s.dtype, coarse), coarse) for v, s in ((x, a), (y, b))]
            wide = [np.asarray(cast(v, s.dtype, "float64")) for v, s in ((x, a), (y, b))]
            nans = np.isnan(wide[0]) & np.isnan(wide[1])
            steps = np.abs(ordered[0] - ordered[1])
            steps[nans] = 0
            differ = _bits_of(x) != _bits_of(y) if a.dtype == b.dtype else _unlike(*wide) & ~nans
            with np.errstate(invalid="ignore"):
                gap = np.abs(wide[0] - wide[1])
                gap[nans] = 0
                far = ~np.isfinite(gap)  # an infinity or a NaN is no neighbour of anything
                limit = self.tolerance.atol + self.tolerance.rtol * np.abs(wide[1])
                allowed = gap <= limit
                if self.tolerance.ulp:
                    allowed |= steps <= self.tolerance.ulp
                allowed &= ~far & (self.tolerance != Tolerance())  # else -0.0 would count as 0.0
            tally.strange |= bool((differ & far).any())
        if not differ.any():
            return
        tally.count += int(differ.sum())
        tally.beyond += int((differ & ~allowed).sum())
        with np.errstate(invalid="ignore", divide="ignore"):
            gap = np.abs(wide[0] - wide[1])[differ]
            scale = np.maximum(np.abs(wide[0]), np.abs(wide[1]))[differ]
            both = np.isnan(wide[0][differ]) & np.isnan(wide[1][differ])
            gap[both | (scale == 0)], scale[both | (scale == 0)] = 0, 1
            tally.max_abs = _top(tally.max_abs, gap)
            tally.max_rel = _top(tally.max_rel, gap / scale)
        tally.max_ulp = max(tally.max_ulp, int(steps[differ].max()))
        inside = tuple(int(n) for n in np.unravel_index(int(differ.argmax()), differ.shape))
        first = tuple(low + n for low, n in zip(box.lo, inside, strict=True))
        at = linear_index(first, a.shape)
        if tally.first is None or at < tally.at:
            tally.first, tally.at = first, at
            tally.values = (float(wide[0][inside]), float(wide[1][inside]))


def _bits_of(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(f"u{array.itemsize}")


def _unlike(x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """Where two arrays of floats differ, signs of zeros included."""
    found: NDArray[Any] = (x != y) | (np.signbit(x) != np.signbit(y))
    return found


def _precision(dtype: str) -> int:
    """Bits of a float's fraction: the coarser of two is the one with fewer."""
    return {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}.get(dtype, 0)


def _ordered(array: NDArray[Any], dtype: str) -> NDArray[np.int64]:
    """Floats as integers in the order of their values, neighbours one apart; both zeros are 0."""
    size = itemsize(dtype)
    bits = np.ascontiguousarray(array).view(f"u{size}").astype(np.int64).reshape(array.shape)
    if size == 8:
        negative, magnitude = bits < 0, bits & np.int64(0x7FFFFFFFFFFFFFFF)
    else:
        top = np.int64(1) << np.int64(8 * size - 1)
        negative, magnitude = (bits & top) != 0, bits & (top - 1)
    signed: NDArray[np.int64] = magnitude * (1 - 2 * negative.astype(np.int64))
    return signed


def _top(known: float, values: NDArray[Any]) -> float:
    if not values.size:
        return known
    if np.isnan(values).any():
        return math.inf
    return max(known, float(values.max()))


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
