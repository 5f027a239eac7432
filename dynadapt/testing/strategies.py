"""Hypothesis strategies for shapes, boxes, key sets and layouts.

What matters when an example shrinks (how many keys and endpoints, which kinds of split) is drawn by
hypothesis; the fine structure comes from a seed, because a layout of hundreds of draws would be slow.

>>> from hypothesis import find
>>> find(shapes(), lambda shape: len(shape) == 2)
(0, 0)
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from dynadapt.testing.layouts import KINDS, random_layout, random_specs
from dynadapt.vps.box import MAX_DIMS, Box, Span
from dynadapt.vps.placement import Flat, Pin, Placement, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.vps.keys import KeySpec
    from dynadapt.vps.layout import RowLayout

__all__ = ["boxes", "endpoints", "key_sets", "layouts", "placements", "seeds", "shapes", "spans"]

seeds = st.integers(0, 2**32 - 1)
"""A seed for everything that need not shrink."""


@st.composite
def shapes(
    draw: st.DrawFn, max_dims: int = MAX_DIMS, max_side: int = 6, max_volume: int = 600
) -> tuple[int, ...]:
    """0 to 8 dims, zero sizes included, of at most `max_volume` elements."""
    shape: list[int] = []
    for _ in range(draw(st.integers(0, max_dims))):
        room = max_volume // max(prod(shape), 1)
        shape.append(draw(st.integers(0, min(max_side, max(room, 1)))))
    return tuple(shape)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box inside a tensor, empty ones included."""
    pairs = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in pairs), tuple(high for _, high in pairs))


@st.composite
def spans(draw: st.DrawFn, shape: tuple[int, ...]) -> Span:
    """Any span inside a tensor."""
    total = prod(shape)
    low, high = sorted((draw(st.integers(0, total)), draw(st.integers(0, total))))
    return Span(low, high)


@st.composite
def key_sets(draw: st.DrawFn, max_tensors: int = 5, max_volume: int = 1500) -> tuple[KeySpec, ...]:
    """Specs of up to `max_tensors` tensors with their slots: tied, frozen, absent, empty, derived."""
    num = draw(st.integers(1, max_tensors))
    return random_specs(draw(seeds), num, max_volume)


def endpoints(max_seats: int = 8, among: int = 8) -> st.SearchStrategy[tuple[int, ...]]:
    """Some of the seats `[0, among)`, at least one, sorted."""
    seats = st.sets(st.integers(0, among - 1), min_size=1, max_size=max_seats)
    return seats.map(lambda chosen: tuple(sorted(chosen)))


@st.composite
def layouts(draw: st.DrawFn, specs: tuple[KeySpec, ...], over: tuple[int, ...]) -> RowLayout:
    """A layout of these keys over these endpoints: flat, gridded, replicated, overlapping, mixed."""
    kinds = draw(st.lists(st.sampled_from([*KINDS, "zero"]), min_size=1, max_size=4))
    return random_layout(draw(seeds), specs, over, kinds)


@st.composite
def placements(
    draw: st.DrawFn, shape: tuple[int, ...], axes: Mapping[str, int]
) -> tuple[Placement, ...]:
    """Any placements of a tensor over a mesh: nested shards, blocks, copies, pins, one flat split."""
    found: list[Placement] = []
    left = list(draw(st.permutations(list(axes))))
    cut: set[int] = set()
    blocked: set[int] = set()
    while left:
        axis, ways = left[0], axes[left.pop(0)]
        kind = draw(st.sampled_from(["replicate", "shard", "shard", "flat", "pin", "left out"]))
        free = [dim for dim in range(len(shape)) if dim not in blocked]
        if kind == "shard" and free:
            dim = draw(st.sampled_from(free))
            blocks = draw(st.sampled_from([n for n in (1, 1, 2, 3) if shape[dim] % n == 0]))
            blocks = 1 if dim in cut else blocks
            copies = draw(st.sampled_from([n for n in (1, 1, 2) if ways % n == 0]))
            over: tuple[str, ...] | str = axis
            if left and copies == 1 and draw(st.booleans()):
                over = (axis, left.pop(0))
            found.append(Shard(over, dim, draw(st.integers(1, 3)), blocks, copies))
            cut.add(dim)
            blocked |= {dim} if blocks > 1 else set()
        elif kind == "flat" and not blocked:
            all_ = (axis, *left[: draw(st.integers(0, len(left)))])
            flat = Flat(all_, draw(st.integers(1, 4)))
            many = any(isinstance(each, Pin) and each.also for each in found)
            if not many and draw(st.booleans()):  # one of several tensors in a flat buffer
                offset, ways = draw(st.integers(0, 50)), prod(axes[each] for each in all_)
                part = -(-(prod(shape) + offset) // ways) + draw(st.integers(0, 5))
                flat = Flat(flat.axes, 1, max(part, 1), offset)
            found.append(flat)
            break
        elif kind == "pin":
            where = sorted(draw(st.sets(st.integers(0, ways - 1), min_size=1, max_size=2)))
            found.append(Pin(axis, where[0], tuple(where[1:])))
        elif kind == "replicate":
            found.append(Replicate(axis))
    return tuple(found)
