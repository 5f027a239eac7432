"""The printed plan: the union of all seats, as JSON and as a table, priced for links."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dynadapt import api
from dynadapt.testing.layouts import random_layout, random_specs
from dynadapt.testing.seats import run_seats
from dynadapt.testing.states import MemoryAdapter, MemoryState, logical_values
from dynadapt.transport.cost import LINKS

if TYPE_CHECKING:
    from dynadapt.elastic.worlds import Session


def test_a_plan_says_what_a_migration_then_does() -> None:
    """Bytes, tensors and seats of the plan are those of the migration; nothing was changed by it."""
    MemoryAdapter.install()
    specs = random_specs(5, 8, 4000)
    layouts = [random_layout(i, specs, range(3), [kind]) for i, kind in enumerate(("flat", "grid"))]
    values = [logical_values(seed, specs) for seed in (1, 2)]

    def seat(session: Session) -> tuple[dict[str, object], str, int, list[str]]:
        a, b = (
            MemoryState(layout, session.seat, own)
            for layout, own in zip(layouts, values, strict=True)
        )
        plan = api.plan(a, b, session=session, timeout=20)
        left = b.differing(values[1])
        report = api.migrate(a, b, session=session, timeout=20)
        return plan.to_json(), str(plan), report.bytes_moved, left

    answers = run_seats(3, seat)
    told, text, moved, _ = answers[0]
    assert all(answer[0] == told for answer in answers)
    assert all(answer[3] == [] for answer in answers)
    told = json.loads(json.dumps(told))
    assert told["bytes_moved"] == told["bytes_minimum"] == moved > 0
    assert sum(tensor["moved"] for tensor in told["tensors"]) == moved
    assert sum(seat["bytes_in"] for seat in told["seats"]) == moved
    assert sum(m["bytes"] for seat in told["seats"] for m in seat["moves"]) == 2 * moved
    assert set(told["seconds"]) == set(LINKS)
    assert all(seconds > 0 for seconds in told["seconds"].values())
    assert {tensor["why"] for tensor in told["tensors"]} >= {"partly held where it is needed"}
    assert "plan, by seat" in text
