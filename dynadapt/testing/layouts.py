"""Layouts to test with: every kind that a row can express, drawn from a seed.

A kind says how one key is split over the endpoints; where its rows lie in memory (packed, padded,
transposed, interleaved with another tensor) is drawn apart from it.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from dynadapt.vps.box import Box, Span, row_major_strides, uncovered
from dynadapt.vps.keys import Key, KeySpec, Presence
from dynadapt.vps.layout import Row, RowLayout
from dynadapt.vps.mesh_layout import MeshLayout
from dynadapt.vps.placement import Flat, Pin, Placement, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "KINDS",
    "flat_rows",
    "grid_boxes",
    "random_layout",
    "random_mesh",
    "random_placements",
    "random_shape",
    "random_specs",
]

Boxes = dict[int, list[Box]]

DTYPES = ("float32", "bfloat16", "float64", "int64", "uint8", "bool", "float16", "complex64")


class _Placer:
    """Gives the rows of one endpoint their places in a few buffers per dtype."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ends: dict[str, int] = {}
        self._holes: dict[tuple[str, tuple[int, ...]], tuple[str, int, tuple[int, ...]]] = {}

    def place(self, key: Key, box: Box, dtype: str) -> Row:
        """A row with strides of its own, or in the gaps of an earlier row of the same shape."""
        hole = self._holes.pop((dtype, box.shape), None)
        if hole is not None:
            return Row(key, box, *hole)
        rng = self._rng
        order = list(range(box.ndim))
        if rng.random() < 0.3:
            rng.shuffle(order)
        step = interleave = 2 if rng.random() < 0.2 else 1
        strides = [0] * box.ndim
        for dim in reversed(order):
            strides[dim] = step
            step *= box.shape[dim] + rng.choice((0, 0, 0, 1))
        buffer = f"{dtype}/{rng.randrange(2)}"
        row = Row(key, box, buffer, self._after(buffer), tuple(strides))
        self._ends[buffer] = row.last + interleave
        if interleave == 2:
            self._holes[dtype, box.shape] = (buffer, row.offset + 1, tuple(strides))
        return row

    def place_flat(self, key: Key, boxes: Iterable[Box], dtype: str) -> Iterator[Row]:
        """Rows one after another without a gap, as a span of a flat buffer has them."""
        buffer = f"{dtype}/flat"
        at = self._after(buffer)
        for box in boxes:
            yield Row(key, box, buffer, at, row_major_strides(box.shape))
            at += box.volume
        self._ends[buffer] = at

    def _after(self, buffer: str) -> int:
        return self._ends.get(buffer, 0) + self._rng.choice((0, 0, 1, 5))


def grid_boxes(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """The cells of a grid, row-major; `cuts` are the inner edges per dim, equal ones give empty cells.

    >>> [str(box) for box in grid_boxes((4, 2), [(1,), ()])]
    ['[0:1,0:2]', '[1:4,0:2]']
    """
    edges = [(0, *sorted(inner), size) for inner, size in zip(cuts, shape, strict=True)]
    parts = [list(itertools.pairwise(edge)) for edge in edges]
    return [
        Box(tuple(low for low, _ in cell), tuple(high for _, high in cell))
        for cell in itertools.product(*parts)
    ]


def _replicated(rng: random.Random, shape: tuple[int, ...], endpoints: Sequence[int]) -> Boxes:
    whole = Box.whole(shape)
    return {endpoint: [whole] for endpoint in _some(rng, endpoints)}


def _grid(rng: random.Random, shape: tuple[int, ...], endpoints: Sequence[int]) -> Boxes:
    """Uneven cells, each with one holder or several."""
    cuts: list[list[int]] = []
    most = 24
    for size in shape:
        num = rng.randint(1, max(1, min(4, most)))
        most //= num
        cuts.append([rng.randint(0, size) for _ in range(num - 1)])
    found: Boxes = {}
    for box in grid_boxes(shape, cuts):
        for endpoint in _some(rng, endpoints) if rng.random() < 0.3 else [rng.choice(endpoints)]:
            found.setdefault(endpoint, []).append(box)
    return found


def _overlapping(rng: random.Random, shape: tuple[int, ...], endpoints: Sequence[int]) -> Boxes:
    """A box a holder, overlapping as they come; what none of them has goes to anyone."""
    found: Boxes = {}
    for endpoint in _some(rng, endpoints):
        pairs = [sorted((rng.randint(0, size), rng.randint(0, size))) for size in shape]
        found[endpoint] = [Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))]
    taken = [boxes[0] for boxes in found.values()]
    for gap in uncovered(taken, Box.whole(shape)):
        found.setdefault(rng.choice(endpoints), []).append(gap)
    return found


def _flat(rng: random.Random, shape: tuple[int, ...], endpoints: Sequence[int]) -> Boxes:
    """A span an endpoint: even parts of a padded length, or any."""
    total = Box.whole(shape).volume
    num = len(endpoints)
    if rng.random() < 0.5:
        part = -(-total // num)
        edges = [min(i * part, total) for i in range(num + 1)]
    else:
        edges = [0, *sorted(rng.randint(0, total) for _ in range(num - 1)), total]
    return {
        endpoint: list(Span(start, stop).boxes(shape))
        for endpoint, start, stop in zip(endpoints, edges, edges[1:], strict=False)
    }


def _some(rng: random.Random, endpoints: Sequence[int]) -> list[int]:
    return sorted(rng.sample(list(endpoints), rng.randint(1, len(endpoints))))


KINDS: Mapping[str, Callable[[random.Random, tuple[int, ...], Sequence[int]], Boxes]] = {
    "replicated": _replicated,
    "grid": _grid,
    "overlapping": _overlapping,
    "flat": _flat,
}
"""Ways to split one key; `random_layout` also knows "zero", all keys in one padded flat buffer."""


def flat_rows(
    specs: Iterable[KeySpec], endpoints: Sequence[int], align: int = 1
) -> dict[int, list[Row]]:
    """Keys one after another in a flat buffer a dtype, padded to `align` and cut evenly (as ZeRO does).

    >>> spec = KeySpec(Key("w", "param"), (5,), "float32")
    >>> [str(row.box) for row in flat_rows([spec], (0, 1))[1]]
    ['[3:5]']
    """
    rows: dict[int, list[Row]] = {endpoint: [] for endpoint in endpoints}
    groups: dict[str, list[tuple[int, KeySpec]]] = {}
    ends: dict[str, int] = {}
    for spec in specs:
        buffer = f"{spec.dtype}/{spec.key.slot}/zero"
        start = -(-ends.get(buffer, 0) // align) * align
        groups.setdefault(buffer, []).append((start, spec))
        ends[buffer] = start + spec.numel
    for buffer, members in groups.items():
        part = -(-ends[buffer] // (len(endpoints) * align)) * align
        for number, endpoint in enumerate(endpoints):
            for start, spec in members:
                low = min(max(number * part - start, 0), spec.numel)
                high = min(max((number + 1) * part - start, 0), spec.numel)
                at = start + low - number * part
                for box in Span(low, high).boxes(spec.shape):
                    rows[endpoint].append(
                        Row(spec.key, box, buffer, at, row_major_strides(box.shape))
                    )
                    at += box.volume
    return rows


def random_layout(
    seed: int, specs: Sequence[KeySpec], endpoints: Sequence[int], kinds: Sequence[str] = ()
) -> RowLayout:
    """A layout of these keys: key `i` is split as `kinds[i % len(kinds)]` says, all else by the seed.

    Absent keys get no rows; a derived copy lies where its `param` does.

    >>> spec = KeySpec(Key("w", "param"), (5,), "float32")
    >>> random_layout(0, [spec], (0, 1, 2), ["flat"]).endpoints
    (0, 1, 2)
    """
    rng = random.Random(seed)
    names = [*kinds] or [rng.choice([*KINDS, "zero"]) for _ in range(3)]
    rows: dict[int, list[Row]] = {endpoint: [] for endpoint in endpoints}
    placers = {endpoint: _Placer(rng) for endpoint in endpoints}
    zero: list[KeySpec] = []
    split: dict[Key, Boxes] = {}
    plain = [spec for spec in specs if not spec.derived and spec.presence == "present"]
    for number, spec in enumerate(plain):
        kind = names[number % len(names)]
        if kind == "zero":
            zero.append(spec)
            continue
        split[spec.key] = KINDS[kind](rng, spec.shape, endpoints)
        for endpoint, boxes in split[spec.key].items():
            held = [box for box in boxes if box.volume]
            if kind == "flat":
                rows[endpoint] += placers[endpoint].place_flat(spec.key, held, spec.dtype)
            else:
                rows[endpoint] += [placers[endpoint].place(spec.key, b, spec.dtype) for b in held]
    for endpoint, flat in flat_rows(zero, endpoints, rng.choice((1, 2, 4))).items():
        rows[endpoint] += flat
        for row in flat:
            split.setdefault(row.key, {}).setdefault(endpoint, []).append(row.box)
    for spec in specs:
        if spec.derived and spec.presence == "present":
            for endpoint, boxes in split.get(Key(spec.key.name, "param"), {}).items():
                held = [box for box in boxes if box.volume]
                rows[endpoint] += [placers[endpoint].place(spec.key, b, spec.dtype) for b in held]
    return RowLayout(specs, rows)


def random_placements(
    rng: random.Random, shape: Sequence[int], axes: Mapping[str, int]
) -> tuple[Placement, ...]:
    """Any placements of a tensor over a mesh: nested shards, blocks, copies, pins, one flat split.

    >>> len(random_placements(random.Random(0), (4, 4), {"dp": 2, "tp": 2})) <= 2
    True
    """
    found: list[Placement] = []
    left = rng.sample(list(axes), len(axes))
    cut: set[int] = set()
    blocked: set[int] = set()
    while left:
        axis, ways = left[0], axes[left.pop(0)]
        kind = rng.choice(["replicate", "shard", "shard", "flat", "pin", "left out"])
        free = [dim for dim in range(len(shape)) if dim not in blocked]
        if kind == "shard" and free:
            dim = rng.choice(free)
            blocks = rng.choice(
                [n for n in (1, 1, 2, 3) if shape[dim] % n == 0 and dim not in cut] or [1]
            )
            copies = rng.choice([n for n in (1, 1, 2) if ways % n == 0])
            over = (axis, left.pop(0)) if left and copies == 1 and rng.random() < 0.5 else axis
            found.append(Shard(over, dim, rng.randint(1, 3), blocks, copies))
            cut.add(dim)
            blocked |= {dim} if blocks > 1 else set()
        elif kind == "flat" and not blocked:
            all_ = (axis, *left[: rng.randint(0, len(left))])
            many = any(isinstance(each, Pin) and each.also for each in found)
            flat = Flat(all_, rng.randint(1, 4))
            if not many and rng.random() < 0.5:  # one of several tensors in a flat buffer
                offset, total = rng.randint(0, 50), prod(axes[each] for each in all_)
                part = -(-(prod(shape) + offset) // total) + rng.randint(0, 5)
                flat = Flat(all_, 1, max(part, 1), offset)
            found.append(flat)
            break
        elif kind == "pin":
            where = sorted({rng.randrange(ways), rng.randrange(ways)})
            found.append(Pin(axis, where[0], tuple(where[1:])))
        elif kind == "replicate":
            found.append(Replicate(axis))
    return tuple(found)


def random_mesh(seed: int, specs: Sequence[KeySpec]) -> MeshLayout:
    """A declared layout of these keys on up to 12 seats, from a seed.

    >>> spec = KeySpec(Key("w", "param"), (5,), "float32")
    >>> len(random_mesh(0, [spec]).keys)
    1
    """
    rng = random.Random(seed)
    axes = {
        axis: rng.randint(1, most)
        for axis, most in rng.sample([("pp", 2), ("dp", 3), ("tp", 2)], 3)
    }
    own: dict[Key, tuple[Placement, ...]] = {}
    known: dict[tuple[int, ...], tuple[Placement, ...]] = {}
    for spec in specs:
        if spec.shape not in known or rng.random() < 0.3:
            known[spec.shape] = random_placements(rng, spec.shape, axes)
        own[spec.key] = known[spec.shape]
    step, first = rng.choice((1, 1, 2)), rng.randint(0, 2)
    seats = [first + step * number for number in range(prod(axes.values()))]
    return MeshLayout(axes, specs, own, seats)


def random_shape(rng: random.Random, max_volume: int = 4096) -> tuple[int, ...]:
    """0 to 8 dims; some sizes are 0 or 1, most are odd."""
    ndim = rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 8))
    shape: list[int] = []
    room = max_volume
    for _ in range(ndim):
        size = rng.randint(1, max(1, min(room, 37 if ndim < 4 else 5)))
        room = max(room // size, 1)
        shape.append(size)
    if shape and rng.random() < 0.06:
        shape[rng.randrange(ndim)] = 0
    return tuple(shape)


def random_specs(seed: int, num: int, max_volume: int = 4096) -> tuple[KeySpec, ...]:
    """Keys of `num` tensors: parameters with optimizer states, buffers, frozen, tied and absent ones.

    >>> all(spec.kind in ("parameter", "buffer", "state") for spec in random_specs(1, 9))
    True
    """
    rng = random.Random(seed)
    found: list[KeySpec] = []
    for number in range(num):
        name = f"layers.{number}.weight"
        shape = random_shape(rng, max_volume)
        dtype = rng.choice(DTYPES)
        if rng.random() < 0.15:
            key = Key(f"layers.{number}.mask", "buffer")
            found.append(KeySpec(key, shape, dtype, kind="buffer", trainable=False, order=number))
            continue
        aliases = (f"tied.{number}.weight",) if rng.random() < 0.2 else ()
        weight = KeySpec(Key(name, "param"), shape, dtype, order=number, aliases=aliases)
        if dtype not in {"float32", "bfloat16", "float64"} or rng.random() < 0.15:
            found.append(replace(weight, trainable=False))  # frozen: it has no optimizer state
            continue
        weight = replace(weight, group=number % 2)
        found.append(weight)
        presence: Presence = "none" if rng.random() < 0.15 else "present"
        for slot in ("exp_avg", "exp_avg_sq"):
            state = replace(weight, key=Key(name, slot), kind="state", presence=presence)
            found.append(replace(state, dtype=rng.choice((dtype, "float32"))))
        if dtype == "float32" and rng.random() < 0.5:
            copy = replace(weight, key=Key(name, "compute"), dtype="bfloat16", derived=True)
            found.append(copy)
    return tuple(sorted(found, key=lambda spec: spec.key))
