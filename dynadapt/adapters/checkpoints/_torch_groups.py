"""An optimizer's state dict in a torch file: its groups, and what an entry of its state is."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._deepspeed_files import number
from dynadapt.adapters.checkpoints._optimizer_kinds import FACTORED, SCALARS
from dynadapt.adapters.checkpoints._pickle import StoredTensor
from dynadapt.vps.wire import encodable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynadapt.adapters.checkpoints._optimizer_names import Shape
    from dynadapt.adapters.checkpoints._torch_file import TorchFile

__all__ = ["NAMES", "are_groups", "are_names", "hyper_of", "is_scalar", "shape_of"]

NAMES = "param_names"
"""In an optimizer's state dict: for each group the list of its members' names, which it does not say."""


def are_groups(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(type(id_) in (int, str) for id_ in group["params"])
        for group in groups
    )


def are_names(told: Any, numbers: Sequence[Sequence[Any]]) -> bool:
    """Whether these are names for all members of all groups."""
    return (
        isinstance(told, list)
        and len(told) == len(numbers)
        and all(
            isinstance(own, list) and len(own) == len(ids)
            for own, ids in zip(told, numbers, strict=True)
        )
        and all(isinstance(name, str) for own in told for name in own)
    )


def is_scalar(label: str, value: StoredTensor, shape: Shape) -> bool:
    if label in SCALARS:
        return True
    return label not in FACTORED and prod(value.shape) == 1 and value.shape != shape


def shape_of(entry: Any) -> Shape | None:
    """The shape of the parameter whose state this is, as far as the state tells."""
    entry = entry if isinstance(entry, dict) else {}
    tensors = {k: v for k, v in entry.items() if isinstance(v, StoredTensor) and k not in SCALARS}
    row, column = tensors.get("row_var"), tensors.get("col_var")
    if row is not None and column is not None and row.shape and column.shape:
        return (*row.shape[:-1], column.shape[-1])
    shapes = [tensor.shape for tensor in tensors.values()]
    return max(shapes, key=lambda shape: (len(shape), prod(shape)), default=None)


def hyper_of(group: Mapping[str, Any], file: TorchFile) -> dict[str, Any]:
    """A group's entries but for its members; tensors of one element are numbers."""
    found = {}
    for name, value in group.items():
        plain = number(value, file) if isinstance(value, StoredTensor) else value
        if name not in {"params", NAMES} and encodable(plain):
            found[str(name)] = plain
    return found
