"""Random streams follow their place in the mesh, not their process."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import dynadapt
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool


def _draw() -> list[float]:
    return [torch.rand(()).item(), float(np.random.random()), random.random()]


def _seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def _streams(rank: int, world: int) -> dict[str, Any]:
    engine = jobs.zero3(jobs.net())
    model, optimizer, _ = jobs.tensor_parallel(jobs.net(seed=1))
    state = dynadapt.TrainState(model, optimizer, counters={})
    _seed(rank)
    expected = {}
    for place in range(world):  # what each data rank's stream would draw next
        _seed(place)
        _draw()
        expected[place] = _draw()
    _seed(rank)
    _draw()
    there = dynadapt.migrate(engine, state, timeout=20)
    drawn = _draw()
    _seed(rank)
    back = dynadapt.migrate(state, engine, timeout=20)
    after = _draw()
    twin = jobs.zero3(jobs.net())
    _seed(rank)
    again = dynadapt.migrate(engine, twin, timeout=20)
    stayed = _draw()
    _seed(rank)
    return {
        "drawn": drawn,
        "expected": expected,
        "kinds": {o.path: o.kind for o in there.outcomes if o.path.startswith("rng/")},
        "back": {o.path: o.kind for o in back.outcomes if o.path.startswith("rng/")},
        "after": after,
        "same place": (stayed, _draw(), [o for o in again.outcomes if o.path.startswith("rng/")]),
    }


def test_streams_follow_their_place(ranks4: Pool) -> None:
    """ZeRO-3 x 4 -> TP 2 x DP 2: data rank d goes on with stream d, on both of its TP ranks."""
    answers = ranks4.run(_streams)
    for rank, answer in enumerate(answers):
        assert answer["drawn"] == answer["expected"][rank // 2]
        assert answer["kinds"] == {
            "rng/dp0-tp0-pp0": "exact",
            "rng/dp0-tp1-pp0": "derived",
            "rng/dp1-tp0-pp0": "exact",
            "rng/dp1-tp1-pp0": "derived",
        }
        assert answer["back"]["rng/dp3-tp0-pp0"] == "reseeded"
        stayed, expected, told = answer["same place"]
        assert stayed == expected
        assert told == []
    assert len({tuple(answer["after"]) for answer in answers}) == 4  # no two data ranks draw alike
