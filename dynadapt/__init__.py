"""dynadapt moves sharded training state between frameworks and layouts, exactly.

The names below are loaded on first use: importing the package loads no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynadapt.api import declare, describe, fingerprint, load, migrate, plan, save, simulate
    from dynadapt.elastic.checkpoint import Checkpoint
    from dynadapt.errors import DynadaptError, Finding, MigrationAborted, Refused
    from dynadapt.offline import convert, diff, open
    from dynadapt.protocols import TrainState

__all__ = [
    "Checkpoint",
    "DynadaptError",
    "Finding",
    "MigrationAborted",
    "Refused",
    "TrainState",
    "__version__",
    "convert",
    "declare",
    "describe",
    "diff",
    "fingerprint",
    "load",
    "migrate",
    "open",
    "plan",
    "save",
    "simulate",
]

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "dynadapt.elastic.checkpoint",
    "DynadaptError": "dynadapt.errors",
    "Finding": "dynadapt.errors",
    "MigrationAborted": "dynadapt.errors",
    "Refused": "dynadapt.errors",
    "TrainState": "dynadapt.protocols",
    "convert": "dynadapt.offline",
    "declare": "dynadapt.api",
    "describe": "dynadapt.api",
    "diff": "dynadapt.offline",
    "fingerprint": "dynadapt.api",
    "load": "dynadapt.api",
    "migrate": "dynadapt.api",
    "open": "dynadapt.offline",
    "plan": "dynadapt.api",
    "save": "dynadapt.api",
    "simulate": "dynadapt.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
