"""The param groups of a Megatron optimizer, of which a checkpoint lists everything but the members.

Megatron makes its groups itself: no weight decay for biases and whatever else has one dim, and experts that
lie on their own ranks apart. By that rule members are told where the groups are such; others the user names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.adapters.checkpoints._plain import MARK
from dynadapt.errors import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dynadapt.protocols import FileSource
    from dynadapt.vps.keys import KeySpec

__all__ = ["groups_of", "number_of", "optimizers_in", "step_of"]

_STACKED = re.compile(r"(?:^|\.)layers\.(?!\d)")
_EXPERT = re.compile(r"(?:^|\.)experts\.")
_EXPERTS_STACKED = re.compile(r"(?:^|\.)experts\.experts\.(?!\d)")

_MULTIPLE = "wd_mult"
"""What weight decay is multiplied by in a group."""

_VARY = frozenset({_MULTIPLE, "weight_decay"})


def optimizers_in(value: Any) -> Iterator[dict[str, Any]]:
    """The state dicts in a value that have param groups: of one optimizer, or of a chain of them.

    >>> [*optimizers_in({0: {"optimizer": {"param_groups": []}}, "param_state": 1})]
    [{'param_groups': []}]
    """
    if isinstance(value, dict):
        if isinstance(value.get("param_groups"), list):
            yield value
            return
        for part in value.values():
            yield from optimizers_in(part)


def number_of(value: Any) -> int | float | None:
    """A number, or the element of a small tensor that is one, as it was lowered.

    >>> number_of({"torch.Tensor": ["float32", [], np.float32(2).tobytes()]}), number_of("two")
    (2.0, None)
    """
    if isinstance(value, dict) and value.keys() == {MARK}:
        dtype, _, data = value[MARK]
        if (
            dtype in {"float32", "float64", "int32", "int64"}
            and len(data) == np.dtype(dtype).itemsize
        ):
            found: int | float = np.frombuffer(data, dtype)[0].item()
            return found
        return None
    return value if type(value) in (int, float) else None


def step_of(tree: Mapping[str, Any], group: Mapping[str, Any]) -> int | None:
    """How many steps a group has taken: Megatron keeps one count for all, here or there."""
    state = tree.get("state")
    told = group.get("step", state.get("common_step") if isinstance(state, dict) else None)
    found = number_of(told)
    return int(found) if found is not None and float(found).is_integer() else None


def groups_of(
    groups: Sequence[Mapping[str, Any]],
    params: Mapping[str, KeySpec],
    said: FileSource,
    where: str,
) -> tuple[list[list[str]], list[Finding]]:
    """The names of each group's members, and what is wrong: `groups`, `ambiguous-order`."""
    if said.groups:
        return _said(groups, params, said, where)
    apart = any(group.get("is_expert_parallel") for group in groups)
    names: list[list[str]] = [[] for _ in groups]
    lost: list[str] = []
    for name, spec in params.items():
        expert = apart and bool(_EXPERT.search(name))
        own = [i for i, g in enumerate(groups) if bool(g.get("is_expert_parallel")) == expert]
        if len(own) > 1:
            own = _by_decay(own, groups, _undecayed(name, spec))
        if len(own) == 1:
            names[own[0]].append(name)
        else:
            lost.append(name)
    if not lost:
        return names, []
    cause = (
        f"has {len(groups)} param groups without their members, and Megatron's own rule (no weight decay for "
        f"biases and what has one dim) does not tell whose {lost[0]} is"
    )
    fix = "give the names of each group: --order FILE with groups (groups=)"
    return names, [Finding("ambiguous-order", where, cause, fix)]


def _said(
    groups: Sequence[Mapping[str, Any]],
    params: Mapping[str, KeySpec],
    said: FileSource,
    where: str,
) -> tuple[list[list[str]], list[Finding]]:
    names = [[name for name in own if name in params] for own in said.groups]
    every = [name for own in names for name in own]
    if len(names) == len(groups) and len(set(every)) == len(every) == len(params):
        return names, []
    cause = (
        f"has {len(groups)} groups of {len(params)} parameters, and {len(names)} with {len(set(every))} of "
        "them are named"
    )
    return names, [Finding("groups", where, cause, "name every parameter in one group")]


def _undecayed(name: str, spec: KeySpec) -> bool:
    """Whether Megatron decays no such weight; a dim of all layers, or of all experts, is not the module's."""
    stacked = bool(_STACKED.search(name)) + bool(_EXPERTS_STACKED.search(name))
    return name.endswith(".bias") or len(spec.shape) - stacked <= 1


def _by_decay(own: list[int], groups: Sequence[Mapping[str, Any]], undecayed: bool) -> list[int]:
    """Of two groups that differ in weight decay alone, the one of those that have none, or the other."""
    rest = [{k: v for k, v in groups[i].items() if k not in _VARY} for i in own]
    multiples = [groups[i].get(_MULTIPLE) for i in own]
    if len(own) == 2 and rest[0] == rest[1] and sorted(map(str, multiples)) == ["0.0", "1.0"]:
        return [own[multiples.index(0.0 if undecayed else 1.0)]]
    return own
