"""GROUPS B40, B42, B43, B45, B46, FROZEN B09, B12: many groups, tiny and empty ones; what one side lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from tests.live import jobs
from tests.live.kinds import Recipe, build

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from tests._ranks import Pool

#: Each in a group of its own, with what only it has. `norm.bias` has 8 elements: with 4 ranks ZeRO pads.
OWN = {
    "embed.weight": {"lr": 1e-2, "weight_decay": 0.1},
    "up.weight": {"lr": 2e-2, "weight_decay": 0.2, "betas": (0.8, 0.9)},
    "up.bias": {"lr": 3e-2, "weight_decay": 0.0},
    "down.weight": {"lr": 4e-2, "weight_decay": 0.3},
    "norm.weight": {"lr": 5e-2, "weight_decay": 0.0, "betas": (0.5, 0.6)},
    "norm.bias": {"lr": 6e-2, "weight_decay": 0.0},
    "tiny": {"lr": 7e-2, "weight_decay": 0.0},
}


def names_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by the names of the bare model."""
    found = {n.removeprefix("module."): p for n, p in model.named_parameters() if p.requires_grad}
    return {n.replace("_fsdp_wrapped_module.", ""): p for n, p in found.items()}


def groups(
    order: int = 1, empty: tuple[int, ...] = (), members: Callable[[str], bool] = lambda name: True
) -> Callable[[nn.Module], list[dict[str, Any]]]:
    """One group a parameter, forwards or backwards, with empty groups before some of them."""

    def made(model: nn.Module) -> list[dict[str, Any]]:
        named = names_of(model)
        found: list[dict[str, Any]] = [
            {"params": [named[n]], **OWN[n]}
            for n in list(OWN)[::order]
            if n in named and members(n)
        ]
        for at in empty:
            found.insert(at, {"params": [], "lr": 0.9, "weight_decay": 0.5})
        return found

    return made


def recipe(**facts: Any) -> Recipe:
    """AdamW over such groups."""
    return Recipe(torch.optim.AdamW, {"lr": 1.0}, groups(**facts))


def hyper_of(state: Any) -> dict[str, tuple[Any, ...]]:
    """Name -> what dynadapt says of its group."""
    found = dynadapt.describe(state).aux["param_groups"]
    return {
        name: (g["hyper"]["lr"], tuple(g["hyper"]["betas"]), g["hyper"]["weight_decay"])
        for g in found
        for name in g["names"]
    }


CHAIN = (
    ("zero3-fp32", {}),
    ("plain", {"order": -1, "empty": (0, 3)}),
    ("zero2-fp32", {"order": -1}),
    ("fsdp2", {"empty": (2,)}),
    ("zero1rr-fp32", {}),
    ("fsdp1-FULL_SHARD", {"order": -1}),
    ("zero0-fp32", {}),
)


def _through(rank: int, world: int) -> list[dict[str, Any]]:
    kind, facts = CHAIN[0]
    job, answers = build(kind, recipe(**facts)), []
    for number, (kind, facts) in enumerate(CHAIN[1:]):
        job.step(2 * number)
        before = job.tensors()
        next_job = build(kind, recipe(**facts))
        dynadapt.migrate(job.state, next_job.state, timeout=30)
        after = next_job.tensors()
        hyper = [hyper_of(each.state) for each in (job, next_job)]
        for each in (job, next_job):
            each.step(2 * number + 1)
        ours, theirs = job.tensors(), next_job.tensors()
        gaps = [float((ours[name] - theirs[name]).abs().max()) for name in ours]
        answers.append(
            {
                "hop": f"-> {kind}",
                "differing": jobs.differing(before, after),
                "hyper": hyper[0] == hyper[1],
                "own": hyper[1]["norm.weight"],
                "gap": max(gaps),
            }
        )
        job = next_job
    return answers


def test_a_group_for_every_parameter_in_any_order(ranks4: Pool) -> None:
    """B40, B42, B43: lr, betas and decay follow names; groups are turned round, empty ones come and go."""
    for answers in ranks4.run(_through, timeout=250):
        for answer in answers:
            assert answer["differing"] == [], answer
            assert answer["hyper"], answer
            assert answer["own"] == (5e-2, (0.5, 0.6), 0.0)
            assert answer["gap"] < 5e-6, answer


def _tiny_groups(rank: int, world: int) -> dict[str, Any]:
    """One parameter of one element in a group of its own: most ranks hold only padding of it."""
    answers = {}
    for kind in ("zero2", "zero3"):
        source = dynadapt.TrainState(*_with_scalar(jobs.net(0)))
        for number in range(2):
            source.model(jobs.tokens(number)).backward()
            source.optimizer.step()
            source.optimizer.zero_grad()
        model, optimizer = _with_scalar(jobs.net(1))
        engine = jobs.deepspeed_engine(f"{kind}-fp32", model, optimizer)
        dynadapt.migrate(source, engine, timeout=30)
        back = dynadapt.TrainState(*_with_scalar(jobs.net(2)))
        dynadapt.migrate(engine, back, timeout=30)
        expected = jobs.torch_tensors(source.model, source.optimizer)
        answers[kind] = {
            "differing": jobs.differing(expected, jobs.torch_tensors(back.model, back.optimizer)),
            "step": dynadapt.describe(back).scalars["tiny"],
            "state": "tiny/exp_avg" in expected,
        }
        engine(jobs.tokens(5))
    return answers


def _with_scalar(model: nn.Module) -> tuple[nn.Module, torch.optim.AdamW]:
    model.tiny = torch.nn.Parameter(torch.full((1,), 0.5))
    model.embed.register_forward_hook(lambda module, args, out: out * model.tiny)
    return model, torch.optim.AdamW(groups()(model))


def test_a_group_too_small_for_the_ranks(ranks4: Pool) -> None:
    """S1, B40: a group of one element, on 4 ranks: three of them hold nothing but padding."""
    for answers in ranks4.run(_tiny_groups, timeout=200):
        for answer in answers.values():
            assert answer == {"differing": [], "step": {"step": 2}, "state": True}


def _half(name: str) -> bool:
    return name not in {"up.weight", "norm.bias"}


def _frozen(rank: int, world: int) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    every, some = recipe(), recipe(members=_half)
    for kind in ("plain", "fsdp2", "zero2-fp32", "zero3-fp32"):
        # frozen in the source, trained in the target
        source = build("plain", some)
        _freeze(source.model)
        source.step(0)
        target = build(kind, every)
        report = dynadapt.migrate(source.state, target.state, timeout=30)
        notes = {o.path: o.note for o in report.outcomes if "frozen in the source" in o.note}
        target.step(1)
        answers[f"thaw {kind}"] = (sorted(notes), _moments_of(target))
        # trained in the source, frozen in the target
        source = build(kind, every)
        source.step(0)
        target = build("plain", some)
        _freeze(target.model)
        try:
            dynadapt.migrate(source.state, target.state, timeout=30)
        except dynadapt.MigrationAborted as error:
            told = [f for f in error.findings if "frozen" in f.cause]
            answers[f"freeze {kind}"] = (error.reason, sorted(f.where.split("/")[0] for f in told))
        report = dynadapt.migrate(source.state, target.state, allow={"extra"}, timeout=30)
        left = sorted(o.path.split("/")[0] for o in report.outcomes if "frozen" in o.note)
        weights = source.tensors()
        same = all(
            torch.equal(weights[f"{n}/param"], p.detach())
            for n, p in target.model.named_parameters()
        )
        answers[f"left {kind}"] = (left, same)
    return answers


def _freeze(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not _half(name):
            parameter.requires_grad_(requires_grad=False)


def _moments_of(job: Any) -> bool:
    tensors = job.tensors()
    return bool(tensors["up.weight/exp_avg"].abs().max() > 0)


def test_parameters_that_one_side_freezes(ranks2: Pool) -> None:
    """B09, B12: their state starts anew, or is left behind by name; their weights move in any case."""
    names = ["norm.bias", "up.weight"]
    for answers in ranks2.run(_frozen, timeout=250):
        for kind in ("plain", "fsdp2", "zero2-fp32", "zero3-fp32"):
            assert answers[f"thaw {kind}"] == ([f"{n}/param" for n in names], True), answers
            assert answers[f"freeze {kind}"] == ("extra-key", names), answers
            assert answers[f"left {kind}"] == (names, True), answers


MEMBERSHIP = ("plain", "fsdp2", "fsdp1-FULL_SHARD", "zero1-fp32", "zero2-fp32", "zero3-fp32")


def _part(rank: int, world: int) -> dict[str, Any]:
    """Optimizers over half of the parameters; the others could be trained, and are not."""
    found: dict[str, Any] = {}
    some = recipe(members=_half)
    source = build("plain", some)
    for kind in (*MEMBERSHIP, "plain"):
        source.step(0)
        target = build(kind, some)
        report = dynadapt.migrate(source.state, target.state, timeout=30)
        described = dynadapt.describe(target.state)
        found[f"{len(found)} {kind}"] = {
            "members": sorted(n for g in described.aux["param_groups"] for n in g["names"]),
            "states": sorted(
                {k.key.name for k in described.layout.keys if k.key.slot == "exp_avg"}
            ),
            "equal": report.fingerprint_source == report.fingerprint_target,
            "gap": abs(source.step(1) - target.step(1)),
        }
        source = target
    return found


def test_an_optimizer_of_some_parameters_keeps_to_them(ranks2: Pool) -> None:
    """B45: who is in no group stays so in every layout, has no state, and moves as a weight."""
    members = sorted(name for name in OWN if name != "tiny" and _half(name))
    for answers in ranks2.run(_part, timeout=250):
        for answer in answers.values():
            gap = answer.pop("gap")
            assert answer == {"members": members, "states": members, "equal": True}, answers
            assert gap < 0.05, answers


def _permuted(rank: int, world: int, kind: str) -> dict[str, Any]:
    """On rank 1 parameters, and the entries of their states, stand the other way round."""

    def turned(model: nn.Module) -> list[dict[str, Any]]:
        params = list(names_of(model).values())
        return [{"params": params[:: -1 if rank else 1]}]

    one = Recipe(torch.optim.AdamW, {"lr": 1e-2}, turned)
    source, target = build("plain", one), build(kind, one)
    source.step(0)
    for param, entry in list(source.state.optimizer.state.items())[::-1]:
        del source.state.optimizer.state[param]
        source.state.optimizer.state[param] = dict(list(entry.items())[:: -1 if rank else 1])
    before = source.tensors()
    back = build("plain", one)
    reports = [
        dynadapt.migrate(a.state, b.state, timeout=30)
        for a, b in ((source, target), (target, back))
    ]
    arrived = back.tensors()
    return {
        "prints": {r.fingerprint_source for r in reports} | {r.fingerprint_target for r in reports},
        "differing": jobs.differing(before, arrived),
        "losses": source.step(1) == back.step(1),
    }


@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "fsdp1-FULL_SHARD"])
def test_ranks_that_order_parameters_otherwise(ranks2: Pool, kind: str) -> None:
    """B46: all goes by name, so that nothing is paired by its place."""
    for answer in ranks2.run(_permuted, kind, timeout=100):
        assert len(answer["prints"]) == 1
        assert (answer["differing"], answer["losses"]) == ([], True)


def _other_members(rank: int, world: int) -> tuple[str, str]:
    """Rank 1 has put one tensor into the other group."""
    source, target = build("plain", recipe()), build("fsdp2", recipe())
    if rank:
        groups = source.state.optimizer.param_groups
        groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
    try:
        dynadapt.migrate(source.state, target.state, timeout=30)
    except dynadapt.MigrationAborted as error:
        return error.reason, error.findings[0].where
    return "moved", ""


def test_ranks_whose_groups_have_other_members(ranks2: Pool) -> None:
    """B46: found before anything moves, on all ranks."""
    answers = ranks2.run(_other_members, timeout=60)
    assert answers[0] == answers[1]
    assert answers[0][0] == "ranks-disagree"
