"""Real checkpoints, written by the real frameworks on real ranks, and what the ranks held."""

from __future__ import annotations

from typing import Any

import torch

from tests.live import jobs


def save_deepspeed(
    rank: int, world: int, kind: str, where: str, steps: int, config: dict[str, Any]
) -> dict[str, torch.Tensor] | None:
    """Train an engine of `jobs` and save it; rank 0 answers every tensor, by DeepSpeed's gathers."""
    engine = jobs.deepspeed_engine(kind, jobs.net(), **config)
    for number in range(steps):
        jobs.step(engine, number)
    engine.save_checkpoint(where, tag=f"step{steps}")
    every = jobs.zero_tensors(engine)
    return every if rank == 0 else None
