"""Which entries of a param group are hyperparameters: read by live adapters and by those of files."""

from __future__ import annotations

__all__ = ["NOT_HYPER"]

#: Group entries that say how an optimizer runs, or hold parameters: never carried to another one.
NOT_HYPER = frozenset(
    {
        "params",
        "param_names",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "step",  # FusedAdam keeps a count here; a step is a scalar of each parameter
    }
)
