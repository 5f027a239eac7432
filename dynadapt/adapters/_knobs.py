"""What `finish` sets beside tensors, remembered so that `abandon` can put it back."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dynadapt.protocols import TrainState

__all__ = ["remembered"]


def remembered(
    state: TrainState,
    groups: Sequence[dict[str, Any]],
    states: Iterable[dict[str, Any]] = (),
    stateful: Iterable[Any] = (),
    attributes: Iterable[tuple[Any, str]] = (),
) -> Callable[[], None]:
    """Look at all of it now; the function that comes back restores it. Tensors keep their identity.

    `groups` are param groups, `states` an optimizer's per-parameter states (of which numbers and
    one-element tensors count), `stateful` objects with `state_dict` and `load_state_dict`.

    >>> from dynadapt.protocols import TrainState
    >>> groups = [{"params": [], "lr": 0.1}]
    >>> put_back = remembered(TrainState(None), groups)
    >>> groups[0].update(lr=7.0, initial_lr=7.0)
    >>> put_back()
    >>> groups
    [{'params': [], 'lr': 0.1}]
    """
    entries = [(group, _kept(group)) for group in groups]
    numbers = [(own, _kept({k: v for k, v in own.items() if _is_number(v)})) for own in states]
    objects = [(each, _own(each.state_dict())) for each in stateful if each is not None]
    values = [(owner, name, getattr(owner, name)) for owner, name in attributes]
    counters, samples = dict(state.counters), state.samples

    def put_back() -> None:
        for group, kept in entries:
            for key in [k for k in group if k not in kept and k not in _PARAMS]:
                del group[key]
            _restore(group, kept)
        for own, kept in numbers:
            _restore(own, kept)
        for owner, name, value in values:
            setattr(owner, name, value)
        state.counters.clear()
        state.counters.update(counters)
        state.samples = samples
        for each, own_state in objects:
            each.load_state_dict(own_state)

    return put_back


_PARAMS = frozenset({"params", "param_names"})


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float)


def _kept(entries: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each entry itself, and of a tensor its content."""
    return {
        key: (value, value.detach().clone() if isinstance(value, torch.Tensor) else None)
        for key, value in entries.items()
        if key not in _PARAMS
    }


def _restore(entries: dict[str, Any], kept: Mapping[str, tuple[Any, Any]]) -> None:
    for key, (value, content) in kept.items():
        entries[key] = value
        if content is not None:
            with torch.no_grad():
                value.copy_(content)


def _own(state: Any) -> Any:
    """A copy that a later `load_state_dict` cannot have changed."""
    try:
        return copy.deepcopy(state)
    except Exception:  # it holds what cannot be copied, such as a generator
        return dict(state)
