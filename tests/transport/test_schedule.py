"""Chunks: exact, within the budget, cut where needed inside tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynadapt.testing import strategies as more
from dynadapt.testing.layouts import random_layout
from dynadapt.transport.executor import staging_bytes
from dynadapt.transport.plan import Options
from dynadapt.transport.schedule import Slicing, spread_of
from dynadapt.vps.box import Box
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import Row, RowLayout
from tests.transport._movers import Planned

BUDGET = 1 << 16


@settings(max_examples=60)
@given(st.data(), more.endpoints(6, 6), more.endpoints(6, 6), more.seeds)
def test_chunks_are_the_plan_in_parts(
    data: st.DataObject, source: tuple[int, ...], target: tuple[int, ...], seed: int
) -> None:
    specs = [
        KeySpec(Key("a", "param"), (131, 257), "float32"),
        KeySpec(Key("b", "param"), (7, 11, 13, 17), "bfloat16"),
        KeySpec(Key("c", "param"), (3,), "float64"),
    ]
    kinds = st.sampled_from(["flat", "grid", "overlapping", "replicated", "zero"])
    layouts = [
        random_layout(seed + i, specs, over, [data.draw(kinds)])
        for i, over in enumerate((source, target))
    ]
    planned = Planned(*layouts, Options(budget=BUDGET))
    for seat, plan in planned.plans.items():
        numbers = [chunk.number for chunk in planned.chunks[seat]]
        assert numbers == sorted(set(numbers))
        for way in ("receives", "sends"):
            covered: dict[tuple[Key, int, int], np.ndarray] = {}
            parts = [m for chunk in planned.chunks[seat] for m in getattr(chunk, way)]
            for move, sign in [(m, 1) for m in parts] + [(m, -1) for m in getattr(plan, way)]:
                shape = planned.target.by_name[move.key].shape
                at = (move.key, move.source, move.target)
                count = covered.setdefault(at, np.zeros(shape, np.int64))
                count[tuple(map(slice, move.box.lo, move.box.hi))] += sign
            assert all((count == 0).all() for count in covered.values())
        assert staging_bytes(planned.chunks[seat]) <= BUDGET
    everyone = {s: {c.number: c for c in own} for s, own in planned.chunks.items()}
    for seat, own in everyone.items():
        for number, chunk in own.items():
            for peer in {m.source for m in chunk.receives}:
                sent = [m for m in everyone[peer][number].sends if m.target == seat]
                assert sent == [m for m in chunk.receives if m.source == peer]


def test_a_border_may_fall_inside_an_element_row() -> None:
    spec = KeySpec(Key("w", "param"), (2, 1 << 16), "float64")
    whole = [Row(spec.key, Box.whole(spec.shape), "x", 0, (1 << 16, 1))]
    layouts = RowLayout([spec], {0: whole}), RowLayout([spec], {1: whole})
    planned = Planned(*layouts, Options(budget=BUDGET))
    assert len(planned.chunks[0]) >= 2 * spec.nbytes // BUDGET
    assert max(chunk.nbytes for chunk in planned.chunks[0]) <= BUDGET // 2
    assert any(m.box.lo[1] % 8 == 0 and m.box.lo[1] for c in planned.chunks[1] for m in c.receives)


@pytest.mark.parametrize("copies", [7, 40, 100])
def test_one_holder_and_many_targets_stay_within_the_budget(copies: int) -> None:
    spec = KeySpec(Key("w", "param"), (1 << 15,), "float32")
    whole = [Row(spec.key, Box.whole(spec.shape), "x", 0, (1,))]
    target = RowLayout([spec], dict.fromkeys(range(1, copies + 1), whole))
    planned = Planned(RowLayout([spec], {0: whole}), target, Options(budget=BUDGET))
    assert staging_bytes(planned.chunks[0]) <= BUDGET
    assert sum(chunk.nbytes for chunk in planned.chunks[0]) == copies * spec.nbytes


def test_many_small_tensors_share_chunks() -> None:
    specs = [KeySpec(Key(f"{i:03}", "param"), (5,), "bfloat16") for i in range(300)]
    rows = [Row(spec.key, Box((0,), (5,)), "x", 8 * i, (1,)) for i, spec in enumerate(specs)]
    planned = Planned(RowLayout(specs, {0: rows}), RowLayout(specs, {1: rows}), Options(BUDGET))
    assert len(planned.chunks[0]) == 1
    assert staging_bytes(planned.chunks[0]) == 2 * 300 * 16


def test_nothing_to_move_is_no_chunk() -> None:
    spec = KeySpec(Key("w", "param"), (4,), "float32")
    layout = RowLayout([spec], {0: [Row(spec.key, Box((0,), (4,)), "x", 0, (1,))]})
    assert Planned(layout, layout).chunks == {0: []}
    empty = replace(spec, shape=(0,))
    assert Planned(RowLayout([empty], {0: []}), RowLayout([empty], {1: []})).chunks == {
        0: [],
        1: [],
    }


@settings(max_examples=60)
@given(st.integers(1, 50), st.integers(1, 10**9), st.integers(1, 10**6), st.integers(0, 9))
def test_slices_of_a_stream_are_in_different_chunks_in_order(
    count: int, nbytes: int, shortest: int, peer: int
) -> None:
    cut = Slicing(count, shortest)
    slices = cut.slices(nbytes)
    spread = spread_of(np.array([0]), np.array([peer]))
    found = cut.chunk_of(np.arange(slices), np.array([slices]), spread).tolist()
    assert found == sorted(set(found))
    assert found[0] >= 0
    assert found[-1] < count


def test_every_chunk_has_the_same_part_of_every_stream() -> None:
    specs = [KeySpec(Key(name, "param"), (64, 1 << 10), "float32") for name in "abc"]
    source = random_layout(1, specs, range(4), ["flat"])
    target = random_layout(2, specs, range(4), ["replicated"])
    planned = Planned(source, target, Options(budget=BUDGET))
    for own in planned.chunks.values():
        sizes = [chunk.nbytes for chunk in own]
        assert max(sizes) - min(sizes) <= 0.1 * max(sizes)
