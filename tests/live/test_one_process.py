"""Whole migrations in one process: what an optimizer, a scheduler and odd tensors need to go on exactly."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dynadapt


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _train(state: dynadapt.TrainState, steps: int = 2) -> list[float]:
    losses = []
    for number in range(steps):
        x = torch.linspace(-1, 1, 12).reshape(4, 3) + number
        loss = state.model(x).square().mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        if state.scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                state.scheduler.step()
        losses.append(loss.item())
    return losses


def _split(model: nn.Sequential, turned: bool = False) -> list[dict[str, Any]]:
    groups = [
        {"params": [model[0].weight, model[2].weight], "lr": 1e-2},
        {"params": [model[0].bias, model[2].bias], "lr": 1e-4},
    ]
    return groups[::-1] if turned else groups


def _state(
    seed: int, groups: Any, kind: Any = torch.optim.AdamW, **more: Any
) -> dynadapt.TrainState:
    model = _model(seed)
    optimizer = kind(groups(model), **more)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
    return dynadapt.TrainState(model, optimizer, scheduler)


def _refused(source: Any, target: Any, **arguments: Any) -> str:
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(source, target, **arguments)
    return caught.value.reason


def test_a_schedule_follows_its_params_into_turned_groups() -> None:
    """Groups in another order: each parameter keeps its own rate, now and at every later step."""
    source = _state(0, _split)
    target = _state(1, lambda model: _split(model, turned=True))
    _train(source)
    dynadapt.migrate(source, target)
    assert _train(target, 3) == _train(source, 3)


def test_a_schedule_over_other_groups_is_refused() -> None:
    """Said before it goes wrong, with both sides as they were."""
    source = _state(0, lambda model: [{"params": list(model.parameters())}])
    target = _state(1, _split)
    _train(source)
    before = [g["lr"] for g in target.optimizer.param_groups]
    assert _refused(source, target) == "scheduler-groups"
    assert len(before) == 2
    _train(source)


@pytest.mark.parametrize(
    "more", [{"maximize": True}, {"amsgrad": True}, {"weight_decay": 0.3, "eps": 1e-3}]
)
def test_every_setting_of_an_update_is_carried(more: dict[str, Any]) -> None:
    """A target built with other settings makes the source's steps."""
    source = _state(0, _split, **more)
    target = _state(1, _split, amsgrad=more.get("amsgrad", False))
    _train(source)
    dynadapt.migrate(source, target)
    assert _train(target) == _train(source)


def test_rates_in_one_shared_tensor_are_parted() -> None:
    """torch gives all groups the tensor that was passed; two rates need two."""
    source = _state(0, _split)
    target = _state(1, lambda m: [{"params": g["params"]} for g in _split(m)], lr=torch.tensor(0.5))
    _train(source)
    dynadapt.migrate(source, target)
    rates = [float(group["lr"]) for group in target.optimizer.param_groups]
    assert rates == pytest.approx([group["lr"] for group in source.optimizer.param_groups])
    assert rates[0] != rates[1]


def test_another_update_rule_is_refused() -> None:
    """The same state tensors do not make the same optimizer."""
    source = _state(0, _split)
    _train(source)
    for kind in (torch.optim.RAdam, torch.optim.NAdam):
        assert _refused(source, _state(1, _split, kind)) == "optimizer-class"
    into = _state(1, _split, torch.optim.Adam)
    dynadapt.migrate(source, into)  # Adam and AdamW differ by a setting, which is carried
    assert _train(into) == _train(source)


class Lookahead(torch.optim.Optimizer):
    """A wrapper that keeps slow weights of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.optimizer = inner
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    def step(self, closure: Any = None) -> None:
        """The inner one's."""
        self.optimizer.step()


def test_a_wrapper_with_state_of_its_own_is_refused() -> None:
    """Its slow weights would be left behind without a word."""
    model = _model()
    source = dynadapt.TrainState(model, Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert _refused(source, _state(1, _split)) == "unknown-optimizer"


@pytest.mark.parametrize("kind", ["conj", "neg"])
def test_lazy_views_are_refused(kind: str) -> None:
    """Their storage does not hold their values."""
    states = []
    for seed in (0, 1):
        model = _model(seed)
        z = torch.tensor([1 + 2j, 3 - 4j])
        model.register_buffer("z", z.conj() if kind == "conj" else z.conj().imag)
        states.append(dynadapt.TrainState(model))
    assert _refused(*states) == "unsupported-tensor"


def test_expanded_buffers_are_refused_with_a_way_out() -> None:
    """One element for many coordinates cannot be written."""
    states = []
    for seed in (0, 1):
        model = _model(seed)
        model.register_buffer("mask", torch.zeros(1).expand(5))
        states.append(dynadapt.TrainState(model))
    assert _refused(*states) == "shared-memory"


class Position(nn.Module):
    """A buffer over memory that torch does not own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = _model(seed)
        self.register_buffer("table", torch.from_numpy(np.full((3, 4), seed, np.float32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The body's output."""
        return self.body(x) + self.table.sum()


def _position(seed: int) -> dynadapt.TrainState:
    model = Position(seed)
    return dynadapt.TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def test_parking_leaves_foreign_memory_alone() -> None:
    """Such a storage cannot be resized; everything else is freed."""
    source, target = _position(3), _position(4)
    _train(source)
    dynadapt.migrate(source, target, mode="park")
    assert torch.equal(target.model.table, torch.full((3, 4), 3.0))
    assert source.model.body[0].weight.untyped_storage().nbytes() == 0


def test_a_park_that_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for the third copy: the first two go back, and training goes on as a twin's."""
    source, twin, target = _position(0), _position(0), _position(1)
    assert _train(source) == _train(twin)
    from dynadapt.elastic import parked

    true, calls = parked._HostCopy, []

    def third_fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise MemoryError
        return true(*arguments)

    monkeypatch.setattr(parked, "_HostCopy", third_fails)
    assert _refused(source, target, mode="park") == "out-of-memory"
    monkeypatch.setattr(parked, "_HostCopy", true)
    assert _train(source) == _train(twin)
    dynadapt.migrate(source, target, mode="park")
    assert _refused(target, target, mode="park") == "bad-argument"


def test_reading_leaves_storages_resizable() -> None:
    """A fingerprint must not change the tensors that it reads."""
    state = _state(0, _split)
    _train(state)
    dynadapt.fingerprint(state)
    assert all(p.untyped_storage().resizable() for p in state.model.parameters())


def test_a_wrong_model_of_many_tensors_is_told_in_time() -> None:
    """The nearest names are looked up for the first findings only."""
    source, target = (
        nn.ParameterDict({f"{name}{i}": torch.zeros(2) for i in range(1500)}) for name in "ab"
    )
    assert _refused(source, target) == "missing-key"


def test_an_error_after_the_commit_does_not_undo_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other seats have gone on with the target by then."""
    from dynadapt.elastic import rng

    source, target = _state(0, _split), _state(1, _split)
    source.coordinate, target.coordinate = {"dp": 1}, {"dp": 0}
    _train(source)

    def broken(stream: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(rng, "put", broken)
    with pytest.warns(UserWarning, match="random streams"):
        dynadapt.migrate(source, target)
    assert _train(target) == _train(source)


def test_a_real_submodule_named_as_a_wrapper_keeps_its_name() -> None:
    """`module.weight` beside `weight` are two parameters."""

    def model(seed: int) -> nn.Module:
        made = nn.Linear(2, 2)
        made.module = nn.Linear(2, 2)
        torch.manual_seed(seed)
        for p in made.parameters():
            nn.init.normal_(p)
        return made

    source, target = model(0), model(1)
    dynadapt.migrate(source, target)
    for a, b in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_parked_model_stays_parked_until_a_state_has_arrived() -> None:
    """Planning into it, or a migration that fails, must not let undefined memory pass for a state."""
    source, target = _state(0, _split), _state(1, _split)
    _train(source)
    dynadapt.migrate(source, target, mode="park")
    dynadapt.plan(target, source)
    wrong = dynadapt.TrainState(nn.Linear(7, 7))
    assert _refused(wrong, source) == "missing-key"
    assert _refused(source, _state(2, _split)) == "parked"
    for call in (dynadapt.describe, dynadapt.fingerprint):
        with pytest.raises(dynadapt.MigrationAborted) as caught:
            call(source)
        assert caught.value.reason == "parked"
    dynadapt.migrate(target, source)
    assert _train(source) == _train(target)


def test_a_forgotten_optimizer_is_refused() -> None:
    """A source without one would start the target's afresh: only if that is what is wanted."""
    source, target = _state(0, _split), _state(1, _split)
    assert _refused(source.model, target) == "missing-key"
    dynadapt.migrate(source.model, target, allow="missing")
    assert torch.equal(source.model[0].weight, target.model[0].weight)


def test_weights_alone_into_another_optimizer() -> None:
    """With both allowances: the source's moments stay behind, the target's start afresh."""
    source, target = _state(0, _split), _state(1, _split, torch.optim.SGD, momentum=0.9)
    _train(source)
    target.scheduler = None
    dynadapt.migrate(source, target, allow={"extra", "missing"})
    assert torch.equal(source.model[0].weight, target.model[0].weight)


class Scaled(nn.Linear):
    """A layer that keeps more than parameters and buffers."""

    seen = 0

    def get_extra_state(self) -> Any:
        """What torch saves with the module."""
        return {"seen": self.seen, "range": torch.tensor([1.5, float(self.seen)])}

    def set_extra_state(self, state: Any) -> None:
        """The inverse."""
        self.seen = state["seen"]
        assert state["range"][1] == self.seen


def test_extra_state_of_modules_is_carried() -> None:
    """By module name, tensors included."""
    source, target = (nn.Sequential(Scaled(2, 2)) for _ in range(2))
    source[0].seen = 7
    report = dynadapt.migrate(source, target)
    assert target[0].seen == 7
    assert ("user/extra state of 0", "exact") in {(o.path, o.kind) for o in report.outcomes}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_target_made_whole_without_gradients_trains_on(mode: Any) -> None:
    """States made under `inference_mode` could never be stepped."""
    source, target = _state(0, _split), _state(1, _split)
    _train(source)
    with mode():
        dynadapt.migrate(source, target)
    assert _train(target) == _train(source)
