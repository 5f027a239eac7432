"""A migration that fails late: the target is as it was in all that `finish` sets, the source trains on."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool


class Boom(Exception):
    """What a test raises."""


class Position:
    """A user's object."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.at = state["at"]


def _state(seed: int, lr: float, steps: int) -> dynadapt.TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr), betas=(0.5, lr))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = dynadapt.TrainState(model, optimizer, scheduler)
    state.user, state.samples, state.counters = {"data": Position(seed)}, seed, {"epoch": seed}
    for _ in range(steps):
        _train(state)
    return state


def _train(state: dynadapt.TrainState) -> float:
    loss = state.model(torch.ones(1, 3)).square().mean()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.scheduler.step()
    return float(loss.detach())


def _told(state: dynadapt.TrainState) -> dict[str, Any]:
    """All of a state but its tensors."""
    groups = [
        {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
        for group in state.optimizer.param_groups
    ]
    steps = [float(s["step"]) for s in state.optimizer.state.values()]
    aux = (state.scheduler.state_dict(), state.samples, dict(state.counters), state.user["data"].at)
    return copy.deepcopy({"groups": groups, "steps": steps, "aux": aux})


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("where", ["apply_behaviour", "apply_user", "certify", "commit"])
def test_what_finish_had_set_is_put_back(
    monkeypatch: pytest.MonkeyPatch, where: str, steps: int
) -> None:
    """Rates, schedule, steps, counts, the user's objects: of a fresh target, and of a trained one."""
    from dynadapt.adapters.live import _torch_adapter

    source, twin, target = _state(0, 0.25, 3), _state(0, 0.25, 3), _state(1, 0.5, steps)
    before = _told(target)

    def boom(*_: Any) -> None:
        raise Boom

    if where.startswith("apply"):
        monkeypatch.setattr(_torch_adapter, where, boom)

    def on_phase(name: str) -> None:
        if name == where:
            raise Boom

    with pytest.raises(dynadapt.MigrationAborted, match="Boom"):
        dynadapt.migrate(source, target, on_phase=on_phase)
    assert _told(target) == before
    assert _train(source) == _train(twin)
    monkeypatch.undo()
    dynadapt.migrate(source, target)
    assert _told(target) == _told(source)
    assert _train(source) == _train(target)


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [("lr", torch.tensor(0.125), "0.bias/lr"), ("betas", (0.5, 0.75), "2.weight/betas")],
)
def test_a_hyperparameter_that_did_not_arrive(key: str, value: Any, where: str) -> None:
    """Compared by parameter name before the commit, as every tensor is."""
    source, twin, target = _state(0, 0.25, 3), _state(0, 0.25, 3), _state(1, 0.5, 0)
    before = _told(target)

    def on_phase(name: str) -> None:
        if name == "certify":
            target.optimizer.param_groups[0][key] = value

    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(source, target, on_phase=on_phase)
    assert caught.value.reason == "certificate"
    assert where in {finding.where for finding in caught.value.findings}
    assert _told(target) == before
    assert _train(source) == _train(twin)


def test_a_rate_in_single_precision_is_told() -> None:
    """0.1 is not a float32: the target's tensor takes the nearest, and the report says so."""
    source, target = _state(0, 0.25, 3), _state(1, 0.5, 0)
    source.optimizer.param_groups[0]["lr"] = 0.1
    report = dynadapt.migrate(source, target)
    assert ("0.bias/lr", "derived") in {(o.path, o.kind) for o in report.outcomes}


@pytest.mark.parametrize("mode", ["keep", "park"])
def test_one_bit_in_a_placed_tensor(mode: str) -> None:
    """Flipped between the move and the certificate: refused with the tensor's name."""
    source, twin, target = _state(0, 0.25, 3), _state(0, 0.25, 3), _state(1, 0.5, 0)

    def on_phase(name: str) -> None:
        if name == "certify":
            target.model[2].weight.detach().view(torch.int32)[1, 3] ^= 1 << 4

    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(source, target, mode=mode, on_phase=on_phase)
    assert [(f.reason, f.where) for f in caught.value.findings] == [
        ("certificate", "2.weight/param")
    ]
    assert _train(source) == _train(twin)
    report = dynadapt.migrate(source, target, mode=mode)
    assert report.fingerprint_source == report.fingerprint_target


def _engine(rank: int, world: int, kind: str) -> dict[str, Any]:
    source, target = (jobs.deepspeed_engine(kind, jobs.net(seed=seed)) for seed in (0, 1))
    twin = jobs.deepspeed_engine(kind, jobs.net())
    for number in range(2):
        jobs.step(source, number)
        jobs.step(twin, number)
    groups = target.optimizer.param_groups
    for group in groups:
        group["lr"] = 0.5

    def told() -> Any:
        hyper = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        return copy.deepcopy((hyper, target.global_steps, target.micro_steps))

    before = told()

    def on_phase(name: str) -> None:
        if name == "commit" and rank == 1:
            raise Boom

    try:
        dynadapt.migrate(source, target, timeout=60, on_phase=on_phase)
    except dynadapt.MigrationAborted as error:
        text = str(error)
    same = told() == before
    trains = jobs.step(source, 2) == jobs.step(twin, 2)
    then = dynadapt.migrate(source, target, timeout=60)
    return {
        "text": text,
        "same": same,
        "trains": trains,
        "then": then.fingerprint_source == then.fingerprint_target,
        "on": jobs.step(source, 3) == jobs.step(target, 3),
    }


def test_an_engine_is_put_back(ranks4: Pool) -> None:
    """Rates and counters of a DeepSpeed target, after a vote against the commit."""
    for answer in ranks4.run(_engine, "zero3-bf16"):
        assert "Boom" in answer.pop("text")
        assert all(answer.values()), answer
