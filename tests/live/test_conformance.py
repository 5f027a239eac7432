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


class Zero:
    """DeepSpeed, of any stage."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        # Without ZeRO DeepSpeed divides gradients by a scale that the loss was not multiplied by.
        fp16 = {"fp16": {"enabled": True, "loss_scale": 1}}
        self._config: dict[str, Any] = fp16 if kind.endswith("fp16") else {}

    def build(self, seed: int) -> dynadapt.TrainState:
        """An engine over the odd little model."""
        engine = jobs.deepspeed_engine(self._kind, jobs.net(seed), **self._config)
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


def _subject(kind: str) -> Any:
    return Zero(kind) if kind.startswith("zero") else Torch(kind)


def _check(rank: int, world: int, one: str, two: str) -> None:
    def near(a: float, b: float) -> bool:
        return abs(a - b) < 0.05

    check_adapter(_subject(one), _subject(two), same_loss=near, timeout=30)


PAIRS = [
    ("zero3-bf16", "tpdp"),
    ("zero3-bf16", "zero3-fp32"),
    ("zero3-fp32", "fsdp2"),
    ("fsdp2", "plain"),
    ("fsdp1", "zero3-fp32"),
    ("fsdp1-flat", "even"),
    ("zero1-bf16", "plain"),
    ("zero2rr-bf16", "zero0-bf16"),
    ("zero1acc-bf16", "zero0-fp32"),
]

MORE = [
    ("zero1rr-fp32", "zero3-fp32"),
    ("zero2off-bf16", "fsdp2"),
    ("zero0fused-bf16", "tpdp"),
    ("zero2-fp16", "zero0-fp16"),
    ("zero0fused-fp16", "zero1-fp16"),
    ("zero1acc-bf16", "zero2-fp32"),
    ("zero0-fp32", "plain"),
]


@pytest.mark.parametrize(
    ("one", "two"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in MORE)],
)
def test_conformance(ranks4: Pool, one: str, two: str) -> None:
    """Out and back between two frameworks, with every rule of the contract tried on the way."""
    ranks4.run(_check, one, two, timeout=200)
