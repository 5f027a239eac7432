"""Values of torch files that are no tensors of the model, as plain values and back.

The form of small tensors among them is that of the live adapters' user objects: `{"torch.Tensor": [dtype,
shape, bytes]}`.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.adapters.checkpoints._pickle import Size, StoredTensor
from dynadapt.adapters.checkpoints._repickle import tensor
from dynadapt.vps.keys import ITEMSIZE
from dynadapt.vps.wire import encodable

if TYPE_CHECKING:
    from dynadapt.adapters.checkpoints._torch_file import TorchFile

__all__ = ["MARK", "Lifting", "lowered", "plain_part"]

MOST = 1 << 20
"""Bytes of a tensor that is carried as a value: a random generator's state has 5,000."""

MARK = "torch.Tensor"


def lowered(value: Any, file: TorchFile) -> Any:
    """A value with its small tensors as bytes; what cannot be carried stays, and is not `encodable`."""
    if isinstance(value, StoredTensor):
        if prod(value.shape) * ITEMSIZE.get(value.dtype, 16) > MOST or value.dtype not in ITEMSIZE:
            return value
        buffer = file.buffer(value)
        if not prod(value.shape):
            return {MARK: [value.dtype, list(value.shape), b""]}
        whole = buffer.array()
        strides = [n * whole.itemsize for n in value.strides]
        view = np.lib.stride_tricks.as_strided(whole[value.offset :], value.shape, strides)
        return {MARK: [value.dtype, list(value.shape), view.tobytes()]}
    if isinstance(value, dict):
        found = {key: lowered(part, file) for key, part in value.items()}
        if type(value) is not dict and hasattr(value, "elements"):  # a Counter, of milestones
            return type(value)(found)
        return found
    if isinstance(value, Size):
        return tuple(value)
    if isinstance(value, list | tuple):
        return type(value)(lowered(part, file) for part in value)
    return value


def plain_part(value: dict[Any, Any]) -> tuple[dict[Any, Any], list[str]]:
    """The entries that can be carried, and the names of the others.

    >>> plain_part({"a": 1, "b": object()})
    ({'a': 1}, ['b'])
    """
    kept = {key: part for key, part in value.items() if isinstance(key, str | int)}
    kept = {key: part for key, part in kept.items() if encodable(part)}
    return kept, sorted(str(key) for key in value if key not in kept)


class Lifting:
    """The inverse of `lowered`, for one file: `values` are the bytes of the tensors' storages."""

    def __init__(self, prefix: str = "value.") -> None:
        self._prefix = prefix
        self.values: dict[str, bytes] = {}

    def storage(self, data: bytes) -> str:
        """The name of a new storage of these bytes."""
        name = f"{self._prefix}{len(self.values)}"
        self.values[name] = data
        return name

    def number(self, value: float) -> StoredTensor:
        """A single-precision tensor without dims, as optimizers keep their steps."""
        return tensor(self.storage(np.float32(value).tobytes()), "float32", ())

    def lifted(self, value: Any) -> Any:
        """A value with its tensors as tensors of this file."""
        if isinstance(value, dict) and value.keys() == {MARK}:
            dtype, shape, data = value[MARK]
            return tensor(self.storage(bytes(data)), dtype, tuple(shape))
        if type(value) is dict:
            return {key: self.lifted(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self.lifted, value))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            flat = np.ascontiguousarray(value)
            return tensor(self.storage(flat.tobytes()), value.dtype.name, value.shape)
        return value
