"""What the adapter refuses, and what it says that it left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stripes.trainer import ThreadRanks, Trainer
from subjects import Net, batch, loss

import dynadapt
from dynadapt import TrainState


def _torch(groups: Any = None, **more: Any) -> TrainState:
    model = Net(1)
    return TrainState(model, torch.optim.AdamW(groups or model.parameters(), **more))


def _trainer() -> Trainer:
    return Trainer(Net(2), loss, ThreadRanks.of(1)[0])


def test_hyperparameters_of_one_set_of_groups_arrive() -> None:
    """And what the trainer has no place for is told."""
    trainer = _trainer()
    source = _torch(lr=0.5, betas=(0.8, 0.9), weight_decay=0.25, maximize=True)
    report = dynadapt.migrate(source, TrainState(trainer))
    assert (trainer.lr, trainer.betas, trainer.weight_decay) == (0.5, (0.8, 0.9), 0.25)
    assert [o.note for o in report.outcomes if o.path == "param_groups/maximize"]


def test_groups_that_differ_are_refused() -> None:
    """The trainer has one set of hyperparameters; it must not take the first group's for all."""
    source = _torch()
    first, *others = source.model.parameters()
    source.optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": others}])
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(source, TrainState(_trainer()))
    assert caught.value.reason == "hyper-conflict"


def test_what_would_be_lost_is_refused() -> None:
    """A user's objects beside a trainer: the adapter does not carry them."""
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(TrainState(_trainer(), counters={"epoch": 3}), TrainState(_trainer()))
    assert caught.value.reason == "unsupported-state"
    assert "counters" in str(caught.value)


def test_what_the_trainer_has_no_place_for_is_told() -> None:
    """Counters of the source, for one."""
    source = _torch()
    source.counters = {"epoch": 3}
    report = dynadapt.migrate(source, TrainState(_trainer()))
    assert [o.kind for o in report.outcomes if o.path == "counters"] == ["dropped"]


def test_the_samples_seen_travel() -> None:
    """From the trainer, which counts them, to a torch state, whose loop is told where to go on."""
    trainer, target = _trainer(), _torch()
    trainer.accumulate(batch(0, 0))
    trainer.step()
    dynadapt.migrate(TrainState(trainer), target)
    assert target.samples == len(batch(0, 0))
