"""Checkpoints that several files of tests read, made once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests import _ranks
from tests.offline import _made, _odd

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.live import jobs


@dataclass(frozen=True)
class Made:
    """The checkpoints of `_odd.save_all` by name, and what rank 0 told of each; they are only read."""

    folder: Path
    told: Mapping[str, Mapping[str, Any]]

    def __getitem__(self, name: str) -> Path:
        return self.folder / name

    def held(self, name: str) -> dict[str, Any]:
        """What the job had, by the framework's gathers."""
        return dict(self.told[name]["held"])

    def print(self, name: str) -> str:
        """The live job's fingerprint."""
        return str(self.told[name]["print"])


@pytest.fixture(scope="session")
def _zero3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jobs.Tensors]:
    folder = tmp_path_factory.mktemp("saved") / "zero3"
    every = _ranks.pool(2).run(_made.save_deepspeed, "zero3-bf16", str(folder), 2, {}, timeout=200)
    return folder, every[0]


@pytest.fixture(scope="session")
def saved(_zero3: tuple[Path, jobs.Tensors]) -> Path:
    """What an engine of ZeRO-3 in bf16 on 2 ranks saved after two steps; it is only read."""
    return _zero3[0]


@pytest.fixture(scope="session")
def held(_zero3: tuple[Path, jobs.Tensors]) -> jobs.Tensors:
    """All tensors of the engine that wrote `saved`, by DeepSpeed's own gathers."""
    return _zero3[1]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """What real jobs of four ranks saved."""
    folder = tmp_path_factory.mktemp("made")
    told = _ranks.pool(4).run(_odd.save_all, str(folder), timeout=400)[0]
    return Made(folder, told)
