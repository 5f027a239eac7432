"""A live ZeRO-3 job becomes TP x DP and goes back: every tensor bit for bit, judged by the frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import dynadapt
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool


def _there_and_back(rank: int, world: int) -> dict[str, Any]:
    engine = jobs.zero3(jobs.net())
    for number in range(4):
        jobs.step(engine, number)
    engine.eval()
    with torch.no_grad():
        engine(jobs.tokens(99, rank))
    engine.train()
    before = jobs.zero_tensors(engine)
    model, optimizer, mesh = jobs.tensor_parallel(jobs.net(seed=1))
    state = dynadapt.TrainState(model=model, optimizer=optimizer, counters={})
    there = dynadapt.migrate(engine, state, timeout=30)
    middle = jobs.torch_tensors(model, optimizer)
    steps = {float(entry["step"]) for entry in optimizer.state.values()}
    row = mesh.get_local_rank("dp")
    batch = torch.cat([jobs.tokens(4, 2 * row), jobs.tokens(4, 2 * row + 1)])
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    after_step = jobs.torch_tensors(model, optimizer)
    with torch.no_grad():
        held_out = float(model(jobs.tokens(99, row)))
    back = dynadapt.migrate(state, engine, timeout=30)
    again = jobs.zero_tensors(engine)
    engine.eval()
    with torch.no_grad():
        held_out_again = float(engine(jobs.tokens(99, row)))
    engine.train()
    losses = [jobs.step(engine, number) for number in range(5, 8)]
    return {
        "bits": [jobs.differing(before, middle), jobs.differing(after_step, again)],
        "count": len(before),
        "steps": steps,
        "global_steps": engine.global_steps,
        "reports": [there.to_json(), back.to_json()],
        "held_out": (held_out, held_out_again),
        "finite": all(loss == loss for loss in losses),
        "moved_on": jobs.differing(again, jobs.zero_tensors(engine)),
    }


def test_there_and_back_bit_for_bit(ranks4: Pool) -> None:
    """ZeRO-3 x 4 -> TP 2 x DP 2 -> ZeRO-3 x 4, an eval forward before each migration."""
    for answer in ranks4.run(_there_and_back):
        assert answer["bits"] == [[], []]
        assert answer["count"] == 6 * 3 + 1  # six trained parameters in three slots, one frozen
        assert answer["steps"] == {4.0}
        assert answer["global_steps"] == 4 + 3  # carried there, back, and counted on
        for report in answer["reports"]:
            assert report["bytes_moved"] == report["bytes_minimum"] > 0
            assert report["fingerprint_source"] == report["fingerprint_target"]
            assert report["peak_extra_bytes"] > 0
            assert report["warnings"] == []
        assert answer["reports"][1]["bytes_rebuilt"] > 0
        there, again = answer["held_out"]
        assert abs(there - again) < 1e-2
        assert answer["finite"]
        assert answer["moved_on"]


def _losses_after(rank: int, world: int, kind: str) -> list[float]:
    """Losses of steps 4..9 on the reference, the migrated, or the moment-less run."""
    engine = jobs.zero3(jobs.net())
    for number in range(4):
        jobs.step(engine, number)
    if kind == "reference":
        return _mean([jobs.step(engine, number) for number in range(4, 10)])
    model, optimizer, mesh = jobs.tensor_parallel(jobs.net(seed=1))
    dynadapt.migrate(engine, dynadapt.TrainState(model=model, optimizer=optimizer), timeout=30)
    if kind == "control":
        for entry in optimizer.state.values():
            entry["exp_avg"].zero_()
            entry["exp_avg_sq"].zero_()
    row, losses = mesh.get_local_rank("dp"), []
    for number in range(4, 10):
        loss = model(torch.cat([jobs.tokens(number, 2 * row), jobs.tokens(number, 2 * row + 1)]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return _mean(losses)


def _mean(losses: list[float]) -> list[float]:
    import torch.distributed as dist

    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def test_losses_follow_the_uninterrupted_run(ranks4: Pool) -> None:
    """The gap to the uninterrupted run is at least 5x smaller than that of a run without moments."""
    reference, migrated, control = (
        ranks4.run(_losses_after, kind)[0] for kind in ("reference", "migrated", "control")
    )
    gap = sum(abs(a - b) for a, b in zip(migrated, reference, strict=True))
    control_gap = sum(abs(a - b) for a, b in zip(control, reference, strict=True))
    assert 5 * gap < control_gap
