"""What a torch training loop keeps beside tensors: the loss scaler, counts, and its own behaviour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from dynadapt.adapters._aux import apply_data
from dynadapt.protocols import AuxItem, Outcome

if TYPE_CHECKING:
    from dynadapt.protocols import TrainState

__all__ = [
    "apply_counters",
    "apply_scaler",
    "holds_value",
    "scaler_item",
]


def holds_value(gradient: torch.Tensor) -> bool:
    """Whether any element of a gradient that is here differs from zero: then a step has yet to use it."""
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    if local.is_meta or not local.numel():
        return False
    if local.layout is not torch.strided:
        local = local.coalesce().values()
    return bool(local.count_nonzero().item())


def scaler_item(scaler: Any) -> AuxItem | None:
    """The `scaler` aux item of a GradScaler: class, current scale, all its fields."""
    state = {} if scaler is None else scaler.state_dict()
    if not state:
        return None
    value = {"class": type(scaler).__name__, "scale": float(state["scale"]), "state": dict(state)}
    return AuxItem("scaler", value)


def apply_scaler(scaler: Any, item: AuxItem | None) -> tuple[Outcome, ...]:
    """Go on with the source's loss scale; with all of its fields, if the classes are the same."""
    own = {} if scaler is None else scaler.state_dict()
    if item is None:
        note = "the source does not scale its loss; the target starts with its own scale"
        return (Outcome("scaler", "dropped", note),) if own else ()
    if not own:
        return (Outcome("scaler", "dropped", "the target does not scale its loss"),)
    value = item.value
    if own.keys() == value["state"].keys():
        scaler.load_state_dict(value["state"])
        return (Outcome("scaler", "exact"),)
    scaler.load_state_dict({**own, "scale": value["scale"]})
    return (Outcome("scaler", "derived", "the scale only: the classes differ"),)


def apply_counters(
    state: TrainState, counters: AuxItem | None, data: AuxItem | None
) -> tuple[Outcome, ...]:
    """Put the source's counts into the target's `counters`; say where the data go on."""
    outcomes = []
    if counters is not None:
        state.counters.update(counters.value)
        outcomes.append(Outcome("counters", "exact"))
    elif state.counters:
        outcomes.append(Outcome("counters", "dropped", "the source keeps none"))
    return (*outcomes, *apply_data(state, data))
