"""The adapters' scenario on real ranks: each framework with itself, and with another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from dynadapt.protocols import TrainState
from dynadapt.testing.adapters import check_adapter
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool


class _Subject:
    """What all frameworks share: batches that do not depend on the layout, and the mean loss."""

    def __init__(self) -> None:
        self.parts, self.place = dist.get_world_size(), dist.get_rank()

    def batch(self, step: int) -> torch.Tensor:
        """This data rank's rows of a batch that is a function of the step."""
        rows = torch.cat([jobs.tokens(step, rank) for rank in range(dist.get_world_size())])
        return rows.chunk(self.parts)[self.place]

    def mean(self, loss: torch.Tensor) -> float:
        """Over all ranks."""
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def evaluate(self, x: TrainState) -> float:
        x.model.eval()
        with torch.no_grad():
            loss = x.model(self.batch(999))
        x.model.train()
        return self.mean(loss)


class Zero3(_Subject):
    """A DeepSpeed engine."""

    def build(self, seed: int) -> TrainState:
        return TrainState(jobs.zero3(jobs.net(seed)))

    def train_step(self, x: TrainState, step: int) -> float:
        loss = x.model(self.batch(step))
        x.model.backward(loss)
        x.model.step()
        return self.mean(loss)

    def open_step(self, x: TrainState) -> None:
        x.model.backward(x.model(self.batch(0)))

    def close_step(self, x: TrainState) -> None:
        x.model.step()


class _Torch(_Subject):
    """A module and its optimizer."""

    def train_step(self, x: TrainState, step: int) -> float:
        loss = x.model(self.batch(step))
        loss.backward()
        x.optimizer.step()
        x.optimizer.zero_grad()
        return self.mean(loss)

    def open_step(self, x: TrainState) -> None:
        x.model(self.batch(0)).backward()

    def close_step(self, x: TrainState) -> None:
        x.optimizer.zero_grad()


class TensorParallel(_Torch):
    """TP 2 x replicated DP 2."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.place = self.parts // 2, self.place // 2

    def build(self, seed: int) -> TrainState:
        model, optimizer, _ = jobs.tensor_parallel(jobs.net(seed))
        return TrainState(model, optimizer)


class Fsdp2(_Torch):
    """`fully_shard`, in bf16 as the others."""

    def build(self, seed: int) -> TrainState:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = jobs.net(seed)
        fully_shard(model.up, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return TrainState(model, jobs.adamw(model))


SUBJECTS = {"zero3": Zero3, "tp-dp": TensorParallel, "fsdp2": Fsdp2}


def _near(a: float, b: float) -> bool:
    return abs(a - b) < 2e-2 * abs(b)


def _check(rank: int, world_size: int, source: str, target: str) -> None:
    one, two = SUBJECTS[source](), SUBJECTS[target]()
    same: dict[str, Any] = {} if source == target else {"same_loss": _near}
    check_adapter(one, None if source == target else two, timeout=60, **same)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("zero3", "zero3"),
        ("fsdp2", "fsdp2"),
        ("tp-dp", "tp-dp"),
        ("zero3", "tp-dp"),
        ("zero3", "fsdp2"),
    ],
)
def test_live_adapters(ranks4: Pool, source: str, target: str) -> None:
    ranks4.run(_check, source, target)
