"""What a training state holds beside tensors: hyperparameters, scheduler, counts, user objects.

Both live adapters read these into aux items and write them from aux items with the same functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dynadapt.adapters._hyper import NOT_HYPER, hyper_in_files
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import PER_GROUP, AuxItem, Outcome, TrainState
from dynadapt.torch_dtypes import dtype_name, torch_dtype
from dynadapt.vps.keys import canonical_name
from dynadapt.vps.wire import encodable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynadapt.vps.keys import KeySpec

__all__ = [
    "REGROUP",
    "apply_behaviour",
    "apply_data",
    "apply_groups",
    "apply_scheduler",
    "apply_user",
    "dropped_extras",
    "groups_item",
    "optimizer_item",
    "plain",
    "scheduler_item",
    "user_items",
    "with_extra_states",
]

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
                key: entry
                for key, value in hyper_in_files(group).items()  # not of `params`, which are read
                if encodable(entry := plain(value))
            },
        }
        for group, members in zip(groups, names, strict=True)
    ]
    return AuxItem("param_groups", value)


_FAMILIES = {
    "AdamW": "Adam",
    "MuonWithAuxAdam": "Muon",
    "FusedAdam": "Adam",
    "DeepSpeedCPUAdam": "Adam",
    "FusedLion": "Lion",
    "DeepSpeedCPULion": "Lion",
}
"""Classes with one update rule; AdamW differs from Adam by a group entry, which is carried."""


def _family(optimizer: Any) -> str:
    kind = type(optimizer).__name__
    return _FAMILIES.get(kind, kind)


def optimizer_item(optimizer: Any) -> AuxItem:
    """The `optimizer` aux item: the name of its update rule.

    >>> optimizer_item(torch.optim.AdamW([torch.zeros(1)])).value
    'Adam'
    """
    return AuxItem("optimizer", _family(optimizer))


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


#: The way out where members of one target group have different hyperparameters in the source.
REGROUP = "give the target optimizer the source's param groups"


def apply_groups(
    groups: Sequence[dict[str, Any]],
    names: Sequence[Sequence[str]],
    item: AuxItem | None,
    way_out: str = REGROUP,
) -> tuple[Outcome, ...]:
    """Give each target group its members' source hyperparameters, in place, by parameter name.

    Raises `Refused` (`hyper-conflict`) where members of one target group differ in the source. Only
    entries that the target group has are written, so that an optimizer never meets a foreign one; what
    the source's optimizer does not have, such as one of an older torch, stays as it is and is told.
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
        if not known and not members and len(groups) == len(item.value):
            known = [("", item.value[index]["hyper"])]  # its members are on other stages
        if not known:
            outcomes.append(
                Outcome(f"param_groups[{index}]", "dropped", "no member is in a source group")
            )
            continue
        first_name, hyper = known[0]
        for name, other in known[1:]:
            differing = sorted(
                k for k in {*hyper, *other} - NOT_HYPER if hyper.get(k) != other.get(k)
            )
            if differing:
                findings.append(
                    Finding(
                        "hyper-conflict",
                        f"param group {index}",
                        f"{first_name} and {name} differ in {', '.join(differing)} in the source",
                        way_out,
                    )
                )
                break
        lost = []
        for key, value in hyper.items():
            if (key in group and key not in NOT_HYPER) or key == "initial_lr":
                shared = sum(group.get(key) is other.get(key) for other in groups) > 1
                _set_entry(group, key, value, shared)
            elif key not in NOT_HYPER and value not in _IDLE:
                lost.append(key)
        kept = [k for k in group if k not in {*hyper, *NOT_HYPER} and group[k] not in _IDLE]
        outcomes.append(Outcome(f"param_groups[{index}]", "exact"))
        outcomes += [
            Outcome(
                f"param_groups[{index}]/{key}", "derived", "the source has none; it keeps its own"
            )
            for key in kept
        ]
        outcomes += [
            Outcome(f"param_groups[{index}]/{key}", "dropped", "the target's optimizer has none")
            for key in lost
        ]
    if findings:
        raise Refused(findings)
    return tuple(outcomes)


#: Values of an entry that change nothing where the other side's optimizer does not know it.
_IDLE = (None, False, 0)


def _set_entry(group: dict[str, Any], key: str, value: Any, shared: bool) -> None:
    old = group.get(key)
    if isinstance(old, torch.Tensor):
        # torch gives all groups one and the same tensor where one was passed: part them then
        group[key] = old.clone().fill_(value) if shared else old.fill_(value)
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


def _source_group_of(names: Sequence[Sequence[str]], groups: AuxItem | None) -> list[int] | None:
    """For each target group, the source group of the same members; None where they are cut otherwise.

    Source groups of which the target has no member are left out: a pipeline stage has but its own.
    """
    source = [set(group["names"]) for group in (groups.value if groups else [])]
    common = set().union(*source) & set().union(*map(set, names))
    left = [(members & common, index) for index, members in enumerate(source)]
    found = []
    for members in names:
        match = next((one for one in left if one[0] == set(members) & common), None)
        if match is None:
            return None
        left.remove(match)
        found.append(match[1])
    return None if any(members for members, _ in left) else found


def _by_target_group(value: Any, order: Sequence[int], count: int, key: str = "") -> Any:
    """Lists of `count` entries, one a source group, in the order of the target's; at any depth."""
    if isinstance(value, dict):
        return {k: _by_target_group(v, order, count, str(k)) for k, v in value.items()}
    if isinstance(value, list) and key in PER_GROUP and len(value) == count:
        return [value[index] for index in order]
    if isinstance(value, list):
        return [_by_target_group(part, order, count) for part in value]
    return value


def apply_scheduler(
    scheduler: Any,
    item: AuxItem | None,
    groups: AuxItem | None = None,
    names: Sequence[Sequence[str]] = (),
) -> tuple[Outcome, ...]:
    """Load the source scheduler's state into a target scheduler of the same class.

    A checkpoint does not say the class: there the entries of the state must be the same.

    `groups` is the source's `param_groups` item and `names` the target's: what a scheduler keeps per
    group follows the members. Raises `Refused` (`scheduler-groups`) if the groups are cut otherwise.
    """
    if item is None and scheduler is None:
        return ()
    if item is None:
        return (Outcome("scheduler", "dropped", "the source has no scheduler"),)
    if scheduler is None:
        return (Outcome("scheduler", "dropped", "the target has no scheduler"),)
    own, given, kind = scheduler.state_dict(), item.value["state"], item.value["class"]
    if (kind and type(scheduler).__name__ != kind) or not (kind or _one_kind(own, item)):
        plain_keys = sorted(key for key in given if not key.startswith("_"))
        what = f"is a {kind}" if kind else f"keeps {', '.join(plain_keys) or 'nothing'}"
        note = f"the source's {what}, the target's is a {type(scheduler).__name__}"
        return (Outcome("scheduler", "dropped", note),)
    if groups is not None:
        order = _source_group_of(names, groups)
        if order is None:
            cause = (
                "the source keeps rates by param group, and the target's groups have other members"
            )
            fix = "give the target optimizer the source's param groups, or no scheduler"
            raise Refused([Finding("scheduler-groups", "scheduler", cause, fix)])
        given = _by_target_group(given, order, len(groups.value))
    state = {key: _like(own.get(key), value) for key, value in given.items()}
    scheduler.load_state_dict({**own, **state})
    if left := item.value.get("left"):
        note = f"all but {', '.join(left)}, which the target keeps as it was built"
        return (Outcome("scheduler", "derived", note),)
    return (Outcome("scheduler", "exact"),)


def _one_kind(own: Mapping[str, Any], item: AuxItem) -> bool:
    """Whether a schedule that does not say its class, as in a file, keeps what the target's keeps."""

    def told(keys: Iterable[str]) -> set[str]:
        return {k for k in keys if not k.startswith("_") and k != "verbose"}  # by torch's version

    return told(own) == told([*item.value["state"], *item.value.get("left", ())])


def _like(own: Any, value: Any) -> Any:
    """A value in the type of the target's: milestones are a Counter, a rate may be a tensor."""
    if isinstance(own, torch.Tensor) and isinstance(value, int | float):
        return own.clone().fill_(value)
    if type(own) is list and type(value) is list and len(own) == len(value):
        return [_like(a, b) for a, b in zip(own, value, strict=True)]
    if isinstance(value, dict | list) and isinstance(own, dict | list) and type(own) is not dict:
        return type(own)(value)
    return value


class _ExtraState:
    """A module's own extra state, as the user objects have it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.state_dict, self.load_state_dict = module.get_extra_state, module.set_extra_state


def with_extra_states(model: torch.nn.Module, user: Mapping[str, Any]) -> dict[str, Any]:
    """The user's objects, and one for each module with `get_extra_state` that can travel."""
    found: dict[str, Any] = {}
    plain_one = torch.nn.Module.get_extra_state
    for name, module in model.named_modules():
        if type(module).get_extra_state is not plain_one:
            own = _ExtraState(module)
            if encodable(_lowered(own.state_dict())):
                found[f"extra state of {canonical_name(f'{name}.').rstrip('.') or 'model'}"] = own
    return {**found, **user}


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
    if type(value) in {torch.Tensor, torch.nn.Parameter} and value.layout is torch.strided:
        value = value.detach().resolve_conj().resolve_neg()
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
