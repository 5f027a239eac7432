"""One job through every live layout, a training step in each: every hop bit for bit and minimal.

The oracles are the frameworks' own gathers, before and after each hop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dynadapt
from tests.live import jobs
from tests.live.kinds import build

if TYPE_CHECKING:
    from tests._ranks import Pool

CHAINS = {
    "bf16": ("zero3-bf16", "fsdp2", "tpfsdp", "hsdp", "ddp", "tp", "tpdp", "plain", "zero3-bf16"),
    "fp32": ("zero3-fp32", "tpdp", "zero3-fp32", "ddp", "zero3-fp32", "fsdp2", "zero3-fp32"),
    "fp16": ("zero3-fp16", "tpdp", "zero3-fp16"),
    "stages": (
        *("zero1-bf16", "plain", "zero2-bf16", "zero3-bf16", "zero1rr-bf16", "fsdp2"),
        *("zero2rr-bf16", "zero0-bf16", "zero1acc-bf16", "ddp", "zero1-bf16"),
    ),
    "stages fp32": (
        "zero2-fp32",
        "zero0-fp32",
        "tpdp",
        "zero1rr-fp32",
        "zero3-fp32",
        "zero2off-fp32",
    ),
    "stages fp16": (
        "zero1-fp16",
        "zero0-fp16",
        "zero2-fp16",
        "plain",
        "zero0fused-fp16",
        "zero3-fp16",
    ),
    "adam": ("zero3-bf16", "fsdp2", "zero3-bf16"),
    "sgd": ("zero3-bf16", "tpdp", "fsdp1-FULL_SHARD", "zero3-bf16"),
    "fsdp1": (
        *("zero3-bf16", "fsdp1-FULL_SHARD", "fsdp2", "fsdp1-SHARD_GRAD_OP", "tpfsdp"),
        *("fsdp1-HYBRID_SHARD", "zero3-fp32", "fsdp1-NO_SHARD", "ddp"),
    ),
    "even": (
        *("zero3-bf16", "fsdp1-FULL_SHARD-flat", "tpdp", "fsdp1-SHARD_GRAD_OP-flat", "ddp"),
        *("fsdp1-HYBRID_SHARD-flat", "fsdp1-FULL_SHARD", "fsdp1-NO_SHARD-flat", "zero3-fp32"),
    ),
}


def _walk(rank: int, world: int, name: str) -> list[dict[str, Any]]:
    optimizer = name if name in {"adam", "sgd", "even"} else "adamw"
    job = build(CHAINS[name][0], optimizer)
    answers = []
    for number, kind in enumerate(CHAINS[name][1:]):
        job.step(2 * number)
        before = job.tensors()
        job.evaluate()
        next_job = build(kind, optimizer)
        next_job.evaluate()
        report = dynadapt.migrate(job.state, next_job.state, timeout=30, budget=64 << 10)
        differing = jobs.differing(before, next_job.tensors())
        losses = [each.step(2 * number + 1) for each in (job, next_job)]
        answers.append(
            {
                "hop": f"{job.kind.name} -> {kind}",
                "moved": (report.bytes_moved, report.bytes_minimum),
                "equal": report.fingerprint_source == report.fingerprint_target,
                "differing": differing,
                "gap": abs(losses[0] - losses[1]),
            }
        )
        job = next_job
    return answers


@pytest.mark.parametrize("name", list(CHAINS))
def test_every_hop(ranks4: Pool, name: str) -> None:
    """No hop loses a bit, moves a byte too many, or leaves a stale copy that a step would see."""
    for answers in ranks4.run(_walk, name, timeout=200):
        for answer in answers:
            assert answer["equal"], answer
            assert answer["moved"][0] == answer["moved"][1], answer
            assert answer["differing"] == [], answer
            assert answer["gap"] < 0.05, answer
