"""Importing dynadapt loads no framework.

import-linter sees what a module imports, not that importing it also runs the `__init__` of every
package above it. So this test imports for real, where no framework can be imported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS = ["accelerate", "deepspeed", "safetensors", "torch", "transformers"]
LIGHT = [
    "dynadapt",
    "dynadapt.adapters.checkpoints.deepspeed_dir",
    "dynadapt.adapters.checkpoints.safetensors_dir",
    "dynadapt.adapters.checkpoints.universal_dir",
    "dynadapt.cli",
    "dynadapt.elastic.comparison",
    "dynadapt.elastic.conversion",
    "dynadapt.elastic.verification",
    "dynadapt.offline",
    "dynadapt.protocols",
    "dynadapt.registry",
    "dynadapt.transport.planner",
    "dynadapt.vps",
]


def _import_without_frameworks(module: str) -> subprocess.CompletedProcess[str]:
    """Import in a fresh interpreter; None in `sys.modules` makes an import fail at once."""
    script = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({FRAMEWORKS!r}))\n"
        f"importlib.import_module({module!r})\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_without_any_framework(module: str) -> None:
    done = _import_without_frameworks(module)
    assert done.returncode == 0, done.stderr


def test_the_check_can_fail() -> None:
    done = _import_without_frameworks("dynadapt.adapters._common")
    assert "import of torch halted" in done.stderr
