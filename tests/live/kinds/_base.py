"""What a kind is, what a job can do, and how a job of a kind is built."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import dynadapt
from tests.live import jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dynadapt.vps.tensor_map import TensorMap

ADAM = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Recipe:
    """How a job's optimizer is made; `slots` are the state tensors of a parameter."""

    cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    defaults: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "betas": (0.9, 0.95)})
    groups: Callable[[nn.Module], list[dict[str, Any]]] = jobs.groups
    slots: tuple[str, ...] = ADAM

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a model that is wrapped already."""
        return self.cls(self.groups(model), **self.defaults)


def _even(model: nn.Module) -> list[dict[str, Any]]:
    params = [p for _, p in model.named_parameters() if p.requires_grad]
    return [{"params": params, "weight_decay": 0.1}]


#: "even" has one decay for all: a flat parameter has no other.
RECIPES = {
    "adamw": Recipe(),
    "even": Recipe(groups=_even),
    "adam": Recipe(torch.optim.Adam, {"lr": 1e-2}),
    "sgd": Recipe(torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}, slots=("momentum_buffer",)),
}


class Job(ABC):
    """One live job. `state` is what dynadapt takes, `kind` its entry in `KINDS`."""

    kind: Kind
    tensor_map: TensorMap | None = None
    """From the names of this job's tensors to those of `jobs.Net`, if they differ."""

    def __init__(self, state: dynadapt.TrainState, recipe: Recipe) -> None:
        self.state, self.recipe = state, recipe

    @property
    def module(self) -> Any:
        """What has this rank's parameters and buffers."""
        return self.state.model

    @abstractmethod
    def step(self, number: int) -> float:
        """One optimizer step on `jobs.tokens(number)`, the same on every rank; the loss."""

    @abstractmethod
    def evaluate(self) -> None:
        """A forward without gradients, which may leave gathered weights behind."""

    @abstractmethod
    def tensors(self) -> jobs.Tensors:
        """Every "name/param" and "name/<slot>" whole, in fp32, by the framework's own gathers.

        On every rank, under the names of `jobs.Net`; a parameter is its authoritative copy.
        """


class EngineJob(Job):
    """A DeepSpeed engine that is called, and gathered as ZeRO is."""

    def __init__(self, engine: Any, recipe: Recipe) -> None:
        super().__init__(dynadapt.TrainState(model=engine, counters={}), recipe)
        self.engine = engine

    def step(self, number: int) -> float:
        """One step of the engine."""
        loss = self.engine(jobs.tokens(number))
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def evaluate(self) -> None:
        """A forward of the engine."""
        with torch.no_grad():
            self.engine(jobs.tokens(99))

    def tensors(self) -> jobs.Tensors:
        """DeepSpeed's gathers, where they are right."""
        return jobs.zero_tensors(self.engine, self.recipe.slots)


class TorchJob(Job):
    """A module, wrapped or not, and a torch optimizer."""

    def __init__(self, model: nn.Module, optimizer: Any, recipe: Recipe) -> None:
        super().__init__(dynadapt.TrainState(model, optimizer, counters={}), recipe)
        self.model, self.optimizer = model, optimizer

    def step(self, number: int) -> float:
        """Forward, backward, step."""
        loss: torch.Tensor = self.model(jobs.tokens(number))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def evaluate(self) -> None:
        """A forward of the model."""
        with torch.no_grad():
            self.model(jobs.tokens(99))

    def tensors(self) -> jobs.Tensors:
        """DTensor's gathers."""
        return jobs.torch_tensors(self.model, self.optimizer, self.recipe.slots)


@dataclass(frozen=True)
class Kind:
    """One kind: `make` turns a fresh model into a job.

    `worlds` are the numbers of ranks it runs on, `dtype` what its forward and backward compute in.
    `one_group`: its parameters must all have the same hyperparameters. `about` is for the page of all
    pairs: what the name does not say.
    """

    name: str
    make: Callable[[jobs.Net, Recipe], Job]
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    dtype: torch.dtype = torch.float32
    one_group: bool = False
    about: str = ""


KINDS: dict[str, Kind] = {}


def kind(
    name: str, **facts: Any
) -> Callable[[Callable[[jobs.Net, Recipe], Job]], Callable[[jobs.Net, Recipe], Job]]:
    """Register a function as the maker of a kind; `facts` are fields of `Kind`."""

    def register(make: Callable[[jobs.Net, Recipe], Job]) -> Callable[[jobs.Net, Recipe], Job]:
        if name in KINDS:
            raise ValueError(f"two kinds are called {name}")
        KINDS[name] = Kind(name, make, **facts)
        return make

    return register


def hidden(world: int) -> int:
    """The model's hidden size: what three ranks divide, as tensor parallelism needs, or not."""
    return 21 if world == 3 else jobs.HIDDEN


def build(
    name: str,
    recipe: str | Recipe = "adamw",
    seed: int | None = None,
    width: int | None = None,
) -> Job:
    """A fresh job of a kind on all ranks, with weights of its own; a recipe, or its name in `RECIPES`.

    `width` is the hidden size, if not `hidden(world)`.
    """
    entry = KINDS[name]
    seed = zlib.crc32(name.encode()) % 1000 if seed is None else seed
    width = hidden(dist.get_world_size()) if width is None else width
    model = jobs.net(seed, hidden=width)
    with torch.no_grad():  # what is frozen mostly comes from a 16-bit checkpoint
        model.frozen.weight.mul_(256).round_().div_(256)
    job = entry.make(model, RECIPES[recipe] if isinstance(recipe, str) else recipe)
    job.kind = entry
    return job
