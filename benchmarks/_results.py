"""Results of the benchmarks: a table to look at, a page to keep, and JSON for programs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

__all__ = ["Result", "machine", "middle", "page", "table", "write", "write_faults", "write_fuzz"]

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


def write(results: Mapping[str, Sequence[Result]]) -> None:
    """The benchmarks' part of `results.json`, and the page anew; what other cases gave is kept."""
    fields = ("name", "ours", "peer", "ratio", "bar", "met", "note")
    rows = [
        row for row in _known().get("benchmarks", {}).get("rows", []) if row["case"] not in results
    ]
    for case, own in results.items():
        rows += [{"case": case} | {field: getattr(r, field) for field in fields} for r in own]
    _keep("benchmarks", rows)


def write_faults(rows: Sequence[Mapping[str, str | int | float]]) -> None:
    """The faults' part of `results.json`, and the page anew. A row is one fault: `kind`, `phase`,
    `outcome`, `seconds`, and whether its promises were `kept`.
    """
    _keep("faults", list(rows))


def write_fuzz(rows: Sequence[Mapping[str, str]]) -> None:
    """The part of `results.json` on damaged checkpoints, and the page anew. A row is one of them:
    `format`, `kind` of damage, `outcome`; what is kept are the numbers of each.
    """
    counts = Counter((row["format"], row["kind"], row["outcome"]) for row in rows)
    fields = ("format", "kind", "outcome", "count")
    _keep("fuzz", [dict(zip(fields, (*key, n), strict=True)) for key, n in sorted(counts.items())])


FILE = HERE / "results.json"


def _known() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return known


def _keep(part: str, rows: list[Any]) -> None:
    known = _known()
    known[part] = {"machine": machine(), "rows": rows}
    FILE.write_text(json.dumps(known, indent=1) + "\n")
    (HERE / "RESULTS.md").write_text("\n".join(page(known)) + "\n")


def page(known: Mapping[str, Any]) -> list[str]:
    """The lines of `RESULTS.md`, from what is in `results.json`."""
    lines = ["# Results", ""]
    if "benchmarks" in known:
        lines += _benchmarks(**known["benchmarks"])
    if "faults" in known:
        lines += _faults(**known["faults"])
    if "fuzz" in known:
        lines += _fuzz(**known["fuzz"])
    return lines[:-1]


def _benchmarks(machine: list[str], rows: list[dict[str, Any]]) -> list[str]:
    results = [
        Result(row["name"], row["ours"], row["peer"], row["bar"], row["note"]) for row in rows
    ]
    return [
        "## Benchmarks",
        "",
        "Written by `make bench`. Each case and its peer run in turn in one run, after a warm-up; the",
        "numbers are medians. Absolute times drift by a factor of two on a shared machine: only the",
        "ratios mean anything. `--only PATTERN` runs some cases, and writes them with `--write`;",
        "`--quick` runs small ones, and does not.",
        "",
        *(f"- {fact}" for fact in machine),
        "",
        f"| {' | '.join(HEADS)} |",
        f"|---|{'---:|' * (len(HEADS) - 1)}",
        *(f"| {' | '.join(result.cells())} |" for result in results),
        "",
        *(f"- **{result.name}**: {result.note}" for result in results if result.note),
        "",
    ]


OUTCOMES = ("undone", "done", "source-lost", "lost", "hung")


def _faults(machine: list[str], rows: list[dict[str, Any]]) -> list[str]:
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    heads = ("", *phases, *OUTCOMES, "longest wait, s")
    table = []
    for kind in (*kinds, "all"):
        own = [row for row in rows if kind in {row["kind"], "all"}]
        counts = [sum(row["phase"] == phase for row in own) for phase in phases]
        counts += [sum(row["outcome"] == outcome for row in own) for outcome in OUTCOMES]
        longest = max(row["seconds"] for row in own)
        table.append(f"| {kind} | {' | '.join(map(str, counts))} | {longest:.1f} |")
    broken = sum(not row["kept"] for row in rows)
    return [
        "## Faults",
        "",
        "Written by `make faults`: how often each kind of fault was done to one of four ranks in the middle",
        "of a migration, by phase, and how the migrations ended. *Undone*: all ranks that lived raised one",
        "error, and the source was bit for bit what it was. *Done*: the fault came too late to matter, and",
        'the target has all. *Source-lost*: in `mode="release"` alone, a rank was killed after source memory',
        "had been freed, and all that lived were told so by this reason. *Lost*: some rank was left with",
        "something else. *Hung*: some rank did not",
        f"return. In {broken} of {len(rows)} cases some promise was broken (the cause, the seat and the",
        "phase are told rightly; nobody waits longer than the timeout allows; the source trains on like",
        "its twin; the target is as fresh as it was and takes the next migration).",
        "",
        *(f"- {fact}" for fact in machine),
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
        *table,
        "",
    ]


FUZZ = ("refused", "malformed", "read", "silent", "error", "hang", "memory")


def _fuzz(machine: list[str], rows: list[dict[str, Any]]) -> list[str]:
    kinds = sorted({row["kind"] for row in rows})

    def count(**of: str) -> int:
        return sum(row["count"] for row in rows if all(row[k] == v for k, v in of.items()))

    table = []
    for name in (*dict.fromkeys(row["format"] for row in rows), "all"):
        own = {} if name == "all" else {"format": name}
        cells = [count(**own, kind=kind) for kind in kinds]
        cells += [count(**own, outcome=outcome) for outcome in FUZZ]
        table.append(f"| {name} | {' | '.join(map(str, cells))} |")
    heads = ("", *kinds, *FUZZ)
    return [
        "## Damaged checkpoints",
        "",
        "Written by `python -m tests.offline.fuzz --write`: whole checkpoints with one damage each, by kind,",
        "and what became of reading all of them. *Refused*: with the place and the reason. *Malformed*:",
        "refused, by the net under all readers, which knows the checkpoint and not the place. *Read*: the",
        "damage left a checkpoint that is right by all that the format tells of itself, or hit what says",
        "nothing. *Silent*: another state was read without a word, though torch wrote check sums into the",
        "damaged file. *Error*: an exception that is none of dynadapt's. *Hang*: over ten seconds of",
        "processor time. *Memory*: over 256 MiB. The last four must not be.",
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
        *table,
        "",
    ]
