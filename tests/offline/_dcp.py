"""Distributed checkpoints as people save and load them, on real ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dsd

import dynadapt
from tests.live import _oracle, jobs, kinds


def _states(job: Any, form: str) -> dict[str, Any]:
    """The nested dict that is saved, and filled by a load."""
    options = dsd.StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    model, optimizer = dsd.get_state_dict(job.model, job.optimizer, options=options)
    if form == "app":
        return {"app": {"model": model, "optim": optimizer}, "epoch": 3, "loader": {"at": [1, 2]}}
    if form == "root":  # as torchtitan: weights at the top
        return {**model, "optimizer": optimizer, "train": {"tokens": job.state.samples or 7}}
    if form == "raw":
        return {"model": model, "optimizer": job.optimizer.state_dict()}
    if form == "weights":
        return dict(model)
    return {"model": model, "optimizer": optimizer}


def save(rank: int, world: int, kind: str, recipe: str, form: str, where: str, steps: int) -> str:
    """Train a job of `kinds` and save it; its live fingerprint."""
    job = kinds.build(kind, recipe, seed=0)
    for number in range(steps):
        job.step(number)
    dcp.save(_states(job, form), checkpoint_id=where)
    return dynadapt.fingerprint(job.state)


def load(
    rank: int, world: int, kind: str, recipe: str, form: str, where: str, steps: int
) -> dict[str, Any]:
    """Load a checkpoint into a fresh job by torch's loader, and step on from number `steps`."""
    job: Any = kinds.build(kind, recipe, seed=5)
    states = _states(job, form)
    dcp.load(states, checkpoint_id=where)
    options = dsd.StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    dsd.set_state_dict(
        job.model,
        job.optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
        options=options,
    )
    answer: dict[str, Any] = {"tensors": job.tensors(), "live": dynadapt.fingerprint(job.state)}
    answer["hyper"] = [group["weight_decay"] for group in job.optimizer.param_groups]
    answer["steps"] = {float(s["step"]) for s in job.optimizer.state.values() if "step" in s}
    next_one, loss = _oracle.step(
        answer["tensors"], job.recipe, {}, taken=steps, number=steps, dtype=job.kind.dtype
    )
    answer["losses"] = [job.step(steps)]
    answer["wrong"] = jobs.differing(next_one, job.tensors())
    answer["wrong"] += [] if answer["losses"] == [loss] else ["loss"]
    answer["losses"].append(job.step(steps + 1))
    answer["after"] = job.tensors()
    return answer


def unbroken(rank: int, world: int, kind: str, recipe: str, steps: int) -> dict[str, Any]:
    """The same job as it goes on without having stopped."""
    job: Any = kinds.build(kind, recipe, seed=0)
    for number in range(steps):
        job.step(number)
    answer: dict[str, Any] = {"tensors": job.tensors()}
    answer["losses"] = [job.step(number) for number in (steps, steps + 1)]
    answer["after"] = job.tensors()
    return answer


def save_apart(rank: int, world: int, where: str) -> None:
    """Save a sharded tensor without collectives: every rank has a `__RANK.metadata`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(14, dtype=torch.float32).reshape(7, 2)
    tensor = distribute_tensor(whole, init_device_mesh("cpu", (world,)), [Shard(0)])
    dcp.save({"model": {"w": tensor}}, checkpoint_id=where, use_collectives=False)


def save_safetensors(rank: int, world: int, where: str) -> dict[str, torch.Tensor]:
    """The weights of an FSDP2 job as torch's writer for Hugging Face has them, a file a rank."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    job: Any = kinds.build("fsdp2", seed=0)
    weights = dsd.get_model_state_dict(job.model)
    del weights["head.weight"]  # safetensors refuses what shares memory
    dcp.save(dict(weights), storage_writer=HuggingFaceStorageWriter(where, save_distributed=True))
    return {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in weights.items()}
