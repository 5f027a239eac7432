"""What a DeepSpeed engine keeps beside its tensors, whatever the ZeRO stage: counters, loss scaler,
and the parts of its behaviour that another framework may not have."""

from __future__ import annotations

from typing import Any

import torch

from dynadapt.adapters.live._deepspeed_pipe import is_pipeline
from dynadapt.protocols import AuxItem, Outcome
from dynadapt.vps.wire import encodable

__all__ = [
    "apply_counters",
    "apply_scaler",
    "attributes",
    "behaviour",
    "counters_of",
    "scaler_item",
]

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def counters_of(engine: Any) -> dict[str, int]:
    """The engine's own counts."""
    counts = {name: int(getattr(engine, name)) for name in COUNTERS}
    if is_pipeline(engine):
        del counts["micro_steps"]  # a pipeline does not count them
    return counts


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
    if is_pipeline(engine):
        engine.micro_steps = 0
    elif "global_steps" in found and ("micro_steps" not in found or engine.micro_steps % every):
        engine.micro_steps = steps * every
        outcomes.append(Outcome("counters/micro_steps", "derived", f"{steps} steps of {every}"))
    if "global_steps" in found and "global_samples" not in found:
        engine.global_samples = steps * engine.train_batch_size()
        note = f"{steps} steps of {engine.train_batch_size()} samples"
        outcomes.append(Outcome("counters/global_samples", "derived", note))
    return tuple(outcomes)


def attributes(engine: Any) -> list[tuple[Any, str]]:
    """Where the counts and the loss scaler are kept: objects and names of their attributes."""
    found = [(engine, name) for name in COUNTERS]
    scaler = _scaler_of(engine)
    if scaler is not None:
        found += [(scaler, name) for name in vars(scaler)]
        names = ("external_loss_scale", "custom_loss_scaler")
        found += [(engine.optimizer, name) for name in names if hasattr(engine.optimizer, name)]
    return found


def _scaler_of(engine: Any) -> Any:
    """The loss scaler of an fp16 engine, or None.

    Optimizers of other dtypes may have a scaler too, that multiplies by one: no state. Without ZeRO
    it is called a config, and counts all the same.
    """
    if engine.get_data_types()[0] != torch.float16:
        return None
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or optimizer.loss_scale_config


def _is_dynamic(scaler: Any) -> bool:
    return bool(getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)))


def scaler_item(engine: Any) -> AuxItem | None:
    """The `scaler` aux item of an fp16 engine: class, current scale, and all its fields."""
    scaler = _scaler_of(engine)
    if scaler is None:
        return None
    optimizer = engine.optimizer
    override = optimizer.external_loss_scale if optimizer.custom_loss_scaler else None
    value = {
        "class": type(scaler).__name__,
        "scale": float(scaler.cur_scale),
        "state": {name: value for name, value in vars(scaler).items() if encodable(value)},
        "override": override,
    }
    return AuxItem("scaler", value)


def apply_scaler(engine: Any, item: AuxItem | None) -> tuple[Outcome, ...]:
    """Go on with the source's loss scale; with all of its fields, if the classes are the same."""
    scaler = _scaler_of(engine)
    if item is None:
        note = "the source does not scale its loss; the target starts with its own scale"
        return (Outcome("scaler", "dropped", note),) if scaler is not None else ()
    if scaler is None:
        return (Outcome("scaler", "dropped", "the target does not scale its loss"),)
    value = item.value
    if value.get("override") is not None:
        engine.optimizer.override_loss_scale(value["override"])
    if value.get("class") == type(scaler).__name__:
        for name, entry in value["state"].items():
            if hasattr(scaler, name):
                setattr(scaler, name, entry)
        return (Outcome("scaler", "exact"),)
    if not _is_dynamic(scaler) or "scale" not in value:
        note = f"the source's is a {value.get('class')}, the target's a {type(scaler).__name__}"
        return (Outcome("scaler", "dropped", note),)
    scaler.cur_scale = value["scale"]
    return (Outcome("scaler", "derived", "the scale only: the classes differ"),)


def behaviour(engine: Any) -> dict[str, Any]:
    """What the engine does to a step by configuration rather than by state."""
    scaler = _scaler_of(engine)
    scaling = "none"
    if scaler is not None:
        scaling = "dynamic" if _is_dynamic(scaler) else "static"
        if not engine.zero_optimization():
            # DeepSpeed 0.19 divides gradients by the scale without having multiplied the loss by it,
            # so moments of such an engine are smaller than those of any other.
            scaling += ", of gradients only"
    autocast = engine.torch_autocast_dtype() if engine.torch_autocast_enabled() else None
    return {
        "framework": "deepspeed",
        "zero_stage": int(engine.zero_optimization_stage()),
        "precision": str(engine.get_data_types()[0]).removeprefix("torch."),
        "autocast": str(autocast).removeprefix("torch.") if autocast is not None else None,
        "gradient_clipping": float(engine.gradient_clipping()),
        "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        "train_batch_size": int(engine.train_batch_size()),
        "loss_scaling": scaling,
        "scheduler": engine.scheduler_name(),
    }
