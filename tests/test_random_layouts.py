"""Any layout to any other and back, bit for bit, with exactly the bytes that have to move."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynadapt import api
from dynadapt.protocols import AuxItem
from dynadapt.testing import strategies as more
from dynadapt.testing.layouts import random_layout
from dynadapt.testing.seats import run_seats
from dynadapt.testing.states import MemoryAdapter, MemoryState, logical_values
from dynadapt.vps.keys import Key, KeySpec, itemsize

if TYPE_CHECKING:
    from dynadapt.elastic.outcome import MigrationReport
    from dynadapt.elastic.worlds import Session
    from dynadapt.vps.layout import RowLayout

SMALLEST_BUDGET = 64 << 10


@pytest.fixture(autouse=True)
def _adapter() -> None:
    MemoryAdapter.install()


def _minimum(source: RowLayout, target: RowLayout) -> int:
    """By masks, one element at a time: what a target seat needs and does not hold."""
    total = 0
    for spec in target.keys:
        origin = source.by_name[spec.key]
        if spec.derived or not origin.moves:
            continue
        for endpoint in target.endpoints:
            needs, has = (torch.zeros(spec.shape, dtype=torch.bool) for _ in range(2))
            for layout, mask in ((target, needs), (source, has)):
                for row in layout.rows_of(spec.key, endpoint):
                    mask[tuple(map(slice, row.box.lo, row.box.hi))] = True
            total += int((needs & ~has).sum()) * itemsize(spec.dtype)
    return total


def _there_and_back(
    count: int, source: RowLayout, target: RowLayout, seed: int, budget: int
) -> list[MigrationReport]:
    """Migrate on `count` seats; every seat checks its rows after each way."""
    values = logical_values(seed, source.keys)
    names = {spec.key.name for spec in source.keys if spec.kind == "state"}
    scalars = {name: {"step": seed % 97} for name in names}
    aux = (AuxItem("param_groups", [{"lr": 0.1, "betas": (0.9, 0.95)}]),)
    absent = [s.key for s in target.keys if s.kind == "state" and seed % 2]

    def seat(session: Session) -> list[MigrationReport]:
        me = session.seat
        a = b = None
        if me in source.endpoints:
            a = MemoryState(source, me, values, scalars=scalars, aux=aux, by_alias=me % 2 == 1)
        if me in target.endpoints:
            b = MemoryState(target, me, absent=absent, by_alias=me % 3 == 1)
        before = a.digest() if a else ""
        there = api.migrate(a, b, session=session, timeout=30, budget=budget)
        assert a is None or a.digest() == before
        assert b is None or b.differing(values) == []
        assert b is None or b.scalars == scalars
        fresh = MemoryState(source, me) if a else None
        back = api.migrate(b, fresh, session=session, timeout=30, budget=budget)
        assert fresh is None or fresh.differing(values) == []
        assert fresh is None or fresh.scalars == scalars
        return [there, back]

    reports = run_seats(count, seat)
    for there, back in reports:
        assert there.fingerprint_source == there.fingerprint_target == back.fingerprint_target
        assert there.bytes_moved == there.bytes_minimum == _minimum(source, target)
        assert back.bytes_moved == back.bytes_minimum
        assert max(there.staging_bytes, back.staging_bytes) <= budget
    return reports[0]


# Each example is two whole migrations by up to eight threads.
@settings(
    max_examples=settings().max_examples * 2 // 3, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data(), count=st.integers(1, 8), specs=more.key_sets(), seed=more.seeds)
def test_any_layout_to_any_other_and_back(
    data: st.DataObject, count: int, specs: tuple[KeySpec, ...], seed: int
) -> None:
    source = data.draw(more.layouts(specs, data.draw(more.endpoints(count, count))))
    if data.draw(st.booleans()):  # a target that has zeros where the source keeps nothing
        specs = tuple(replace(spec, presence="present") for spec in specs)
    target = data.draw(more.layouts(specs, data.draw(more.endpoints(count, count))))
    _there_and_back(count, source, target, seed, SMALLEST_BUDGET)


@pytest.mark.parametrize("count", [2, 3, 5, 7])
@pytest.mark.parametrize("kinds", [("flat", "grid"), ("zero", "overlapping"), ("grid", "zero")])
def test_many_chunks(count: int, kinds: tuple[str, str]) -> None:
    shapes = {"a": (97, 513), "b": (11, 7, 5, 131), "c": (3,), "d": (70_001,), "e": ()}
    specs = [
        KeySpec(Key(name, slot), shape, "float32", kind="parameter" if slot == "param" else "state")
        for name, shape in shapes.items()
        for slot in ("param", "exp_avg")
    ]
    source = random_layout(1, specs, range(count), kinds[:1])
    target = random_layout(2, specs, range(count), kinds[1:])
    report, _ = _there_and_back(count, source, target, 3, SMALLEST_BUDGET)
    assert report.chunks > 5
