"""What no pair of layouts can do: refused by name, with a way out that works, and a source that trains on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from tests.live import _oracle, _walk, jobs
from tests.live.kinds import KINDS, build

if TYPE_CHECKING:
    from tests._ranks import Pool
    from tests.live.kinds import Job

FLAT = [kind.name for kind in KINDS.values() if kind.one_group and 4 in kind.worlds]
LOWER = [
    *(
        "zero0-bf16",
        "zero0fused-fp16",
        "zero1acc-bf16",
        "zero1-fp16",
        "zero2rr-bf16",
        "zero2off-bf16",
    ),
    *("zero3-bf16", "zero3-fp16", "zero3offp-bf16"),
]


def _refused(job: Job, target: Job) -> list[dict[str, str]]:
    """The findings; the source is as it was."""
    before = job.tensors()
    try:
        dynadapt.migrate(job.state, target.state, timeout=30)
    except dynadapt.MigrationAborted as error:
        assert jobs.differing(before, job.tensors()) == []
        return [finding.to_json() for finding in error.findings]
    raise AssertionError("it went through")


def _goes_on(job: Job, taken: int) -> None:
    """The next step of a plain job is plain torch's, bit for bit."""
    after, _ = _oracle.step(
        job.tensors(),
        job.recipe,
        _walk.HYPER,
        taken=taken,
        number=taken,
        dtype=torch.float32,
    )
    job.step(taken)
    assert jobs.differing(after, job.tensors()) == []


def _two_decays(rank: int, world: int) -> list[list[dict[str, str]]]:
    found = []
    for name in FLAT:
        job, target = _walk.start("adamw"), build(name, "even")
        found.append(_refused(job, target))
        _goes_on(job, 2)
        for group in job.state.optimizer.param_groups:
            group["weight_decay"] = 0.2
        before = job.tensors()
        dynadapt.migrate(job.state, target.state, timeout=30)
        assert jobs.differing(before, target.tensors()) == []
        assert [group["weight_decay"] for group in target.state.optimizer.param_groups] == [0.2]
    return found


def test_two_sets_of_hyperparameters_into_a_flat_parameter(ranks4: Pool) -> None:
    """Named by the tensors that differ; with one decay for all it goes through."""
    for findings in ranks4.run(_two_decays)[0]:
        assert {finding["reason"] for finding in findings} == {"hyper-conflict"}
        assert all("weight_decay" in finding["cause"] for finding in findings)
        assert all("use_orig_params" in finding["fix"] for finding in findings)


def _frozen(rank: int, world: int, name: str) -> list[dict[str, str]]:
    job, target = _walk.start("adamw"), build(name)
    with torch.no_grad():
        job.state.model.frozen.weight += 1e-5
    found = _refused(job, target)
    _goes_on(job, 2)
    before: Any = job.tensors()
    dynadapt.migrate(job.state, target.state, timeout=30, narrow="allow")
    lower = before["frozen.weight/param"].to(KINDS[name].dtype).float()
    assert not torch.equal(lower, before["frozen.weight/param"])
    before["frozen.weight/param"] = lower
    assert jobs.differing(before, target.tensors()) == []
    return found


@pytest.mark.parametrize("name", LOWER)
def test_a_frozen_weight_that_16_bits_cannot_hold(ranks4: Pool, name: str) -> None:
    """Refused before a byte is lost; allowed, it is rounded once, and what trains keeps every bit."""
    findings = ranks4.run(_frozen, name)[0]
    assert {finding["reason"] for finding in findings} == {"narrowing"}
    assert all(finding["where"].startswith("frozen.weight") for finding in findings)
    assert all("narrow" in finding["fix"] for finding in findings)
