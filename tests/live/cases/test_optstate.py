"""OPTSTATE B48, B50, B56, B59, B60, STEP B61: every optimizer's state through layouts of every family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from tests.live import jobs
from tests.live.cases._recipes import EVERY, SOME, WHOLE
from tests.live.kinds import build

if TYPE_CHECKING:
    from tests._ranks import Pool

SHORT = ("zero3-fp32", "plain", "zero2-fp32", "fsdp2", "zero3-fp32")
LONG = (
    *("zero0-fp32", "fsdp1-FULL_SHARD", "zero1-fp32", "tp", "zero3-bf16", "ddp", "zero2rr-bf16"),
    *("hsdp", "zero1acc-bf16", "fsdp1-SHARD_GRAD_OP", "zero0-bf16", "plain"),
)


def _walk(rank: int, world: int, name: str, chain: tuple[str, ...]) -> list[dict[str, Any]]:
    recipe = {**EVERY, **WHOLE}[name]
    job, answers = build(chain[0], recipe), []
    for number, kind in enumerate(chain[1:]):
        job.step(2 * number)
        before = job.tensors()
        next_job = build(kind, recipe)
        report = dynadapt.migrate(job.state, next_job.state, timeout=30)
        moved = next_job.tensors()
        said = [dynadapt.describe(each.state).scalars for each in (job, next_job)]
        for each in (job, next_job):
            each.step(2 * number + 1)
        after = [each.tensors() for each in (job, next_job)]
        answers.append(
            {
                "hop": f"{job.kind.name} -> {kind}",
                "slots": {key.rpartition("/")[2] for key in before} - {"param"},
                "differing": jobs.differing(before, moved),
                "waste": report.bytes_moved - report.bytes_minimum,
                "steps": {entry.get("step") for each in said for entry in each.values()},
                "made": 2 * number + 1,
                "gap": _gap(*after)
                if {job.kind.dtype, next_job.kind.dtype} == {torch.float32}
                else 0,
            }
        )
        job = next_job
    return answers


def _gap(a: jobs.Tensors, b: jobs.Tensors) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


def _check(answers: list[dict[str, Any]], name: str) -> None:
    for answer in answers:
        assert answer["slots"] == set({**EVERY, **WHOLE}[name].slots), answer
        assert answer["differing"] == [], answer
        assert answer["waste"] == 0, answer
        assert answer["steps"] <= {answer["made"]}, answer
        # One more step of both: gradients are added up in another order, and Muon then rounds to bf16;
        # RMSprop divides by what is left of one average when another is taken from it.
        most = {"muon": 2e-3, "rmsprop centered": 2e-5}.get(name, 2e-6)
        assert answer["gap"] < most, answer


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SOME else [pytest.mark.nightly]) for n in EVERY]
)
def test_every_optimizer(ranks4: Pool, name: str) -> None:
    """B48, B59: no bit of a slot is lost, and the next step is the source's own."""
    for answers in ranks4.run(_walk, name, SHORT, timeout=200):
        _check(answers, name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_through_more_layouts(ranks4: Pool, name: str) -> None:
    """The same through the layouts that the short walk leaves out."""
    chain = LONG
    if name == "adagrad":  # B48: DeepSpeed cannot build it with masters of its own
        chain = tuple(kind for kind in LONG if not kind.startswith("zero0"))
    if name in {"adamw foreach", "adamw fused"}:  # torch steps no lists of DTensors and others
        chain = tuple(kind for kind in LONG if kind != "tp")
    for answers in ranks4.run(_walk, name, chain, timeout=300):
        _check(answers, name)


WALKS = {
    "adafactor": ("plain", "ddp", "plain"),
    "muon": ("plain", "fsdp2", "zero0-fp32", "tp", "hsdp", "plain"),
}


@pytest.mark.parametrize("name", WALKS)
def test_optimizers_of_whole_tensors(ranks4: Pool, name: str) -> None:
    """B48, B50: factored state, whose shapes are not the parameter's; momentum of matrices only."""
    for answers in ranks4.run(_walk, name, WALKS[name], timeout=200):
        _check(answers, name)


def _refusals(rank: int, world: int) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name in WALKS:
        source = build("plain", WHOLE[name])
        source.step(0)
        for kind in ("zero2-fp32", "zero3-fp32", "fsdp1-FULL_SHARD", "fsdp2"):
            if (name, kind) != ("muon", "fsdp1-FULL_SHARD"):  # it shows no matrices to take
                answers[f"{name} {kind}"] = _attempt(source, kind, name)
    job = build("fsdp2", WHOLE["adafactor"])
    try:
        job.step(0)
        answers["torch"] = "it steps"
    except RuntimeError as error:
        answers["torch"] = str(error)
    return answers


def _attempt(source: Any, kind: str, name: str) -> str:
    try:
        target = build(kind, WHOLE[name])
    except Exception as error:
        return f"the framework: {error}"
    try:
        dynadapt.migrate(source.state, target.state, timeout=30)
    except dynadapt.MigrationAborted as error:
        return f"{error.reason}: {error.findings[0]}"
    return "moved"


def test_what_needs_whole_tensors_is_refused_where_they_are_cut(ranks4: Pool) -> None:
    """B50: by name and with the way out; torch's Adafactor cannot step a DTensor at all."""
    for answers in ranks4.run(_refusals, timeout=200):
        assert "placement" in answers.pop("torch")
        assert answers.pop("muon fsdp2") == "moved"
        for told in answers.values():
            assert told.startswith("unsupported-optimizer: "), answers
            assert "use it with whole parameters" in told


def _stepped(seed: int, **hyper: Any) -> dynadapt.TrainState:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (seed + 1), **hyper)
    state = dynadapt.TrainState(model, optimizer)
    _once(state)
    return state


def _once(state: dynadapt.TrainState) -> None:
    state.model(torch.ones(2, 4)).square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def test_entries_of_groups_that_another_version_has() -> None:
    """B56: what the source does not know keeps the target's value; what the target does not, is told."""
    source, target = _stepped(0, weight_decay=0.3), _stepped(1, weight_decay=0.3)
    for group in source.optimizer.param_groups:
        del group["decoupled_weight_decay"]  # as AdamW had it before torch 2.6
        group["layer_scale"] = 0.75  # as a fork of it has
    report = dynadapt.migrate(source, target)
    (group,) = target.optimizer.param_groups
    assert group["decoupled_weight_decay"] is True
    assert group["lr"] == 0.1
    assert "layer_scale" not in group
    told = {outcome.path: outcome for outcome in report.outcomes}
    assert told["param_groups[0]/layer_scale"].kind == "dropped"
    kept = told["param_groups[0]/decoupled_weight_decay"]
    assert (kept.kind, "keeps its own" in kept.note) == ("derived", True)
    source.optimizer.param_groups[0]["decoupled_weight_decay"] = True
    for state in (source, target):
        _once(state)
    assert torch.equal(source.model.weight, target.model.weight)


def _wider(seed: int, stepped: bool) -> dynadapt.TrainState:
    """Weights in bf16 whose gradients are declared fp32: SGD's momentum is then fp32 as well."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    state = dynadapt.TrainState(model, optimizer)
    if stepped:
        _wide_step(state, 0)
    return state


def _wide_step(state: dynadapt.TrainState, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in state.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    state.optimizer.step()
    state.optimizer.zero_grad()


def test_states_are_made_without_a_step_and_of_the_gradients_dtype() -> None:
    """B60: no gradient is ever set, no hook of the optimizer runs, and no bit of a wider state is lost."""
    source, target = _wider(0, True), _wider(1, False)
    called: list[Any] = []
    target.optimizer.register_step_pre_hook(lambda *_: called.append("step"))
    dynadapt.migrate(source, target)
    assert called == []
    for mine, theirs in zip(target.model.parameters(), source.model.parameters(), strict=True):
        assert (mine.grad, mine.grad_dtype) == (None, torch.float32)
        own, given = (
            x.optimizer.state[p]["momentum_buffer"] for x, p in ((target, mine), (source, theirs))
        )
        assert own.dtype == torch.float32
        assert torch.equal(own, given)
    for state in (source, target):
        _wide_step(state, 1)
    assert torch.equal(source.model.weight, target.model.weight)


class _Counting(torch.optim.SGD):
    """Momentum, and a number that is none until something was measured."""

    def step(self, closure: Any = None) -> None:
        """As SGD does it."""
        super().step(closure)
        for state in self.state.values():
            state.setdefault("noise", float("nan"))


def test_a_number_that_is_not_a_number_arrives() -> None:
    """NaN is not equal to itself, and yet the same in source and target."""
    source, target = (torch.nn.Linear(3, 2) for _ in range(2))
    states = []
    for model in (source, target):
        optimizer = _Counting(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(dynadapt.TrainState(model, optimizer))
    for state in states[1].optimizer.state.values():
        state["noise"] = 1.0
    dynadapt.migrate(*states)
    assert all(s["noise"] != s["noise"] for s in states[1].optimizer.state.values())
