"""The command line and the public names: what they are is frozen here, what they do is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer.main

import dynadapt
from dynadapt import cli

TOOLS = Path(sys.executable).parent


def _run(*words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(
        [str(TOOLS / "dynadapt"), *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=env,
    )


def test_public_names() -> None:
    """A name added or taken away is a decision, not an accident."""
    assert dynadapt.__all__ == [
        "DynadaptError",
        "Finding",
        "MigrationAborted",
        "Refused",
        "TrainState",
        "__version__",
        "describe",
        "fingerprint",
        "migrate",
        "plan",
    ]
    assert all(hasattr(dynadapt, name) for name in dynadapt.__all__)


def test_commands_and_options() -> None:
    """The same for the command line."""
    group: Any = typer.main.get_command(cli.app)
    found = {
        name: sorted(option for param in command.params for option in param.opts)
        for name, command in group.commands.items()
    }
    assert found == {"demo": ["--json"], "env": ["--json"]}


def test_env() -> None:
    """It names versions and adapters, as a table and as JSON."""
    assert "deepspeed_zero" in _run("env").stdout
    facts = json.loads(_run("env", "--json").stdout)
    assert facts["dynadapt"] == dynadapt.__version__
    assert {adapter["name"] for adapter in facts["adapters"]} >= {"deepspeed_zero", "torch_module"}
    assert all(adapter["usable"] for adapter in facts["adapters"])


def test_a_bad_path_is_one_message(tmp_path: Path) -> None:
    """Said before minutes are spent."""
    ran = _run("demo", "--json", str(tmp_path / "no" / "such.json"))
    assert ran.returncode == 2
    assert "is not a folder" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_demo(tmp_path: Path) -> None:
    """The whole demo, and what its JSON promises."""
    ran = _run("demo", "--json", str(tmp_path / "demo.json"), timeout=300)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    told = json.loads((tmp_path / "demo.json").read_text())
    assert told["ok"] is True
    assert (told["source"], told["target"], told["ranks"]) == ("zero3:dp=4", "ddp:dp=2,tp=2", 4)
    assert len(told["migrations"]) == 2
    for migration in told["migrations"]:
        assert migration["bytes_moved"] == migration["bytes_minimum"] > 0
        assert migration["fingerprint_source"] == migration["fingerprint_target"]
        assert migration["peak_extra_bytes"] > 0
        assert abs(sum(migration["seconds"].values()) - migration["pause_seconds"]) < 1e-3
    count = len(told["losses"])
    assert count == len(told["reference_losses"]) == len(told["control_losses"]) == 24
    assert told["losses"][:8] == told["reference_losses"][:8] == told["control_losses"][:8]
    assert 5 * told["gap"] < told["control_gap"]
