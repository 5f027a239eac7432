"""Options that several commands take, and how one is read."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from dynadapt.errors import DynadaptError

__all__ = ["Globs", "JsonOption", "WeightsOption", "WorkersOption", "size_of"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Globs = Annotated[list[str] | None, typer.Option(help="Glob over tensor names; may be repeated.")]
WeightsOption = Annotated[bool, typer.Option("--weights-only", help="No optimizer.")]
WorkersOption = Annotated[
    int, typer.Option(help="Threads or processes that read and write.", min=1, max=64)
]

UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3}
UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def size_of(text: str) -> int:
    """`512MiB`, `1GB` or a plain number as bytes; raises `DynadaptError` (`bad-argument`)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if found is None or found[2].lower() not in UNITS:
        raise DynadaptError(f"{text!r} is not a size such as 512MiB", reason="bad-argument")
    return int(float(found[1]) * UNITS[found[2].lower()])
