"""torch tensors as numpy arrays of plain words, and casts whose bits are certain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["as_words", "cast_into"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_words(tensor: torch.Tensor) -> NDArray[Any]:
    """A CPU tensor as an array of unsigned words of its element size (complex128: as it is).

    >>> as_words(torch.ones(2, dtype=torch.bfloat16)).tolist()
    [16256, 16256]
    """
    size = tensor.dtype.itemsize
    if size in _WORDS:
        return _shared(tensor.detach().view(_WORDS[size])).view(f"u{size}")
    return _shared(tensor.detach())


def _shared(tensor: torch.Tensor) -> NDArray[Any]:
    """A NumPy view. `Tensor.numpy()` would mark the user's storage as never to be resized again."""
    return np.from_dlpack(tensor)


def cast_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, with a cast whose bits depend on the value alone.

    torch's own cast of a NaN to bfloat16 gives other bits in vector code than in scalar code, so they
    change with strides and lengths; here a NaN keeps its upper half, as all other values do.

    >>> target = torch.zeros(64, dtype=torch.bfloat16)
    >>> cast_into(target, torch.full((64,), float("nan")))
    >>> hex(as_words(target)[0])
    '0x7fc0'
    """
    target.copy_(source)
    narrows = target.dtype == torch.bfloat16 and source.dtype.itemsize > 1
    if not narrows or source.dtype == torch.bfloat16 or not source.is_floating_point():
        return
    nan = torch.isnan(source)
    if nan.any():
        upper = (source[nan].to(torch.float32).view(torch.int32) >> 16) | 0x40
        target.view(torch.int16)[nan] = upper.to(torch.int16).to(target.device)
