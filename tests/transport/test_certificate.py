"""The certificate: sensitive to place, additive, blind to layout; and the fingerprint's golden value."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynadapt import api
from dynadapt.errors import MigrationAborted
from dynadapt.testing import strategies as more
from dynadapt.testing.layouts import grid_boxes, random_layout
from dynadapt.testing.seats import run_seats
from dynadapt.testing.states import MemoryAdapter, MemoryState, logical_values
from dynadapt.transport import weights
from dynadapt.transport._torch import as_words
from dynadapt.transport.certificate import fingerprint, weighted_sum
from dynadapt.vps.box import Box
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import Row, RowLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY = Key("w", "param")
MOD = 2**64
GOLDEN_SUM = 3826142118002294784
GOLDEN_PRINT = "15ae72c5c691e853643e3f22e220930a"
"""A fingerprint is written into files and logs: a change of these two needs a new version of it."""

DTYPES = ["?", "u1", "<i2", "<f2", "<f4", "<i8", "<f8", "<c8", "<c16"]


def whole(array: NDArray[Any], key: Key = KEY) -> int:
    return weighted_sum(array, Box.whole(array.shape), key)


def noise(shape: tuple[int, ...], dtype: str = "<f4", seed: int = 0) -> NDArray[Any]:
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    if dtype == "?":
        raw = raw & 1
    return np.frombuffer(raw.tobytes(), dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@given(shape=more.shapes(max_dims=4), seed=more.seeds)
def test_the_sum_adds_up_over_any_partition(dtype: str, shape: tuple[int, ...], seed: int) -> None:
    array, rng = noise(shape, dtype, seed), random.Random(seed)
    cuts = [[rng.randint(0, n) for _ in range(rng.randint(0, 3))] for n in shape]
    parts = grid_boxes(shape, cuts)
    total = sum(weighted_sum(array[tuple(map(slice, box.lo, box.hi))], box, KEY) for box in parts)
    assert total % MOD == whole(array)


def test_big_arrays_are_summed_in_blocks_alike() -> None:
    for shape in ((700_000,), (3, 300_000), (5, 400, 300), (1000, 3, 129), (40_000, 2)):
        array = noise(shape, "<i2")
        cut = shape[0] // 3 + 1
        boxes = grid_boxes(shape, [(cut,), *[()] * (len(shape) - 1)])
        parts = np.split(array, [cut])
        sums = [weighted_sum(part, box, KEY) for part, box in zip(parts, boxes, strict=True)]
        assert sum(sums) % MOD == whole(array)


@pytest.mark.parametrize("dtype", ["<i2", "<f4", "<f8"])
def test_strides_do_not_matter(dtype: str) -> None:
    array = noise((24, 18), dtype)
    assert whole(np.asfortranarray(array)) == whole(array)
    padded = np.zeros((24, 40), dtype)
    padded[:, 3:39:2] = array
    assert whole(padded[:, 3:39:2]) == whole(array)


@given(st.data(), st.sampled_from(DTYPES))
def test_any_two_elements_swapped_are_seen(data: st.DataObject, dtype: str) -> None:
    array = noise((6, 9), dtype).copy()
    before = whole(array)
    a, b = (data.draw(st.tuples(st.integers(0, 5), st.integers(0, 8))) for _ in range(2))
    same = array[a].tobytes() == array[b].tobytes()
    array[a], array[b] = array[b].copy(), array[a].copy()
    assert (whole(array) == before) == same


@pytest.mark.parametrize("axis", [0, 1])
def test_swapped_halves_are_seen(axis: int) -> None:
    """Gate and up of a fused SwiGLU weight in the wrong order: equal norm, equal sum."""
    array = noise((64, 32))
    first, second = np.split(array, 2, axis)
    assert whole(np.concatenate([second, first], axis)) != whole(array)


def test_permutations_transposes_and_other_keys_are_seen() -> None:
    array = noise((16, 16))
    sums = {
        whole(array),
        whole(array[::-1]),
        whole(array[:, ::-1]),
        whole(np.ascontiguousarray(array.T)),
        whole(array, Key("w", "exp_avg")),
        whole(array, Key("v", "param")),
        whole(array.reshape(256)),
    }
    assert len(sums) == 7


@given(st.integers(0, 53), st.integers(0, 31))
def test_one_flipped_bit_is_seen(at: int, bit: int) -> None:
    words = noise((6, 9), "<i4").copy().view("<u4")
    before = whole(words)
    words.reshape(-1)[at] ^= np.uint32(1 << bit)
    assert whole(words) != before


def test_the_halves_of_wide_elements_are_told_apart() -> None:
    value = np.array([0x0000000100000002], "<u8")
    assert whole(value) != whole(np.array([0x0000000200000001], "<u8"))
    pair = np.array([1 + 2j], "<c16")
    assert whole(pair) != whole(np.array([2 + 1j], "<c16"))


def test_signed_zeros_and_nans_are_told_apart() -> None:
    raw = np.array([0, 0x80000000, 0x7FC00000, 0x7FC00001], "<u4").view("<f4")
    assert len({whole(raw[i : i + 1]) for i in range(4)}) == 4


def test_words_are_signed() -> None:
    for narrow in ("i1", "<i2"):
        array = noise((5, 5), narrow)
        assert whole(array) == whole(array.astype("<i4"))
        assert whole(array) == whole(array.view(narrow.replace("i", "u")))
    assert whole(np.array([0xFFFF], "<u2")) == whole(np.array([-1], "<i4"))


@pytest.mark.parametrize("dtype", ["i1", "<i2", "<i4", "<i8"])
@pytest.mark.parametrize(
    "shape",
    [(64, 1024), (33, 4096), (700_001,), (9, 40_000), (2, 70_000), (200_000, 3), (700, 129, 7)],
)
def test_many_words_are_hashed_exactly(dtype: str, shape: tuple[int, ...]) -> None:
    """As floats, which is exact: also if every word is the one farthest from zero."""
    least = np.iinfo(dtype).min
    for array in (noise(shape, dtype), np.full(shape, least, dtype), np.full(shape, -1, dtype)):
        assert whole(array) == by_integers(array)


def by_integers(array: NDArray[Any]) -> int:
    """The definition: no floats, no blocks, no limbs."""
    seed, count = weights.key_seed(KEY.name, KEY.slot), max(array.itemsize // 4, 1)
    words = array.view(f"i{min(array.itemsize, 4)}").reshape(*array.shape, count)
    sums = words.astype(np.int64).view(np.uint64) * weights.word_weights(seed, count)
    for dim, size in reversed(list(enumerate(array.shape))):
        at = np.arange(size)
        tables = [weights._table(seed, dim, digit, 0, 1 << 12) for digit in range(3)]
        own = tables[0][at & 1023] * tables[1][at >> 10 & 4095] * tables[2][at >> 22]
        sums = (sums.sum(-1) if dim == array.ndim - 1 else sums) * own
        sums = sums.sum(-1)
    return int(sums)


def test_coordinates_above_32_bits_have_weights_of_their_own() -> None:
    array = noise((7,))
    sums = set()
    for start in (0, 1 << 12, 1 << 24, 1 << 31, 1 << 32, 1 << 36, (1 << 40) - 3):
        box = Box((start,), (start + 7,))
        sums.add(weighted_sum(array, box, KEY))
        parts = [Box((start,), (start + 4,)), Box((start + 4,), (start + 7,))]
        total = sum(
            weighted_sum(part, own, KEY)
            for part, own in zip(np.split(array, [4]), parts, strict=True)
        )
        assert total % MOD == weighted_sum(array, box, KEY)
    assert len(sums) == 7


def test_every_torch_dtype_has_words() -> None:
    for name in ("bool", "uint8", "bfloat16", "float8_e4m3fn", "complex64", "complex128", "int64"):
        tensor = torch.arange(6).remainder(2).to(getattr(torch, name)).reshape(2, 3)
        words = as_words(tensor.t())
        assert words.shape == (3, 2)
        assert whole(words) == whole(np.ascontiguousarray(words))


def test_the_fingerprint_does_not_change_between_versions() -> None:
    spec = KeySpec(Key("layers.0.weight", "param"), (3, 5), "float32")
    moment = replace(spec, key=Key("layers.0.weight", "exp_avg"), kind="state")
    values = np.arange(15, dtype=np.float32).reshape(3, 5)
    sums = {s.key: whole(values * (i + 1), s.key) for i, s in enumerate((spec, moment))}
    assert sums[spec.key] == GOLDEN_SUM
    assert fingerprint([moment, spec], sums) == fingerprint([spec, moment], sums) == GOLDEN_PRINT


def test_what_the_fingerprint_covers() -> None:
    spec = KeySpec(KEY, (3,), "float32")
    base = fingerprint([spec], {KEY: 5})
    assert fingerprint([spec], {KEY: 6}) != base
    assert fingerprint([replace(spec, dtype="int32")], {KEY: 5}) != base
    assert fingerprint([replace(spec, shape=(1, 3))], {KEY: 5}) != base
    copy = replace(spec, key=Key("w", "compute"), derived=True)
    scratch = replace(spec, key=Key("s", "buffer"), kind="transient")
    assert fingerprint([spec, copy, scratch], {KEY: 5, copy.key: 1, scratch.key: 2}) == base


# --- over seats -----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(specs=more.key_sets(max_tensors=3, max_volume=500), seed=more.seeds, count=st.integers(1, 4))
def test_layouts_do_not_change_the_fingerprint(
    specs: tuple[KeySpec, ...], seed: int, count: int
) -> None:
    MemoryAdapter.install()
    values = logical_values(seed, specs)
    alone = random_layout(0, specs, (0,), ["replicated"])
    layout = random_layout(seed, specs, range(count))
    one = run_seats(
        1, lambda session: api.fingerprint(MemoryState(alone, 0, values), session=session)
    )
    many = run_seats(
        count,
        lambda session: api.fingerprint(MemoryState(layout, session.seat, values), session=session),
    )
    assert set(many) == set(one)


@pytest.mark.parametrize("change", [{1: 1}, {1: 1, 2: -1}, {0: 3, 1: 1, 2: -1, 3: 3}])
def test_replicas_that_drift_are_named(change: dict[int, int]) -> None:
    """Also those that drift by opposite amounts, which a sum over replicas would not see."""
    MemoryAdapter.install()
    spec = KeySpec(KEY, (4, 3), "int32")
    row = Row(KEY, Box.whole(spec.shape), "x", 0, (3, 1))
    layout = RowLayout([spec], {seat: [row] for seat in range(4)})

    def seat(session: Any) -> None:
        value = torch.full((4, 3), 100, dtype=torch.int32)
        value[2, 1] += change.get(session.seat, 0)
        state = MemoryState(layout, session.seat, {KEY: value})
        api.migrate(state, MemoryState(layout, session.seat), session=session, timeout=20)

    with pytest.raises(MigrationAborted) as caught:
        run_seats(4, seat)
    assert caught.value.reason == "replicas-differ"
    assert "w/param [2,1]" in str(caught.value)
    assert "[0:4,0:3]" in str(caught.value)


def test_buffers_that_drift_take_the_first_holder() -> None:
    MemoryAdapter.install()
    spec = KeySpec(Key("mean", "buffer"), (3,), "float32", kind="buffer", trainable=False)
    row = Row(spec.key, Box((0,), (3,)), "x", 0, (1,))
    layout = RowLayout([spec], {seat: [row] for seat in range(3)})

    def seat(session: Any) -> list[float]:
        value = torch.full((3,), float(session.seat))
        state = MemoryState(layout, session.seat, {spec.key: value})
        target = MemoryState(layout, session.seat)
        report = api.migrate(state, target, session=session, timeout=20)
        assert "replicas-differ" in {finding.reason for finding in report.warnings}
        assert report.bytes_moved == report.bytes_minimum == 2 * spec.nbytes
        return target.view(row).tolist()

    assert run_seats(3, seat) == [[0.0] * 3] * 3


def test_a_diverged_state_still_moves() -> None:
    """NaNs in a master: the bits of its half-precision copy are the framework's own."""
    MemoryAdapter.install()
    spec = KeySpec(KEY, (67,), "float32")
    copy = replace(spec, key=Key("w", "compute"), dtype="bfloat16", derived=True)
    value = torch.full((67,), float("nan"))
    values = {KEY: value, copy.key: value.to(torch.bfloat16)}

    def seat(session: Any) -> None:
        layouts = [
            random_layout(i, [spec, copy], range(3), [k]) for i, k in enumerate(("flat", "grid"))
        ]
        source = MemoryState(layouts[0], session.seat, values)
        target = MemoryState(layouts[1], session.seat)
        report = api.migrate(source, target, session=session, timeout=20)
        assert not report.warnings
        assert target.differing(values) == []

    run_seats(3, seat)
