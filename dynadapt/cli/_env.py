"""`dynadapt env`: what is installed."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from rich.console import Console
from rich.table import Table

import dynadapt
from dynadapt.cli._options import JsonOption
from dynadapt.cli._output import print_json

__all__ = ["env", "version"]

FRAMEWORKS = ("torch", "numpy", "safetensors", "deepspeed", "accelerate", "transformers")


def env(as_json: JsonOption = False) -> None:
    """Print versions, the frameworks that were found, and the adapters."""
    from dynadapt.registry import entries

    found = {name: version(name) for name in FRAMEWORKS}
    facts: dict[str, Any] = {
        "dynadapt": dynadapt.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "frameworks": found,
        "adapters": [
            {
                "name": entry.name,
                "needs": list(entry.requires),
                "usable": all(found.get(name) or version(name) for name in entry.requires),
            }
            for entry in entries()
        ],
    }
    if as_json:
        print_json(facts)
        return
    table = Table("", "", show_header=False)
    for name in ("dynadapt", "python", "platform"):
        table.add_row(name, str(facts[name]))
    for name, own in found.items():
        table.add_row(name, own or "not installed")
    for adapter in facts["adapters"]:
        state = "usable" if adapter["usable"] else f"needs {', '.join(adapter['needs'])}"
        table.add_row(f"adapter {adapter['name']}", state)
    Console().print(table)


def version(name: str) -> str | None:
    """The installed version of a distribution, None without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
