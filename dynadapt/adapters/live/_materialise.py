"""Memory for a target that was built on the meta device, without a new object for any tensor.

`Module.to_empty` puts new parameters in the place of the old ones, so that an optimizer that was made
before it trains tensors that no forward reads. Here each tensor keeps its identity and gets its content
exchanged, so ties, optimizers and whatever else holds a parameter stay right, and it can be undone.
Views of one storage stay views of one storage.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from dynadapt.adapters._common import named_buffers, named_parameters
from dynadapt.adapters.live import _fsdp2
from dynadapt.errors import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dynadapt.adapters._common import NamedTensor
    from dynadapt.vps.keys import KeySpec

__all__ = ["Ghost", "is_meta"]


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or this rank's part of it, has no memory."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).is_meta


class Ghost:
    """The parameters and buffers of a model that have no memory yet; none in an ordinary model.

    `device` is where they get it: by default their mesh's device, that of the model's other tensors, or
    this process's accelerator. `made_bytes` is what `materialise` has made.
    """

    def __init__(self, model: torch.nn.Module, device: Any = None) -> None:
        self._model = model
        self._device = None if device is None else torch.device(device)
        self.made_bytes = 0
        self._swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._resharded: list[tuple[Any, dict[str, Any]]] = []

    def _named(self) -> Iterator[tuple[str, NamedTensor]]:
        """Slot and tensor of each."""
        for slot, every in (
            ("param", named_parameters(self._model)),
            ("buffer", named_buffers(self._model)),
        ):
            yield from ((slot, each) for each in every if is_meta(each.tensor))

    def findings(self, keys: Iterable[KeySpec]) -> list[Finding]:
        """Why they cannot all be made and filled from a source with these keys; changes nothing."""
        served = {
            (name, spec.key.slot)
            for spec in keys
            if spec.presence == "present"
            for name in (spec.key.name, *spec.aliases)
        }
        findings = []
        for slot, named in self._named():
            names = {(name, slot) for name in (named.name, *named.aliases)}
            if named.tensor.numel() and not names & served:
                cause = "it is on the meta device, and the source holds no value for it"
                fix = "give it memory and its value on the target before"
                findings.append(Finding("not-materialised", named.name, cause, fix))
            elif weakref.getweakrefs(named.tensor):
                cause = "it is on the meta device, and weak references to it forbid to exchange it"
                fix = "call to_empty(device=...) on its module, before the optimizer is made"
                findings.append(Finding("not-materialised", named.name, cause, fix))
        return findings

    def materialise(self) -> None:
        """Give each of them memory of undefined content."""
        storages: dict[int, torch.UntypedStorage] = {}
        ghosts = [named.tensor for _, named in self._named()]
        hosted = _fsdp2.offloaded(self._model)
        default = self._default() if ghosts else torch.device("cpu")
        for tensor in ghosts:
            device = (
                torch.device("cpu") if id(tensor) in hosted else self._device_of(tensor, default)
            )
            full = _with_memory(tensor, device, storages)
            # What a user has put on a tensor as an attribute changes sides with its content.
            full.__dict__.update(tensor.__dict__)
            torch.utils.swap_tensors(tensor, full)  # type: ignore[no-untyped-call]
            self._swapped.append((tensor, full))
        self.made_bytes = sum(storage.nbytes() for storage in storages.values())
        if ghosts:
            self._resharded += _fsdp2.reset(self._model)

    def _device_of(self, tensor: torch.Tensor, default: torch.device) -> torch.device:
        if self._device is not None or not isinstance(tensor, DTensor):
            return default
        return _current(torch.device(tensor.device_mesh.device_type))

    def _default(self) -> torch.device:
        """Where a tensor goes that says nothing itself."""
        others = (*self._model.parameters(), *self._model.buffers())
        found = next((other.device for other in others if not is_meta(other)), None)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return self._device or found or _current(accelerator or torch.device("cpu"))

    def undo(self) -> None:
        """Back to the meta device; the same objects, without memory."""
        while self._resharded:
            held, old = self._resharded.pop()
            vars(held).update(old)
        while self._swapped:
            torch.utils.swap_tensors(*self._swapped.pop())  # type: ignore[no-untyped-call]
        self.made_bytes = 0


def _current(kind: torch.device) -> torch.device:
    """This process's device of a kind."""
    if kind.type == "cpu":
        return kind
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _with_memory(
    tensor: torch.Tensor, device: torch.device, storages: dict[int, torch.UntypedStorage]
) -> torch.Tensor:
    """The tensor's equal with memory; those that share a storage share the new one in the same way."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    old = local.untyped_storage()
    storage = storages.get(old._cdata)
    if storage is None:
        made: Any = torch.empty(old.nbytes(), dtype=torch.uint8, device=device)
        storage = storages[old._cdata] = made.untyped_storage()
    view = torch.empty(0, dtype=local.dtype, device=device)
    view.set_(storage, local.storage_offset(), local.size(), local.stride())
    if isinstance(tensor, DTensor):
        whole = DTensor(view, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(whole, requires_grad=tensor.requires_grad)
        return whole.requires_grad_(tensor.requires_grad)
    return torch.Tensor._make_subclass(type(tensor), view, tensor.requires_grad)
