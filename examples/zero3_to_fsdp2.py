"""A DeepSpeed ZeRO-3 job becomes an FSDP2 job in the middle of training, and goes back.

Run it with torchrun on as many CPU ranks as you like:

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/zero3_to_fsdp2.py
"""

from __future__ import annotations

import os
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dynadapt


def build_model(seed: int) -> nn.Module:
    """Any model; both frameworks get one of the same class."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 16))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The same optimizer class and param groups on both sides; its settings are carried over."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step: int) -> torch.Tensor:
    """This rank's rows of a step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(4, 16, generator=generator)


def train_zero3(engine: Any, steps: range) -> None:
    """DeepSpeed's own loop."""
    for step in steps:
        x = batch(step)
        loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        tell(f"ZeRO-3 step {step}: {loss.item():.4f}")


def train_fsdp2(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """A plain loop."""
    for step in steps:
        x = batch(step)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # before the next migration: gradients must not be half-accumulated
        tell(f"FSDP2  step {step}: {loss.item():.4f}")


def tell(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    """Train, migrate, train, migrate back, train."""
    dist.init_process_group("gloo")
    model = build_model(0)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(model),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        },
        dist_init_required=False,
    )
    train_zero3(engine, range(3))

    other = build_model(1)  # its values do not matter: they are overwritten
    fully_shard(other)
    target = dynadapt.TrainState(model=other, optimizer=build_optimizer(other), counters={})
    tell(str(dynadapt.plan(engine, target)))
    report = dynadapt.migrate(engine, target)
    tell(str(report))
    train_fsdp2(other, target.optimizer, range(3, 6))

    report = dynadapt.migrate(target, engine)
    tell(f"back: {report.bytes_moved} bytes moved, fingerprint {report.fingerprint_target}")
    train_zero3(engine, range(6, 9))
    dist.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo may abort at interpreter exit after subgroups; nothing is left to do
