"""Results of the benchmarks: a table to look at, a page to keep, and JSON for programs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

__all__ = ["Result", "machine", "middle", "table", "write"]

HERE = Path(__file__).resolve().parent
PACKAGES = ("torch", "numpy", "dynadapt")


@dataclass(frozen=True)
class Result:
    """One case beside its peer. The unit is in the name; a bar is the largest ratio that will do, or
    without a peer the largest figure.
    """

    name: str
    ours: float
    peer: float | None = None
    bar: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours by the peer's."""
        return None if self.peer is None else self.ours / self.peer

    @property
    def met(self) -> bool | None:
        """Whether the ratio, or without a peer the figure, is within the bar; None without a bar."""
        found = self.ours if self.peer is None else self.ratio
        return None if self.bar is None or found is None else found <= self.bar

    def cells(self) -> tuple[str, ...]:
        """The result as text: name, ours, peer, ratio, bar, met."""
        met = {None: "", True: "yes", False: "no"}[self.met]
        numbers = (self.ours, self.peer, self.ratio, self.bar)
        return (self.name, *("" if n is None else f"{n:.3g}" for n in numbers), met)


HEADS = ("case", "ours", "peer", "ratio", "bar", "met")


def middle(name: str, ours: Sequence[float], peer: Sequence[float], **more: float | str) -> Result:
    """A result from the medians of interleaved runs."""
    return Result(name, median(ours), median(peer), **more)  # type: ignore[arg-type]


def machine() -> list[str]:
    """What the numbers depend on."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return [
        f"{os.cpu_count()} cores ({platform.machine()}), {pages / 2**30:.0f} GiB of memory",
        f"{platform.system()}, Python {platform.python_version()}, {versions}",
    ]


def table(results: Sequence[Result]) -> Table:
    """For the terminal."""
    from rich.table import Table

    found = Table(title="benchmarks", caption="; ".join(machine()))
    for head in HEADS:
        found.add_column(head, justify="left" if head == "case" else "right")
    for result in results:
        style = {None: "", True: "green", False: "red"}[result.met]
        found.add_row(*result.cells(), style=style)
    return found


def write(results: Sequence[Result]) -> None:
    """`RESULTS.md` and `results.json` beside this file."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. Each case and its peer run in turn in one run, after a warm-up; the",
        "numbers are medians. Absolute times drift by a factor of two on a shared machine: only the",
        "ratios mean anything. `--only PATTERN` runs some cases, `--quick` small ones; neither writes",
        "this page.",
        "",
        *(f"- {fact}" for fact in machine()),
        "",
        f"| {' | '.join(HEADS)} |",
        f"|---|{'---:|' * (len(HEADS) - 1)}",
        *(f"| {' | '.join(result.cells())} |" for result in results),
        "",
        *(f"- **{result.name}**: {result.note}" for result in results if result.note),
    ]
    (HERE / "RESULTS.md").write_text("\n".join(lines) + "\n")
    fields = ("name", "ours", "peer", "ratio", "bar", "met")
    rows = [{field: getattr(result, field) for field in fields} for result in results]
    (HERE / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
