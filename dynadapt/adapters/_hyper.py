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

    An optimizer that ran fused would go on unfused else, and round otherwise.

    >>> hyper_in_files({"lr": 0.1, "fused": True, "foreach": None, "params": [0]})
    {'lr': 0.1, 'fused': True}
    """
    return {str(k): v for k, v in group.items() if k not in NOT_HYPER or (k in RUNS and v is True)}
