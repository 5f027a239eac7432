"""Optimizers for the jobs of `tests.live.kinds`, by name."""

from __future__ import annotations

from typing import Any

import torch

from tests.live.kinds import RECIPES, Recipe

MOMENTUM = ("momentum_buffer",)


class Lion(torch.optim.Optimizer):
    """One moment, no step: https://arxiv.org/abs/2302.06675."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """The sign of a mix of moment and gradient."""
        for group in self.param_groups:
            slow, fast = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                mixed = state["exp_avg"] * slow + param.grad * (1 - slow)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(torch.sign(mixed), alpha=-group["lr"])
                state["exp_avg"].mul_(fast).add_(param.grad, alpha=1 - fast)


def _adam(cls: Any = torch.optim.AdamW, more: tuple[str, ...] = (), **hyper: Any) -> Recipe:
    return Recipe(cls, {"lr": 1e-2, **hyper}, slots=("exp_avg", "exp_avg_sq", *more))


def _sgd(slots: tuple[str, ...] = MOMENTUM, **hyper: Any) -> Recipe:
    return Recipe(torch.optim.SGD, {"lr": 1e-2, **hyper}, slots=slots)


ONE = RECIPES["even"].groups

EVERY: dict[str, Recipe] = {
    "adamw one by one": _adam(foreach=False),
    "adamw foreach": _adam(foreach=True),
    "adamw fused": _adam(fused=True),
    "amsgrad": _adam(more=("max_exp_avg_sq",), amsgrad=True),
    "nadam": _adam(torch.optim.NAdam),
    "radam": _adam(torch.optim.RAdam),
    "adamax": Recipe(torch.optim.Adamax, {"lr": 1e-2}, slots=("exp_avg", "exp_inf")),
    "sgd bare": _sgd(()),
    "sgd momentum": _sgd(momentum=0.9),
    "sgd nesterov": _sgd(momentum=0.9, nesterov=True),
    "adagrad": Recipe(
        torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}, ONE, ("sum",)
    ),
    "rmsprop": Recipe(torch.optim.RMSprop, {"lr": 1e-3}, slots=("square_avg",)),
    "rmsprop centered": Recipe(
        torch.optim.RMSprop,
        {"lr": 1e-3, "momentum": 0.9, "centered": True},
        slots=("square_avg", "grad_avg", *MOMENTUM),
    ),
    "adadelta": Recipe(torch.optim.Adadelta, {"lr": 1.0}, slots=("square_avg", "acc_delta")),
    "lion": Recipe(Lion, {"lr": 1e-3}, slots=("exp_avg",)),
}

#: Those that need whole tensors, or matrices.
WHOLE: dict[str, Recipe] = {
    "adafactor": Recipe(
        torch.optim.Adafactor, {"lr": 1e-2}, slots=("row_var", "col_var", "variance")
    ),
    "muon": Recipe(torch.optim.Muon, {"lr": 1e-2}, lambda m: [{"params": matrices(m)}], MOMENTUM),
}

#: What the suite walks; the rest is for the night.
SOME = ("adamw fused", "amsgrad", "nadam", "sgd nesterov", "adagrad", "rmsprop centered", "lion")


def matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """What Muon takes; the rest is frozen, as nothing would step it."""
    for parameter in model.parameters():
        if parameter.ndim != 2:
            parameter.requires_grad_(requires_grad=False)
    return [p for p in model.parameters() if p.requires_grad]
