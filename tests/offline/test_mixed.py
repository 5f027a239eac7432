"""Folders whose files are not of one save: renamed, copied, left over, of another step, changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import dynadapt
from dynadapt.elastic.verification import verified
from dynadapt.errors import Refused
from tests import _ranks
from tests.offline import _made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of a job's tags, after 1 and after 2 steps."""
    root = tmp_path_factory.mktemp("saves")
    for steps in (1, 2):
        where = str(root / str(steps))
        _ranks.pool(2).run(_made.save_deepspeed, "zero3-bf16", where, steps, {}, timeout=200)
    return {steps: root / str(steps) / f"step{steps}" for steps in (1, 2)}


def _optim(folder: Path, rank: int) -> Path:
    return folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _swap(folder: Path, other: Path) -> None:
    _optim(folder, 0).rename(folder / "x")
    _optim(folder, 1).rename(_optim(folder, 0))
    (folder / "x").rename(_optim(folder, 1))


def _copy(folder: Path, other: Path) -> None:
    shutil.copy(_optim(folder, 0), _optim(folder, 1))


def _left_over(folder: Path, other: Path) -> None:
    shutil.copy(_optim(folder, 1), _optim(folder, 2))


def _optimizer_of_another_step(folder: Path, other: Path) -> None:
    shutil.copy(_optim(other, 1), _optim(folder, 1))


def _model_of_another_step(folder: Path, other: Path) -> None:
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    shutil.copy(other / name, folder / name)


def _last_gone(folder: Path, other: Path) -> None:
    _optim(folder, 1).unlink()
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()


@pytest.mark.parametrize(
    ("change", "reason", "told"),
    [
        (_swap, "mixed-files", "was written as bf16_zero_pp_rank_1"),
        (_copy, "mixed-files", "was written as bf16_zero_pp_rank_0"),
        (_left_over, "mixed-files", "are of 2 ranks, and there are files of 3"),
        (_optimizer_of_another_step, "mixed-files", "its steps are 1, those of"),
        (_model_of_another_step, "mixed-files", "global_steps 2"),
        (_last_gone, "missing-file", r"states of ranks \[1\] are missing"),
    ],
)
def test_what_is_not_of_one_save_is_refused(
    saved: dict[int, Path], tmp_path: Path, change: object, reason: str, told: str
) -> None:
    folder = tmp_path / "step2"
    shutil.copytree(saved[2], folder)
    change(folder, saved[1])  # type: ignore[operator]
    with pytest.raises(Refused, match=told) as refused:
        dynadapt.open(folder)
    assert refused.value.findings[0].reason == reason


def test_what_is_written_here_is_told_apart_too(saved: dict[int, Path], tmp_path: Path) -> None:
    dynadapt.convert(saved[2], tmp_path / "new", "zero2:dp=2")
    folder = tmp_path / "new" / "dynadapt"
    _swap(folder, folder)
    with pytest.raises(Refused, match="another rank's"):
        dynadapt.open(tmp_path / "new")


def test_verify_takes_the_check_sums_that_torch_wrote(
    saved: dict[int, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "step2"
    shutil.copytree(saved[2], folder)
    assert verified(dynadapt.open(folder))[0] == ()
    found = dynadapt.open(folder)
    buffer = next(b for n, b in found.buffers.items() if _optim(folder, 1).name in n)
    with Path(buffer.path).open("r+b") as file:
        file.seek(buffer.offset + 5)
        byte = file.read(1)[0]
        file.seek(buffer.offset + 5)
        file.write(bytes([byte ^ 4]))
    findings, _ = verified(dynadapt.open(folder))
    assert [finding.reason for finding in findings] == ["certificate"]
    assert _optim(folder, 1).name in findings[0].where


def test_no_name_leads_out_of_a_universal_checkpoint(tmp_path: Path) -> None:
    """A parameter's name is a folder there, and it is the source's."""
    inner = tmp_path / "a" / "b" / "c"
    inner.mkdir(parents=True)
    for name in ("../../../../../x", "w/../../../../../x", str(tmp_path / "x")):
        save_file({name: np.ones(3, "f4"), "ok": np.ones(2, "f4")}, inner / "x.safetensors")
        with pytest.raises(Refused) as refused:
            dynadapt.convert(
                inner / "x.safetensors", inner / "new", "universal", order=(name, "ok")
            )
        assert refused.value.reason == "path-traversal"
        assert {p.name for p in tmp_path.rglob("*")} == {"a", "b", "c", "x.safetensors"}


def test_no_name_leads_a_reader_out_of_a_universal_checkpoint(
    saved: dict[int, Path], tmp_path: Path
) -> None:
    dynadapt.convert(saved[2], tmp_path / "new", "universal")
    model = tmp_path / "new" / "dynadapt" / "mp_rank_00_model_states.pt"
    tree = torch.load(model, weights_only=False)
    for own in tree["param_shapes"]:
        if "up.weight" in own:
            own["../../up.weight"] = own.pop("up.weight")
    torch.save(tree, model)
    with pytest.raises(Refused, match=r"would lie outside") as refused:
        dynadapt.open(tmp_path / "new")
    assert refused.value.reason == "path-traversal"


def test_a_state_that_one_parameter_has_lost_is_missed(
    saved: dict[int, Path], tmp_path: Path
) -> None:
    dynadapt.convert(saved[2], tmp_path / "new", "universal")
    (tmp_path / "new" / "dynadapt" / "zero" / "up.weight" / "exp_avg.pt").unlink()
    with pytest.raises(Refused, match=r"zero/up.weight/exp_avg.pt: is missing"):
        dynadapt.open(tmp_path / "new")
