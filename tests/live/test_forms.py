"""Parameters and buffers of every form in one process: whole migrations, with training after them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dynadapt

Told = dict[str, Any]


class Forms(nn.Module):
    """What a module may hold besides contiguous matrices of floats."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scalar = nn.Parameter(torch.randn(()))
        self.one = nn.Parameter(torch.randn(1))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.every_other = nn.Parameter(torch.randn(3, 8)[:, ::2])
        self.channels = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.wave = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        fused = torch.randn(9, 4)
        self.q, self.k, self.v = (nn.Parameter(part) for part in fused.split((2, 3, 4)))
        self.first = nn.Parameter(torch.randn(3, 4))
        self.second, self.third = self.first, self.first
        self.register_parameter("absent", None)
        self.places = nn.Parameter(torch.randint(9, (5,)), requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(2, 2).bfloat16(), requires_grad=False)
        self.register_buffer("mask", torch.randn(5) > 0)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("octets", torch.randint(255, (7,), dtype=torch.uint8))
        self.register_buffer("rough", torch.randn(3).bfloat16(), persistent=False)
        self.register_buffer("flag", torch.tensor(seed % 2 == 0), persistent=False)
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex128))
        self.register_buffer("columns", torch.randn(4, 3).t())
        self.register_buffer("none_of", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("lacking", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss that every trained parameter has a part in."""
        every = self.turned + self.every_other + self.wave.abs() + self.wide
        every = every + self.first * self.second + self.third + self.nothing.sum()
        mixed = torch.cat([self.q, self.k, self.v]).sum() + self.channels.square().sum()
        return (every * x * self.scalar + self.one + mixed).square().mean()


def state(seed: int, **hyper: Any) -> dynadapt.TrainState:
    """A job of all forms."""
    model = Forms(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    return dynadapt.TrainState(model, torch.optim.AdamW(trained, lr=1e-2, **hyper))


def train(x: dynadapt.TrainState, steps: int = 2) -> list[float]:
    """Some steps; the losses."""
    losses = []
    for number in range(steps):
        loss = x.model(torch.linspace(-1, 1, 12).reshape(3, 4) + number)
        loss.backward()
        x.optimizer.step()
        x.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def held(x: dynadapt.TrainState) -> Told:
    """Shape, dtype, strides and values of all tensors, by names that no tie leaves out."""
    named = dict(x.model.named_parameters(remove_duplicate=False))
    found = {**named, **dict(x.model.named_buffers())}
    for name, param in named.items():
        found |= {f"{name}/{slot}": t for slot, t in x.optimizer.state.get(param, {}).items()}
    return {
        n: (tuple(t.shape), t.dtype, t.stride(), t.detach().resolve_conj().tolist())
        for n, t in found.items()
    }


@pytest.mark.parametrize("hyper", [{}, {"amsgrad": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("mode", ["keep", "park", "release"])
def test_every_form(hyper: Told, mode: str) -> None:
    """Values, strides and ties arrive; the next steps are the source's own; and back again."""
    source, twin, target = state(1, **hyper), state(1, **hyper), state(2, **hyper)
    train(source)
    train(twin)
    expected, before = held(twin), held(target)
    report = dynadapt.migrate(source, target, mode=mode)
    assert report.fingerprint_source == report.fingerprint_target
    assert held(target) == expected
    assert before != expected
    assert target.model.first is target.model.second is target.model.third
    assert train(target) == train(twin)
    dynadapt.migrate(target, source)
    assert held(source) == held(twin)
    assert train(source) == train(twin)


def _one(make: Any) -> tuple[dynadapt.TrainState, dynadapt.TrainState]:
    pair = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        make(model)
        pair.append(dynadapt.TrainState(model))
    return pair[0], pair[1]


def _expanded(model: nn.Module) -> None:
    model.rows = nn.Parameter(torch.randn(1).expand(5))


def _windows(model: nn.Module) -> None:
    model.windows = nn.Parameter(torch.randn(6).unfold(0, 3, 1))


def _halves(model: nn.Module) -> None:
    whole = torch.randn(6)
    model.low, model.high = nn.Parameter(whole[:4]), nn.Parameter(whole[2:])


def _two_objects(model: nn.Module) -> None:
    model.again = nn.Parameter(model.weight.detach())


@pytest.mark.parametrize("make", [_expanded, _windows, _halves, _two_objects])
def test_memory_of_several_elements_is_read_and_not_written(make: Any) -> None:
    """Two coordinates, one place: as a target by name, and told which; nothing has changed."""
    source, target = _one(make)
    before = copy.deepcopy(target.model.state_dict())
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(source, target)
    assert caught.value.reason == "shared-memory"
    assert any(each.fix for each in caught.value.findings)
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_gradient_of_what_is_frozen_is_an_unfinished_step() -> None:
    """An optimizer would step it all the same: frozen, but with a gradient left over."""
    source, target = state(1), state(2)
    train(source)
    left = source.model.first
    left.requires_grad_(requires_grad=False)
    left.grad = torch.ones_like(left)
    with pytest.raises(dynadapt.MigrationAborted, match="first") as caught:
        dynadapt.migrate(source, target)
    assert caught.value.reason == "mid-step"


def test_a_gradient_that_no_optimizer_will_use_is_told() -> None:
    """Its parameter is in no param group: nothing is lost by leaving it."""
    source, target = state(1), state(2)
    train(source)
    source.model.frozen.requires_grad_(requires_grad=False)
    source.model.frozen.grad = torch.ones_like(source.model.frozen)
    report = dynadapt.migrate(source, target)
    assert [w.where for w in report.warnings if w.reason == "unused-gradient"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("mask", torch.zeros(5), "dtype"),
        ("count", torch.tensor(1.0), "dtype"),
        ("count", torch.zeros(1, dtype=torch.int64), "shape"),
        ("phase", torch.zeros(2), "dtype"),
        ("columns", torch.zeros(3, 4, dtype=torch.bfloat16), "narrowing"),
        ("none_of", torch.zeros(1, dtype=torch.int64), "shape"),
        ("lacking", torch.zeros(1), "missing-key"),
        ("columns", None, "extra-key"),
    ],
)
def test_a_form_that_differs_is_refused(name: str, value: Any, reason: str) -> None:
    """Nothing is turned into something else that has the same number of elements."""
    source, target = state(1), state(2)
    target.model._buffers[name] = value
    with pytest.raises(dynadapt.MigrationAborted, match=name) as caught:
        dynadapt.migrate(source, target)
    assert caught.value.reason == reason


def test_a_parameter_that_one_side_lacks() -> None:
    """`register_parameter(name, None)` is no tensor."""
    source, target = state(1), state(2)
    target.model.absent = nn.Parameter(torch.zeros(2))
    with pytest.raises(dynadapt.MigrationAborted, match="absent") as caught:
        dynadapt.migrate(source, target)
    assert caught.value.reason == "missing-key"


@pytest.mark.parametrize("side", ["source", "target"])
def test_strides_need_not_agree(side: str) -> None:
    """A matrix by columns into the same by rows, with moments that lie as each side's weights do."""
    made = []
    for seed in (0, 1):
        model = nn.Linear(4, 3)
        torch.manual_seed(seed)
        nn.init.normal_(model.weight)
        if (seed == 0) == (side == "source"):
            model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
        made.append(dynadapt.TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1)))
    source, target = made

    def steps(x: dynadapt.TrainState) -> None:
        x.model(torch.ones(1, 4)).square().sum().backward()
        x.optimizer.step()
        x.optimizer.zero_grad()

    def compare(same: Any) -> None:
        for a, b in zip(source.model.parameters(), target.model.parameters(), strict=True):
            assert same(a, b)
            for slot in ("exp_avg", "exp_avg_sq"):
                own = target.optimizer.state[b][slot]
                assert same(source.optimizer.state[a][slot], own)
                assert own.stride() == b.stride()

    steps(source)
    dynadapt.migrate(source, target)
    compare(torch.equal)
    steps(source)
    steps(target)
    compare(torch.allclose)  # torch multiplies by other kernels where strides are others
