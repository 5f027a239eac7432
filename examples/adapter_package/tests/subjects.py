"""The states that the conformance scenario works on: the trainer's, and plain torch as its other side."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from stripes.trainer import Ranks, Trainer
from torch import nn

from dynadapt.protocols import TrainState

if TYPE_CHECKING:
    from collections.abc import Callable

_seeding = threading.Lock()
"""Ranks that are threads share torch's generator: without it, their models would differ."""


class Net(nn.Module):
    """A small MLP with what makes sharding hard: ties, frozen, empty and 0-dim tensors, a buffer."""

    shift: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        with _seeding:
            torch.manual_seed(seed)
            self._make()

    def _make(self) -> None:
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(7, 7, bias=False)
        self.last = nn.Linear(7, 3)
        self.third.weight = self.second.weight
        self.first.bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.rand(()) + 1)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("shift", torch.randn(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of 6 numbers to rows of 3."""
        x = self.first(x).tanh()
        x = self.third(self.second(x).tanh()).tanh()
        found: torch.Tensor = self.last(x) * self.gain + self.shift.sum(0)
        return found


def loss(forward: Callable[..., torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """How far the model is from a fixed function of its input."""
    wanted = torch.stack([batch.sum(1), batch.prod(1), batch.amax(1)], 1)
    return (forward(batch) - wanted).square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    """The rows of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 6, generator=generator)


EVALUATION = 99
"""The step whose batch is for evaluation."""


class Stripes:
    """The trainer. `height` is the height of its stripes: two heights are two layouts."""

    def __init__(self, ranks: Ranks, height: int = 2) -> None:
        self._ranks, self._height = ranks, height

    def build(self, seed: int) -> TrainState:
        """Hyperparameters differ by seed as well, so that the scenario sees whether they travel."""
        more: dict[str, Any] = {"lr": 0.01 * seed, "betas": (0.9, 0.9 + 0.01 * seed)}
        return TrainState(Trainer(Net(seed), loss, self._ranks, height=self._height, **more))

    def train_step(self, x: TrainState, step: int) -> float:
        """Two micro-steps, one step."""
        found = [x.model.accumulate(batch(step + n, self._ranks.rank)) for n in (0, 50)]
        x.model.step()
        return float(sum(found))

    def evaluate(self, x: TrainState) -> float:
        """Leaves whole weights behind."""
        return float(x.model.evaluate(batch(EVALUATION, self._ranks.rank)))

    def open_step(self, x: TrainState) -> None:
        """On the last rank alone: a rank must not go ahead because it has nothing to refuse itself."""
        x.model.accumulate(batch(7, self._ranks.rank))
        if self._ranks.rank != self._ranks.size - 1:
            x.model.drop_gradients()

    def close_step(self, x: TrainState) -> None:
        """Drop the gradients."""
        x.model.drop_gradients()


class Plain:
    """A torch module and AdamW on every rank, trained by the same arithmetic as the trainer.

    Its forward rounds the weights to bf16, so losses of both sides can be compared to the last digits.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def build(self, seed: int) -> TrainState:
        """See `Stripes.build`."""
        model = Net(seed)
        betas = (0.9, 0.9 + 0.01 * seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed, betas=betas)
        place = {"dp": self._ranks.rank}
        return TrainState(model, optimizer, samples=0, coordinate=place)

    def train_step(self, x: TrainState, step: int) -> float:
        """See `Stripes.train_step`."""
        found = [self._backward(x, step + n) for n in (0, 50)]
        x.optimizer.step()
        x.optimizer.zero_grad()
        return sum(found)

    def evaluate(self, x: TrainState) -> float:
        """See `Stripes.evaluate`."""
        with torch.no_grad():
            return self._mean(self._loss(x, EVALUATION))

    def open_step(self, x: TrainState) -> None:
        """See `Stripes.open_step`."""
        self._backward(x, 7)
        if self._ranks.rank != self._ranks.size - 1:
            x.optimizer.zero_grad()

    def close_step(self, x: TrainState) -> None:
        """Drop the gradients."""
        x.optimizer.zero_grad()

    def _loss(self, x: TrainState, step: int) -> torch.Tensor:
        rounded = {n: p + (p.bfloat16() - p).detach() for n, p in x.model.named_parameters()}

        def forward(*given: torch.Tensor) -> torch.Tensor:
            found = torch.func.functional_call(x.model, rounded, given)
            assert isinstance(found, torch.Tensor)
            return found

        return loss(forward, batch(step, self._ranks.rank))

    def _backward(self, x: TrainState, step: int) -> float:
        """Add the gradients, averaged over the ranks."""
        found = self._loss(x, step)
        trained = [p for p in x.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(found, trained, materialize_grads=True)
        for parameter, own in zip(trained, gradients, strict=True):
            mean = (
                torch.stack(self._ranks.exchange("gradient", own.reshape(-1)))
                .mean(0)
                .view_as(parameter)
            )
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        return self._mean(found)

    def _mean(self, found: torch.Tensor) -> float:
        return float(torch.stack(self._ranks.exchange("loss", found.detach().reshape(1))).mean())
