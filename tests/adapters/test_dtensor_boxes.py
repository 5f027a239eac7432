"""The boxes of sharded tensors against brute-force index maps and torch's own."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dynadapt.adapters.live._dtensor import Split, _split, boxes_of
from dynadapt.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def pieces(array: np.ndarray, dim: int, count: int) -> list[np.ndarray]:
    """torch.chunk, with empty pieces for the ranks that it leaves out."""
    found = [part.numpy() for part in torch.chunk(torch.from_numpy(array), count, dim)]
    empty = np.take(array, [], axis=dim)
    return found + [empty] * (count - len(found))


def cut(array: np.ndarray, split: Split, count: int, index: int) -> np.ndarray:
    """What a strided shard is by definition: piece `index` of each of the equal parts."""
    parts = pieces(array, split.dim, split.factor)
    return np.concatenate([pieces(p, split.dim, count)[index] for p in parts], axis=split.dim)


def indices(shape: Sequence[int]) -> np.ndarray:
    return np.arange(prod(shape), dtype=np.int64).reshape(tuple(shape))


def assembled(shape: Sequence[int], result: tuple[tuple[int, ...], tuple[Any, ...]]) -> np.ndarray:
    """The local tensor of indices that the boxes describe; -1 where none says anything."""
    whole, (local_shape, boxes) = indices(shape), result
    local = np.full(local_shape, -1, np.int64)
    for part in boxes:
        at = tuple(slice(s, s + n) for s, n in zip(part.start, part.box.shape, strict=True))
        source = tuple(slice(a, b) for a, b in zip(part.box.lo, part.box.hi, strict=True))
        assert (local[at] == -1).all()
        local[at] = whole[source]
    return local


def coordinates(mesh: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return product(*map(range, mesh))


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=4)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@st.composite
def plain_cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[Split | None]]:
    shape, mesh = draw(shapes), draw(meshes)
    one = st.none() if not shape else st.none() | st.builds(Split, st.integers(0, len(shape) - 1))
    return shape, mesh, [draw(one) for _ in mesh]


@given(plain_cases())
def test_shards_and_replicas(case: tuple[list[int], list[int], list[Split | None]]) -> None:
    shape, mesh, placements = case
    for where in coordinates(mesh):
        expected = indices(shape)
        for axis, split in enumerate(placements):
            if split is not None:
                expected = cut(expected, split, mesh[axis], where[axis])
        result = boxes_of(shape, mesh, where, placements)
        assert len(result[1]) <= 1
        np.testing.assert_array_equal(assembled(shape, result), expected)


@given(
    st.integers(0, 40), st.integers(1, 5), st.integers(2, 5), st.integers(0, 1), st.integers(1, 3)
)
def test_lone_strided_shard(size: int, count: int, factor: int, dim: int, other: int) -> None:
    """No other axis cuts the dim, so the local tensor is several stretches of it."""
    shape = (size, other) if dim == 0 else (other, size)
    split = Split(dim, factor)
    for index in range(count):
        result = boxes_of(shape, (2, count), (1, index), (None, split))
        np.testing.assert_array_equal(
            assembled(shape, result), cut(indices(shape), split, count, index)
        )


@st.composite
def ordered_cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A dim, the sizes of the axes that cut it, and the order in which they do."""
    mesh = draw(st.lists(st.integers(2, 4), min_size=2, max_size=3))
    order = draw(st.permutations(range(len(mesh))))
    return [draw(st.integers(0, 50)), draw(st.integers(1, 2))], mesh, list(order)


@given(ordered_cases())
def test_axes_in_any_order(case: tuple[list[int], list[int], list[int]]) -> None:
    """Factors are the products of the later axes that cut before; no rank's share is ever split."""
    shape, mesh, order = case
    placements: list[Split | None] = []
    for axis in range(len(mesh)):
        before = [other for other in order[: order.index(axis)] if other > axis]
        placements.append(Split(0, prod(mesh[other] for other in before)))
    for where in coordinates(mesh):
        expected = indices(shape)
        for axis in order:
            expected = cut(expected, Split(0), mesh[axis], where[axis])
        result = boxes_of(shape, mesh, where, placements)
        assert len(result[1]) <= 1
        np.testing.assert_array_equal(assembled(shape, result), expected)


def test_uneven_strided_shard_differs_from_left_to_right() -> None:
    """7 rows over TP 2 then FSDP 3: rank (2, 0) has none, where left to right gives it row 6."""
    placements = (Split(0, 2), Split(0))
    assert boxes_of((7,), (3, 2), (2, 0), placements) == ((0,), ())
    assert str(boxes_of((7,), (3, 2), (2, 1), placements)[1][0].box) == "[6:7]"


@given(st.integers(1, 40), st.integers(2, 4), st.integers(2, 4))
def test_every_row_has_one_owner(size: int, dp: int, tp: int) -> None:
    placements = (Split(0, tp), Split(0))
    owned = [
        row
        for where in coordinates((dp, tp))
        for part in boxes_of((size,), (dp, tp), where, placements)[1]
        for row in range(part.box.lo[0], part.box.hi[0])
    ]
    assert sorted(owned) == list(range(size))


def test_placements_become_splits() -> None:
    assert _split("w", Shard(1)) == Split(1)
    assert _split("w", _StridedShard(0, split_factor=4)) == Split(0, 4)
    assert _split("w", Replicate()) is None
    with pytest.raises(Refused) as caught:
        _split("w", Partial())
    assert caught.value.reason == "partial-placement"
