"""`dynadapt diff`: two checkpoints of any formats, compared element by element."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dynadapt.cli._arrange import ModelOption, OrderOption, said_of
from dynadapt.cli._diff_page import page_of
from dynadapt.cli._listing import print_lines
from dynadapt.cli._options import Globs, JsonOption, WeightsOption, WorkersOption
from dynadapt.cli._output import print_json
from dynadapt.errors import Refused

if TYPE_CHECKING:
    from dynadapt.elastic.comparison import Comparison, Difference

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
    weights_only: WeightsOption = False,
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
        print_json({"a": str(a), "b": str(b), **found.to_json()})
    else:
        _print(Console(), found)
    sys.exit(0 if found.same else 1)


def _write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page)
    except OSError as error:
        from dynadapt.files import unwritable

        raise Refused([unwritable(path, error)]) from error


def _lines(d: Difference) -> list[str]:
    """What is known of a difference, a line each."""
    lines = []
    if d.dtypes[0] != d.dtypes[1]:
        lines.append(f"{d.dtypes[0]}, {d.dtypes[1]}")
    if d.shapes[0] != d.shapes[1]:
        lines.append(f"shapes {list(d.shapes[0])}, {list(d.shapes[1])}")
    if d.first is not None:
        lines.append(
            f"{d.count:,} of {d.numel:,} elements, at most {d.max_abs:.3g}, {d.max_ulp:,} ulp"
        )
        lines.append(f"first at {list(d.first)}: {d.values[0]:.9g} and {d.values[1]:.9g}")
    lines += [f"{side}: {place}" for side, place in zip("AB", d.places, strict=True) if place]
    return [*lines, d.hint] if d.hint else lines


def _beside(found: Comparison) -> list[str]:
    """What differs beside tensors, a line each; what differs alike for many parameters in one."""
    params = {key.rpartition("/")[0] for d in found.tensors for key in d.keys}
    alike: dict[tuple[str, str], list[str]] = {}
    for path, (x, y) in found.aux.items():
        own = path.removeprefix("param_groups/")
        name, _, label = own.rpartition("/")
        what = path[: -len(own)] + label if name in params else path
        alike.setdefault((what, f"{x!r} and {y!r}"), []).append(path)
    return [
        f"{paths[0]}: {values}"
        if len(paths) == 1
        else f"{what} of {len(paths)} parameters, {paths[0]} first: {values}"
        for (what, values), paths in alike.items()
    ]


def _print(console: Console, found: Comparison) -> None:
    told = [d for d in found.tensors if d.verdict != "identical"]
    for d in told[:MOST]:
        print_lines(console, [f"{' = '.join(d.keys)}: {d.verdict}", *(f"  {x}" for x in _lines(d))])
    if len(told) > MOST:
        console.print(f"... and {len(told) - MOST} more")
    beside = _beside(found)
    print_lines(console, beside[:MOST])
    if len(beside) > MOST:
        console.print(f"... and {len(beside) - MOST} more beside tensors")
    counts = {v: found.count(v) for v in ("identical", "rounding", "different")}
    counts["only in one"] = found.count("only-in-a") + found.count("only-in-b")
    console.print(", ".join(f"{n} {v}" for v, n in counts.items()), highlight=False)
    console.print("[green]same[/green]" if found.same else "[red]differ[/red]")
