"""Layouts learnt from marks, against layouts that are known."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynadapt.errors import Refused
from dynadapt.testing import layouts
from dynadapt.testing import strategies as more
from dynadapt.vps import cover
from dynadapt.vps.box import Box, Span, row_major_strides
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.probe import Marks, markers, observed, probe, rows_from_marks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dynadapt.vps.layout import Row, RowLayout


def rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """What a dtype keeps of values."""
    import torch

    wide = torch.from_numpy(np.ascontiguousarray(values, np.float64))
    return wide.to(getattr(torch, dtype)).double().numpy()


def filled(layout: RowLayout, rank: int, full: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """One rank's buffers with each row's elements where it says; the rest is zero."""
    ends: dict[str, int] = {}
    for row in layout.rows(rank):
        ends[row.buffer] = max(ends.get(row.buffer, 0), row.last + 3)
    buffers = {name: np.zeros(end) for name, end in ends.items()}
    for row in layout.rows(rank):
        strides = [8 * stride for stride in row.strides]
        view = np.lib.stride_tricks.as_strided(
            buffers[row.buffer][row.offset :], row.box.shape, strides
        )
        view[...] = full[row.key.name][_cut(row.box)]
    return buffers


def _cut(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(box.lo, box.hi, strict=True))


def places(rows: tuple[Row, ...], name: str) -> dict[tuple[int, ...], tuple[str, int]]:
    """Where each coordinate of one tensor lies."""
    return {
        coordinate: (row.buffer, row.offset_of(coordinate))
        for row in rows
        if row.key.name == name
        for coordinate in np.ndindex(*row.box.hi)
        if all(a >= b for a, b in zip(coordinate, row.box.lo, strict=True))
    }


def learnt(layout: RowLayout, marks: Marks, dtype: str = "float64") -> RowLayout:
    rows = {
        rank: probe(
            marks,
            dict,
            lambda full, rank=rank: {
                name: rounded(values, dtype) for name, values in filled(layout, rank, full).items()
            },
        )
        for rank in layout.endpoints
    }
    return observed(marks, rows, layout.keys)


def a_layout(seed: int, kinds: list[str], num: int = 3) -> RowLayout:
    specs = [
        KeySpec(Key(spec.key.name, "param"), spec.shape, "float32")
        for spec in layouts.random_specs(seed, num, 600)
        if spec.key.slot == "param"
    ]
    return layouts.random_layout(seed, specs, (0, 1, 2), kinds)


@given(st.integers(0, 10**6), st.sampled_from([*layouts.KINDS, "zero"]))
def test_any_layout_is_found_again(seed: int, kind: str) -> None:
    layout = a_layout(seed, [kind])
    marks = markers({spec.key.name: spec.shape for spec in layout.keys}, "float64")
    found = learnt(layout, marks)
    for rank in layout.endpoints:
        for spec in layout.keys:
            name = spec.key.name
            assert places(found.rows(rank), name) == places(layout.rows(rank), name)
            if kind in {"flat", "zero", "replicated"}:
                ours = len(found.rows_of(spec.key, rank))
                assert ours <= len(layout.rows_of(spec.key, rank))
    assert cover.prove(found) == cover.prove(layout)


@given(st.integers(0, 10**6), st.sampled_from(["bfloat16", "float16", "float8_e5m2", "int8"]))
@settings(max_examples=30)
def test_a_dtype_that_holds_little_takes_more_passes(seed: int, dtype: str) -> None:
    layout = a_layout(seed, [])
    marks = markers({spec.key.name: spec.shape for spec in layout.keys}, dtype)
    found = learnt(layout, marks, dtype)
    for rank in layout.endpoints:
        for spec in layout.keys:
            ours = places(found.rows(rank), spec.key.name)
            assert ours == places(layout.rows(rank), spec.key.name)


@given(st.data(), more.shapes(max_dims=4, max_volume=200))
def test_spans_are_the_boxes_that_spans_are_lowered_to(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    marks = markers({"before": (3,), "w": shape}, "float64")
    flat = np.arange(3 + start, 3 + stop)
    rows = rows_from_marks(marks, {"flat": np.concatenate(([-1, -1], flat, [-1]))})
    assert tuple(row.box for row in rows) == Span(start, stop).boxes(shape)
    assert len(rows) <= max(2 * len(shape) - 1, 1)
    at = 2
    for row in rows:
        assert row.offset == at
        at += row.box.volume


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("cut", [np.s_[:, :, 2:5], np.s_[:, 1:2], np.s_[3:6], np.s_[::1, :, 6:7]])
def test_a_slice_is_one_row_in_whatever_order_memory_is(
    cut: tuple[slice, ...], order: tuple[int, ...]
) -> None:
    marks = markers({"w": (6, 4, 7)})
    rows = probe(
        marks, dict, lambda full: {"b": np.ascontiguousarray(full["w"][cut].transpose(order))}
    )
    assert len(rows) == 1
    local = np.arange(6 * 4 * 7).reshape(6, 4, 7)[cut]
    memory = row_major_strides([local.shape[dim] for dim in order])
    for dim, size in enumerate(local.shape):
        assert size == 1 or rows[0].strides[dim] == memory[order.index(dim)]
    assert rows[0].box.volume == local.size


def test_packed_blocks_are_a_row_each() -> None:
    """Rank 1 of 3 of a tensor of two blocks along a dim: gate and up in one matrix."""
    for dim, shape in ((0, (12, 5)), (1, (5, 12))):
        marks = markers({"w": shape})
        rows = probe(
            marks,
            dict,
            lambda full, dim=dim: {
                "b": np.concatenate([np.split(full["w"], 6, dim)[i] for i in (1, 4)], dim)
            },
        )
        assert [row.box.lo[dim] for row in rows] == [2, 8]
        assert [row.box.hi[dim] for row in rows] == [4, 10]


def test_blocks_of_one_line_are_not_taken_for_strides() -> None:
    """A line, a jump, three lines: the jump is nobody's stride."""
    marks = markers({"w": (4, 3)})
    rows = probe(marks, dict, lambda full: {"b": np.insert(full["w"].reshape(-1), 3, [0] * 7)})
    assert [str(row.box) for row in rows] == ["[0:1,0:3]", "[1:4,0:3]"]


def test_a_tensor_of_no_dims_and_one_of_no_elements() -> None:
    marks = markers({"scalar": (), "empty": (0, 3), "w": (2,)})
    rows = probe(marks, dict, lambda full: {n: v.reshape(-1) for n, v in full.items()})
    assert [(row.key.name, str(row.box)) for row in rows] == [("scalar", "[]"), ("w", "[0:2]")]


def test_padding_is_none_of_the_marks() -> None:
    marks = markers({"w": (40, 9)}, "bfloat16")
    stray = np.random.default_rng(0).integers(0, 257, (marks.passes, 2000))
    odd = np.array([[0, 42, -3, 0.5, np.nan, np.inf, 257, 1e30]] * marks.passes)
    readings = [np.concatenate((marks.values(p)["w"].ravel(), odd[p])) for p in range(marks.passes)]
    assert marks.decode(readings)[360:].tolist() == [-1] * 8
    assert (marks.decode(list(stray)) >= 0).sum() == 0


def test_a_value_that_was_changed_leaves_a_hole() -> None:
    marks = markers({"w": (6, 5)}, "bfloat16")

    def read(full: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        values = full["w"].copy()
        values[2, 3] += 1 if values[2, 3] < 256 else -1
        return {"b": values}

    layout = observed(marks, {0: probe(marks, dict, read)})
    assert [finding.where for finding in cover.prove(layout)] == ["w/param [2:3,3:4]"]


def test_what_was_torn_between_two_passes_is_not_believed() -> None:
    """Half of one pass comes from another; a check of 16 bits lets one in 65,536 through."""
    marks = markers({"w": (300, 300)}, "bfloat16")
    assert marks.passes == 5
    readings = [marks.values(p)["w"].ravel() for p in range(5)]
    readings[2][45_000:] = marks.values(1)["w"].ravel()[45_000:]
    found = marks.decode(readings)
    assert found[:45_000].tolist() == list(range(45_000))
    right = found[45_000:] == np.arange(45_000, 90_000)  # digits that are equal in both passes
    assert np.count_nonzero((found[45_000:] >= 0) & ~right) < 10
    assert np.count_nonzero(right) < 400


def test_two_copies_need_two_slots() -> None:
    marks = markers({"w": (4,), "v": (3,)})
    one, two = np.array([0, 1, 2, 3, 4]), np.array([5, 0, 1, -1])
    with pytest.raises(Refused) as refused:
        rows_from_marks(marks, {"master": one, "copy": two})
    assert [(f.reason, f.where) for f in refused.value.findings] == [("duplicate-mark", "w/param")]
    rows = rows_from_marks(
        marks, {"master": one, "copy": two}, {"master": "param", "copy": "compute"}
    )
    assert [str(row.key) for row in rows] == ["v/compute", "v/param", "w/compute", "w/param"]
    with pytest.raises(Refused, match="2 of its elements"):
        rows_from_marks(marks, {"b": np.array([0, 1, 2, 1, 0])})


def test_a_layout_of_dust_is_refused() -> None:
    marks = markers({"w": (20_000,)})
    dust = np.random.default_rng(0).permutation(20_000)
    with pytest.raises(Refused, match="too-many-rows"):
        rows_from_marks(marks, {"b": dust})


def test_a_framework_that_changes_its_buffers_is_noticed() -> None:
    marks = markers({"w": (300, 300)})
    assert marks.passes == 2
    lengths = iter((3, 4))
    with pytest.raises(ValueError, match="of one length"):
        probe(marks, dict, lambda full: {"b": full["w"].ravel()[: next(lengths)]})
    with pytest.raises(ValueError, match="passes 0 to 1"):
        marks.values(2)


@pytest.mark.parametrize("dtype", ["bool", "complex64"])
def test_a_dtype_that_cannot_be_marked_is_named(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"cannot mark {dtype}"):
        markers({"w": (2,)}, dtype)


def test_too_many_elements_are_refused_before_any_is_made() -> None:
    with pytest.raises(ValueError, match="too many"):
        markers({"w": (1 << 30, 1 << 30)})


def test_a_million_elements_in_columns_are_one_row() -> None:
    marks = markers({"w": (200_000, 2), "v": (1000, 1500)})
    rows = probe(marks, dict, lambda full: {"w": full["w"][:, 1:], "v": full["v"].T})
    assert [(row.key.name, row.box.shape) for row in rows] == [
        ("v", (1000, 1500)),
        ("w", (200_000, 1)),
    ]
