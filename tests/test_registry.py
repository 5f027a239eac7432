"""Adapters of others: one that cannot be imported keeps nobody else's objects from theirs."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from dynadapt import registry
from dynadapt.errors import DynadaptError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "line", ["raise RuntimeError('no licence')", "import no_such_module", "x ="]
)
def test_a_broken_adapter_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    (tmp_path / "bad_plugin.py").write_text(line + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("bad", "bad_plugin:Adapter", registry.GROUP)
    monkeypatch.setattr(registry, "_points", lambda: (point,))
    save_file({"w": np.ones(3, "f4")}, tmp_path / "a.safetensors")
    assert registry.adapter_for(str(tmp_path / "a.safetensors")).name == "safetensors"
    with pytest.raises(DynadaptError, match="bad"):
        registry.adapter_for(object())
