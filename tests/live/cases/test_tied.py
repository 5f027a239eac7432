"""TIED B01, B03, B04, B06, B07: one tensor of several names, kept once, found by each, never untied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from tests.live import jobs
from tests.live.kinds import build

if TYPE_CHECKING:
    from tests._ranks import Pool

NAMES = ("embed.weight", "head.weight")


class Tied(nn.Module):
    """An embedding and a head; which of the two is registered first is a matter of taste."""

    def __init__(self, seed: int, first: str = "embed", tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        made = {"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)}
        for name in (first, *(name for name in made if name != first)):
            self.add_module(name, made[name])
        if tied and first == "embed":
            self.head.weight = self.embed.weight
        elif tied:
            self.embed.weight = self.head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Next-token loss."""
        logits = self.head(self.embed(tokens))
        return nn.functional.cross_entropy(logits[:-1], tokens[1:])


def state(seed: int, **how: Any) -> dynadapt.TrainState:
    """A small job."""
    model = Tied(seed, **how)
    return dynadapt.TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.05))


def train(x: dynadapt.TrainState, steps: int = 2) -> list[float]:
    """Some steps; the losses."""
    losses = []
    for number in range(steps):
        loss = x.model((torch.arange(8) + number) % 6)
        loss.backward()
        x.optimizer.step()
        x.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _refused(source: Any, target: Any, **more: Any) -> str:
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(source, target, **more)
    assert caught.value.reason == "tie"
    assert all(name in str(caught.value) for name in NAMES)
    return str(caught.value)


@pytest.mark.parametrize("first", ["embed", "head"])
def test_whichever_name_an_optimizer_saw_first(first: str) -> None:
    """B04, B06: state is found by any name, whatever order the other side registered them in."""
    source, target = state(1), state(2, first=first)
    train(source)
    keys = [str(spec.key) for spec in dynadapt.describe(source).layout.keys]
    assert keys == ["embed.weight/exp_avg", "embed.weight/exp_avg_sq", "embed.weight/param"]
    dynadapt.migrate(source, target)
    assert target.model.head.weight is target.model.embed.weight
    (moments,) = target.optimizer.state.values()
    assert torch.equal(moments["exp_avg"], next(iter(source.optimizer.state.values()))["exp_avg"])
    assert train(target) == train(source)


def test_memory_that_is_shared_without_being_one_parameter_is_no_tie() -> None:
    """B03: ties are told by identity; equal values, or equal addresses of copies, prove nothing."""
    source, target = state(1, tied=False), state(2, tied=False)
    with torch.no_grad():
        source.model.head.weight.copy_(source.model.embed.weight)
    dynadapt.migrate(source, target)
    assert target.model.head.weight is not target.model.embed.weight
    train(source)
    train(target)
    assert torch.equal(source.model.head.weight, target.model.head.weight)
    assert not torch.equal(target.model.head.weight, target.model.embed.weight)


@pytest.mark.parametrize("untied", ["source", "target"])
def test_a_tie_of_one_side_only_is_refused(untied: str) -> None:
    """Both names are told; with leave of the user both copies get the same values."""
    source = state(1, tied=untied != "source")
    target = state(2, tied=untied != "target")
    train(source)
    _refused(source, target)
    dynadapt.migrate(source, target, allow={"tie"})
    assert torch.equal(target.model.embed.weight, source.model.embed.weight)
    assert torch.equal(target.model.head.weight, target.model.embed.weight)


def test_what_a_tie_leaves_behind_is_told() -> None:
    """Joined tensors that differ lose one's values; those that are equal lose nothing."""
    source, target = state(1, tied=False), state(2)
    train(source)
    report = dynadapt.migrate(source, target, allow={"tie"})
    lost = {f.where for f in report.warnings if f.reason == "tie"}
    assert lost == {f"head.weight/{slot}" for slot in ("param", "exp_avg", "exp_avg_sq")}
    source.model.head.weight.data.copy_(source.model.embed.weight.data)
    states = source.optimizer.state
    states[source.model.head.weight] = {
        slot: value.clone() for slot, value in states[source.model.embed.weight].items()
    }
    assert not dynadapt.migrate(source, target, allow={"tie"}).warnings


def _stored_once(rank: int, world: int) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    source = build("zero2-bf16", "even")
    source.step(0)
    before = source.tensors()
    plain = build("plain", "even")
    report = dynadapt.migrate(source.state, plain.state, timeout=30)
    answers["merged"] = jobs.differing(before, plain.tensors())
    answers["waste"] = report.bytes_moved - report.bytes_minimum
    keys = dynadapt.describe(plain.state).layout.keys
    answers["head"] = [str(spec.key) for spec in keys if spec.key.name == "head.weight"]
    answers["aliases"] = {spec.aliases for spec in keys if spec.key.name == "embed.weight"}
    answers["named"] = torch.equal(plain.model.head.weight, plain.model.embed.weight)
    plain.step(1)
    source.step(1)
    ours, theirs = plain.tensors(), source.tensors()
    answers["gap"] = max(float((ours[k] - theirs[k]).abs().max()) for k in theirs)
    return answers


def test_a_head_is_there_after_a_merge(ranks2: Pool) -> None:
    """B01: once, under one name."""
    for answer in ranks2.run(_stored_once, timeout=100):
        assert answer["merged"] == []
        assert answer["waste"] == 0
        assert answer["head"] == []
        assert answer["aliases"] == {("head.weight",)}
        assert answer["named"]
        assert answer["gap"] < 0.05


#: How a tie is cut: units that have one name of it, the framework, and what becomes of a move into it.
CUTS = {
    "embed in a unit": ("embed", {}, "tie"),
    "head in a unit": ("head", {}, "tie"),
    "a flat of its own": ("embed", {"orig_params": False}, "tie"),
    "fully_shard": ("embed", None, "tie"),
    "whole on every rank": ("head", {"strategy": "NO_SHARD"}, "carried"),
}


def _cut(unit: str, options: dict[str, Any] | None) -> Any:
    from torch.distributed.fsdp import fully_shard

    if options is not None:
        return jobs.fsdp1(jobs.net(3), units=("frozen", unit), **options)
    model = jobs.net(3)
    fully_shard(model.get_submodule(unit))
    return fully_shard(model)


def _cut_ties(rank: int, world: int) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name, (unit, options, _) in CUTS.items():
        plain, model = build("plain", "even"), _cut(unit, options)
        plain.step(0)
        state = dynadapt.TrainState(model, jobs.even(model), counters={})
        try:
            dynadapt.migrate(plain.state, state, timeout=30)
        except dynadapt.MigrationAborted as error:
            answers[name] = f"{error.reason}: {error}"
        else:
            answers[name] = _agrees(plain, model, state)
    wrong = jobs.fsdp1(jobs.net(3), units=("embed",))
    for what, move in (
        ("as source", lambda: dynadapt.migrate(wrong, build("plain").state, timeout=30)),
        ("forward", lambda: wrong(jobs.tokens(0))),
    ):
        try:
            move()
        except (dynadapt.MigrationAborted, RuntimeError) as error:
            answers[what] = f"{type(error).__name__}: {error}"
    return answers


def _agrees(plain: Any, model: Any, state: dynadapt.TrainState) -> str:
    """Whether steps of both give one loss, and the same tensors after a move back."""
    for number in (1, 2):
        loss = model(jobs.tokens(number))
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        if float(loss.detach()) != plain.step(number):
            return "another loss"
    back = build("plain", "even", seed=8)
    dynadapt.migrate(state, back.state, timeout=30)
    return "carried" if not jobs.differing(plain.tensors(), back.tensors()) else "other tensors"


def test_a_tie_that_units_cut_is_carried_or_refused(ranks2: Pool) -> None:
    """B07: with both names; FSDP1 itself fails in the forward, with a message about sizes."""
    for answers in ranks2.run(_cut_ties, timeout=100):
        for name, (_, _, expected) in CUTS.items():
            assert answers[name].startswith(expected), (name, answers[name])
            if expected == "tie":
                assert all(each in answers[name] for each in NAMES), answers[name]
        assert "MigrationAborted" in answers["as source"]
        assert "[tie]" in answers["as source"]
        assert "size mismatch" in answers["forward"]
