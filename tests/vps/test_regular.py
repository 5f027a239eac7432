"""From rows back to placements: every declared layout is found, what is none is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynadapt.errors import Refused
from dynadapt.testing import strategies as more
from dynadapt.vps.box import Box, row_major_strides
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import Row, RowLayout
from dynadapt.vps.mesh_layout import MeshLayout
from dynadapt.vps.placement import Flat, Pin, Placement, Replicate, Shard
from dynadapt.vps.regular import regular

if TYPE_CHECKING:
    from collections.abc import Mapping

AXES = ("pp", "dp", "tp")


def boxes(layout: MeshLayout | RowLayout) -> dict[int, list[tuple[Key, Box]]]:
    return {
        endpoint: sorted((row.key, row.box) for row in layout.rows(endpoint))
        for endpoint in layout.endpoints
    }


def declared(
    axes: Mapping[str, int], shape: tuple[int, ...], *placements: Placement
) -> tuple[MeshLayout, Key]:
    spec = KeySpec(Key("w", "param"), shape, "float32")
    return MeshLayout(axes, [spec], {spec.key: placements}), spec.key


@given(st.data(), more.shapes(max_dims=3, max_volume=200), st.tuples(*[st.integers(1, 4)] * 3))
def test_a_layout_of_a_few_axes_is_found_again(
    data: st.DataObject, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    axes = dict(zip(AXES, sizes, strict=True))
    layout, _ = declared(axes, shape, *data.draw(more.placements(shape, axes)))
    try:
        found = regular(layout.explicit(), axes)
    except Refused:
        # Blocks are only found as the last cut: nothing is a box after it.
        own = layout.placements(Key("w", "param"))
        assert any(isinstance(each, Shard) and each.blocks > 1 for each in own)
        return
    assert boxes(found) == boxes(layout)


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((12, 5), (Shard("tp", 0), Shard("dp", 0))),
        ((12, 8), (Shard("tp", 1), Shard("dp", 0))),
        ((14, 7), (Shard(("dp", "tp"), 0),)),
        ((12, 6), (Pin("pp", 1), Shard("tp", 0, blocks=2))),
        ((12, 6), (Shard("tp", 0, multiple=3, copies=2),)),
        ((10, 5), (Shard("tp", 1), Flat("dp"))),
        ((9, 5), (Pin("pp", 0), Flat("dp", part=17, offset=3))),
        ((9, 5), (Flat(("dp", "tp"), part=8, offset=11),)),
        ((5, 3), (Pin("pp", 0, (2,)), Flat("dp"))),
        ((), (Pin("dp", 1),)),
        ((0, 3), ()),
        ((4, 4), ()),
    ],
)
def test_what_frameworks_do_is_found_as_it_is_written(
    shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    axes = {"pp": 3, "dp": 3, "tp": 4}
    layout, key = declared(axes, shape, *placements)
    found = regular(layout.explicit(), axes)
    assert boxes(found) == boxes(layout)
    said = {each for each in found.placements(key) if not isinstance(each, Replicate)}
    assert {(type(each), each.over) for each in said} == {
        (type(each), each.over) for each in placements
    }


def test_endpoints_of_any_numbers_fill_the_mesh_in_order() -> None:
    spec = KeySpec(Key("w", "param"), (4, 2), "float32")
    halves = (Box((0, 0), (2, 2)), Box((2, 0), (4, 2)))
    rows = {9 + 4 * i: [Row(spec.key, box, "b", 0, (2, 1))] for i, box in enumerate(halves)}
    found = regular(RowLayout([spec], rows), {"dp": 2})
    assert found.endpoints == (9, 13)
    assert boxes(found) == boxes(RowLayout([spec], rows))


def test_absent_and_alike_keys_cost_nothing_more() -> None:
    specs = [KeySpec(Key(f"{i}", "param"), (6,), "float32") for i in range(400)]
    absent = KeySpec(Key("none", "exp_avg"), (6,), "float32", kind="state", presence="none")
    layout = MeshLayout({"dp": 4}, specs, {spec.key: (Flat("dp"),) for spec in specs})
    rows = {endpoint: layout.rows(endpoint) for endpoint in layout.endpoints}
    found = regular(RowLayout([*specs, absent], rows), {"dp": 4})
    assert boxes(found) == boxes(layout)
    assert len(found.keys) == 401


def test_every_key_that_is_not_regular_is_named() -> None:
    specs = [KeySpec(Key(name, "param"), (6, 4), "float32") for name in ("a", "b", "c")]
    cuts = {"a": ((0, 2), (2, 6)), "b": ((0, 3), (3, 6)), "c": ((0, 4), (2, 6))}
    rows: dict[int, list[Row]] = {0: [], 1: []}
    for spec in specs:
        for rank, (low, high) in enumerate(cuts[spec.key.name]):
            box = Box((low, 0), (high, 4))
            at = 100 * spec.order
            rows[rank].append(Row(spec.key, box, spec.key.name, at, row_major_strides(box.shape)))
    with pytest.raises(Refused) as refused:
        regular(RowLayout(specs, rows), {"dp": 2})
    found = refused.value.findings
    assert [(f.reason, f.where) for f in found] == [("irregular", "c/param")]
    assert "0: [0:4,0:4], 1: [2:6,0:4]" in found[0].cause
    with pytest.raises(Refused, match="bad-mesh"):
        regular(RowLayout(specs, rows), {"dp": 3})
