"""The format as installed: every command and function of dynadapt works on it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch
from stripes.raw_format import INDEX

import dynadapt
from dynadapt.cli import main

if TYPE_CHECKING:
    from pathlib import Path


def _job(seed: int) -> dynadapt.TrainState:
    """A plain job with an odd little model, one of whose parameters is frozen."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
    )
    model[0].bias.requires_grad_(requires_grad=False)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    state = dynadapt.TrainState(model, torch.optim.AdamW(named, lr=0.1))
    for _ in range(2):
        _step(state)
    return state


def _step(state: dynadapt.TrainState) -> float:
    loss = state.model(torch.linspace(-1, 1, 20).reshape(4, 5)).square().sum()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return float(loss.detach())


def _run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["dynadapt", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_job_is_saved_and_goes_on(tmp_path: Path) -> None:
    """Written from memory, read into another job: the next step is the same."""
    job, other = _job(0), _job(1)
    report = dynadapt.save(job, tmp_path / "saved", "raw")
    assert (tmp_path / "saved" / INDEX).is_file()
    assert report.fingerprint_target == dynadapt.fingerprint(job)
    dynadapt.load(other, tmp_path / "saved")
    assert dynadapt.fingerprint(other) == dynadapt.fingerprint(job)
    assert _step(other) == _step(job)


@pytest.mark.parametrize("to", ["zero2:dp=2", "torch"])
def test_there_and_back(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the commands: from here to formats of frameworks, and back."""
    job = _job(0)
    dynadapt.save(job, tmp_path / "raw", "raw")
    assert _run(monkeypatch, "inspect", tmp_path / "raw") == 0
    assert _run(monkeypatch, "convert", tmp_path / "raw", tmp_path / "there", "--to", to) == 0
    assert _run(monkeypatch, "convert", tmp_path / "there", tmp_path / "back", "--to", "raw") == 0
    assert _run(monkeypatch, "verify", tmp_path / "back") == 0
    assert dynadapt.open(tmp_path / "back").format == "raw"
    assert dynadapt.open(tmp_path / "back").fingerprint() == dynadapt.fingerprint(job)
    assert _run(monkeypatch, "diff", tmp_path / "there", tmp_path / "back") == 0


@pytest.mark.parametrize("words", [["raw/zero3:dp=2"], ["raw", "--dtype", "bf16"]])
def test_what_it_cannot_be_is_refused(
    tmp_path: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And not passed over; nothing is left of it."""
    dynadapt.save(_job(0), tmp_path / "a", "torch")
    assert _run(monkeypatch, "convert", tmp_path / "a", tmp_path / "b", "--to", *words) == 2
    assert "unsupported-format" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_is_broken_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is short, and an index that is none."""
    dynadapt.save(_job(0), tmp_path / "raw", "raw")
    part = tmp_path / "raw" / "0.raw"
    part.write_bytes(part.read_bytes()[:-1])
    assert _run(monkeypatch, "verify", tmp_path / "raw") == 1
    (tmp_path / "raw" / INDEX).write_bytes(b"no index")
    assert _run(monkeypatch, "inspect", tmp_path / "raw") == 2
