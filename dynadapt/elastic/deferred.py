"""Optimizer state that gets its memory when its first bytes arrive, not when it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dynadapt.protocols import Buffer

__all__ = ["Deferred", "gives_back", "zero"]

_SMALL = 4096
"""Bytes below which a tensor is made at once."""

_EMPTY = {
    torch.ops.aten.zeros_like.default: torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default: torch.ops.aten.new_empty.default,
    torch.ops.aten.zeros.default: torch.ops.aten.empty.memory_format,
}


class Deferred(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, tensors of zeros are made without memory, until anything but a view needs them.

    For an adapter's `prepare`, whatever the adapter: its states are to be overwritten anyhow.

    >>> with Deferred() as deferred:
    ...     state = torch.zeros(4096)
    >>> state.untyped_storage().nbytes(), deferred.nbytes
    (0, 16384)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waiting: dict[int, tuple[torch.UntypedStorage, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that have no memory yet."""
        return sum(nbytes for _, nbytes in self._waiting.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        empty = _EMPTY.get(func)
        if empty is not None:
            made = empty(*args, **kwargs)
            self._defer(_local(made))
            return made
        storages = [_local(t).untyped_storage() for t in _tensors((*args, *kwargs.values()))]
        if not _is_view(func):
            for storage in storages:
                self._fill(storage)
            return func(*args, **kwargs)
        empty_ones = [self._waiting[s._cdata] for s in storages if s._cdata in self._waiting]
        for storage, nbytes in empty_ones:  # a view has to lie within its storage when it is made
            storage.resize_(nbytes)
        try:
            return func(*args, **kwargs)
        finally:
            for storage, _ in empty_ones:
                storage.resize_(0)

    def _defer(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.is_meta or storage.nbytes() < _SMALL or not storage.resizable():
            tensor.zero_()
            return
        self._waiting[storage._cdata] = (storage, storage.nbytes())
        storage.resize_(0)

    def _fill(self, storage: torch.UntypedStorage) -> None:
        known = self._waiting.pop(storage._cdata, None)
        if known is not None:
            storage.resize_(known[1])
            zero(storage)

    def settle(self, buffers: Mapping[str, Buffer]) -> dict[str, tuple[torch.UntypedStorage, int]]:
        """The buffers that wait for memory, with their storage and how many bytes it is to have.

        Every other deferred tensor gets its memory now.
        """
        found = {}
        for name, buffer in buffers.items():
            try:
                own = buffer.tensor().untyped_storage()
            except RuntimeError:  # freed, by us
                buffer.refill()
                ident = buffer.tensor().untyped_storage()._cdata
                buffer.free()
                if ident in self._waiting:
                    found[name] = self._waiting[ident]
                continue
            if own._cdata in self._waiting:  # its `tensor` makes a storage whole without a word
                self._fill(own)
        behind = {storage._cdata for storage, _ in found.values()}
        for ident in self._waiting.keys() - behind:
            self._fill(self._waiting[ident][0])
        return found


def zero(storage: torch.UntypedStorage) -> None:
    """Zero a whole storage."""
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


def gives_back(buffer: Buffer) -> bool:
    """Whether torch owns the buffer's memory, so that `free` really frees it."""
    return buffer.tensor().untyped_storage().resizable()


def _is_view(func: Any) -> bool:
    infos = [argument.alias_info for argument in func._schema.arguments]
    return any(info is not None and not info.is_write for info in infos)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
