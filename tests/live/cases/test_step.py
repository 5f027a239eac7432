"""STEP B61, B63, B64, B66, OPTSTATE B57, B59: one logical step a parameter, in whatever form it is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool


class IntSteps(torch.optim.Optimizer):
    """A mean of gradients, corrected by a count that is a plain int, as many own AdamW have it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Descend along the corrected mean."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(param)
                state["step"] += 1
                state["mean"].lerp_(param.grad, 0.1)
                param.sub_(state["mean"] / (1 - 0.9 ** state["step"]), alpha=group["lr"])


def state(seed: int, kind: Any = torch.optim.AdamW) -> dynadapt.TrainState:
    """A small job."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return dynadapt.TrainState(model, kind(model.parameters(), lr=0.02))


def train(x: dynadapt.TrainState, steps: int) -> list[float]:
    """Some steps; the losses."""
    losses = []
    for number in range(steps):
        loss = x.model(torch.linspace(-1, 1, 12).reshape(4, 3) * (number + 1)).square().mean()
        loss.backward()
        x.optimizer.step()
        x.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


FORMS = {
    "int": int,
    "float": float,
    "one element": lambda step: torch.tensor([float(step)]),
    "float64": lambda step: torch.tensor(float(step), dtype=torch.float64),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_step_in_any_form_is_one_number(form: str) -> None:
    """B63, B64: as loaders and other versions leave it; the target has it as its own optimizer does."""
    source, twin, target = state(0), state(0), state(1)
    train(source, 3)
    train(twin, 3)
    for entry in source.optimizer.state.values():
        entry["step"] = FORMS[form](int(entry["step"]))
    dynadapt.migrate(source, target)
    own = next(iter(target.optimizer.state.values()))["step"]
    assert (own.shape, own.dtype, float(own)) == ((), torch.float32, 3.0)
    assert train(target, 3) == train(twin, 3)


def test_an_optimizer_that_counts_in_plain_ints() -> None:
    """B61, B66: unknown to dynadapt, so the target takes a step of its own first; then it is the source's."""
    source, target = state(0, IntSteps), state(1, IntSteps)
    train(source, 3)
    with pytest.raises(dynadapt.MigrationAborted, match="IntSteps") as caught:
        dynadapt.migrate(source, target)
    assert caught.value.reason == "unknown-optimizer"
    train(target, 1)
    dynadapt.migrate(source, target)
    assert {type(entry["step"]) for entry in target.optimizer.state.values()} == {int}
    assert train(target, 3) == train(source, 3)


def test_a_step_that_is_missing_beside_its_moments_is_named() -> None:
    """B59: before the optimizer meets it."""
    source = state(0)
    train(source, 2)
    del next(iter(source.optimizer.state.values()))["step"]
    with pytest.raises(dynadapt.MigrationAborted, match=r"0\.weight/step") as caught:
        dynadapt.migrate(source, state(1))
    assert caught.value.reason == "missing-key"


def test_gradients_do_not_hide_that_there_is_no_state() -> None:
    """B57: a gradient without a step is an unfinished step, never an absent state."""
    source = state(0)
    source.model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(source, state(1))
    assert caught.value.reason == "mid-step"


OUTSIDE = {"embed.weight", "norm.weight", "norm.bias"}


def _some(how: str, seed: int) -> dynadapt.TrainState:
    """A job whose optimizer has the inner matrices only; all others are trainable nevertheless."""
    from torch.distributed.fsdp import fully_shard

    model: Any = jobs.net(seed)
    if how == "fsdp2":
        fully_shard(model)
    elif how.startswith("fsdp1"):
        units = ("frozen", "up", "down")
        model = jobs.fsdp1(model, orig_params="flat" not in how, units=units)
    own = [p for name, p in model.named_parameters() if "up" in name or "down" in name]
    return dynadapt.TrainState(model, torch.optim.AdamW(own, lr=0.01))


def _left(rank: int, world: int) -> dict[str, Any]:
    answers = {}
    for how in ("plain", "fsdp2", "fsdp1", "fsdp1 flat"):
        source, twin, target = (_some(how if i < 2 else "plain", i // 2) for i in range(3))
        for each in (source, twin):
            for number in range(2):
                each.model(jobs.tokens(number)).backward()
                each.optimizer.step()
                each.optimizer.zero_grad()
        report = dynadapt.migrate(source, target, timeout=30)
        told = [w.where for w in report.warnings if w.reason == "unused-gradient"]
        losses = [float(each.model(jobs.tokens(5)).detach()) for each in (target, twin)]
        source.model(jobs.tokens(2)).backward()
        try:
            dynadapt.migrate(source, target, timeout=30)
            reason, where = "moved", []
        except dynadapt.MigrationAborted as error:
            reason = error.reason
            where = sorted({finding.where.split(".")[0] for finding in error.findings})
        answers[how] = {"told": told, "gap": abs(losses[0] - losses[1]), "open": (reason, where)}
    return answers


def test_gradients_that_no_optimizer_uses_are_no_open_step(ranks2: Pool) -> None:
    """`optimizer.zero_grad()` passes them by, so that they are there for good; those in a group count."""
    for answers in ranks2.run(_left, timeout=60):
        for how, answer in answers.items():
            left = {"_flat_param"} if how == "fsdp1 flat" else OUTSIDE
            assert set(answer["told"]) == left, how
            assert answer["gap"] < 1e-6
            assert answer["open"] == ("mid-step", ["down", "up"]), how
