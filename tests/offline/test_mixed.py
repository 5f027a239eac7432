"""Folders whose files are not of one save: renamed, copied, left over, of another step, changed."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file

import dynadapt
from dynadapt.elastic.verification import verified
from dynadapt.errors import Refused
from dynadapt.zips import extent_of, records_of, zips_in
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
    findings, _, _ = verified(dynadapt.open(folder))
    assert [finding.reason for finding in findings] == ["certificate"]
    assert _optim(folder, 1).name in findings[0].where


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def _reasons(folder: Path) -> tuple[list[str], list[str]]:
    """Of problems and of warnings."""
    found = verified(dynadapt.open(folder))
    return [f.reason for f in found.problems], [f.reason for f in found.warnings]


def _distributed(folder: Path) -> Path:
    """What torch itself writes: tensors, a number, and an object with a tensor in it."""
    model = {"w": torch.arange(64.0), "v": torch.ones(64, dtype=torch.bfloat16)}
    rest = {"step": 7, "seen": {"mask": torch.arange(9)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp.save({"model": model, "rest": rest}, checkpoint_id=folder, no_dist=True)
    return folder


def test_verify_takes_the_check_sums_inside_distributed_checkpoints(tmp_path: Path) -> None:
    """One for every part of every zip that torch wrote into a file, one after another."""
    folder = _distributed(tmp_path / "a")
    assert _reasons(folder) == ([], [])
    for buffer in dynadapt.open(folder).buffers.values():
        assert buffer.crc
        damaged = tmp_path / "b"
        shutil.copytree(folder, damaged)
        _flip(damaged / Path(buffer.path).name, buffer.offset + 5)
        assert _reasons(damaged) == (["certificate"], [])
        shutil.rmtree(damaged)


def test_verify_looks_at_files_without_tensors_too(saved: dict[int, Path], tmp_path: Path) -> None:
    """Steps, schedules and random states, in whatever folder of the checkpoint they lie."""
    for to in ("accelerate/fsdp2:dp=2", "universal"):
        new = tmp_path / to.partition("/")[0]
        dynadapt.convert(saved[2], new, to)
        (new / "dynadapt.json").unlink()
        tensors = {Path(b.path) for b in dynadapt.open(new).buffers.values()}
        flipped = 0
        for path in sorted(p for p in new.rglob("*") if p.is_file() and p not in tensors):
            whole = path.read_bytes()
            for start, each in zips_in(memoryview(whole)):
                places = {r.name: extent_of(each, r) for r in records_of(each)}
                for name in (name for name in places if "/data/" in name and places[name][1]):
                    _flip(path, start + places[name][0])
                    assert _reasons(new)[0] == ["certificate"], path
                    path.write_bytes(whole)
                    flipped += 1
        assert flipped


def test_a_changed_pickle_is_refused(saved: dict[int, Path], tmp_path: Path) -> None:
    """A learning rate, a shape or a count that is not what was written."""
    path = shutil.copytree(saved[2], tmp_path / "a") / _optim(saved[2], 0).name
    at = path.read_bytes().index(b"weight_decay")
    _flip(path, at)
    with pytest.raises(Refused, match=r"data\.pkl has not the check sum") as refused:
        dynadapt.open(path.parent)
    assert refused.value.reason == "bad-file"


def test_verify_says_where_there_is_no_check_sum(saved: dict[int, Path], tmp_path: Path) -> None:
    save_file({"w": np.ones(300, "f4")}, tmp_path / "model.safetensors")
    found = verified(dynadapt.open(tmp_path / "model.safetensors"))
    assert found.problems == ()
    assert [f.reason for f in found.warnings] == ["no-checksum"]
    assert "1.2 KiB of 1.2 KiB" in found.warnings[0].cause
    assert "(model.safetensors)" in found.warnings[0].cause
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "plain.pt")
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    assert _reasons(tmp_path / "plain.pt") == ([], ["no-checksum"])
    dynadapt.convert(saved[2], tmp_path / "new", "safetensors")
    assert _reasons(tmp_path / "new") == ([], [])  # the manifest has sums
    (tmp_path / "new" / "dynadapt.json").unlink()
    assert _reasons(tmp_path / "new") == ([], ["no-checksum"])


def test_swapped_files_that_do_not_say_whose_they_are(
    saved: dict[int, Path], tmp_path: Path
) -> None:
    """Told by the manifest's sums, where there is one; else that it cannot be told."""
    new = tmp_path / "new"
    dynadapt.convert(saved[2], new, "dcp/fsdp2:dp=4")
    sizes = {p: p.stat().st_size for p in sorted(new.glob("*.distcp"))}
    one, two = next((a, b) for a in sizes for b in sizes if a < b and sizes[a] == sizes[b])
    for path, other in ((one, tmp_path / "x"), (two, one), (tmp_path / "x", two)):
        path.rename(other)
    problems, unsure = _reasons(new)
    assert set(problems) == {"certificate"}
    assert unsure == []
    (new / "dynadapt.json").unlink()
    assert _reasons(new) == ([], ["nameless-files"])


def test_swapped_files_of_a_universal_checkpoint(saved: dict[int, Path], tmp_path: Path) -> None:
    """A state under another's name, by the name that torch wrote into it; weights by their copies."""
    new = tmp_path / "new"
    dynadapt.convert(saved[2], new, "universal")
    (new / "dynadapt.json").unlink()
    assert _reasons(new) == ([], ["nameless-files"])
    zero = new / "dynadapt" / "zero"
    shapes = {s.key.name: s.shape for s in dynadapt.open(new).keys if s.key.slot == "exp_avg"}
    one, two = next((a, b) for a in shapes for b in shapes if a < b and shapes[a] == shapes[b])
    for a, b, told in (
        (zero / one / "exp_avg.pt", zero / one / "exp_avg_sq.pt", "mixed-files"),
        (zero / one / "fp32.pt", zero / two / "fp32.pt", "stale-copy"),
    ):
        for path, other in ((a, tmp_path / "x"), (b, a), (tmp_path / "x", b)):
            path.rename(other)
        if told == "mixed-files":
            with pytest.raises(Refused, match="another state's") as refused:
                dynadapt.open(new)
            assert refused.value.reason == told
        else:
            problems, _ = _reasons(new)
            assert problems == [told] * 2
        for path, other in ((a, tmp_path / "x"), (b, a), (tmp_path / "x", b)):
            path.rename(other)
    assert _reasons(new) == ([], ["nameless-files"])


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
