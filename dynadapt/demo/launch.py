"""Starts the demo's ranks under torchrun, shows them live, and judges the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from dynadapt.demo.extensions import environment
from dynadapt.elastic.outcome import human

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Result", "run"]

RANKS = 4
CAUSE = (
    "The state itself was moved bit for bit (equal fingerprints). The differences in the losses' last "
    "digits arise in TP x DP, where bf16 partial sums are added in another order, and stay."
)


@dataclass
class Result:
    """What the ranks told, event by event."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    migrations: list[dict[str, Any]] = field(default_factory=list)
    status: str = "starting 4 ranks"
    done: bool = False

    def take(self, event: dict[str, Any]) -> None:
        """Take one event in."""
        kind = event["event"]
        if kind == "step":
            self.steps.append(event)
            self.status = f"training as {event['layout']}"
        elif kind == "eval":
            self.evals.append(event)
        elif kind == "migrating":
            self.status = f"migrating {event['source']} -> {event['target']}"
        elif kind == "migrated":
            path = {"from": event["source"], "to": event["target"]}
            self.migrations.append({**event["report"], **path})
        elif kind == "phase":
            head = self.status.partition(":")[0]
            self.status = f"{head}: {event['name']}"
        elif kind == "status":
            self.status = event["text"]
        elif kind == "done":
            self.done = True
            self.status = "done"

    def gaps(self) -> tuple[float, float]:
        """Mean distance to the uninterrupted run after the first migration: main's, the control's."""
        after = [s for s in self.steps if s["step"] >= _per_phase(self.steps)]
        count = max(len(after), 1)
        mine = sum(abs(s["loss"] - s["reference"]) for s in after) / count
        control = sum(abs(s["control"] - s["reference"]) for s in after) / count
        return mine, control

    @property
    def ok(self) -> bool:
        """Whether everything that the demo is meant to show was shown."""
        mine, control = self.gaps()
        moved = all(
            m["bytes_moved"] == m["bytes_minimum"]
            and m["fingerprint_source"] == m["fingerprint_target"]
            for m in self.migrations
        )
        return self.done and len(self.migrations) == 2 and moved and 5 * mine <= control

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        mine, control = self.gaps()
        keep = [
            *("from", "to", "bytes_moved", "bytes_minimum", "bytes_rebuilt", "peak_extra_bytes"),
            *("seconds", "pause_seconds", "fingerprint_source", "fingerprint_target"),
        ]
        return {
            "ok": self.ok,
            "source": "zero3:dp=4",
            "target": "ddp:dp=2,tp=2",
            "ranks": RANKS,
            "migrations": [{name: m[name] for name in keep} for m in self.migrations],
            "losses": [s["loss"] for s in self.steps],
            "reference_losses": [s["reference"] for s in self.steps],
            "control_losses": [s["control"] for s in self.steps],
            "evaluations": [{k: e[k] for k in ("step", "loss", "reference")} for e in self.evals],
            "gap": mine,
            "control_gap": control,
            "cause_of_gap": CAUSE,
        }


def _per_phase(steps: list[dict[str, Any]]) -> int:
    first = next((s["step"] for s in steps if s["layout"] != steps[0]["layout"]), len(steps))
    return int(first)


def run(json_path: Path | None, console: Console, steps: int = 24) -> int:
    """Run the demo; returns the exit status. Writes the result to `json_path` if given."""
    result = Result()
    with tempfile.TemporaryDirectory(prefix="dynadapt-demo-") as folder:
        events, log = Path(folder, "events.jsonl"), Path(folder, "log.txt")
        events.touch()
        with (
            _ranks(events, log) as process,
            Live(console=console, refresh_per_second=8, transient=True) as live,
        ):
            for event in _follow(events, process, lambda: live.update(_view(result, steps))):
                result.take(event)
                live.update(_view(result, steps))
        if process.returncode or not result.done:
            console.print(
                f"[red]the ranks ended with status {process.returncode}[/red]; their last words:"
            )
            console.print(_tail(log), markup=False, highlight=False)
            return 1
    console.print(_summary(result))
    if json_path is not None:
        json_path.write_text(json.dumps(result.to_json(), indent=2) + "\n")
        console.print(f"wrote {json_path}")
    return 0 if result.ok else 1


@contextmanager
def _ranks(events: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The ranks, ended with this block whatever happens."""
    env = {**os.environ, **environment()}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    command = [sys.executable, *launcher, "-m", "dynadapt.demo.worker", str(events)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=env, stdout=sink, stderr=sink, cwd=log.parent)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _follow(path: Path, process: subprocess.Popen[bytes], idle: Any) -> Iterator[dict[str, Any]]:
    """Events as they are written, until the ranks have ended."""
    with path.open() as lines:
        rest = ""
        while True:
            ended = process.poll() is not None
            rest += lines.read()
            *whole, rest = rest.split("\n")
            yield from (json.loads(line) for line in whole)
            if ended:
                return
            if not whole:
                time.sleep(0.1)
                idle()


def _view(result: Result, steps: int) -> Group:
    """The live display: a bar, and the last steps."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
    )
    progress.add_task(result.status, total=steps, completed=len(result.steps))
    return Group(progress, _losses(result.steps[-6:]))


def _losses(steps: list[dict[str, Any]]) -> Table:
    table = Table("layout", "step", "loss", "uninterrupted", "control")
    for s in steps:
        losses = (f"{s[name]:.6f}" for name in ("loss", "reference", "control"))
        table.add_row(s["layout"], str(s["step"]), *losses)
    return table


def _summary(result: Result) -> Group:
    table = Table("", *(f"{m['from']} -> {m['to']}" for m in result.migrations))
    sizes = ("bytes_moved", "bytes_minimum", "bytes_rebuilt", "peak_extra_bytes")
    for name in sizes:
        row = (human(m[name]) for m in result.migrations)
        table.add_row(name.replace("_bytes", "").removeprefix("bytes_").replace("_", " "), *row)
    for phase in result.migrations[0]["seconds"] if result.migrations else ():
        table.add_row(f"s, {phase}", *(f"{m['seconds'][phase]:.3f}" for m in result.migrations))
    table.add_row("s, whole pause", *(f"{m['pause_seconds']:.3f}" for m in result.migrations))
    for name in ("fingerprint_source", "fingerprint_target"):
        prints = ("\n".join((m[name][:16], m[name][16:])) for m in result.migrations)
        table.add_row(name.replace("_", " "), *prints)
    mine, control = result.gaps()
    ratio = control / mine if mine else float("inf")
    verdict = (
        f"mean distance to the uninterrupted run: {mine:.6f}; with the moments lost: {control:.6f} "
        f"({ratio:.0f}x)\n{CAUSE}\n" + ("[green]ok[/green]" if result.ok else "[red]not ok[/red]")
    )
    return Group(_losses(result.steps), table, verdict)


def _tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
