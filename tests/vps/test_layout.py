"""Explicit layouts: their form, their holders, and the proof that they cover a state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynadapt.errors import Refused
from dynadapt.testing import strategies as more
from dynadapt.vps import cover
from dynadapt.vps.box import Box, linear_index, row_major_strides
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import MAX_ROWS_PER_KEY, Layout, Row, RowLayout, file_endpoint

W = KeySpec(Key("w", "param"), (6, 4), "float32")


def row(lo: tuple[int, ...], hi: tuple[int, ...], offset: int = 0, key: Key = W.key) -> Row:
    return Row(key, Box(lo, hi), "b", offset, (4, 1))


def masks(layout: RowLayout, key: Key) -> dict[int, np.ndarray]:
    """Endpoint -> which elements it holds, one by one."""
    shape = layout.by_name[key].shape
    found = {}
    for endpoint in layout.endpoints:
        found[endpoint] = np.zeros(shape, np.int64)
        for own in layout.rows_of(key, endpoint):
            found[endpoint][tuple(map(slice, own.box.lo, own.box.hi))] += 1
    return found


@given(st.data(), more.key_sets(max_volume=300), more.endpoints(5, 6))
def test_holders_are_all_rows_that_overlap(
    data: st.DataObject, specs: tuple[KeySpec, ...], over: tuple[int, ...]
) -> None:
    layout = data.draw(more.layouts(specs, over))
    assert isinstance(layout, Layout)
    for spec in layout.keys:
        box = data.draw(more.boxes(spec.shape))
        expected = [
            (endpoint, own.box)
            for endpoint in layout.endpoints
            for own in layout.rows_of(spec.key, endpoint)
            if own.box.intersect(box) is not None
        ]
        assert [tuple(holder) for holder in layout.holders(spec.key, box)] == expected


@given(st.data(), more.key_sets(max_volume=300), more.endpoints(5, 6))
def test_random_layouts_cover_and_never_hold_twice(
    data: st.DataObject, specs: tuple[KeySpec, ...], over: tuple[int, ...]
) -> None:
    layout = data.draw(more.layouts(specs, over))
    assert cover.prove(layout) == ()
    for spec in layout.keys:
        held = masks(layout, spec.key)
        assert all(mask.max(initial=0) <= 1 for mask in held.values())
        if spec.moves:
            assert (sum(held.values()) >= 1).all()


@given(st.data(), more.shapes(max_dims=3, max_volume=60))
def test_the_proof_finds_every_gap(data: st.DataObject, shape: tuple[int, ...]) -> None:
    spec = replace(W, shape=shape)
    boxes = data.draw(st.lists(more.boxes(shape), max_size=3))
    rows = {e: [Row(spec.key, b, "b", 0, row_major_strides(b.shape))] for e, b in enumerate(boxes)}
    layout = RowLayout([spec], rows)
    missing = int((sum(masks(layout, spec.key).values(), np.zeros(shape, np.int64)) == 0).sum())
    findings = cover.prove(layout)
    if not missing:
        assert findings == ()
    else:
        assert f"{missing} of {spec.numel} elements" in findings[0].cause


def test_the_proof_names_all_keys_and_leaves_out_what_needs_no_rows() -> None:
    names = "abcde"
    specs = [replace(W, key=Key(name, "param")) for name in names]
    changes = ({}, {}, {"derived": True}, {"presence": "none"}, {"local": True})
    layout = RowLayout([replace(s, **c) for s, c in zip(specs, changes, strict=True)], {0: []})
    assert [finding.where[0] for finding in cover.prove(layout)] == ["a", "b"]


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ([row((0, 0), (3, 4)), row((2, 0), (6, 4), 100)], "overlaps another row"),
        ([row((0, 0), (7, 4))], "leaves the tensor's shape"),
        ([row((0, 0), (1, 4), key=Key("v", "param"))], "has no KeySpec"),
        ([Row(W.key, Box((0,), (6,)), "b", 0, (1,))], "leaves the tensor's shape"),
        ([Row(W.key, Box((0, 0), (6, 4)), "b", 0, (0, 1))], "holds one element for several"),
    ],
)
def test_rows_of_bad_form_are_refused_with_their_place(rows: list[Row], cause: str) -> None:
    with pytest.raises(Refused, match=cause) as caught:
        RowLayout([W], {3: rows})
    assert all("endpoint 3" in finding.where for finding in caught.value.findings)


def test_two_rows_in_the_same_memory_are_refused() -> None:
    v = replace(W, key=Key("v", "param"))
    rows = [row((0, 0), (6, 4)), row((0, 0), (6, 4), 23, v.key)]
    with pytest.raises(Refused, match="shares memory"):
        RowLayout([W, v], {0: rows})
    RowLayout([W, v], {0: [rows[0], replace(rows[1], offset=24)]})


def test_interleaved_rows_share_no_memory() -> None:
    v = replace(W, key=Key("v", "param"))
    rows = [Row(key, Box((0, 0), (6, 4)), "b", i, (8, 1)) for key, i in ((W.key, 0), (v.key, 4))]
    RowLayout([W, v], {0: rows})
    with pytest.raises(Refused, match="shares memory"):
        RowLayout([W, v], {0: [rows[0], replace(rows[1], offset=3)]})


def test_too_many_rows_name_the_tensor() -> None:
    spec = KeySpec(Key("w", "param"), (2 * MAX_ROWS_PER_KEY + 2,), "float32")
    many = [
        Row(spec.key, Box((2 * i,), (2 * i + 1,)), "b", i, (1,))
        for i in range(MAX_ROWS_PER_KEY + 1)
    ]
    with pytest.raises(Refused, match="w/param") as caught:
        RowLayout([spec], {0: many})
    assert caught.value.reason == "too-many-rows"


def test_a_key_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        RowLayout([W, W], {})


def test_digests_tell_layouts_apart() -> None:
    whole = RowLayout([W], {0: [row((0, 0), (6, 4))], 1: []})
    assert whole.digest() == RowLayout([W], {1: [], 0: [row((0, 0), (6, 4))]}).digest()
    others = [
        RowLayout([W], {1: [row((0, 0), (6, 4))], 0: []}),
        RowLayout([W], {0: [row((0, 0), (6, 4), 1)], 1: []}),
        RowLayout([replace(W, dtype="int32")], {0: [row((0, 0), (6, 4))], 1: []}),
        RowLayout([W], {0: [row((0, 0), (6, 4))], 1: [], 2: []}),
    ]
    assert len({layout.digest() for layout in (whole, *others)}) == 5


def test_seats_under_two_names_of_a_tied_tensor_are_united() -> None:
    head = replace(W, key=Key("head", "param"), aliases=("w",))
    tied = replace(W, aliases=("head",))
    top, bottom = row((0, 0), (3, 4)), row((3, 0), (6, 4), key=head.key)
    layout = RowLayout.of_seats({0: ([tied], [top]), 1: ([head], [bottom])})
    assert [spec.key.name for spec in layout.keys] == ["head"]
    assert cover.prove(layout) == ()


def test_file_endpoints_are_negative_stable_and_apart() -> None:
    assert file_endpoint("a.pt") == file_endpoint("a.pt") < 0
    assert len({file_endpoint(f"{i}.pt") for i in range(1000)}) == 1000


def test_an_element_has_its_place_by_strides() -> None:
    own = Row(W.key, Box((2, 1), (5, 3)), "b", 7, (1, 10))
    assert own.offset_of((2, 1)) == 7
    assert own.offset_of((4, 2)) == own.last == 19
    assert linear_index((4, 2), (6, 4)) == 18
