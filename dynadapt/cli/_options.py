"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["JsonOption"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
