"""Hypothesis strategies for shapes, boxes, key sets and layouts.

What matters when an example shrinks (how many keys and endpoints, which kinds of split) is drawn by
hypothesis; the fine structure comes from a seed, because a layout of hundreds of draws would be slow.

>>> from hypothesis import find
>>> find(shapes(), lambda shape: len(shape) == 2)
(0, 0)
"""

from __future__ import annotations

import random
from math import prod
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from dynadapt.testing.layouts import KINDS, random_layout, random_placements, random_specs
from dynadapt.vps.box import MAX_DIMS, Box, Span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.vps.keys import KeySpec
    from dynadapt.vps.layout import RowLayout
    from dynadapt.vps.placement import Placement

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
    seed = draw(st.integers(0, 2**16 - 1))
    return random_placements(random.Random(seed), shape, axes)
