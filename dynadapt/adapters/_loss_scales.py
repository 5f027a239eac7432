"""One loss scale as DeepSpeed's scalers keep it and as torch's GradScaler does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.protocols import AuxItem

__all__ = ["as_deepspeed", "as_grad_scaler", "is_deepspeeds"]

_STATIC = 2**31 - 1
"""Steps to the next growth of a scale that does not grow."""


def is_deepspeeds(item: AuxItem) -> bool:
    """Whether DeepSpeed's own classes, or stage 0's fields, have such a state."""
    return item.value["class"] in {"LossScaler", "DynamicLossScaler", "LossScaleConfig"}


def as_deepspeed(item: AuxItem, config: Mapping[str, Any]) -> AuxItem:
    """A scaler of stages 1 to 3, whatever the source's was: `LossScaler` or `DynamicLossScaler`.

    What stage 0 and torch do not keep is taken from the source's DeepSpeed config, or is DeepSpeed's default.
    DeepSpeed lets a scale grow one step later than torch for the same count, which is made up for.
    """
    value, state = item.value, dict(item.value["state"])
    if value["class"] in {"LossScaler", "DynamicLossScaler"}:
        return item
    if value["class"] == "LossScaleConfig":
        dynamic = bool(state.pop("dynamic_loss_scale", False))
    else:
        dynamic = True
        grown: Any = state.get("_growth_tracker", state.get("growth_tracker", 0))
        state = {
            "cur_scale": float(value["scale"]),
            "cur_iter": 1 + int(grown),
            "last_overflow_iter": -1,
            "scale_factor": float(state.get("growth_factor", 2.0)),
            "scale_window": int(state.get("growth_interval", 1000)),
        }
    state = {**(_hysteresis(config) if dynamic else {}), **state, "dynamic": dynamic}
    name = "DynamicLossScaler" if dynamic else "LossScaler"
    return replace(item, value={**value, "class": name, "state": state})


def _hysteresis(config: Mapping[str, Any]) -> dict[str, Any]:
    """What only the scalers of stages 1 to 3 have."""
    section = config.get("fp16") or {}
    delayed = int(section.get("hysteresis", 2))
    return {
        "min_scale": float(section.get("min_loss_scale", 1)),
        "delayed_shift": delayed,
        "cur_hysteresis": delayed,
        "consecutive_hysteresis": bool(section.get("consecutive_hysteresis", False)),
        "raise_error_at_min_scale": True,
    }


def as_grad_scaler(item: AuxItem) -> tuple[dict[str, Any], bool]:
    """The state of a torch GradScaler that grows when the source's would, and whether it was one.

    >>> from dynadapt.protocols import AuxItem
    >>> state = {"dynamic": True, "cur_iter": 3, "last_overflow_iter": -1, "scale_window": 5}
    >>> item = AuxItem("scaler", {"class": "DynamicLossScaler", "scale": 8.0, "state": state})
    >>> as_grad_scaler(item)[0]["_growth_tracker"]
    2
    """
    state = item.value["state"]
    if "growth_factor" in state:
        return dict(state), True
    factor = float(state.get("scale_factor") or 2.0)
    dynamic = state.get("dynamic", state.get("dynamic_loss_scale", not is_deepspeeds(item)))
    window = int(state.get("scale_window") or 2000) if dynamic else _STATIC
    tracker = int(state.get("growth_tracker", 0))
    if "cur_iter" in state and dynamic:
        last = state.get("last_overflow_iter")
        good = int(state["cur_iter"]) - int(-1 if last is None else last) - 1
        tracker = (good - 1) % window if good else 0
    fresh = {
        "scale": float(item.value["scale"]),
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
        "growth_interval": window,
        "_growth_tracker": tracker,
    }
    return fresh, False
