"""OPTSTATE B48, B50, B59, STEP B61: every optimizer's state through layouts of every family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from tests.live import jobs
from tests.live.cases._recipes import EVERY, SOME, WHOLE, build_with

if TYPE_CHECKING:
    from tests._ranks import Pool

SHORT = ("zero3-fp32", "plain", "zero2-fp32", "fsdp2", "zero3-fp32")
LONG = (
    *("zero0-fp32", "fsdp1-FULL_SHARD", "zero1-fp32", "tp", "zero3-bf16", "ddp", "zero2rr-bf16"),
    *("hsdp", "zero1acc-bf16", "fsdp1-SHARD_GRAD_OP", "zero0-bf16", "plain"),
)


def _walk(rank: int, world: int, name: str, chain: tuple[str, ...]) -> list[dict[str, Any]]:
    recipe = {**EVERY, **WHOLE}[name]
    job, answers = build_with(chain[0], recipe), []
    for number, kind in enumerate(chain[1:]):
        job.step(2 * number)
        before = job.tensors()
        next_job = build_with(kind, recipe)
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
        # One more step of both: gradients are added up in another order, and Muon then rounds to bf16.
        assert answer["gap"] < (2e-3 if name == "muon" else 2e-6), answer


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
        source = build_with("plain", WHOLE[name])
        source.step(0)
        for kind in ("zero2-fp32", "zero3-fp32", "fsdp1-FULL_SHARD", "fsdp2"):
            if (name, kind) != ("muon", "fsdp1-FULL_SHARD"):  # it shows no matrices to take
                answers[f"{name} {kind}"] = _attempt(source, kind, name)
    job = build_with("fsdp2", WHOLE["adafactor"])
    try:
        job.step(0)
        answers["torch"] = "it steps"
    except RuntimeError as error:
        answers["torch"] = str(error)
    return answers


def _attempt(source: Any, kind: str, name: str) -> str:
    try:
        target = build_with(kind, WHOLE[name])
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
