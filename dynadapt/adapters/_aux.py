"""What a training state holds beside tensors: hyperparameters, scheduler, counts, user objects.

Both live adapters read these into aux items and write them from aux items with the same functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dynadapt.adapters._common import dtype_name, torch_dtype
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Outcome, TrainState
from dynadapt.vps.wire import encodable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynadapt.vps.keys import KeySpec

__all__ = [
    "apply_behaviour",
    "apply_data",
    "apply_groups",
    "apply_scheduler",
    "apply_user",
    "dropped_extras",
    "groups_item",
    "plain",
    "scheduler_item",
    "user_items",
]

#: Group entries that say how an optimizer runs, or hold parameters: never carried to another one.
NOT_HYPER = frozenset(
    {
        "params",
        "param_names",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "maximize",
        "step",  # FusedAdam keeps a count here; a step is a scalar of each parameter
    }
)

#: Parts of a source's behaviour that are told by another outcome, or say nothing about a step.
_TOLD = frozenset({"framework", "zero_stage", "scheduler"})


def groups_item(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> AuxItem:
    """The `param_groups` aux item: per group, in order, its parameter names and hyperparameters.

    `names[i]` are the canonical names of group i (empty groups included).

    >>> groups_item([{"lr": 0.1, "params": []}], [["w"]]).value
    [{'names': ['w'], 'hyper': {'lr': 0.1}}]
    """
    value = [
        {
            "names": list(members),
            "hyper": {
                key: plain(entry)
                for key, entry in group.items()
                if key not in NOT_HYPER and encodable(plain(entry))
            },
        }
        for group, members in zip(groups, names, strict=True)
    ]
    return AuxItem("param_groups", value)


def plain(value: Any) -> Any:
    """A hyperparameter as plain Python: one-element tensors become numbers, also inside containers.

    >>> plain([torch.tensor(2.0), {"a": (1, torch.tensor([3]))}])
    [2.0, {'a': (1, 3)}]
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return value


def apply_groups(
    groups: Sequence[dict[str, Any]], names: Sequence[Sequence[str]], item: AuxItem | None
) -> tuple[Outcome, ...]:
    """Give each target group its members' source hyperparameters, in place, by parameter name.

    Raises `Refused` (`hyper-conflict`) where members of one target group differ in the source. Only
    entries that the target group has are written, so that an optimizer never meets a foreign one.
    """
    if item is None:
        return (Outcome("param_groups", "dropped", "the source has no optimizer"),)
    by_name = {name: group["hyper"] for group in item.value for name in group["names"]}
    empty = [group["hyper"] for group in item.value if not group["names"]]
    outcomes: list[Outcome] = []
    findings: list[Finding] = []
    for index, (group, members) in enumerate(zip(groups, names, strict=True)):
        known = [(name, by_name[name]) for name in members if name in by_name]
        if not known and not members and empty:
            known = [("", empty.pop(0))]
        if not known:
            outcomes.append(
                Outcome(f"param_groups[{index}]", "dropped", "no member is in a source group")
            )
            continue
        first_name, hyper = known[0]
        for name, other in known[1:]:
            if other != hyper:
                differing = sorted(k for k in {*hyper, *other} if hyper.get(k) != other.get(k))
                findings.append(
                    Finding(
                        "hyper-conflict",
                        f"param group {index}",
                        f"{first_name} and {name} differ in {', '.join(differing)} in the source",
                        "give the target optimizer the source's param groups",
                    )
                )
                break
        for key, value in hyper.items():
            if (key in group and key not in NOT_HYPER) or key == "initial_lr":
                _set_entry(group, key, value)
        outcomes.append(Outcome(f"param_groups[{index}]", "exact"))
    if findings:
        raise Refused(findings)
    return tuple(outcomes)


def _set_entry(group: dict[str, Any], key: str, value: Any) -> None:
    old = group.get(key)
    if isinstance(old, torch.Tensor):
        old.fill_(value)
    elif isinstance(old, tuple) and isinstance(value, list):
        group[key] = tuple(value)
    else:
        group[key] = value


def scheduler_item(scheduler: Any) -> AuxItem | None:
    """The `scheduler` aux item: class name and `state_dict()`, or None without a scheduler."""
    if scheduler is None:
        return None
    state = {k: plain(v) for k, v in scheduler.state_dict().items()}
    kept = {key: value for key, value in state.items() if encodable(value)}
    left = sorted(state.keys() - kept.keys())
    return AuxItem("scheduler", {"class": type(scheduler).__name__, "state": kept, "left": left})


def apply_scheduler(scheduler: Any, item: AuxItem | None) -> tuple[Outcome, ...]:
    """Load the source scheduler's state into a target scheduler of the same class."""
    if item is None and scheduler is None:
        return ()
    if item is None:
        return (Outcome("scheduler", "dropped", "the source has no scheduler"),)
    if scheduler is None:
        return (Outcome("scheduler", "dropped", "the target has no scheduler"),)
    if type(scheduler).__name__ != item.value["class"]:
        note = f"the source's is a {item.value['class']}, the target's a {type(scheduler).__name__}"
        return (Outcome("scheduler", "dropped", note),)
    own = scheduler.state_dict()
    state = {key: _like(own.get(key), value) for key, value in item.value["state"].items()}
    scheduler.load_state_dict({**own, **state})
    if left := item.value.get("left"):
        note = f"all but {', '.join(left)}, which the target keeps as it was built"
        return (Outcome("scheduler", "derived", note),)
    return (Outcome("scheduler", "exact"),)


def _like(own: Any, value: Any) -> Any:
    """A value in the container type of the target's: milestones are a Counter, not any dict."""
    if isinstance(value, dict | list) and isinstance(own, dict | list) and type(own) is not dict:
        return type(own)(value)
    return value


def user_items(
    user: Mapping[str, Any], samples: int | None, counters: Mapping[str, int]
) -> tuple[AuxItem, ...]:
    """Aux items of a `TrainState`'s own objects: `user/<name>`, `data`, `counters`."""
    items = [AuxItem(f"user/{n}", _lowered(obj.state_dict())) for n, obj in sorted(user.items())]
    bad = [item for item in items if not encodable(item.value)]
    if bad:
        raise Refused(
            Finding(
                "user-state",
                item.path,
                "its state_dict() holds more than numbers, text, bytes, lists, dicts and tensors",
                "return plain values from state_dict()",
            )
            for item in bad
        )
    if samples is not None:
        items.append(AuxItem("data", {"samples": samples}))
    if counters:
        items.append(AuxItem("counters", dict(counters)))
    return tuple(items)


def apply_user(user: Mapping[str, Any], aux: Mapping[str, AuxItem]) -> tuple[Outcome, ...]:
    """Give each of the target's user objects the source's state of the same name."""
    outcomes = []
    for name, obj in sorted(user.items()):
        item = aux.get(f"user/{name}")
        if item is None:
            outcomes.append(Outcome(f"user/{name}", "dropped", "the source has none of that name"))
        else:
            obj.load_state_dict(_lifted(item.value))
            outcomes.append(Outcome(f"user/{name}", "exact"))
    lost = [p for p in aux if p.startswith("user/") and p.removeprefix("user/") not in user]
    outcomes += [Outcome(path, "dropped", "the target has none of that name") for path in lost]
    return tuple(outcomes)


def apply_data(state: TrainState, item: AuxItem | None) -> tuple[Outcome, ...]:
    """Tell the target's `samples` where the data go on; setting up the loader is the user's."""
    if item is None:
        return ()
    state.samples = item.value["samples"]
    return (Outcome("data", "exact", f"go on at sample {state.samples}"),)


_TENSOR = "torch.Tensor"


def _lowered(value: Any) -> Any:
    """A user's state with every tensor as (mark, dtype, shape, bytes)."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        return {_TENSOR: [dtype_name(value.dtype), list(value.shape), flat.numpy().tobytes()]}
    if isinstance(value, dict):
        return {key: _lowered(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_lowered, value)) if type(value) in {list, tuple} else value
    return value


def _lifted(value: Any) -> Any:
    """The inverse of `_lowered`, on the CPU."""
    if isinstance(value, dict) and value.keys() == {_TENSOR}:
        name, shape, data = value[_TENSOR]
        empty = torch.empty(shape, dtype=torch_dtype(name))
        if data:
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return flat.view(empty.dtype).reshape(shape)
        return empty
    if isinstance(value, dict):
        return {key: _lifted(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_lifted, value))
    return value


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
