"""Live jobs that load checkpoints and are saved, on ranks: what each rank saw."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import dynadapt
from dynadapt.vps.tensor_map import TensorMap, rename
from tests.live import _oracle, _walk, jobs
from tests.live.kinds import KINDS, build

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.live.kinds import Job

STEPS = 2
"""Steps that a job has taken when it is saved."""

OTHER = ("fsdp2-bf16", "pipe")
"""Kinds with another fingerprint: frozen weights have another dtype there, or tensors other names."""


def started(kind: str, recipe: str = "adamw") -> Job:
    """A job that has taken its steps with hyperparameters, and has a buffer, that no other is built with."""
    job = build(kind, recipe, width=jobs.HIDDEN)
    optimizer = job.state.optimizer or job.state.model.optimizer
    for group in optimizer.param_groups:
        group.update(_oracle.changed(group, _walk.HYPER))
    for name, buffer in job.module.named_buffers():
        if name.endswith("scale"):
            buffer.copy_(torch.tensor(_walk.SCALE))
    for number in range(STEPS):
        job.step(number)
    return job


def steps_on(job: Job) -> dict[str, Any]:
    """Two more steps: losses, and all tensors after each."""
    losses, after = [], []
    for number in range(STEPS, STEPS + 2):
        losses.append(job.step(number))
        after.append(job.tensors())
    return {"losses": losses, "after": after}


def saved_by_deepspeed(rank: int, world: int, kind: str, where: str, recipe: str) -> dict[str, Any]:
    """A job is saved by DeepSpeed: what it held, its fingerprint, and how it goes on."""
    job = started(kind, recipe)
    job.state.model.save_checkpoint(where, tag="here")
    told = {"held": job.tensors(), "fingerprint": dynadapt.fingerprint(job.state)}
    return {**told, **steps_on(job)}


def loaded(
    rank: int, world: int, kinds: Sequence[str], where: str, recipe: str, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """A fresh job of each kind loads a checkpoint and steps on."""
    answers = []
    for kind in kinds:
        job = build(kind, recipe, width=jobs.HIDDEN)
        job.evaluate()  # leaves gathered weights behind, which must not be taken for the new ones
        maps = {} if job.tensor_map is None else {"target_map": job.tensor_map}
        before = torch.get_rng_state()
        report = dynadapt.load(job.state, where, timeout=60, **maps, **options)
        told: dict[str, Any] = {
            "kind": kind,
            "moved": report.bytes_moved,
            "read": report.bytes_read,
            "outcomes": {outcome.path: outcome.kind for outcome in report.outcomes},
            "warnings": [str(warning) for warning in report.warnings],
            "fingerprints": (report.fingerprint_source, report.fingerprint_target),
            "random": torch.equal(before, torch.get_rng_state()),
            "held": job.tensors(),
            "buffers": _walk._buffers(job),
        }
        answers.append({**told, **steps_on(job)})
    return answers


def wrong(saved: dict[str, Any], answer: dict[str, Any], tolerance: float) -> list[str]:
    """What a loaded job does not have as the saved one had it, or does not do as it did.

    With a `tolerance` of 0 both steps after it are to be equal bit for bit.
    """
    found = [f"{name} differs" for name in jobs.differing(saved["held"], answer["held"])]
    found += answer["buffers"]
    one, two = answer["fingerprints"]
    if one != two or (one != saved["fingerprint"] and not answer["kind"].startswith(OTHER)):
        found.append(f"fingerprints {one}, {two} and not {saved['fingerprint']}")
    if answer["moved"] or not answer["read"] or not answer["random"]:
        found.append(f"{answer['moved']} bytes moved, {answer['read']} read")
    for number, (then, now) in enumerate(zip(saved["after"], answer["after"], strict=True)):
        if not tolerance:
            found += [f"{name} differs at step {number}" for name in jobs.differing(then, now)]
        far = {slot: gap for slot, gap in _walk.gaps(then, now).items() if not gap <= tolerance}
        found += [f"step {number} is {far} from the run that never stopped"] if far else []
    return [f"{answer['kind']}: {each}" for each in found]


def far(kind: str) -> float:
    """How far a step of a kind may be from the same in other partial sums, see `_walk.TOLERANCE`."""
    return _walk.TOLERANCE[KINDS[kind].dtype]


def loaded_alone(
    rank: int, world: int, kind: str, paths: Sequence[str], fail: tuple[int, str], then: str = ""
) -> dict[str, Any]:
    """A job that holds something tries to load a path of its own, and may fail in a phase on purpose.

    Then it loads `then`.
    """
    job = started(kind)
    held = job.tensors()

    def on_phase(name: str) -> None:
        if (rank, name) == fail:
            raise RuntimeError("on purpose")

    told: dict[str, Any] = {}
    try:
        dynadapt.load(job.state, paths[min(rank, len(paths) - 1)], timeout=30, on_phase=on_phase)
    except dynadapt.MigrationAborted as error:
        told |= {
            "phase": error.phase,
            "seat": error.seat,
            "reason": error.reason,
            "text": str(error),
        }
        told["findings"] = [finding.to_json() for finding in error.findings]
    told["changed"] = jobs.differing(held, job.tensors())
    if then:
        dynadapt.load(job.state, then, timeout=30)
        told |= {"held": job.tensors(), **steps_on(job)}
    return told


def saved(
    rank: int, world: int, kinds: Sequence[str], folder: str, to: str, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """A job of each kind is saved under its name, and goes on as if nothing had been."""
    answers = []
    for kind in kinds:
        job = started(kind, options.get("recipe", "adamw"))
        told: dict[str, Any] = {"kind": kind, "held": job.tensors()}
        told["live"] = dynadapt.fingerprint(job.state)
        job.evaluate()  # leaves gathered weights behind
        more = {k: v for k, v in options.items() if k != "recipe"}
        maps = {} if job.tensor_map is None else {"tensor_map": job.tensor_map}
        report = dynadapt.save(job.state, f"{folder}/{kind}", to, timeout=60, **maps, **more)
        told |= {
            "moved": report.bytes_moved,
            "written": report.bytes_written,
            "fingerprints": (report.fingerprint_source, report.fingerprint_target),
            "outcomes": {outcome.path: outcome.kind for outcome in report.outcomes},
            "warnings": [str(warning) for warning in report.warnings],
            "changed": jobs.differing(told["held"], job.tensors()),
        }
        answers.append({**told, **steps_on(job)})
    return answers


def loaded_by_deepspeed(
    rank: int, world: int, kind: str, where: str, recipe: str
) -> dict[str, Any]:
    """A fresh engine loads a checkpoint by DeepSpeed's own loader, and goes on."""
    job = build(kind, recipe, width=jobs.HIDDEN)
    engine = job.state.model
    path, _ = engine.load_checkpoint(where)
    hyper = [{name: group[name] for name in _walk.HYPER} for group in engine.optimizer.param_groups]
    told = {"path": path, "held": job.tensors(), "hyper": hyper, "buffers": _walk._buffers(job)}
    return {**told, "kind": kind, **steps_on(job)}


def saved_or_not(
    rank: int,
    world: int,
    kind: str,
    path: str,
    tos: Sequence[str],
    fail: tuple[int, str, str],
    options: dict[str, Any],
) -> dict[str, Any]:
    """A job is to be saved, and a rank fails in a phase: it raises, it dies, or may write no more.

    Then it goes on, and is saved with nothing in its way.
    """
    job = started(kind)
    held = job.tensors()
    at, phase, how = fail

    def on_phase(name: str) -> None:
        if (rank, name) == (at, phase):
            if how == "die":
                os._exit(7)
            if how == "full":
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            else:
                raise RuntimeError("on purpose")

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    to = tos[min(rank, len(tos) - 1)]
    told: dict[str, Any] = {}
    try:
        dynadapt.save(job.state, path, to, timeout=10, on_phase=on_phase, **options)
    except dynadapt.MigrationAborted as error:
        told |= {
            "phase": error.phase,
            "seat": error.seat,
            "reason": error.reason,
            "text": str(error),
        }
        told["findings"] = [finding.to_json() for finding in error.findings]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told["left"] = sorted(os.listdir(os.path.dirname(path)))
    if how != "die":
        told["changed"] = jobs.differing(held, job.tensors())
        told |= steps_on(job)
    return told


def saved_for_transformers(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A Hugging Face model, tied, in wrappers and of two dtypes, saved: its weights, and what was told."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 12}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}

    def model(dtype: torch.dtype = torch.float32) -> Any:
        torch.manual_seed(3)
        made = LlamaForCausalLM(LlamaConfig(**small, **heads)).to(dtype)
        made.config.dtype = torch.bfloat16
        made.generation_config.max_new_tokens = 17
        return made

    def wrapped(kind: str) -> Any:
        if kind == "zero3":
            return jobs.zero3(model())
        if kind == "ddp":
            return DistributedDataParallel(model(torch.bfloat16))
        if kind == "compiled":
            return torch.compile(model())
        return fully_shard(model())

    told: dict[str, Any] = {"weights": model().state_dict()}
    for kind in ("zero3", "ddp", "compiled", "fsdp2"):
        options: dict[str, Any] = {"dtype": "bfloat16"} if kind == "compiled" else {}
        job = wrapped(kind)
        report = dynadapt.save(job, f"{folder}/{kind}", "safetensors", timeout=60, **options)
        told[kind] = {o.path: (o.kind, o.note) for o in report.outcomes}
    named = TensorMap((rename(r"re:model\.(.*)", r"body.\1"),))
    dynadapt.save(model(), f"{folder}/renamed", "safetensors", timeout=60, tensor_map=named)
    dynadapt.save(model(), f"{folder}/universal", "universal", timeout=60)
    return told


#: An engine whose loss scale is too large at first, so that its counts of steps are not one number.
SKIPS = {
    "fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 3},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 3, "total_num_steps": 20},
    },
}


def saved_again(
    rank: int, world: int, kinds: Sequence[str], folder: str, to: str
) -> list[dict[str, Any]]:
    """DeepSpeed saves an engine, and one of another kind that has loaded that, converted: both files' counts.

    And what both engines do then.
    """
    engines = [jobs.deepspeed_engine(kind, jobs.net(n), **SKIPS) for n, kind in enumerate(kinds)]
    for number in range(5):
        jobs.step(engines[0], number)
    engines[0].save_checkpoint(f"{folder}/one", tag="t")
    if rank == 0:
        dynadapt.convert(f"{folder}/one", f"{folder}/between", to)
    torch.distributed.barrier()
    dynadapt.load(engines[1], f"{folder}/between", timeout=60)
    engines[1].save_checkpoint(f"{folder}/two", tag="t")
    answers = []
    for name, engine in zip(("one", "two"), engines, strict=True):
        (path, *_) = sorted(Path(folder, name, "t").glob("*mp_rank_00_model_states.pt"))
        tree = torch.load(path, weights_only=False)
        counts = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")
        told = {count: tree[count] for count in counts}
        told["scaler"] = engine.optimizer.cur_scale
        told["lr"] = [group["lr"] for group in engine.optimizer.param_groups]
        answers.append({**told, "losses": [jobs.step(engine, number) for number in (5, 6)]})
    return answers
