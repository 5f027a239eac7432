"""The trainer trains: alone, and cut over ranks."""

from __future__ import annotations

import pytest
import torch
from stripes.trainer import Striped, ThreadRanks, Trainer, deal
from subjects import Net, batch, loss

from dynadapt.testing.seats import run_threads

STEPS = 40


def _train(size: int, height: int) -> list[float]:
    """The evaluations before and after training on one batch that all ranks share."""

    def rank(ranks: ThreadRanks) -> list[float]:
        trainer = Trainer(Net(0), loss, ranks, height=height, lr=0.02)
        found = [trainer.evaluate(batch(0, 0))]
        for _ in range(STEPS):
            trainer.accumulate(batch(0, 0))
            trainer.step()
        return [*found, trainer.evaluate(batch(0, 0))]

    world = ThreadRanks.of(size)
    first, *others = run_threads([lambda ranks=ranks: rank(ranks) for ranks in world])  # type: ignore[misc]
    assert all(other == first for other in others)
    return first


def test_the_loss_falls_and_is_the_same_on_any_number_of_ranks() -> None:
    """Only the order of sums differs between worlds."""
    before, after = _train(1, 2)
    assert after < before / 4
    assert _train(3, 2) == pytest.approx([before, after], rel=1e-3)


def test_small_tensors_leave_ranks_without_a_share() -> None:
    """4 ranks, one stripe of one row: the others hold nothing, and there is padding behind it."""
    dealt = [deal([Striped(("w",), (1, 3))], 2, rank, 4) for rank in range(4)]
    assert [(len(stripes[0]), length) for stripes, length in dealt] == [(1, 4), *[(0, 0)] * 3]


def test_an_evaluation_keeps_whole_weights_until_the_next_step() -> None:
    """What an adapter has to know: writing to the shards is not seen while they are there."""
    trainer = Trainer(Net(0), loss, ThreadRanks.of(1)[0])
    before = trainer.evaluate(batch(0, 0))
    trainer.masters.zero_()
    trainer.copies.zero_()
    assert trainer.evaluate(batch(0, 0)) == before
    trainer.accumulate(batch(0, 0))
    trainer.step()
    assert trainer.evaluate(batch(0, 0)) != before


def test_a_step_needs_gradients() -> None:
    """And says so."""
    with pytest.raises(RuntimeError, match="call accumulate first"):
        Trainer(torch.nn.Linear(2, 2), loss, ThreadRanks.of(1)[0]).step()
