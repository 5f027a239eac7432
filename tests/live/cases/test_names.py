"""NAMES B76, B78, B79, B81, B82: one state under two sets of names, and tensors that one side keeps fused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from dynadapt.vps.tensor_map import TensorMap, concat, rename, transpose
from tests.live import jobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests._ranks import Pool

SIZES = (4, 2, 2)


class Apart(nn.Module):
    """Three projections of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(3, size) for size in SIZES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All three, side by side."""
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


class Fused(nn.Module):
    """The same as one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, sum(SIZES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All three, side by side."""
        return self.qkv(x)


class Model(nn.Module):
    """A projection and a tied pair, in an attribute of a given name."""

    def __init__(self, kind: type[nn.Module], name: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.name = name
        body = nn.ModuleDict({"att": kind(), "one": nn.Linear(8, 8, bias=False)})
        body["two"] = nn.Linear(8, 8, bias=False)
        body["two"].weight = body["one"].weight
        self.register_module(name, body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        body = self.get_submodule(self.name)
        return body["two"](torch.tanh(body["one"](body["att"](x)))).square().mean()


def state(
    kind: type[nn.Module] = Apart,
    name: str = "body",
    seed: int = 0,
    *,
    turned: bool = False,
    special: Callable[[str], bool] = lambda name: name.endswith("bias"),
) -> dynadapt.TrainState:
    """A train state with two param groups and a schedule."""
    model = Model(kind, name, seed)
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named if not special(n)], "weight_decay": 0.1},
        {"params": [p for n, p in named if special(n)], "lr": 0.03, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups[::-1] if turned else groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return dynadapt.TrainState(model, optimizer, scheduler)


def train(x: dynadapt.TrainState, steps: int = 3) -> list[float]:
    """Some steps; the losses."""
    losses = []
    for number in range(steps):
        loss = x.model(torch.linspace(-1, 1, 12).reshape(4, 3) + number)
        loss.backward()
        x.optimizer.step()
        x.scheduler.step()
        x.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def refused(source: Any, target: Any, **arguments: Any) -> dynadapt.MigrationAborted:
    """The error of a migration."""
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(source, target, **arguments)
    return caught.value


PREFIX = TensorMap((rename(r"re:trunk\.(.*)", r"body.\1"),))


@pytest.mark.parametrize("foreign", ["source", "target"])
def test_one_map_serves_both_ways(foreign: str) -> None:
    """B81: a module in another attribute, on either side: moments, steps, rates and schedule follow."""
    source = state(name="trunk" if foreign == "source" else "body", turned=True)
    target = state(name="trunk" if foreign == "target" else "body", seed=1)
    train(source)
    report = dynadapt.migrate(source, target, **{f"{foreign}_map": PREFIX})
    side = source if foreign == "source" else target
    assert dynadapt.fingerprint(side, tensor_map=PREFIX) == report.fingerprint_target
    other = target if foreign == "source" else source
    assert dynadapt.fingerprint(other) == report.fingerprint_source
    assert train(target) == train(source)


def test_a_regular_expression_keeps_ties_whose_order_it_turns() -> None:
    """TIED: after a rename another name of the tie is the smallest; its state is still found."""
    turn = TensorMap(
        (rename(r"re:body\.one\.(.*)", r"body.zzz.\1"), rename("body.two.{}", "body.a.{}"))
    )
    source, target = state(), state(seed=1)
    train(source)
    dynadapt.migrate(source, target, source_map=turn, target_map=turn)
    assert train(target) == train(source)
    assert dynadapt.describe(source, tensor_map=turn).scalars["body.a.weight"] == {"step": 6}


@pytest.mark.parametrize("there", [True, False])
def test_three_tensors_become_one_with_their_state_and_go_back(there: bool) -> None:
    """B108: fused in the target, or fused in the source: bits, steps and groups."""
    fuse = TensorMap(
        tuple(
            concat([f"{{}}.att.{n}.{w}" for n in "qkv"], f"{{}}.att.qkv.{w}", 0, SIZES)
            for w in ("weight", "bias")
        )
    )
    source = state(Apart if there else Fused)
    target = state(Fused if there else Apart, seed=1)
    train(source)
    side = "source" if there else "target"
    plan = dynadapt.plan(source, target, **{f"{side}_map": fuse})
    assert any("att.qkv.weight" in str(row) for row in plan.to_json()["tensors"])
    report = dynadapt.migrate(source, target, **{f"{side}_map": fuse})
    assert report.fingerprint_source == report.fingerprint_target
    apart, one = (source, target) if there else (target, source)
    for w in ("weight", "bias"):
        parts = [getattr(apart.model.body.att.get_submodule(n), w) for n in "qkv"]
        whole = getattr(one.model.body.att.qkv, w)
        assert torch.equal(torch.cat(list(parts)), whole)
        for slot in ("exp_avg", "exp_avg_sq"):
            states = [apart.optimizer.state[p][slot] for p in parts]
            assert torch.equal(torch.cat(states), one.optimizer.state[whole][slot])
        assert {float(apart.optimizer.state[p]["step"]) for p in parts} == {3.0}
        assert float(one.optimizer.state[whole]["step"]) == 3.0
    assert [g["lr"] for g in one.optimizer.param_groups] == [
        g["lr"] for g in apart.optimizer.param_groups
    ]
    torch.testing.assert_close(train(target), train(source), rtol=1e-6, atol=1e-7)


def test_a_rule_that_matches_nothing_names_the_nearest() -> None:
    """B81: with the side whose map it is, before anything is touched."""
    source, target = state(), state(seed=1)
    error = refused(source, target, source_map=TensorMap((rename("bodies.one.{}", "x.{}"),)))
    (finding,) = error.findings
    assert (error.reason, finding.where) == ("map-unmatched", "source_map: bodies.one.{}")
    assert "body.one.weight" in finding.cause
    error = refused(source, target, target_map=TensorMap((rename("bodies.one.{}", "x.{}"),)))
    assert error.findings[0].where == "target_map: bodies.one.{}"
    error = refused(source, target, target_map="bodies")
    assert error.reason == "bad-argument"


def test_parts_in_groups_that_differ_are_refused_by_name() -> None:
    """GROUPS through a map: q decays and k does not, so that no group fits the fused tensor."""
    fuse = TensorMap((concat([f"{{}}.att.{n}.weight" for n in "qkv"], "{}.att.qkv.weight"),))
    source = state(special=lambda name: name.endswith(("bias", "k.weight")))
    train(source)
    error = refused(source, state(Fused, seed=1), source_map=fuse)
    assert (error.reason, error.findings[0].where) == ("hyper-conflict", "body.att.qkv.weight")


def test_parts_at_different_steps_are_refused_by_name_or_take_the_largest() -> None:
    """STEP through a map."""
    fuse = TensorMap(
        tuple(
            concat([f"{{}}.att.{n}.{w}" for n in "qkv"], f"{{}}.att.qkv.{w}")
            for w in ("weight", "bias")
        )
    )
    source, target = state(), state(Fused, seed=1)
    train(source)
    behind = source.model.body.att.k.weight
    source.optimizer.state[behind]["step"].fill_(2)
    error = refused(source, target, source_map=fuse)
    assert error.reason == "step"
    assert "body.att.k.weight" in error.findings[0].where
    dynadapt.migrate(source, target, source_map=fuse, allow={"step"})
    assert float(target.optimizer.state[target.model.body.att.qkv.weight]["step"]) == 3


def test_what_differs_is_told_with_both_names() -> None:
    """A shape that does not fit, under the common name and the name that the user knows."""
    source, target = state(name="trunk"), state(seed=1)
    turn = TensorMap((*PREFIX.rules, transpose("{}.att.q.weight", (1, 0))))
    error = refused(source, target, source_map=turn)
    assert error.reason == "shape"
    assert any("trunk.att.q.weight in the source" in f.where for f in error.findings)


WRAP = TensorMap((rename(r"re:net\.(.*)", r"\1"),))


def _wrapped(model: nn.Module) -> nn.Module:
    outer = nn.Module()
    outer.net = model
    outer.forward = model.forward  # type: ignore[method-assign]
    return outer


def _through_frameworks(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    source = jobs.deepspeed_engine("zero3-bf16", model := _wrapped(jobs.net()), jobs.adamw(model))
    for number in range(2):
        jobs.step(source, number)
    model = jobs.net(seed=1)
    fully_shard(model.up)
    fully_shard(model)
    sharded = dynadapt.TrainState(model, jobs.adamw(model), counters={})
    first = dynadapt.migrate(source, sharded, source_map=WRAP, timeout=30)
    before = jobs.zero_tensors(source)
    back = jobs.deepspeed_engine(
        "zero2-bf16", other := _wrapped(jobs.net(seed=2)), jobs.adamw(other)
    )
    second = dynadapt.migrate(sharded, back, target_map=WRAP, timeout=30)
    after = {name: value for name, value in jobs.zero_tensors(back).items() if name in before}
    losses = [jobs.step(engine, 2) for engine in (source, back)]
    plain = _wrapped(jobs.net(seed=3))
    with torch.no_grad():
        plain.net.up.bias[rank] += rank
    error = ""
    try:
        dynadapt.migrate(plain, jobs.net(), source_map=WRAP, timeout=30)
    except dynadapt.MigrationAborted as aborted:
        error = f"{aborted.reason}: {aborted.findings[0].where}"
    return {
        "equal": [r.fingerprint_source == r.fingerprint_target for r in (first, second)],
        "moved": [r.bytes_moved - r.bytes_minimum for r in (first, second)],
        "differing": jobs.differing(before, after),
        "loss": losses[0] - losses[1],
        "drift": error,
    }


def test_zero_and_fsdp2_under_other_names(ranks4: Pool) -> None:
    """B81: a prefix on the DeepSpeed side, there and back; drift is placed by the user's name."""
    for answer in ranks4.run(_through_frameworks, timeout=200):
        assert answer["equal"] == [True, True]
        assert answer["moved"] == [0, 0]
        assert answer["differing"] == []
        assert abs(answer["loss"]) < 1e-3
        assert answer["drift"].startswith("replicas-differ: up.bias/param [")
        assert answer["drift"].endswith("(net.up.bias in the source)")


def _wrap(model: nn.Module, order: str) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for letter in reversed(order):
        model = (
            checkpoint_wrapper(model) if letter == "A" else torch.compile(model, backend="eager")
        )
    return model


@pytest.mark.parametrize("order", ["AC", "CA", "ACA"])
def test_wrappers_in_any_order_do_not_show_in_names(order: str) -> None:
    """B76, B78, B79: checkpointing and torch.compile, of the root and of an inner module."""
    source, target = state(), state(seed=1)
    target.model.body["att"] = _wrap(target.model.body["att"], order)
    target.model = _wrap(target.model, order)
    train(source)
    report = dynadapt.migrate(source, target)
    assert dynadapt.fingerprint(source) == report.fingerprint_target
    assert dynadapt.describe(target).scalars == dynadapt.describe(source).scalars


def _flat_and_recomputed(rank: int, world: int, orig: bool) -> dict[str, Any]:
    """FSDP1 over recomputed modules; torch's own names of parameters and of states then differ."""

    def sharded(seed: int) -> Any:
        model = jobs.net(seed)
        for name in ("up", "down"):
            setattr(model, name, _wrap(getattr(model, name), "A"))
        wrapped = jobs.fsdp1(model, orig_params=orig)
        return dynadapt.TrainState(wrapped, jobs.even(wrapped), counters={})

    source, back = sharded(0), sharded(1)
    plain = dynadapt.TrainState(model := jobs.net(2), jobs.even(model), counters={})
    for number in range(2):
        source.model(jobs.tokens(number)).backward()
        source.optimizer.step()
        source.optimizer.zero_grad()
    reports = [dynadapt.migrate(a, b, timeout=30) for a, b in ((source, plain), (plain, back))]
    keys = [spec.key for spec in dynadapt.describe(source).layout.keys]
    return {
        "prints": {r.fingerprint_source for r in reports} | {r.fingerprint_target for r in reports},
        "weights": {key.name for key in keys if key.slot == "param"},
        "states": {key.name for key in keys if key.slot == "exp_avg"},
        "losses": [float(x.model(jobs.tokens(5)).detach()) for x in (source, back)],
        "gathered": jobs.differing(
            jobs.fsdp1_tensors(source.model, source.optimizer),
            jobs.fsdp1_tensors(back.model, back.optimizer),
        ),
    }


@pytest.mark.parametrize("orig", [False, True])
def test_states_of_recomputed_flats_have_their_parameters_names(ranks2: Pool, orig: bool) -> None:
    """B82: one name for a parameter and its state, the bare model's."""
    names = {name for name, _ in jobs.net().named_parameters()}
    for answer in ranks2.run(_flat_and_recomputed, orig, timeout=100):
        assert len(answer["prints"]) == 1
        assert answer["weights"] == names
        assert answer["states"] == names - {"frozen.weight"}
        assert answer["losses"][0] == answer["losses"][1]
        assert answer["gathered"] == []
