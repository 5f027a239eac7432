"""What a torch training loop keeps beside tensors: the loss scaler, counts, and its own behaviour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynadapt.adapters._common import apply_data
from dynadapt.protocols import AuxItem, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dynadapt.protocols import TrainState
    from dynadapt.vps.keys import KeySpec

__all__ = [
    "apply_behaviour",
    "apply_counters",
    "apply_scaler",
    "dropped_extras",
    "scaler_item",
]

#: Parts of a source's behaviour that are told by another outcome, or say nothing about a step.
_TOLD = frozenset({"framework", "zero_stage", "scheduler"})


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


def apply_behaviour(own: Mapping[str, Any], item: AuxItem | None) -> tuple[Outcome, ...]:
    """Say what the source did by set-up that this target does otherwise, or that is its loop's work."""
    outcomes = []
    for name, value in sorted(({} if item is None else item.value).items()):
        if name in _TOLD or own.get(name) == value or value in (None, 0, False, "none", ""):
            continue
        if name == "gradient_accumulation_steps" and value == 1:
            continue
        here = f"the target has {own[name]!r}" if name in own else "the training loop has to do it"
        outcomes.append(
            Outcome(f"behaviour/{name}", "dropped", f"the source had {value!r}; {here}")
        )
    return tuple(outcomes)


def dropped_extras(state: TrainState, keys: Iterable[KeySpec]) -> tuple[Outcome, ...]:
    """The source's extra labels that the target does not have."""
    found = {spec.key.slot for spec in keys if spec.key.slot.startswith("extra:")}
    lost = sorted(found - {f"extra:{label}" for label in state.extra})
    return tuple(Outcome(slot, "dropped", "the target has no such label") for slot in lost)
