"""The formulas of flat buffers against buffers that are really made, the slow way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynadapt.vps.flat import FlatGroup, fsdp1_unit, zero3_groups, zero3_part, zero_group

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=9)
WAYS = st.integers(1, 8)


def laid_out(order: list[int], sizes: list[int], multiple: int, end: int) -> list[tuple[int, int]]:
    """(tensor, element) of each place of a flat: tensors padded to `multiple`, the whole to `end`."""
    flat: list[tuple[int, int]] = []
    for tensor in order:
        flat += [(-1, -1)] * (-len(flat) % multiple)
        flat += [(tensor, element) for element in range(sizes[tensor])]
    return flat + [(-1, -1)] * (-len(flat) % end)


def same(group: FlatGroup, flat: list[tuple[int, int]], sizes: list[int], ways: int) -> None:
    """Every rank's spans say exactly which element lies in each place of its piece."""
    assert group.part * ways >= len(flat)
    for rank in range(ways):
        piece = flat[rank * group.part : (rank + 1) * group.part]
        said = {}
        start, stop, at = group.spans(sizes, rank)
        for tensor, (low, high, index) in enumerate(zip(start, stop, at, strict=True)):
            said |= {int(index) + i - int(low): (tensor, i) for i in range(low, high)}
        assert said == {place: what for place, what in enumerate(piece) if what[0] >= 0}


@given(SIZES, WAYS, st.booleans(), st.sampled_from([1, 4, 8]))
def test_zero_group_is_the_flat_that_deepspeed_makes(
    sizes: list[int], ways: int, round_robin: bool, between: int
) -> None:
    order = [tensor for tensor, size in enumerate(sizes) if size]
    if round_robin:
        order = [order[i] for turn in range(ways) for i in range(turn, len(order), ways)]
    flat = laid_out(order, sizes, between, 2 * ways)
    group = zero_group(sizes, ways, round_robin=round_robin, between=between)
    assert group.part == len(flat) // ways
    same(group, flat, sizes, ways)


@given(SIZES, WAYS, st.booleans(), st.sampled_from([1, 2, 4, 8]))
def test_fsdp1_unit_is_the_flat_that_torch_makes(
    sizes: list[int], ways: int, aligned: bool, itemsize: int
) -> None:
    flat = laid_out(list(range(len(sizes))), sizes, 16 // itemsize if aligned else 1, ways)
    group = fsdp1_unit(sizes, ways, itemsize=itemsize, aligned=aligned)
    assert group.part == len(flat) // ways
    same(group, flat, sizes, ways)


@given(SIZES, WAYS, st.none() | st.integers(0, 40))
def test_zero3_sub_groups_are_filled_one_tensor_at_a_time(
    sizes: list[int], ways: int, wanted: int | None
) -> None:
    kept = [tensor for tensor, size in enumerate(sizes) if size]
    total = sum(zero3_part(sizes[tensor], ways) for tensor in kept)
    expected: list[list[int]] = [[]] if kept else []
    for tensor in kept:
        held = sum(zero3_part(sizes[t], ways) for t in expected[-1])
        if expected[-1] and wanted is not None and wanted < total and held >= wanted:
            expected.append([])
        expected[-1].append(tensor)
    found = zero3_groups(sizes, ways, wanted)
    groups = [np.flatnonzero(found.index == i).tolist() for i in range(len(found.sizes))]
    assert groups == expected
    for members, size in zip(groups, found.sizes, strict=True):
        parts = found.parts[members]
        assert found.offsets[members].tolist() == [0, *np.cumsum(parts)[:-1].tolist()]
        assert size == parts.sum()
    assert set(np.flatnonzero(found.index < 0)) == set(range(len(sizes))) - set(kept)


def test_a_tensor_smaller_than_the_world_leaves_ranks_with_padding_alone() -> None:
    group = zero_group([3], 8)
    assert group.part == 2
    held = [
        (start.item(), stop.item()) for start, stop, _ in (group.spans([3], r) for r in range(8))
    ]
    assert held[:3] == [(0, 2), (2, 3), (3, 3)]
    assert all(start == stop for start, stop in held[2:])


def test_tensors_without_elements_take_no_turn() -> None:
    plain = zero_group([4, 3, 5], 2, round_robin=True)
    mixed = zero_group([4, 0, 3, 0, 5], 2, round_robin=True)
    assert mixed.offsets[[0, 2, 4]].tolist() == plain.offsets.tolist()
    assert mixed.part == plain.part


def test_many_tensors_cost_little_more_than_one_array() -> None:
    sizes = np.arange(1, 200_001)
    group = zero_group(sizes, 8, round_robin=True)
    start, stop, _ = group.spans(sizes, 5)
    assert int((stop - start).sum()) <= group.part
    assert zero3_groups(sizes, 8, 10**7).index.max() > 100


@pytest.mark.parametrize(("sizes", "ways"), [([1, -1], 2), ([[1]], 2), ([1], 0)])
def test_nonsense_is_refused(sizes: list[int], ways: int) -> None:
    with pytest.raises(ValueError, match="needs a list"):
        zero_group(sizes, ways)


def test_the_arrays_cannot_be_changed() -> None:
    group = zero_group([3, 4], 2)
    with pytest.raises(ValueError, match="read-only"):
        group.offsets[0] = 7
