"""A DeepSpeed job leaves its layout and comes back, into an engine that was built anew; a twin stays.

Both then have the same losses and the same bits, step by step, on different batches on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dynadapt
from tests.declared import _worlds
from tests.live import jobs
from tests.live.kinds import build

if TYPE_CHECKING:
    from tests._ranks import Pool

FOUR = {
    "zero1-bf16": ("tpdp", "zero2-bf16"),
    "zero2rr-bf16": ("ddp", "zero0-fp32"),
    "zero1acc-bf16": ("hsdp", "zero1-bf16"),
    "zero0-bf16": ("zero3-bf16", "fsdp2"),
}
THREE = {
    "zero1rr-fp32": ("fsdp2",),
    "zero2-bf16": ("zero3-bf16", "plain"),
    "zero1acc-bf16": ("zero2rr-bf16",),
    "zero0fused-bf16": ("zero1-fp32",),
    "zero2off-fp32": ("ddp", "zero0-fp32"),
}
MORE = {
    "zero2-fp16": ("zero3-fp16", "zero0-fp32"),
    "zero0-fp16": ("zero1rr-fp16",),
    "zero0fused-fp16": ("plain",),
    "zero1-fp32": ("zero0-fp32",),
    "zero0-fp32": ("zero2-fp32", "ddp"),
    "zero2rr-fp32": ("zero3-fp32", "fsdp2"),
    "zero2off-bf16": ("zero1rr-bf16",),
    "zero1rr-bf16": ("zero0fused-bf16", "ddp"),
}


def _round_trips(rank: int, world: int, cases: dict[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    found = []
    for kind, between in cases.items():
        job, twin = build(kind), build(kind)
        for number in range(2):
            assert jobs.step(job.engine, number) == jobs.step(twin.engine, number)
        reports = []
        for hop in (*between, f"{kind} again"):
            following = build(hop.removesuffix(" again"))
            job.evaluate()
            following.evaluate()
            reports.append(dynadapt.migrate(job.state, following.state, timeout=30))
            job = following
        before = jobs.differing(job.tensors(), twin.tensors())
        losses = [
            (jobs.step(job.engine, number), jobs.step(twin.engine, number)) for number in (2, 3)
        ]
        found.append(
            {
                "kind": kind,
                "minimal": all(each.bytes_moved == each.bytes_minimum for each in reports),
                "prints": all(e.fingerprint_source == e.fingerprint_target for e in reports),
                "differing": [*before, *jobs.differing(job.tensors(), twin.tensors())],
                "losses": losses,
            }
        )
    return found


def _check(answers: list[list[dict[str, Any]]]) -> None:
    for answer in (answer for rank in answers for answer in rank):
        assert answer["minimal"], answer
        assert answer["prints"], answer
        assert answer["differing"] == [], answer
        assert all(one == two for one, two in answer["losses"]), answer


def test_there_and_back_on_four_ranks(ranks4: Pool) -> None:
    _check(ranks4.run(_round_trips, FOUR, timeout=300))


def test_there_and_back_on_three_ranks() -> None:
    """Padding in every flat, and parts that end inside tensors."""
    _check(_worlds.run(3, _round_trips, THREE))


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_there_and_back_on_any_ranks(world: int) -> None:
    _check(_worlds.run(world, _round_trips, MORE))
