"""`dynadapt diff`: two checkpoints of any formats, compared element by element."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dynadapt.cli._arrange import ModelOption, OrderOption, said_of
from dynadapt.cli._convert import Globs
from dynadapt.cli._diff_page import page_of
from dynadapt.cli._files import WorkersOption
from dynadapt.cli._options import JsonOption
from dynadapt.errors import DynadaptError

if TYPE_CHECKING:
    from dynadapt.elastic.comparison import Comparison

__all__ = ["diff"]

MOST = 50
"""Tensors listed in the terminal."""


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another, of any format and layout.")],
    rtol: Annotated[float, typer.Option(help="Relative to b's value.", min=0)] = 0.0,
    atol: Annotated[float, typer.Option(help="Absolute.", min=0)] = 0.0,
    ulp: Annotated[int, typer.Option(help="Steps of the coarser dtype.", min=0)] = 0,
    model: ModelOption = None,
    order: OrderOption = None,
    include: Globs = None,
    exclude: Globs = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="No optimizer.")] = False,
    ignore_missing: Annotated[
        bool, typer.Option("--ignore-missing", help="Compare what both hold.")
    ] = False,
    workers: WorkersOption = 2,
    html: Annotated[Path | None, typer.Option(help="A page to write beside the answer.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints; exit 0 same, 1 differ, 2 error.

    Masters, moments, steps, hyperparameters and counts are compared; copies that follow from masters
    are not.
    """
    from dynadapt import offline

    found = offline.diff(
        a,
        b,
        **said_of(model, order),
        rtol=rtol,
        atol=atol,
        ulp=ulp,
        include=include or (),
        exclude=exclude or (),
        weights_only=weights_only,
        ignore_missing=ignore_missing,
        threads=workers,
    )
    if html is not None:
        _write_page(html, page_of(str(a), str(b), found))
    if as_json:
        typer.echo(json.dumps({"a": str(a), "b": str(b), **found.to_json()}, indent=2))
    else:
        _print(Console(), found)
    sys.exit(0 if found.same else 1)


def _write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page)
    except OSError as error:
        cause = f"--html {path}: cannot be written: {error.strerror}"
        raise DynadaptError(cause, reason="unwritable-file") from error


def _print(console: Console, found: Comparison) -> None:
    told = [d for d in found.tensors if d.verdict != "identical"]
    if told:
        table = Table("tensor", "verdict", "elements", "max abs", "max ulp", "first", "where, hint")
        for d in told[:MOST]:
            first = ",".join(map(str, d.first)) if d.first is not None else ""
            count = f"{d.count:,} of {d.numel:,}" if d.count else ""
            where = "\n".join(p for p in (*d.places, d.hint) if p)
            if d.shapes[0] != d.shapes[1]:
                where = f"shapes {list(d.shapes[0])}, {list(d.shapes[1])}\n{where}".strip()
            if d.dtypes[0] != d.dtypes[1]:
                where = f"{d.dtypes[0]}, {d.dtypes[1]}\n{where}".strip()
            numbers = (f"{d.max_abs:.3g}", str(d.max_ulp)) if d.count else ("", "")
            table.add_row(escape(d.key), d.verdict, count, *numbers, first, escape(where))
        console.print(table)
        if len(told) > MOST:
            console.print(f"... and {len(told) - MOST} more")
    for path, (x, y) in list(found.aux.items())[:MOST]:
        console.print(escape(f"{path}: {x!r} and {y!r}"), highlight=False)
    counts = {v: found.count(v) for v in ("identical", "rounding", "different")}
    counts["only in one"] = found.count("only-in-a") + found.count("only-in-b")
    console.print(", ".join(f"{n} {v}" for v, n in counts.items()), highlight=False)
    console.print("[green]same[/green]" if found.same else "[red]differ[/red]")
