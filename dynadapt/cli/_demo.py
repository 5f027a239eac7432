"""`dynadapt demo`: a migration, watched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dynadapt.cli._env import version
from dynadapt.errors import DynadaptError

__all__ = ["demo"]


def demo(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file.")
    ] = None,
) -> None:
    """Train a small Llama as DeepSpeed ZeRO-3 on 4 CPU ranks, migrate to TP x DP, train, go back."""
    from dynadapt.demo import launch

    missing = [n for n in ("torch", "deepspeed", "transformers") if version(n) is None]
    if missing:
        raise DynadaptError(
            f"the demo needs {', '.join(missing)}: pip install 'dynadapt[deepspeed,transformers]'",
            reason="not-installed",
        )
    if json_path is not None and not json_path.resolve().parent.is_dir():
        raise DynadaptError(f"{json_path.parent} is not a folder", reason="bad-argument")
    raise typer.Exit(launch.run(json_path, Console()))
