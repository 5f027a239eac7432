"""Moving bytes: casts, staging, failures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings

from dynadapt import api
from dynadapt.errors import ChannelError, MigrationAborted, Refused
from dynadapt.testing import strategies as more
from dynadapt.testing.layouts import random_layout, random_specs
from dynadapt.testing.seats import run_seats
from dynadapt.testing.states import MemoryAdapter, MemoryState, bits, logical_values
from dynadapt.transport._torch import cast_into
from dynadapt.transport.channels.memory import MemoryChannel, MemoryHub
from dynadapt.transport.executor import DIRECT, Storage, execute
from dynadapt.transport.plan import Options
from dynadapt.vps.box import Box, row_major_strides
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import Row, RowLayout
from tests.transport._movers import Planned

if TYPE_CHECKING:
    from tests._ranks import Pool

BUDGET = 1 << 16


@settings(max_examples=40)
@given(specs=more.key_sets(), seed=more.seeds)
def test_every_target_gets_its_bits(specs: tuple[KeySpec, ...], seed: int) -> None:
    specs = tuple(spec for spec in specs if not spec.derived)
    layouts = [random_layout(seed + i, specs, range(2 + i)) for i in range(2)]
    values = logical_values(seed, specs)
    states, _ = Planned(*layouts).run(values)
    assert [line for state in states.values() for line in state.differing(values)] == []


@pytest.mark.parametrize("budget", [BUDGET, 4 * BUDGET, 64 * BUDGET])
@pytest.mark.parametrize(
    "kinds", [("grid", "flat"), ("replicated", "grid"), ("flat", "replicated")]
)
def test_staging_never_exceeds_the_budget(kinds: tuple[str, str], budget: int) -> None:
    specs = [
        KeySpec(Key("a", "param"), (311, 257), "float32"),
        KeySpec(Key("b", "param"), (64, 1024), "bfloat16"),
        KeySpec(Key("c", "param"), (5,), "float32"),
    ]
    source, target = (random_layout(i, specs, range(4), [kind]) for i, kind in enumerate(kinds))
    planned = Planned(source, target, Options(budget=budget))
    values = logical_values(1, specs)
    states, moved = planned.run(values)
    assert [line for state in states.values() for line in state.differing(values)] == []
    for seat, did in moved.items():
        assert did.peak_staging <= budget
        assert did.received == planned.plans[seat].minimum
        assert did.sent == planned.plans[seat].bytes_out
        assert did.chunks == len(planned.chunks[seat])


def test_big_contiguous_pieces_go_straight_into_storage() -> None:
    spec = KeySpec(Key("w", "param"), (DIRECT,), "float32")
    whole = [Row(spec.key, Box.whole(spec.shape), "x", 0, (1,))]
    planned = Planned(RowLayout([spec], {0: whole}), RowLayout([spec], {1: whole}))
    _, moved = planned.run(logical_values(0, [spec]))
    assert moved[1].direct == spec.nbytes
    assert moved[0].peak_staging == moved[1].peak_staging == 0


# --- casts ----------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, 1.0, -1.5, float("inf"), float("-inf"), float("nan"), 2.0**-126, 3.0e38]


def _cast(
    value: torch.Tensor, target: str, *, over_wire: bool, narrow: str = "if-exact"
) -> torch.Tensor:
    """One tensor moved to another dtype, inside a seat or between two."""
    dtype = str(value.dtype).removeprefix("torch.")
    spec = KeySpec(Key("w", "param"), tuple(value.shape), dtype)
    rows = [Row(spec.key, Box.whole(spec.shape), "x", 0, row_major_strides(spec.shape))]
    to = 1 if over_wire else 0
    planned = Planned(
        RowLayout([spec], {0: rows}),
        RowLayout([replace(spec, dtype=target)], {to: rows}),
        Options(narrow=narrow if narrow != "refuse" else "allow"),
    )
    states, _ = planned.run({spec.key: value}, narrow)
    return states[to].view(states[to].rows[0])


@pytest.mark.parametrize("over_wire", [False, True])
@pytest.mark.parametrize("narrow_dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_widening_and_back_is_exact(narrow_dtype: torch.dtype, over_wire: bool) -> None:
    name = str(narrow_dtype).removeprefix("torch.")
    every = torch.arange(1 << 8 * narrow_dtype.itemsize, dtype=torch.int32)
    raw = {1: torch.uint8, 2: torch.int16}[narrow_dtype.itemsize]
    value = every.to(raw).view(narrow_dtype)
    if narrow_dtype != torch.bfloat16:  # their NaNs have payloads that float32 quiets
        value = value[~torch.isnan(value.float())]
    else:
        signalling = torch.isnan(value.float()) & ((every & 0x40) == 0)
        value = value[~signalling]
    wide = _cast(value, "float32", over_wire=over_wire)
    assert wide.dtype == torch.float32
    back = _cast(wide, name, over_wire=over_wire)
    assert torch.equal(bits(back), bits(value))


@pytest.mark.parametrize("over_wire", [False, True])
@pytest.mark.parametrize("length", [1, 7, 64, 1000])
def test_special_values_narrow_exactly(length: int, over_wire: bool) -> None:
    value = torch.tensor(SPECIAL).to(torch.bfloat16).float().repeat(length)
    found = _cast(value, "bfloat16", over_wire=over_wire)
    assert torch.equal(bits(found.float()), bits(value))


@pytest.mark.parametrize("over_wire", [False, True])
def test_an_inexact_value_is_refused_and_named(over_wire: bool) -> None:
    value = torch.ones(3, 5000)
    value[1, 4321] = 1.0 + 2.0**-20
    with pytest.raises(Refused, match=r"w/param .*not exact in torch.bfloat16") as caught:
        _cast(value, "bfloat16", over_wire=over_wire)
    assert caught.value.reason == "narrowing"


@pytest.mark.parametrize("over_wire", [False, True])
def test_allowed_narrowing_rounds_as_torch_does(over_wire: bool) -> None:
    value = torch.linspace(-3, 3, 4001)
    found = _cast(value, "bfloat16", over_wire=over_wire, narrow="allow")
    assert torch.equal(bits(found), bits(value.to(torch.bfloat16)))


def test_a_cast_does_not_depend_on_strides() -> None:
    raw = torch.tensor([0x7FC00000, 0x7FC10000, -0x00400000, 0x7F800001], dtype=torch.int32)
    value = raw.view(torch.float32).repeat(50)
    one, two = torch.empty(200, dtype=torch.bfloat16), torch.empty(200, 2, dtype=torch.bfloat16)
    cast_into(one, value)
    cast_into(two[:, 1], value)
    scalar = torch.stack([torch.empty((), dtype=torch.bfloat16) for _ in range(4)])
    for i in range(4):
        cast_into(scalar[i], value[i])
    assert torch.equal(bits(one), bits(two[:, 1]))
    assert torch.equal(bits(one[:4]), bits(scalar))


# --- failures, and real processes -----------------------------------------------------------------


def test_a_peer_that_never_sends_is_named() -> None:
    spec = KeySpec(Key("w", "param"), (8,), "float32")
    whole = [Row(spec.key, Box((0,), (8,)), "x", 0, (1,))]
    planned = Planned(RowLayout([spec], {5: whole}), RowLayout([spec], {9: whole}))
    state = MemoryState(planned.target, 9)
    with pytest.raises(ChannelError, match="seat 5") as caught:
        execute(
            planned.plans[9],
            planned.chunks[9],
            planned.matched,
            Storage({}, {}),
            Storage({9: state.rows}, state.buffers),
            MemoryChannel(MemoryHub(), 9),
            timeout=0.3,
        )
    assert caught.value.peer == 5


def test_a_refused_cast_on_one_seat_ends_all_seats_at_once() -> None:
    MemoryAdapter.install()
    wide = KeySpec(Key("w", "param"), (90,), "float32")
    narrow = replace(wide, dtype="bfloat16")
    source, target = (
        random_layout(i, [spec], range(3), ["flat"]) for i, spec in enumerate((wide, narrow))
    )
    values = {wide.key: torch.ones(90)}
    values[wide.key][70] = 1.0001

    def seat(session: object) -> str:
        me = session.seat  # type: ignore[attr-defined]
        a, b = MemoryState(source, me, values), MemoryState(target, me)
        with pytest.raises(MigrationAborted) as caught:
            api.migrate(a, b, session=session, timeout=20)  # type: ignore[arg-type]
        assert a.differing(values) == []
        return str(caught.value)

    messages = run_seats(3, seat, timeout=15)
    assert len(set(messages)) == 1
    assert "not exact" in messages[0]


def _on_ranks(rank: int, world_size: int, seed: int) -> tuple[int, int]:
    """Random layouts over real processes, there and back; returns bytes moved and their minimum."""
    from dynadapt.elastic.worlds import current_session

    MemoryAdapter.install()
    me, seats = current_session().seat, current_session().seats
    specs = random_specs(seed, 5, max_volume=1 << 18)
    source, target = (random_layout(seed + i, specs, seats) for i in range(2))
    values = logical_values(seed, specs)
    a, b, c = MemoryState(source, me, values), MemoryState(target, me), MemoryState(source, me)
    report = api.migrate(a, b, budget=1 << 20, timeout=30)
    assert b.differing(values) == []
    api.migrate(b, c, budget=1 << 20, timeout=30)
    assert c.differing(values) == []
    return report.bytes_moved, report.bytes_minimum


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_layouts_between_processes(ranks4: Pool, seed: int) -> None:
    for moved, minimum in ranks4.run(_on_ranks, seed):
        assert moved == minimum
