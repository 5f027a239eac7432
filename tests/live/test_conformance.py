"""The scenario that every adapter has to pass, with real engines on real ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import dynadapt
from dynadapt.testing.adapters import check_adapter
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool


def _mean(loss: torch.Tensor) -> float:
    total = loss.detach().to(torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


class Zero3:
    """DeepSpeed ZeRO-3."""

    def __init__(self, **config: Any) -> None:
        self._config = config

    def build(self, seed: int) -> dynadapt.TrainState:
        """An engine over the odd little model."""
        engine = jobs.zero3(jobs.net(seed), **self._config)
        return dynadapt.TrainState(model=engine, counters={})

    def train_step(self, x: dynadapt.TrainState, step: int) -> float:
        """One step on the same batch everywhere."""
        loss = x.model(jobs.tokens(step))
        x.model.backward(loss)
        x.model.step()
        return _mean(loss)

    def evaluate(self, x: dynadapt.TrainState) -> float:
        """Leaves gathered weights behind."""
        with torch.no_grad():
            return _mean(x.model(jobs.tokens(99)))

    def open_step(self, x: dynadapt.TrainState) -> None:
        """A backward without a step."""
        x.model.backward(x.model(jobs.tokens(50)))

    def close_step(self, x: dynadapt.TrainState) -> None:
        """The step."""
        x.model.step()


class Torch:
    """A DTensor, FSDP1 or plain model."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def build(self, seed: int) -> dynadapt.TrainState:
        """A model in the wanted layout."""
        from torch.distributed.fsdp import fully_shard

        model = jobs.net(seed)
        if self._kind == "tpdp":
            model, optimizer, _ = jobs.tensor_parallel(model)
            return dynadapt.TrainState(model, optimizer, counters={})
        if self._kind == "fsdp2":
            fully_shard(model)
        make = jobs.adamw
        if self._kind == "fsdp1":
            model = jobs.fsdp1(model, "SHARD_GRAD_OP", units=("up",))
        if self._kind == "fsdp1-flat":
            model, make = jobs.fsdp1(model, orig_params=False), jobs.even
        if self._kind == "even":
            make = jobs.even
        return dynadapt.TrainState(model, make(model, lr=seed / 200), counters={})

    def train_step(self, x: dynadapt.TrainState, step: int) -> float:
        """One step on the same batch everywhere."""
        loss = x.model(jobs.tokens(step))
        loss.backward()
        x.optimizer.step()
        x.optimizer.zero_grad()
        return _mean(loss)

    def evaluate(self, x: dynadapt.TrainState) -> float:
        """Leaves gathered weights behind."""
        with torch.no_grad():
            return _mean(x.model(jobs.tokens(99)))

    def open_step(self, x: dynadapt.TrainState) -> None:
        """A backward without a step."""
        x.model(jobs.tokens(50)).backward()

    def close_step(self, x: dynadapt.TrainState) -> None:
        """Drop the gradients."""
        x.optimizer.zero_grad()


SUBJECTS: dict[str, Any] = {
    "zero3-bf16": lambda: Zero3(),
    "zero3-fp32": lambda: Zero3(bf16={"enabled": False}),
    "tpdp": lambda: Torch("tpdp"),
    "fsdp2": lambda: Torch("fsdp2"),
    "plain": lambda: Torch("plain"),
    "even": lambda: Torch("even"),
    "fsdp1": lambda: Torch("fsdp1"),
    "fsdp1-flat": lambda: Torch("fsdp1-flat"),
}


def _check(rank: int, world: int, one: str, two: str) -> None:
    def near(a: float, b: float) -> bool:
        return abs(a - b) < 0.05

    check_adapter(SUBJECTS[one](), SUBJECTS[two](), same_loss=near, timeout=30)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("zero3-bf16", "tpdp"),
        ("zero3-bf16", "zero3-fp32"),
        ("zero3-fp32", "fsdp2"),
        ("fsdp2", "plain"),
        ("fsdp1", "zero3-fp32"),
        ("fsdp1-flat", "even"),
    ],
)
def test_conformance(ranks4: Pool, one: str, two: str) -> None:
    """Out and back between two frameworks, with every rule of the contract tried on the way."""
    ranks4.run(_check, one, two, timeout=200)
