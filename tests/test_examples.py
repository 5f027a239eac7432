"""Every example runs as its own text says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynadapt.demo.extensions import environment

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    """An empty folder must not pass."""
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path) -> None:
    """On two ranks, under torchrun, to the end."""
    env = {**os.environ, **environment()}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(path)]
    ran = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=180, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert "fingerprint" in ran.stdout
