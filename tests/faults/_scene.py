"""One fault in one migration of a real job, as a rank sees it: what it was told, and what it has left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import dynadapt
from dynadapt.registry import adapter_for
from tests.faults._inject import Injector
from tests.live import jobs
from tests.live.kinds import Job, build

if TYPE_CHECKING:
    from tests.faults._fault import Fault

__all__ = ["suffer"]

BUDGET = 64 << 10
"""Bytes of staging: the least there can be, so that there are several chunks."""


def suffer(rank: int, world: int, fault: Fault) -> dict[str, Any]:
    """Migrate with the fault. Where everybody lives on: train on, next to a twin, and migrate again."""
    source, twin, target = (
        build(kind, width=fault.width) for kind in (fault.source, fault.source, fault.target)
    )
    for job in (source, twin):
        for number in range(2):
            job.step(number)
    before, fresh = bits(source), _presence(target)
    injector = Injector(fault, rank, source.state, target.state)
    answer: dict[str, Any] = {"rank": rank}
    dist.barrier()  # whoever is still at work on its jobs must not be missed
    began = time.monotonic()
    try:
        with injector.watching():
            report = dynadapt.migrate(
                source.state,
                target.state,
                timeout=fault.timeout,
                mode=fault.mode,
                budget=BUDGET,
                on_phase=injector.on_phase,
                session=injector.session(),
            )
    except dynadapt.MigrationAborted as error:
        answer |= {"seat": error.seat, "phase": error.phase, "reason": error.reason}
        answer |= {"error": str(error)}
    else:
        answer["arrived"] = report.fingerprint_source == report.fingerprint_target
    answer["seconds"] = time.monotonic() - began
    if "error" in answer and answer["reason"] != "source-lost":
        answer["intact"] = before == bits(source)
        answer["fresh"] = fresh == _presence(target)
    if fault.kind == "kill" or answer.get("reason") == "source-lost":
        return answer  # without its peer the source's world cannot train on
    if "error" in answer:
        answer |= _life_after(source, twin, target, fault.mode)
    return answer


def _life_after(source: Job, twin: Job, target: Job, mode: Any) -> dict[str, Any]:
    """The source's next steps beside an untouched twin's, and a migration that nobody disturbs."""
    losses = [(source.step(number), twin.step(number)) for number in (2, 3)]
    told = {
        "losses equal": all(one == two for one, two in losses),
        "bits equal": bits(source) == bits(twin),
    }
    tensors = source.tensors()
    report = dynadapt.migrate(source.state, target.state, timeout=30, mode=mode, budget=BUDGET)
    told["prints equal"] = report.fingerprint_source == report.fingerprint_target
    told["tensors equal"] = not jobs.differing(tensors, target.tensors())
    target.step(4)
    return told


def bits(job: Job) -> dict[str, bytes]:
    """Every buffer of this rank's own shards, as bytes; no communication."""
    own = adapter_for(job.state).describe(job.state)
    found = {}
    for name, buffer in own.buffers.items():
        # Of a copy: whose memory an array has seen, torch does not free.
        flat = buffer.tensor().detach().clone().view(torch.uint8)
        found[name] = flat.numpy().tobytes()
    return found


def _presence(job: Job) -> list[tuple[str, str]]:
    """Which states a job has."""
    own = adapter_for(job.state).describe(job.state)
    return [(str(spec.key), spec.presence) for spec in own.specs]
