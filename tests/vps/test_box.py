"""Box arithmetic against sets of indices."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynadapt.testing import strategies as more
from dynadapt.vps.box import (
    Box,
    Span,
    atoms,
    boxes_in_span,
    count_below,
    linear_index,
    row_major_strides,
    uncovered,
)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(map(range, box.lo, box.hi))))


def indices(box: Box, shape: tuple[int, ...]) -> list[int]:
    return [linear_index(x, shape) for x in sorted(elements(box))]


@st.composite
def tensors_with_boxes(draw: st.DrawFn, most: int = 5) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(more.shapes(max_dims=4, max_side=5, max_volume=200))
    return shape, draw(st.lists(more.boxes(shape), min_size=1, max_size=most))


@given(tensors_with_boxes())
def test_volume_intersection_and_containment(case: tuple[tuple[int, ...], list[Box]]) -> None:
    _, (a, *rest) = case
    for b in rest:
        common = a.intersect(b)
        assert elements(a) & elements(b) == (elements(common) if common else set())
        assert a.volume == len(elements(a))
        if b.volume:
            assert a.contains(b) == (elements(a) >= elements(b))


@given(st.data(), more.shapes())
def test_a_span_is_few_boxes_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    span = data.draw(more.spans(shape))
    found = span.boxes(shape)
    assert [i for box in found for i in indices(box, shape)] == list(range(span.start, span.stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)


def test_the_most_boxes_a_span_needs() -> None:
    shape = (3,) * 8
    assert len(Span(1 + 1, prod(shape) - 2).boxes(shape)) == 15


@given(st.data(), more.shapes(max_dims=4, max_volume=200))
def test_counting_below_an_index(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(more.boxes(shape))
    index = data.draw(st.integers(-2, prod(shape) + 2))
    assert count_below(box, shape, index) == sum(i < index for i in indices(box, shape))


@given(st.data(), more.shapes(max_dims=4, max_volume=200))
def test_the_part_of_a_box_in_a_span(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(more.boxes(shape))
    start, stop = data.draw(st.tuples(st.integers(-3, 210), st.integers(-3, 210)))
    parts = boxes_in_span(box, shape, start, stop)
    found = [i for part in parts for i in indices(part, shape)]
    assert found == [i for i in indices(box, shape) if start <= i < stop]


@given(tensors_with_boxes(most=6))
def test_atoms_are_the_common_refinement(case: tuple[tuple[int, ...], list[Box]]) -> None:
    _, boxes = case
    cells = atoms(boxes)
    assert cells == tuple(sorted(cells))
    seen: set[tuple[int, ...]] = set()
    for cell, holders in cells:
        assert cell.volume
        assert not seen & elements(cell)
        seen |= elements(cell)
        for number, box in enumerate(boxes):
            assert (number in holders) == (elements(cell) <= elements(box))
            assert (number in holders) or not elements(cell) & elements(box)
    assert seen == set().union(*map(elements, boxes))


def test_atoms_leave_equal_and_disjoint_boxes_whole() -> None:
    boxes = [Box((0,), (4,)), Box((4,), (9,)), Box((0,), (4,))]
    assert atoms(boxes) == ((boxes[0], (0, 2)), (boxes[1], (1,)))


@given(tensors_with_boxes(most=6))
def test_gaps(case: tuple[tuple[int, ...], list[Box]]) -> None:
    _, (within, *boxes) = case
    gaps = uncovered(boxes, within)
    found = [x for gap in gaps for x in elements(gap)]
    assert len(found) == len(set(found))
    assert set(found) == elements(within) - set().union(*map(elements, boxes), set())


def test_coordinates_above_32_bits_are_exact() -> None:
    shape = (5, 1 << 33)
    span = Span((1 << 33) - 1, (1 << 34) + 1)
    assert [str(box) for box in span.boxes(shape)] == [
        "[0:1,8589934591:8589934592]",
        "[1:2,0:8589934592]",
        "[2:3,0:1]",
    ]
    assert count_below(Box((0, 0), shape), shape, 1 << 35) == 1 << 35
    assert row_major_strides(shape) == (1 << 33, 1)


@pytest.mark.parametrize(
    ("lo", "hi"), [((-1,), (2,)), ((3,), (2,)), ((0,), (1, 2)), ((0,) * 9, (1,) * 9)]
)
def test_bad_boxes_are_refused(lo: tuple[int, ...], hi: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="box"):
        Box(lo, hi)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_bad_spans_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="span"):
        Span(start, stop)


def test_a_span_beyond_its_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves a tensor"):
        Span(0, 7).boxes((2, 3))


def test_row_major_strides_are_numpys() -> None:
    for shape in ((), (3,), (2, 3, 4)):
        array = np.zeros(shape, np.int8)
        assert row_major_strides(shape) == tuple(array.strides)
