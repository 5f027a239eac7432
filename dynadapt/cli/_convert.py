"""`dynadapt convert`: one checkpoint written in another format or layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dynadapt.cli._arrange import Conversion, takes_conversion
from dynadapt.cli._interrupt import interruptible
from dynadapt.cli._listing import print_facts, print_findings, print_lines
from dynadapt.cli._options import JsonOption
from dynadapt.cli._output import print_json
from dynadapt.errors import DynadaptError

if TYPE_CHECKING:
    from dynadapt.elastic.conversion_report import ConversionReport

__all__ = ["convert"]


@takes_conversion
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint to read.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Where to write; must not exist.")],
    wanted: Conversion,
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it exists.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue what was interrupted or killed, if anything.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint in another format or layout, in one pass, and prove it by its fingerprint.

    DST gets its name when all of it is there and right; SRC is only read. Under torchrun each process
    converts its own share.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from dynadapt import offline

    rank, world = _launched()
    console = Console(stderr=True)
    hidden = bool(rank) or not console.is_terminal
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with (
        interruptible(target),  # says so when the bar is gone
        Progress(*columns, console=console, transient=True, disable=hidden) as bar,
    ):
        task = bar.add_task("converting", total=None)
        report = offline.convert(
            source,
            target,
            **wanted.arguments(),
            force=force,
            resume=resume,
            ranks=(rank, world),
            on_bytes=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if rank:
        return
    if as_json:
        print_json(report.to_json())
    else:
        _print(Console(), report)


def _launched() -> tuple[int, int]:
    """Which of how many processes this is, as torchrun and its like say; alone where they do not."""
    told = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]
    if None in told:
        return 0, 1
    try:
        rank, world = (int(text or "") for text in told)
    except ValueError:
        rank, world = 0, 0
    if not 0 <= rank < world:
        cause = f"RANK={told[0]} of WORLD_SIZE={told[1]} is no process: unset both, or let torchrun set them"
        raise DynadaptError(cause, reason="bad-argument")
    return rank, world


def _print(console: Console, report: ConversionReport) -> None:
    from dynadapt.elastic.outcome import human

    phases = ", ".join(f"{name} {value:.2f}" for name, value in report.seconds.items())
    proof = "read back and equal" if report.verified else "not read back"
    facts = {
        "format": report.format,
        "read, written": f"{human(report.bytes_read)}, {human(report.bytes_written)}",
        "seconds": f"{sum(report.seconds.values()):.2f} ({phases})",
        "fingerprint": f"{report.fingerprint}, {proof}",
    }
    print_facts(console, f"{report.source} -> {report.target}", facts)
    told = [each for each in report.outcomes if each.kind != "exact"]
    print_lines(console, [f"{each.kind} {each.path}: {each.note}" for each in told])
    print_findings(console, "warning", "yellow", report.warnings)
