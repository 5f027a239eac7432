"""`dynadapt show`: a layout, a change of layouts or a plan, in the terminal or as a figure file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from dynadapt.cli._options import JsonOption
from dynadapt.cli._output import print_json
from dynadapt.errors import DynadaptError, Finding, Refused

__all__ = ["show"]


def show(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC",
            help="A layout, KIND:axis=n,... (e.g. zero3:dp=4), or a plan's JSON file.",
        ),
    ],
    to: Annotated[str | None, typer.Option("--to", help="The layout to change to.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="A Hugging Face config.json or its folder, or a JSON list of tensors; "
            "by default a small Llama-like model.",
        ),
    ] = None,
    tp_plan: Annotated[
        Path | None, typer.Option(help="JSON of name patterns to styles; default: the model's own.")
    ] = None,
    experts: Annotated[
        Literal["stacked", "listed"],
        typer.Option(help="stacked or listed: how the model keeps its experts."),
    ] = "stacked",
    tensor: Annotated[
        str | None, typer.Option("--tensor", help="Name or glob of the tensors to map.")
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(help="Also time the change on h100, a800, flat-200g, ethernet-25g."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Draw a figure into this .svg or .png file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show who holds what in a layout, and what a change to another one moves."""
    from dynadapt.report.build import picture_of, picture_of_plan

    if spec.endswith(".json"):
        given = {"--to": to, "--model": model, "--tp-plan": tp_plan, "--tensor": tensor}
        wrong = [name for name, value in {**given, "--links": links}.items() if value]
        if wrong:
            raise DynadaptError(f"a plan takes no {', '.join(wrong)}", reason="bad-argument")
        picture = picture_of_plan(_read(spec), spec)
    else:
        if links is not None and to is None:
            raise DynadaptError("--links times a change: it needs --to", reason="bad-argument")
        shape = cuts = None
        if model is not None:
            from dynadapt.adapters.model_shapes import read_model

            shape, cuts = read_model(model, experts=experts)
        if tp_plan is not None:
            from dynadapt.vps.tp_rules import read_rules

            cuts = read_rules(tp_plan)
        specs = [spec] if to is None else [spec, to]
        picture = picture_of(specs, shape, cuts, tensor=tensor, links=links)
    if out is not None:
        from dynadapt.report.figures import write

        write(picture, out)
    if as_json:
        print_json(picture.to_json(), indent=None)
    elif out is not None:
        typer.echo(f"wrote {out}")
    else:
        from dynadapt.report.terminal import rendered

        Console(highlight=False).print(rendered(picture))


def _read(name: str) -> dict[str, object]:
    cause = "is not a plan"
    try:
        with open(name) as file:
            found = json.load(file)
    except OSError as error:
        cause, found = f"cannot be read: {error.strerror}", None
    except ValueError as error:
        cause, found = f"is not JSON: {error}", None
    if not isinstance(found, dict):
        raise Refused([Finding("bad-plan", name, cause, "write plan(...).to_json() to it")])
    return found
