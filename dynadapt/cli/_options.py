"""Options that several commands take, and how one is read."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Globs", "JsonOption", "WeightsOption", "WorkersOption"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Globs = Annotated[list[str] | None, typer.Option(help="Glob over tensor names; may be repeated.")]
WeightsOption = Annotated[bool, typer.Option("--weights-only", help="No optimizer.")]
WorkersOption = Annotated[
    int, typer.Option(help="Threads or processes that read and write.", min=1, max=64)
]
