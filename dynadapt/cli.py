"""The `dynadapt` command. Imports no framework itself: what a command needs, it loads when it runs."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import dynadapt
from dynadapt.errors import DynadaptError

__all__ = ["app", "main"]

app = typer.Typer(
    name="dynadapt",
    help="Moves sharded training state between frameworks and layouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

FRAMEWORKS = ("torch", "numpy", "safetensors", "deepspeed", "accelerate", "transformers")
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback()
def _root() -> None:
    """Moves sharded training state between frameworks and layouts."""


@app.command()
def env(as_json: JsonOption = False) -> None:
    """Print versions, the frameworks that were found, and the adapters."""
    from dynadapt.registry import entries

    found = {name: _version(name) for name in FRAMEWORKS}
    facts: dict[str, Any] = {
        "dynadapt": dynadapt.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "frameworks": found,
        "adapters": [
            {
                "name": entry.name,
                "needs": list(entry.requires),
                "usable": all(found.get(name) or _version(name) for name in entry.requires),
            }
            for entry in entries()
        ],
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    table = Table("", "", show_header=False)
    for name in ("dynadapt", "python", "platform"):
        table.add_row(name, str(facts[name]))
    for name, version in found.items():
        table.add_row(name, version or "not installed")
    for adapter in facts["adapters"]:
        state = "usable" if adapter["usable"] else f"needs {', '.join(adapter['needs'])}"
        table.add_row(f"adapter {adapter['name']}", state)
    Console().print(table)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@app.command()
def demo(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file.")
    ] = None,
) -> None:
    """Train a small Llama as DeepSpeed ZeRO-3 on 4 CPU ranks, migrate to TP x DP, train, go back."""
    from dynadapt.demo import launch

    missing = [n for n in ("torch", "deepspeed", "transformers") if _version(n) is None]
    if missing:
        raise DynadaptError(
            f"the demo needs {', '.join(missing)}: pip install 'dynadapt[deepspeed,transformers]'",
            reason="not-installed",
        )
    if json_path is not None and not json_path.resolve().parent.is_dir():
        raise DynadaptError(f"{json_path.parent} is not a folder", reason="bad-argument")
    raise typer.Exit(launch.run(json_path, Console()))


def main() -> None:
    """Run the command line; an error of dynadapt's own is one message, not a traceback."""
    try:
        app()
    except DynadaptError as error:
        Console(stderr=True).print(f"[red]error[/red] [{error.reason}] {error}", markup=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
