"""What a DeepSpeed engine keeps beside its tensors, whatever the ZeRO stage: counters, loss scaler,
and the parts of its behaviour that another framework may not have."""

from __future__ import annotations

from typing import Any

import torch

from dynadapt.protocols import AuxItem, Outcome
from dynadapt.vps.wire import encodable

__all__ = [
    "apply_counters",
    "apply_scaler",
    "behaviour",
    "counters_of",
    "scaler_item",
]

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def counters_of(engine: Any) -> dict[str, int]:
    """The engine's own counts."""
    return {name: int(getattr(engine, name)) for name in COUNTERS}


def apply_counters(engine: Any, own: dict[str, int], item: AuxItem | None) -> tuple[Outcome, ...]:
    """Set the engine's counts, and those of `own` that the source has under the same name.

    `micro_steps` must say "at a boundary" in the target's own accumulation, and absent counts follow
    from `global_steps`.
    """
    if item is None:
        return (Outcome("counters", "dropped", "the source keeps none"),)
    found: dict[str, int] = item.value
    own.update({name: value for name, value in found.items() if name in own})
    for name in COUNTERS:
        if name in found:
            setattr(engine, name, found[name])
    outcomes = [Outcome("counters", "exact")]
    steps, every = engine.global_steps, engine.gradient_accumulation_steps()
    if "global_steps" in found and ("micro_steps" not in found or engine.micro_steps % every):
        engine.micro_steps = steps * every
        outcomes.append(Outcome("counters/micro_steps", "derived", f"{steps} steps of {every}"))
    if "global_steps" in found and "global_samples" not in found:
        engine.global_samples = steps * engine.train_batch_size()
        note = f"{steps} steps of {engine.train_batch_size()} samples"
        outcomes.append(Outcome("counters/global_samples", "derived", note))
    return tuple(outcomes)


def scaler_item(optimizer: Any) -> AuxItem | None:
    """The `scaler` aux item of an fp16 engine: class, current scale, and all its fields.

    Other dtypes have a scaler too, that multiplies by one: no state.
    """
    if optimizer.dtype != torch.float16:
        return None
    scaler = optimizer.loss_scaler
    override = optimizer.external_loss_scale if optimizer.custom_loss_scaler else None
    value = {
        "class": type(scaler).__name__,
        "scale": float(scaler.cur_scale),
        "state": {name: value for name, value in vars(scaler).items() if encodable(value)},
        "override": override,
    }
    return AuxItem("scaler", value)


def apply_scaler(optimizer: Any, item: AuxItem | None) -> tuple[Outcome, ...]:
    """Go on with the source's loss scale; with all of its fields, if the classes are the same."""
    scaled = optimizer.dtype == torch.float16
    if item is None:
        note = "the source does not scale its loss; the target starts with its own scale"
        return (Outcome("scaler", "dropped", note),) if scaled else ()
    if not scaled:
        return (Outcome("scaler", "dropped", "the target does not scale its loss"),)
    scaler = optimizer.loss_scaler
    value = item.value
    if value.get("override") is not None:
        optimizer.override_loss_scale(value["override"])
    if value.get("class") == type(scaler).__name__:
        for name, entry in value["state"].items():
            if hasattr(scaler, name):
                setattr(scaler, name, entry)
        return (Outcome("scaler", "exact"),)
    if not scaler.dynamic or "scale" not in value:
        note = f"the source's is a {value.get('class')}, the target's a {type(scaler).__name__}"
        return (Outcome("scaler", "dropped", note),)
    scaler.cur_scale = value["scale"]
    return (Outcome("scaler", "derived", "the scale only: the classes differ"),)


def behaviour(engine: Any) -> dict[str, Any]:
    """What the engine does to a step by configuration rather than by state."""
    if engine.fp16_enabled():
        scaling = "dynamic" if engine.optimizer.loss_scaler.dynamic else "static"
    else:
        scaling = "none"
    autocast = engine.torch_autocast_dtype() if engine.torch_autocast_enabled() else None
    return {
        "framework": "deepspeed",
        "zero_stage": int(engine.zero_optimization_stage()),
        "precision": str(engine.optimizer.dtype).removeprefix("torch."),
        "autocast": str(autocast).removeprefix("torch.") if autocast is not None else None,
        "gradient_clipping": float(engine.gradient_clipping()),
        "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        "train_batch_size": int(engine.train_batch_size()),
        "loss_scaling": scaling,
        "scheduler": engine.scheduler_name(),
    }
