"""A source parked in host memory while its state moves, and what is known of it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dynadapt.protocols import TrainState, models_of, modules_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from dynadapt.protocols import Buffer

__all__ = ["Parked", "Woken", "is_parked", "left"]


class _HostCopy:
    """A parked buffer, as the executor reads it."""

    device = "cpu"

    def __init__(self, dtype: str, host: torch.Tensor) -> None:
        self.dtype, self._host = dtype, host

    @property
    def numel(self) -> int:
        return self._host.numel()

    def tensor(self) -> torch.Tensor:
        return self._host

    def free(self) -> None:
        """Never freed by the executor."""

    def refill(self) -> None:
        """Never freed, so nothing to do."""


_parked: WeakKeyDictionary[Any, tuple[Buffer, ...]] = WeakKeyDictionary()
"""Model or engine -> the buffers it was left without when its state had moved away."""


def is_parked(model: Any) -> bool:
    """Whether a model's state was parked and moved away, so that it holds nothing."""
    return any(part in _parked for part in modules_of(model))


def left(model: Any, buffers: Mapping[str, Buffer]) -> None:
    """A model's state has moved away and its buffers are freed; see `is_parked`."""
    _parked.update(_by_module(model, buffers))


def _by_module(model: Any, buffers: Mapping[str, Buffer]) -> dict[Any, tuple[Buffer, ...]]:
    """Each module of a model with all buffers of that model, which may be one of several."""
    found: dict[Any, tuple[Buffer, ...]] = {}
    for name, state in models_of(TrainState(model)).items():
        prefix = f"{name}/" if name else ""
        own = tuple(buffer for each, buffer in buffers.items() if each.startswith(prefix))
        found.update(dict.fromkeys(modules_of(state.model), own))
    return found


class Woken:
    """A parked model that is to be a target: its storage is made whole, with undefined content.

    It counts as parked until `settle`; `undo` frees it again. Does nothing for a model that is not.
    """

    def __init__(self, model: Any) -> None:
        self._modules = tuple(part for part in modules_of(model) if part in _parked)
        found = {id(b): b for part in self._modules for b in _parked[part]}
        self._buffers = tuple(found.values())
        for buffer in self._buffers:
            buffer.refill()

    def settle(self) -> None:
        """A state has arrived: the model holds one again."""
        for part in self._modules:
            _parked.pop(part, None)

    def undo(self) -> None:
        """No state has arrived: nothing may be read from it."""
        for buffer in self._buffers:
            buffer.free()


class Parked:
    """A source whose buffers were copied to host memory and freed on their device.

    `buffers` reads from the copies; `restore` puts everything back where it was, bit for bit. While it
    is parked, the model is known to `is_parked`.
    """

    def __init__(self, model: Any, buffers: Mapping[str, Buffer]) -> None:
        self._origin = dict(buffers)
        self._parts = _by_module(model, buffers)
        self.buffers: dict[str, Buffer] = {}
        self.nbytes = 0

    def park(self) -> None:
        """Copy and free, buffer by buffer; if that fails half-way, `restore` undoes what was done."""
        _parked.update(self._parts)
        for name, buffer in self._origin.items():
            host = buffer.tensor().to("cpu", copy=True)
            self.nbytes += host.numel() * host.element_size()
            self.buffers[name] = _HostCopy(buffer.dtype, host)
            buffer.free()

    def restore(self) -> None:
        """Refill every buffer that was parked and copy its content back."""
        for name, copy in self.buffers.items():
            self._origin[name].refill()
            self._origin[name].tensor().copy_(copy.tensor())
        for part in self._parts:
            _parked.pop(part, None)
