"""Names of dtypes, as layouts and files have them, to torch's own and back."""

from __future__ import annotations

import torch

__all__ = ["dtype_name", "torch_dtype"]


def dtype_name(dtype: torch.dtype) -> str:
    """A torch dtype's name without the prefix.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name.

    >>> torch_dtype("int64")
    torch.int64
    """
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
