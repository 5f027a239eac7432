"""`dynadapt inspect`, `fingerprint` and `verify`: what one checkpoint on disk holds."""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dynadapt.cli._options import JsonOption

if TYPE_CHECKING:
    from dynadapt.elastic.checkpoint import Checkpoint

__all__ = ["fingerprint", "inspect", "verify"]

PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint: a folder or a file.")
]
WorkersOption = Annotated[int, typer.Option(help="Threads that read and write.", min=1, max=64)]


def inspect(
    path: PathArgument,
    summary: Annotated[bool, typer.Option("--summary", help="No list of tensors.")] = False,
    shards: Annotated[bool, typer.Option("--shards", help="Who holds what, by file.")] = False,
    glob: Annotated[
        str, typer.Option("--filter", help="Only tensors whose name matches this glob.")
    ] = "*",
    as_json: JsonOption = False,
) -> None:
    """Say what a checkpoint is and holds; no tensor's bytes are read. Exit 1: it is not whole."""
    from dynadapt.elastic.checkpoint import open_checkpoint

    found = open_checkpoint(path)
    facts = _facts(found, glob)
    if as_json:
        if summary:
            facts.pop("tensors")
        typer.echo(json.dumps(facts, indent=2, default=str))
    else:
        _print(Console(), found, facts, summary, shards)
    if facts["problems"]:
        sys.exit(1)


def fingerprint(
    path: PathArgument, workers: WorkersOption = 2, as_json: JsonOption = False
) -> None:
    """One number of the whole state, equal in any format and layout, and of the live job."""
    from dynadapt.elastic.checkpoint import open_checkpoint

    value = open_checkpoint(path).fingerprint(threads=workers)
    typer.echo(json.dumps({"path": str(path), "fingerprint": value}) if as_json else value)


def verify(path: PathArgument, workers: WorkersOption = 2, as_json: JsonOption = False) -> None:
    """Read everything: complete, readable, replicas equal, sums as the manifest has them. Exit 1 if not."""
    from dynadapt.elastic.checkpoint import open_checkpoint
    from dynadapt.elastic.verification import verified

    found = open_checkpoint(path)
    findings, told = verified(found, threads=workers)
    if as_json:
        facts = {**told, "problems": [f.to_json() for f in findings]}
        typer.echo(json.dumps({"path": str(path), **facts}, indent=2))
    else:
        console = Console()
        for finding in findings:
            console.print("[red]problem[/red]", escape(str(finding)))
        for name, value in told.items():
            console.print(f"{name}: {value}", markup=False, highlight=False)
        console.print("[green]whole[/green]" if not findings else "[red]not whole[/red]")
    if findings:
        sys.exit(1)


def _facts(found: Checkpoint, glob: str) -> dict[str, Any]:
    layout, aux = found.layout, found.aux
    behaviour = aux["behaviour"].value if "behaviour" in aux else {}
    counters = aux["counters"].value if "counters" in aux else {}
    steps = sorted({v["step"] for v in found.scalars.values() if "step" in v})
    shown = [spec for spec in layout.keys if fnmatchcase(spec.key.name, glob)]
    groups = aux["param_groups"].value if "param_groups" in aux else []
    return {
        "path": found.path,
        "format": found.format,
        "framework": behaviour.get("framework", ""),
        "zero_stage": behaviour.get("zero_stage"),
        "files": len(layout.endpoints),
        "keys": len(layout.keys),
        "parameters": sum(s.numel for s in layout.keys if s.key.slot == "param"),
        "bytes": sum(s.nbytes for s in layout.keys if s.presence == "present"),
        "dtypes": {
            slot: sorted({s.dtype for s in layout.keys if s.key.slot == slot})
            for slot in sorted({s.key.slot for s in layout.keys})
        },
        "steps": steps,
        "counters": counters,
        "groups": [{"parameters": len(group["names"]), **group["hyper"]} for group in groups],
        "aux": sorted(aux),
        "problems": [finding.to_json() for finding in found.problems()],
        "tensors": [
            {
                "key": str(s.key),
                "shape": list(s.shape),
                "dtype": s.dtype,
                "kind": s.kind,
                "trainable": s.trainable,
                "derived": s.derived,
                "aliases": list(s.aliases),
                "rows": sum(len(layout.rows_of(s.key, e)) for e in layout.endpoints),
            }
            for s in shown
        ],
    }


def _print(
    console: Console, found: Checkpoint, facts: dict[str, Any], summary: bool, shards: bool
) -> None:
    from dynadapt.elastic.outcome import human

    table = Table("", "", show_header=False, title=escape(facts["path"]))
    framework = f" ({facts['framework']} stage {facts['zero_stage']})" if facts["framework"] else ""
    steps = ", ".join(f"{step:g}" for step in facts["steps"]) or "none"
    rows = {
        "format": facts["format"] + framework,
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
    for name, text in rows.items():
        table.add_row(name, escape(text))
    console.print(table)
    if shards:
        files = Table("file", "keys", "rows", "bytes", title="who holds what")
        for endpoint in found.layout.endpoints:
            own = found.layout.rows(endpoint)
            size = sum(
                row.box.volume
                * found.buffers[row.buffer].nbytes
                // max(found.buffers[row.buffer].numel, 1)
                for row in own
            )
            name = found.files.get(endpoint, str(endpoint))
            files.add_row(escape(name), str(len({r.key for r in own})), str(len(own)), human(size))
        console.print(files)
    if not summary:
        tensors = Table("key", "shape", "dtype", "kind", "rows")
        for spec in facts["tensors"]:
            kind = spec["kind"] + (", derived" if spec["derived"] else "")
            kind += ", frozen" if spec["kind"] == "parameter" and not spec["trainable"] else ""
            kind += f", tied to {', '.join(spec['aliases'])}" if spec["aliases"] else ""
            shape = "x".join(map(str, spec["shape"])) or "scalar"
            tensors.add_row(escape(spec["key"]), shape, spec["dtype"], kind, str(spec["rows"]))
        console.print(tensors)
    for problem in found.problems():
        console.print("[red]problem[/red]", escape(str(problem)))
