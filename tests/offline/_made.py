"""Real checkpoints, written by the real frameworks on real ranks, and what the ranks held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.live import jobs

if TYPE_CHECKING:
    import torch


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


def load_deepspeed(
    rank: int, world: int, kind: str, where: str, steps: int, config: dict[str, Any]
) -> dict[str, Any]:
    """Load a checkpoint into a fresh engine by DeepSpeed's own loader; what it holds, and steps on."""
    engine = jobs.deepspeed_engine(kind, jobs.net(seed=5), **config)
    path, _ = engine.load_checkpoint(where)
    answer: dict[str, Any] = {
        "loaded": path is not None,
        "counters": (engine.global_steps, engine.global_samples),
        "hyper": [
            {k: v for k, v in group.items() if k in {"lr", "weight_decay", "betas"}}
            for group in engine.optimizer.param_groups
        ],
        "tensors": jobs.zero_tensors(engine),
    }
    answer["losses"] = [jobs.step(engine, number) for number in range(steps, steps + 2)]
    answer["after"] = jobs.zero_tensors(engine)
    return answer


def step_with_nothing(rank: int, world: int, kind: str, where: str) -> tuple[str, str]:
    """A step of an engine whose model has a parameter of no elements: what went wrong, and if nothing did,
    the fingerprint of what is saved then.
    """
    import torch

    import dynadapt

    model = jobs.net()
    model.register_parameter("nothing", torch.nn.Parameter(torch.empty(0, 4)))
    forward = model.forward
    model.forward = lambda tokens: forward(tokens) + model.nothing.float().sum()
    engine = jobs.deepspeed_engine(kind, model)
    try:
        jobs.step(engine, 0)
    except AssertionError as error:
        return str(error), ""
    engine.save_checkpoint(where, tag="t")
    return "", dynadapt.fingerprint(engine)


def without_frozen(
    rank: int, world: int, kind: str, where: str, load: str | None = None
) -> dict[str, Any]:
    """An engine whose tied embedding is frozen, saved as Trainer saves PEFT's models, or loaded."""
    model = jobs.net()
    model.embed.requires_grad_(requires_grad=False)
    engine = jobs.deepspeed_engine(kind, model)
    if load is None:
        jobs.step(engine, 0)
        engine.save_checkpoint(where, tag="t", exclude_frozen_parameters=True)
    else:
        path, _ = engine.load_checkpoint(load, load_module_strict=False)
        assert path is not None
    held = jobs.zero_tensors(engine)
    losses = [jobs.step(engine, number) for number in (1, 2)]
    return {"held": held, "losses": losses, "after": jobs.zero_tensors(engine)}
