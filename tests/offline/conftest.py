"""Checkpoints that several files of tests read, made once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests import _ranks
from tests.offline import _odd

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


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
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """What real jobs of four ranks saved."""
    folder = tmp_path_factory.mktemp("made")
    told = _ranks.pool(4).run(_odd.save_all, str(folder), timeout=400)[0]
    return Made(folder, told)
