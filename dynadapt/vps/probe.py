"""Learn where a framework keeps every element, by letting it keep numbers that say which they are.

Every element of every tensor gets a number of its own, written as digits that its dtype holds exactly,
one digit a pass. The framework is given the tensors of pass 0 and every rank reads its buffers, then
those of pass 1, and so on; what was read says for each place of each buffer which element lies there,
and runs of such places are `Row`s. Nothing is known of the framework, and nothing is communicated:
the caller brings the ranks' rows together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dynadapt.errors import Finding, Refused
from dynadapt.vps._boxes_of_marks import boxes_of
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import MAX_ROWS_PER_KEY, Row, RowLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["Marks", "markers", "observed", "probe", "rows_from_marks"]

Built = TypeVar("Built")

#: Whole numbers from 1 up to this are exact and different in a dtype.
EXACT = {
    "float8_e4m3fn": 1 << 4,
    "float8_e5m2": 1 << 3,
    "bfloat16": 1 << 8,
    "float16": 1 << 11,
    "float32": 1 << 24,
    "float64": 1 << 53,
    "uint8": (1 << 8) - 1,
    "int8": (1 << 7) - 1,
    "int16": (1 << 15) - 1,
    "int32": (1 << 31) - 1,
    "int64": 1 << 53,
}

_CHECK_BITS = 16
"""One stray value in 65,536 passes for a mark, if all its digits happen to be marks at all."""


@dataclass(frozen=True)
class Marks:
    """The numbering of all elements of some tensors; `markers` makes one.

    `shapes` are the tensors' own, unpadded; `base` is the number of values that a digit has (they
    are 1 to `base`, so that the zeros of padding are none); `passes` the number of digits.
    """

    shapes: Mapping[str, tuple[int, ...]]
    base: int
    passes: int

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The number of each tensor's first element, in the order of `shapes`, and of the end."""
        return np.cumsum([0, *(prod(shape) for shape in self.shapes.values())])

    def values(self, number: int) -> dict[str, NDArray[Any]]:
        """What to load in pass `number`: a tensor a name, float32 (float64 if the base asks for it).

        >>> markers({"w": (3,)}, "float64").values(0)["w"].tolist()
        [52656.0, 91637.0, 148816.0]
        """
        if not 0 <= number < self.passes:
            raise ValueError(f"there are passes 0 to {self.passes - 1}, not {number}")
        kind = np.float32 if self.base <= EXACT["float32"] else np.float64
        found = {}
        for name, start, stop in zip(self.shapes, self.starts, self.starts[1:], strict=False):
            words = _words(np.arange(start, stop, dtype=np.uint64))
            digits = words // np.uint64(self.base) ** np.uint64(number) % np.uint64(self.base)
            found[name] = (digits + np.uint64(1)).astype(kind).reshape(self.shapes[name])
        return found

    def decode(self, readings: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
        """The element that lies in each place of one buffer, from what was read of it in each pass.

        The answer is of the buffer's flattened length; -1 where there is no mark (padding, a value
        that was changed). Raises `ValueError` unless there is one reading a pass, all of one length.

        >>> marks = markers({"w": (2,)})
        >>> marks.decode([np.append(marks.values(0)["w"], [0, 42])]).tolist()
        [0, 1, -1, -1]
        """
        flats = [np.asarray(values).reshape(-1) for values in readings]
        if len(flats) != self.passes or len({flat.size for flat in flats}) != 1:
            raise ValueError(f"needs {self.passes} readings of one length, not {len(flats)}")
        word = np.zeros(flats[0].size, np.uint64)
        valid = np.ones(flats[0].size, bool)
        for number, flat in enumerate(flats):
            wide = flat.astype(np.float64)
            good = (wide >= 1) & (wide <= self.base) & (wide == np.floor(wide))
            valid &= good
            digit = np.where(good, wide - 1, 0).astype(np.uint64)
            word += digit * np.uint64(self.base) ** np.uint64(number)
        element = word >> np.uint64(_CHECK_BITS)
        valid &= (element < np.uint64(self.starts[-1])) & (_words(element) == word)
        return np.where(valid, element.astype(np.int64), -1)


def markers(shapes: Mapping[str, Sequence[int]], dtype: str = "float32") -> Marks:
    """Number the elements of tensors such that `dtype` holds every digit exactly.

    `dtype` is the *least* exact one that the values pass through: masters that a framework makes
    from bfloat16 weights need "bfloat16". A tied tensor is one tensor, under one of its names.
    Raises `ValueError` for a dtype that holds too few numbers.

    >>> markers({"w": (300, 300)}, "bfloat16").passes
    5
    """
    if dtype not in EXACT:
        raise ValueError(f"cannot mark {dtype}: it is none of {', '.join(EXACT)}")
    total = sum(prod(shape) for shape in shapes.values())
    words, base, passes = total << _CHECK_BITS, EXACT[dtype], 1
    if words >= 1 << 63:
        raise ValueError(f"{total} elements are too many to number")
    while base**passes < words:
        passes += 1
    return Marks({name: tuple(shape) for name, shape in shapes.items()}, base, passes)


def rows_from_marks(
    marks: Marks,
    buffers: Mapping[str, NDArray[np.int64]],
    slots: Mapping[str, str] | str = "param",
) -> tuple[Row, ...]:
    """One rank's rows, from the decoded elements of each of its buffers.

    `buffers` are 1-D views of storage (an N-D array is taken in C order), as `Marks.decode` gives
    them; `slots` says which state a buffer holds, by its name, or for all. As few rows as may be: a
    slice of a matrix is one, a flat span at most `2 * ndim - 1`, two packed blocks are two. Raises
    `Refused` with each tensor that lies twice in the buffers of a slot (`duplicate-mark`) or in more
    than 4,096 boxes (`too-many-rows`).

    >>> rows = rows_from_marks(markers({"w": (2, 3)}), {"flat": np.array([-1, 1, 2, 3])})
    >>> [(str(row.box), row.offset) for row in rows]
    [('[0:1,1:3]', 1), ('[1:2,0:1]', 3)]
    """
    names = list(marks.shapes)
    rows: list[Row] = []
    findings: list[Finding] = []
    seen: dict[Key, list[NDArray[np.int64]]] = {}
    for buffer, elements in buffers.items():
        slot = slots if isinstance(slots, str) else slots[buffer]
        for tensor, linear, at in _by_tensor(marks, elements.reshape(-1)):
            key = Key(names[tensor], slot)
            seen.setdefault(key, []).append(linear)
            if (np.diff(linear) == 0).any():
                continue
            shape = marks.shapes[key.name]
            placed = boxes_of(linear, at, shape, MAX_ROWS_PER_KEY)
            if placed is None:
                cause = f"it lies in more than {MAX_ROWS_PER_KEY} boxes of {buffer}"
                findings.append(Finding("too-many-rows", str(key), cause, "probe a regular layout"))
                continue
            rows += [Row(key, box, buffer, offset, strides) for box, offset, strides in placed]
    for key, found in seen.items():
        every = np.sort(np.concatenate(found), kind="stable")
        twice = int(np.count_nonzero(np.diff(every) == 0))
        if twice:
            cause = f"{twice} of its elements are in two places of this rank's buffers"
            fix = "give each kind of copy a slot of its own"
            findings.append(Finding("duplicate-mark", str(key), cause, fix))
    if findings:
        raise Refused(findings)
    return tuple(sorted(rows, key=lambda row: (row.key, row.box)))


def probe(
    marks: Marks,
    load: Callable[[Mapping[str, NDArray[Any]]], Built],
    read: Callable[[Built], Mapping[str, NDArray[Any]]],
    slots: Mapping[str, str] | str = "param",
) -> tuple[Row, ...]:
    """Run a framework on marks, once a pass: this rank's rows.

    `load` makes the framework's object from full tensors (or loads them into one that there is);
    `read` returns its buffers on this rank by name, the same ones each time. Padding that the
    framework leaves as it found the memory may hold marks of tensors that were freed there; under
    `torch.use_deterministic_algorithms(True)` new memory is NaN. Raises as `rows_from_marks` does,
    and `ValueError` if the passes' buffers differ.

    >>> rows = probe(markers({"w": (4,)}), lambda full: full["w"], lambda w: {"rank 1": w[2:]})
    >>> str(rows[0].box), rows[0].offset
    ('[2:4]', 0)
    """
    readings: dict[str, list[NDArray[Any]]] = {}
    for number in range(marks.passes):
        for name, values in read(load(marks.values(number))).items():
            readings.setdefault(name, []).append(np.array(values))  # the next pass overwrites it
    decoded = {name: marks.decode(own) for name, own in readings.items()}
    return rows_from_marks(marks, decoded, slots)


def observed(
    marks: Marks,
    rows: Mapping[int, Iterable[Row]],
    specs: Iterable[KeySpec] | None = None,
    dtype: str = "float32",
) -> RowLayout:
    """All ranks' rows as one layout. Without `specs`, each key that has a row is of `dtype`.

    >>> marks = markers({"w": (4,)})
    >>> observed(marks, {r: probe(marks, dict, lambda full: {"b": full["w"][r::2]}) for r in (0, 1)})
    RowLayout(1 keys, 4 rows, 2 endpoints)
    """
    own = {rank: tuple(found) for rank, found in rows.items()}
    if specs is None:
        keys = sorted({row.key for found in own.values() for row in found})
        order = {name: number for number, name in enumerate(marks.shapes)}
        specs = [KeySpec(k, marks.shapes[k.name], dtype, order=order[k.name]) for k in keys]
    return RowLayout(specs, own)


def _words(elements: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Element numbers with a check of 16 bits behind them: the finish of splitmix64."""
    mixed = (elements + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    check = (mixed ^ (mixed >> np.uint64(31))) & np.uint64((1 << _CHECK_BITS) - 1)
    words: NDArray[np.uint64] = (elements << np.uint64(_CHECK_BITS)) | check
    return words


def _by_tensor(
    marks: Marks, elements: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Per tensor in a buffer: its number, the elements of it in ascending order, and where they lie."""
    at = np.flatnonzero(elements >= 0)
    held = elements[at]
    if (np.diff(held) < 0).any():
        order = np.argsort(held, kind="stable")
        at, held = at[order], held[order]
    cuts = np.searchsorted(held, marks.starts)
    for tensor in np.flatnonzero(np.diff(cuts)).tolist():
        low, high = cuts[tensor], cuts[tensor + 1]
        yield tensor, held[low:high] - marks.starts[tensor], at[low:high]
