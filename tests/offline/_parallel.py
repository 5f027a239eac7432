"""Real DeepSpeed jobs under pipeline or tensor parallelism, saved, and how their state goes on elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.adapters import _pipe_engines as pipe
from tests.adapters import test_deepspeed_autotp as autotp

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
STEPS = 2

PIPES: Mapping[str, pipe.Setup] = {
    "pipe zero1": pipe.Setup(frozen=True, scheduler=True),
    "pipe BF16_Optimizer": pipe.Setup(config=FP32_GRADIENTS),
    "pipe without ZeRO, bf16": pipe.Setup(stage=0),
    "pipe of four stages": pipe.Setup(stages=4, norm=False, groups="some"),
}
PLAIN: Mapping[str, pipe.Setup] = {
    "pipe in fp32": pipe.Setup(stage=0, dtype="fp32", scheduler=True),
    "pipe in fp32, four stages": pipe.Setup(4, 0, "fp32", tied=False, groups="one"),
    "pipe in fp16, named": pipe.Setup(stage=0, dtype="fp16", frozen=True, named=True),
    "pipe in fp16, fused": pipe.Setup(stage=0, dtype="fp16", fused=True),
}
"""Pipelines whose files do not list which parameters are whose."""

TENSORS: Mapping[str, autotp.Setup] = {
    "tp zero2, tied": autotp.Setup("llama tied", stage=2),
    "tp zero1, uneven": autotp.Setup("llama odd", tp=4),
    "tp fused, fp32": autotp.Setup("fused", dtype="fp32", plan=autotp.FUSED),
    "tp without ZeRO": autotp.Setup(stage=0),
    "tp without ZeRO, uneven, fp32": autotp.Setup("llama odd", tp=4, stage=0, dtype="fp32"),
    "tp BF16_Optimizer": autotp.Setup("llama tied", config=FP32_GRADIENTS),
    "tp zero3": autotp.Setup("llama tied", stage=3),
}


def names_of(kind: str) -> dict[str, Any]:
    """What a user says of a model of `PLAIN`: its order, and its optimizer's groups."""
    setup = PLAIN[kind]
    model = pipe.stack(setup)
    name_of = {param: name for name, param in model.named_parameters()}
    groups = pipe.optimizer_of(replace(setup, named=False), model).param_groups
    return {
        "order": [*name_of.values()],
        "groups": [[name_of[p] for p in own["params"] if p.requires_grad] for own in groups],
    }


class Job:
    """A pipeline, a tensor-parallel job, or the whole model under ZeRO with the same names."""

    def __init__(self, kind: str, whole: int | None = None, **config: Any) -> None:
        setup: Any = {**PIPES, **PLAIN, **TENSORS}[kind]
        self.module = autotp if kind in TENSORS else pipe
        if whole is not None:
            parallel = {"tp": 0, "plan": None} if kind in TENSORS else {"stages": 0, "norm": True}
            setup = replace(setup, stage=whole, seed=5, config=config, **parallel)
        self.engine = self.module.engine_of(setup)

    def on(self, first: int) -> dict[str, Any]:
        """Two steps from number `first` on: losses, and all that is held after them."""
        losses = [self.module.train(self.engine, step) for step in (first, first + 1)]
        return {"losses": losses, "held": self.held()}

    def held(self) -> dict[Any, Any]:
        """Every tensor whole, by DeepSpeed's own gathers."""
        if self.engine.zero_optimization_stage() == 3:
            return {}
        return self.module.tensors(self.engine)


def saved(
    rank: int, world: int, kinds: Sequence[str], folder: str, then: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Jobs that stepped and were saved; those of `then` go on as the whole model, moved there live."""
    import dynadapt

    answers = []
    for kind in kinds:
        job = Job(kind)
        job.on(0)
        job.engine.save_checkpoint(f"{folder}/{kind}", tag="t")
        told = {"fingerprint": dynadapt.fingerprint(job.engine), "held": job.held()}
        if kind in then:
            target = Job(kind, then[kind])
            dynadapt.migrate(job.engine, target.engine, timeout=60)
            told["on"] = target.on(STEPS)
        answers.append(told)
    return answers


def loaded(
    rank: int, world: int, kind: str, stage: int, folder: str, universal: bool
) -> dict[str, Any]:
    """The whole model, loaded by DeepSpeed's own loader, which goes on."""
    import dynadapt

    config = {"checkpoint": {"load_universal": True}} if universal else {}
    job = Job(kind, stage, **config)
    path, _ = job.engine.load_checkpoint(folder, load_module_strict=not universal)
    assert path is not None
    told = {"held": {} if universal else job.held()}
    told["fingerprint"] = "" if universal else dynadapt.fingerprint(job.engine)
    return {**told, "on": job.on(STEPS)}
