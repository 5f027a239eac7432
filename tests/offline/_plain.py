"""A plain torch job with every optimizer of torch, which saves and loads as everybody does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import dynadapt
from dynadapt.adapters._hyper import NOT_HYPER
from dynadapt.protocols import TrainState
from tests.live import jobs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "AMSGrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "RAdam": lambda groups: torch.optim.RAdam(groups, lr=1e-2),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-1, momentum=0.9, nesterov=True),
    "SGD without momentum": lambda groups: torch.optim.SGD(groups, lr=1e-1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.9, centered=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "Rprop": lambda groups: torch.optim.Rprop(groups, lr=1e-2),
    "ASGD": lambda groups: torch.optim.ASGD(groups, lr=1e-2),
}


class Job:
    """A plain job: tied and frozen tensors, two groups, a schedule, buffers that say what they are."""

    def __init__(self, kind: str = "AdamW", seed: int = 0, unused: bool = False) -> None:
        self.model = jobs.net(seed, extra=unused, integers=True)
        groups = jobs.groups(self.model)
        if unused or kind == "SGD without momentum":  # shapes of states do not tell whose they are
            names = {p: name for name, p in self.model.named_parameters()}
            for group in groups:
                group["params"] = [(names[p], p) for p in group["params"]]
        self.optimizer = OPTIMIZERS[kind](groups)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 3, 5], 0.5)

    def step(self, number: int) -> float:
        loss = self.model(jobs.tokens(number))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach())

    def save(self, path: Path, steps: int = 4) -> Path:
        """What people write, after some steps."""
        for number in range(steps):
            self.step(number)
        tree = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": 7,
            "best": 0.25,
            "rng": torch.get_rng_state(),
        }
        torch.save(tree, path)
        return path

    def load(self, path: Path) -> dict[str, Any]:
        """As everybody loads: nothing but what `weights_only` allows."""
        tree: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.load_state_dict(tree["model"])
        self.optimizer.load_state_dict(tree["optimizer"])
        if "scheduler" in tree:
            self.scheduler.load_state_dict(tree["scheduler"])
        return tree

    def fingerprint(self) -> str:
        return dynadapt.fingerprint(TrainState(self.model, self.optimizer))

    def tensors(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for id_, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"{id_}/{k}": torch.as_tensor(v) for k, v in entry.items() if v is not None}
        return found


def same_steps(a: Job, b: Job, number: int = 4) -> None:
    """The next steps of both are one, bit for bit, with all rates and counts."""
    for each in range(number, number + 3):
        assert a.step(each) == b.step(each)
    mine, its = a.tensors(), b.tensors()
    assert mine.keys() == its.keys()
    assert [name for name in mine if not torch.equal(mine[name], its[name])] == []
    hypers = [
        [
            {k: v for k, v in group.items() if k not in NOT_HYPER}
            for group in job.optimizer.param_groups
        ]
        for job in (a, b)
    ]
    assert hypers[0] == hypers[1]
    assert a.scheduler.state_dict() == b.scheduler.state_dict()
