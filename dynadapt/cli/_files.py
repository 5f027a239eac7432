"""`dynadapt inspect`, `fingerprint` and `verify`: what one checkpoint on disk holds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dynadapt.cli._arrange import ModelOption, OrderOption, said_of
from dynadapt.cli._listing import columns, names_of, print_facts, print_findings, print_lines
from dynadapt.cli._options import JsonOption, WorkersOption
from dynadapt.cli._output import print_json
from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynadapt.elastic.checkpoint import Checkpoint

__all__ = ["fingerprint", "inspect", "verify"]

PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint: a folder or a file.")
]


def inspect(
    path: PathArgument,
    model: ModelOption = None,
    order: OrderOption = None,
    summary: Annotated[bool, typer.Option("--summary", help="No list of tensors.")] = False,
    shards: Annotated[bool, typer.Option("--shards", help="Who holds what, by file.")] = False,
    glob: Annotated[
        str, typer.Option("--filter", help="Only tensors whose name matches this glob.")
    ] = "*",
    as_json: JsonOption = False,
) -> None:
    """Say what a checkpoint is and holds; no tensor's bytes are read. Exit 1: it is not whole."""
    from dynadapt import offline

    found = offline.open(path, **said_of(model, order))
    facts = found.summary(glob)
    if glob != "*" and not facts["tensors"]:
        cause, fix = "matches the name of no tensor", "without --filter all are listed"
        raise Refused([Finding("no-match", f"--filter {glob}", cause, fix)])
    if as_json:
        if summary:
            facts.pop("tensors")
        print_json(facts)
    else:
        _print(Console(), found, facts, summary, shards)
    if facts["problems"]:
        sys.exit(1)


def fingerprint(
    path: PathArgument,
    model: ModelOption = None,
    order: OrderOption = None,
    workers: WorkersOption = 2,
    as_json: JsonOption = False,
) -> None:
    """One number of the whole state, equal in any format and layout, and of the live job."""
    from dynadapt import offline

    value = offline.open(path, **said_of(model, order)).fingerprint(threads=workers)
    if as_json:
        print_json({"path": str(path), "fingerprint": value})
    else:
        typer.echo(value)


def verify(
    path: PathArgument,
    model: ModelOption = None,
    order: OrderOption = None,
    workers: WorkersOption = 2,
    as_json: JsonOption = False,
) -> None:
    """Read everything: complete, readable, copies equal, sums as they were written. Exit 1 if not."""
    from dynadapt import offline
    from dynadapt.elastic.verification import verified

    found = offline.open(path, **said_of(model, order))
    findings, warnings, told = verified(found, threads=workers)
    if as_json:
        facts = {
            **told,
            "problems": [f.to_json() for f in findings],
            "warnings": [f.to_json() for f in warnings],
        }
        print_json({"path": str(path), **facts})
    else:
        console = Console()
        print_findings(console, "problem", "red", findings)
        print_findings(console, "warning", "yellow", warnings)
        print_lines(console, [f"{name}: {value}" for name, value in told.items()])
        console.print("[green]whole[/green]" if not findings else "[red]not whole[/red]")
    if findings:
        sys.exit(1)


def _print(
    console: Console, found: Checkpoint, facts: dict[str, Any], summary: bool, shards: bool
) -> None:
    from dynadapt.elastic.outcome import human

    framework = facts["framework"] and " ({framework}{stage})".format(
        framework=facts["framework"],
        stage="" if facts["zero_stage"] is None else f" stage {facts['zero_stage']}",
    )
    steps = ", ".join(f"{step:g}" for step in facts["steps"]) or "none"
    _, _, loaders = facts["written"].partition("/")
    rows = {
        "format": facts["format"] + framework,
        "made by": facts["made_by"] or "not said",
        "layout": facts["layout"] or f"whole tensors{loaders and f', for {loaders} alone'}",
        "files": f"{facts['files']} with tensors",
        "parameters": f"{facts['parameters']:,}",
        "tensors": f"{facts['keys']:,}, {human(facts['bytes'])}",
        "dtypes": "; ".join(f"{slot} {', '.join(own)}" for slot, own in facts["dtypes"].items()),
        "optimizer step": steps,
        "groups": "\n".join(
            ", ".join(f"{k}={v}" for k, v in group.items() if v is not None)
            for group in facts["groups"]
        )
        or "none",
        "beside tensors": ", ".join(facts["aux"]) or "nothing",
    }
    print_facts(console, facts["path"], rows)
    if shards:
        print_lines(console, ["", "who holds what", *_shards(found)])
    if not summary:
        print_lines(console, ["", *_tensors(facts["tensors"])])
    print_findings(console, "problem", "red", found.problems())


def _shards(found: Checkpoint) -> list[str]:
    """A line for each file, whose name is its last column."""
    from dynadapt.elastic.outcome import human
    from dynadapt.vps.keys import itemsize

    rows = []
    for endpoint in found.layout.endpoints:
        own = found.layout.rows(endpoint)
        size = sum(row.box.volume * itemsize(found.buffers[row.buffer].dtype) for row in own)
        keys = len({row.key for row in own})
        name = found.files.get(endpoint, str(endpoint))
        rows.append((str(keys), str(len(own)), human(size), name))
    rows.sort(key=lambda row: row[-1])
    return columns([("keys", "rows", "bytes", "file"), *rows], numbers=True)


def _tensors(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of each tensor, all of a tied one, and below them a line for each slot."""
    rows = []
    for spec in specs:
        names, slot = names_of(spec["key"], spec["aliases"])
        kind = spec["kind"] + (", derived" if spec["derived"] else "")
        kind += ", frozen" if spec["kind"] == "parameter" and not spec["trainable"] else ""
        shape = "x".join(map(str, spec["shape"])) or "scalar"
        many = f"{spec['rows']} row{'s' * (spec['rows'] != 1)}"
        rows.append((names, (slot, shape, spec["dtype"], many, kind)))
    lines: list[str] = []
    last = ""
    for (names, _), line in zip(rows, columns([row for _, row in rows]), strict=True):
        lines += [f"  {line}"] if names == last else [names, f"  {line}"]
        last = names
    return lines
