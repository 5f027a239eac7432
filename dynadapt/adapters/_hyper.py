"""Which entries of a param group are hyperparameters: read by live adapters and by those of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NOT_HYPER", "RUNS", "hyper_in_files"]

#: Group entries that say how an optimizer runs. A live optimizer keeps its own.
RUNS = frozenset({"foreach", "fused", "capturable", "differentiable"})

#: Group entries that say how an optimizer runs, or hold parameters: never carried to another live one.
NOT_HYPER = RUNS | {
    "params",
    "param_names",
    "step",  # FusedAdam keeps a count here; a step is a scalar of each parameter
}


def hyper_in_files(group: Mapping[Any, Any]) -> dict[str, Any]:
    """What is kept of a group from one checkpoint to another: loaders take all of a group from the file.

    How it ran is part of that: a fused optimizer rounds otherwise, one with `foreach=False` takes less
    memory, and torch's SGD reads an absent `fused` as False, which it is not made with.

    >>> hyper_in_files({"lr": 0.1, "fused": None, "params": [0], "step": 3})
    {'lr': 0.1, 'fused': None}
    """
    return {str(k): v for k, v in group.items() if k not in NOT_HYPER or k in RUNS}
