"""The command line and the public names: what they are is frozen here, what they do is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest
import typer.main

import dynadapt
from dynadapt import cli

TOOLS = Path(sys.executable).parent


def _run(
    *words: str,
    timeout: float = 60,
    stdout: int | TextIO = subprocess.PIPE,
    stderr: int | TextIO = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(
        [str(TOOLS / "dynadapt"), *words],
        stdout=stdout,
        stderr=stderr,
        text=True,
        timeout=timeout,
        check=False,
        env=env,
    )


def test_public_names() -> None:
    """A name added or taken away is a decision, not an accident."""
    assert dynadapt.__all__ == [
        "Checkpoint",
        "DynadaptError",
        "Finding",
        "MigrationAborted",
        "Refused",
        "TrainState",
        "__version__",
        "convert",
        "declare",
        "describe",
        "diff",
        "fingerprint",
        "load",
        "migrate",
        "open",
        "plan",
        "save",
        "simulate",
    ]
    assert all(hasattr(dynadapt, name) for name in dynadapt.__all__)


def test_commands_and_options() -> None:
    """The same for the command line."""
    group: Any = typer.main.get_command(cli.app)
    found = {
        name: sorted(option for param in command.params for option in param.opts)
        for name, command in group.commands.items()
    }
    assert found == {
        "convert": [
            "--add-prefix",
            "--dtype",
            "--exclude",
            "--force",
            "--include",
            "--json",
            "--keep-dtype",
            "--like",
            "--max-memory",
            "--max-shard-size",
            "--model",
            "--order",
            "--resume",
            "--strip-prefix",
            "--to",
            "--verify",
            "--weights-only",
            "--workers",
            "source",
            "target",
        ],
        "demo": ["--json"],
        "diff": [
            "--atol",
            "--exclude",
            "--html",
            "--ignore-missing",
            "--include",
            "--json",
            "--model",
            "--order",
            "--rtol",
            "--ulp",
            "--weights-only",
            "--workers",
            "a",
            "b",
        ],
        "env": ["--json"],
        "fingerprint": ["--json", "--model", "--order", "--workers", "path"],
        "inspect": ["--filter", "--json", "--model", "--order", "--shards", "--summary", "path"],
        "plan": [
            "--add-prefix",
            "--budget",
            "--dtype",
            "--exclude",
            "--experts",
            "--from",
            "--include",
            "--json",
            "--keep-dtype",
            "--like",
            "--links",
            "--max-memory",
            "--max-shard-size",
            "--model",
            "--optimizer",
            "--order",
            "--strip-prefix",
            "--to",
            "--tp-plan",
            "--verify",
            "--weights-only",
            "--workers",
            "checkpoint",
        ],
        "show": [
            "--experts",
            "--json",
            "--links",
            "--model",
            "--out",
            "--tensor",
            "--to",
            "--tp-plan",
            "spec",
        ],
        "verify": ["--json", "--model", "--order", "--workers", "path"],
    }


def test_env() -> None:
    """It names versions and adapters, as a table and as JSON."""
    assert "deepspeed_zero" in _run("env").stdout
    facts = json.loads(_run("env", "--json").stdout)
    assert facts["dynadapt"] == dynadapt.__version__
    known = {adapter["name"] for adapter in facts["adapters"]}
    assert known >= {"deepspeed_zero", "fsdp1", "torch_module"}
    assert all(adapter["usable"] for adapter in facts["adapters"])


def test_a_bad_path_is_one_message(tmp_path: Path) -> None:
    """Said before minutes are spent."""
    ran = _run("demo", "--json", str(tmp_path / "no" / "such.json"))
    assert ran.returncode == 2
    assert "is not a folder" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_who_reads_no_more_is_no_error_to_show() -> None:
    """It ends as what a broken pipe's signal ends, and with no code that means something else."""
    for words in (["--help"], ["env", "--json"]):
        command = [sys.executable, "-m", "dynadapt", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
            assert done.stdout is not None
            assert done.stderr is not None
            done.stdout.close()
            assert done.stderr.read() == b""
            assert done.wait(60) == 141, words
    assert "convert" in _run("--help").stdout
    assert _run("no-such-command").returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_where_no_more_can_be_printed() -> None:
    """One message and 2; where errors cannot be printed, the code that they have."""
    with Path("/dev/full").open("w") as full:
        for words in (["--help"], ["env", "--json"]):
            ran = _run(*words, stdout=full)
            assert ran.returncode == 2
            assert ran.stderr.startswith("error [disk-full] standard output: "), ran.stderr
            assert len(ran.stderr.splitlines()) == 1
        assert _run("no-such-command", stderr=full).returncode == 2
        assert _run("inspect", "/no/such", stderr=full).returncode == 2
        assert _run("env", stdout=full, stderr=full).returncode == 2


@pytest.mark.parametrize("fault", ["RuntimeError", "EOFError", "BrokenPipeError"])
def test_a_fault_of_the_program_is_no_answer(fault: str) -> None:
    """With a traceback, and not with the 1 by which `diff` says that two differ."""
    code = (
        "from unittest import mock; from dynadapt import cli, offline\n"
        "import sys; sys.argv = ['dynadapt', 'diff', 'a', 'b']\n"
        f"with mock.patch.object(offline, 'diff', side_effect={fault}(32, 'odd')): cli.run()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert f"{fault}: " in ran.stderr
    assert "odd" in ran.stderr.splitlines()[-1]


def test_plan_of_a_model_that_is_not_loaded(tmp_path: Path) -> None:
    """A listing of tensors and two layouts are enough; the figures are those of the layouts."""
    listing = tmp_path / "model.json"
    tensors = [{"name": f"layers.{i}.up_proj.weight", "shape": [64, 16]} for i in range(4)]
    listing.write_text(json.dumps(tensors))
    rules = tmp_path / "rules.json"
    rules.write_text('{"up_proj": "colwise"}')
    words = ["plan", "--model", str(listing), "--from", "zero3:dp=4", "--to", "ddp:dp=2,tp=2"]
    told = json.loads(_run(*words, "--tp-plan", str(rules), "--json").stdout)
    assert (told["world"], told["parameters"], told["tensors"]) == (4, 4096, 4)
    assert told["state_bytes"] == 12 * 4096
    # each rank needs half of all and holds a quarter, of its half for two of the four ranks
    assert told["minimum_worst"] == told["bytes_in_worst"] == 12 * 2048
    assert told["seconds"] >= told["lower_bound"] > 0
    assert [row["family"] for row in told["families"]] == ["layers.{}.up_proj.weight"]
    shown = _run(*words).stdout
    assert "stay whole over tp" in shown
    assert "layers.*.up_proj.weight" in shown.replace("\n", "")


def test_a_plan_says_what_is_wrong_with_its_words(tmp_path: Path) -> None:
    """One message with the way out, exit code 2."""
    listing = tmp_path / "model.json"
    listing.write_text('[{"name": "w", "shape": [4]}]')
    good = {"--model": str(listing), "--from": "zero3:dp=2", "--to": "ddp:dp=2"}
    for option, value, word in (
        ("--from", "zero4:dp=2", "did you mean"),
        ("--to", "ddp:dp=0", "not a number of places"),
        ("--model", str(tmp_path / "no.json"), "no.json"),
        ("--links", "carrier-pigeon", "known: h100"),
        ("--budget", "much", "not a size"),
        ("--optimizer", "lion", "adamw"),
        ("--experts", "some", "stacked or listed"),
        ("--dtype", "bf16", "there is no SRC"),
    ):
        words = [word for pair in {**good, option: value}.items() for word in pair]
        ran = _run("plan", *words)
        assert ran.returncode == 2, option
        assert word in ran.stderr.replace("\n", " "), ran.stderr
        assert ran.stderr.startswith("error [")
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


def test_closed_streams_do_not_change_how_it_ends() -> None:
    """As a daemon starts it: there is nothing to flush, and all else is as ever."""
    command = f"exec {TOOLS / 'dynadapt'} env"
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        ended = subprocess.run(
            ["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stderr) == (0, ""), closed
