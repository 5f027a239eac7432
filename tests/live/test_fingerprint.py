"""One number for one state, in any layout; another number for any other state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import dynadapt
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool


def _prints(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    engine = jobs.zero3(jobs.net(), bf16={"enabled": False})
    for number in range(2):
        jobs.step(engine, number)
    sharded, split = jobs.net(seed=1), jobs.net(seed=2)
    fully_shard(sharded)
    split, optimizer, _ = jobs.tensor_parallel(split)
    states = {
        "fsdp2": dynadapt.TrainState(sharded, jobs.adamw(sharded)),
        "tpdp": dynadapt.TrainState(split, optimizer),
        "plain": dynadapt.TrainState(plain := jobs.net(seed=3), jobs.adamw(plain)),
    }
    found = {"zero3": dynadapt.fingerprint(engine)}
    for name, state in states.items():
        dynadapt.migrate(engine, state, timeout=20)
        found[name] = dynadapt.fingerprint(state)
    moments = states["plain"].optimizer.state[plain.up.weight]["exp_avg"]
    with torch.no_grad():
        moments[[0, 1]] = moments[[1, 0]]  # no norm, sum or sorted list would notice
    found["swapped"] = dynadapt.fingerprint(states["plain"])
    return {"found": found, "described": str(dynadapt.describe(engine))}


def test_one_number_for_one_state(ranks4: Pool) -> None:
    """Equal over four frameworks' layouts, unequal after two rows of one moment were swapped."""
    answers = ranks4.run(_prints)
    assert all(answer["found"] == answers[0]["found"] for answer in answers)
    found = dict(answers[0]["found"])
    swapped = found.pop("swapped")
    assert len(set(found.values())) == 1
    assert swapped not in found.values()
    for words in ("up.weight/exp_avg", "20x8", "derived", "4 seats"):
        assert words in answers[0]["described"]
