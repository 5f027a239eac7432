"""Parking the source in host memory: it frees its device memory, and comes back whole as a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dynadapt
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool


def _park(rank: int, world: int) -> dict[str, Any]:
    engine, twin = jobs.zero3(jobs.net()), jobs.zero3(jobs.net())
    for number in range(2):
        jobs.step(engine, number)
        jobs.step(twin, number)
    model, optimizer, _ = jobs.tensor_parallel(jobs.net(seed=1))
    state = dynadapt.TrainState(model=model, optimizer=optimizer, counters={})
    there = dynadapt.migrate(engine, state, timeout=20, mode="park")
    flats = engine.optimizer.fp32_partitioned_groups_flat
    freed = [flat.untyped_storage().nbytes() for flat in flats]
    again = _refused_as_source(engine, state)
    back = dynadapt.migrate(state, engine, timeout=20)
    after = [flat.untyped_storage().nbytes() for flat in flats]
    losses = [jobs.step(engine, number) == jobs.step(twin, number) for number in range(2, 5)]
    return {
        "freed": freed,
        "after": min(after),
        "same": losses,
        "equal": [r.fingerprint_source == r.fingerprint_target for r in (there, back)],
        "again": again,
    }


def _refused_as_source(engine: Any, target: Any) -> str:
    try:
        dynadapt.migrate(engine, target, timeout=20)
    except dynadapt.MigrationAborted as error:
        return error.reason
    return "it went through"


def test_a_parked_engine_comes_back(ranks4: Pool) -> None:
    """Parked, migrated, migrated back: training goes on bit for bit like an engine left alone."""
    for answer in ranks4.run(_park):
        assert set(answer["freed"]) == {0}
        assert answer["after"] > 0
        assert all(answer["same"])
        assert answer["equal"] == [True, True]
        assert answer["again"] == "parked"
