"""ATOMIC, PICKLE, MEMTIME, VERIFY and HANG on disk: a half one, a hostile one, a large one, another."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from dynadapt.elastic.verification import verified
from dynadapt.errors import DynadaptError, Refused
from tests import _ranks
from tests.live import jobs
from tests.offline import _odd
from tests.offline.test_cases_weights import loads, saved

if TYPE_CHECKING:
    from pathlib import Path

    from tests.offline.conftest import Made

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_atomic_a_folder_without_latest(made: Made, tmp_path: Path) -> None:
    """ATOMIC B157, B158: the folder of a step is a checkpoint; `latest` that is gone, empty or of another."""
    assert dynadapt.open(made["zero3"] / "here").fingerprint() == made.print("zero3")
    for number, text in enumerate([None, "", "there"]):
        copy = tmp_path / str(number)
        shutil.copytree(made["zero3"], copy)
        (copy / "latest").unlink()
        if text is not None:
            (copy / "latest").write_text(text)
        with pytest.raises(DynadaptError) as caught:
            dynadapt.open(copy)
        assert str(copy) in str(caught.value)
        assert "here" in str(caught.value), text  # what is there instead


def test_atomic_files_of_no_bytes_and_cut_ones(made: Made, tmp_path: Path) -> None:
    """ATOMIC B157, B160: after a power loss; every file of it is named at once."""
    copy = tmp_path / "a"
    shutil.copytree(made["zero2"], copy)
    names = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (1, 3)]
    (copy / "here" / names[0]).write_bytes(b"")
    cut = copy / "here" / names[1]
    cut.write_bytes(cut.read_bytes()[:-1000])
    with pytest.raises(Refused) as caught:
        dynadapt.open(copy)
    told = str(caught.value)
    assert all(name in told for name in names), told


def test_atomic_what_is_not_whole_is_not_taken_for_whole(made: Made, tmp_path: Path) -> None:
    """ATOMIC B155, B160, B163: one file of a conversion lost or changed; the manifest and `verify` tell."""
    dynadapt.convert(made["zero2"], tmp_path / "a", "dcp/fsdp2:dp=3")
    found, unsure, told = verified(dynadapt.open(tmp_path / "a"))
    assert (found, unsure, told["manifest"]) == ((), (), "compared")
    at = tmp_path / "a" / "__1_0.distcp"
    whole = at.read_bytes()
    at.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    found, _, _ = verified(dynadapt.open(tmp_path / "a"))
    assert found
    at.unlink()
    with pytest.raises(Refused, match=r"__1_0\.distcp"):
        verified(dynadapt.open(tmp_path / "a"))


def test_atomic_a_folder_that_another_makes_at_the_same_time(made: Made, tmp_path: Path) -> None:
    """ATOMIC B161, B164, B166: parents are made once and may exist; a place that is not is told in full."""
    there = tmp_path / "x" / "y" / "z"
    there.parent.mkdir(parents=True)
    dynadapt.convert(made["sgd"], there, "torch")
    assert sorted(p.name for p in there.parent.iterdir()) == ["z"]
    with pytest.raises(DynadaptError) as caught:
        dynadapt.open(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(caught.value)


def test_pickle_is_read_without_frameworks_and_never_run(made: Made, tmp_path: Path) -> None:
    """PICKLE B167, B170: optimizer and config objects of DeepSpeed, where neither it nor torch can be had."""
    script = (
        "import sys; sys.modules['torch'] = sys.modules['deepspeed'] = None\n"
        "import dynadapt; print(dynadapt.open(sys.argv[1]).fingerprint())"
    )
    for name in ("zero2", "zero0"):
        done = subprocess.run(
            [sys.executable, "-c", script, str(made[name])],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.strip() == made.print(name)


@pytest.mark.parametrize("to", ["zero2:dp=2", "zero3:dp=2", "universal", "torch"])
def test_pickle_that_is_written_is_plain(made: Made, tmp_path: Path, to: str) -> None:
    """PICKLE B169: a strict loader reads it; DeepSpeed's own classes are named where it wants them."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    dynadapt.convert(made["zero2"], tmp_path / "a", to)
    files = sorted((tmp_path / "a").rglob("*.pt"))
    assert files
    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        for at in files:
            torch.load(at, weights_only=True)


def _read(rank: int, world: int, where: str) -> int:
    """What all ranks together read of a checkpoint."""
    return dynadapt.load(_odd.engine_of("zero3", seed=5), where).bytes_read


def test_memtime_each_range_is_read_once(made: Made, tmp_path: Path) -> None:
    """MEMTIME B135, B136, B142: ranks read what their pieces need; a conversion reads the state once."""
    found = dynadapt.open(made["zero3"])
    state = sum(s.nbytes for s in found.keys if s.presence == "present" and not s.derived)
    report = dynadapt.convert(made["zero3"], tmp_path / "a", "zero3:dp=2", verify=False)
    buffers = sum(s.nbytes for s in found.keys if s.kind == "buffer")  # in each rank's file
    assert report.bytes_read <= state + buffers
    answers = _ranks.pool(2).run(_read, str(made["zero3"]), timeout=100)
    extra = sum(s.nbytes for s in found.keys if s.kind == "buffer" or not s.trainable)
    for read in answers:
        assert read <= state + 2 * extra + 1000


def test_verify_lists_missing_and_unexpected(made: Made, tmp_path: Path) -> None:
    """VERIFY B183, B186: one tensor more, one less, one of another shape, one element off: where it lies."""
    tree = _odd.tree(_odd.plain())
    one = saved(tree, tmp_path / "a.pt")
    other = loads(one)
    model = other["model"]
    model["more"] = torch.ones(2)
    del model["norm.bias"]
    model["thin.weight"] = torch.ones(1, 9)
    model["up.weight"][3, 5] += 1
    two = saved({"model": model}, tmp_path / "b.pt")
    compared = dynadapt.diff(one, two, weights_only=True)
    assert not compared.same
    told = {d.key: d for d in compared.tensors}
    verdicts = {key: d.verdict for key, d in told.items() if d.verdict != "identical"}
    assert verdicts == {
        "more/param": "only-in-b",
        "norm.bias/param": "only-in-a",
        "thin.weight/param": "different",
        "up.weight/param": "different",
    }
    changed = told["up.weight/param"]
    assert (changed.first, changed.count, round(changed.max_abs)) == ((3, 5), 1, 1)
    fresh = _odd.odd(5)
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.load(fresh, two)
    reasons = {(f.reason, f.where.partition("/")[0]) for f in caught.value.findings}
    assert {
        ("extra-key", "more"),
        ("missing-key", "norm.bias"),
        ("shape", "thin.weight"),
    } <= reasons


def test_verify_one_number_for_a_state_in_any_layout(made: Made, tmp_path: Path) -> None:
    """VERIFY B185: padding, copies and the cut do not count; one bit of one moment does."""
    for name in ("zero0", "zero2off", "zero3", "lora", "tpfsdp", "hsdp", "fsdp1-FULL_SHARD"):
        assert dynadapt.open(made[name]).fingerprint() == made.print(name), name
    assert made.print("fsdp2") == made.print("hsdp")
    assert len({made.print(name) for name in ("zero0", "zero2", "zero3", "sgd")}) == 4
    state = _odd.plain()
    whole = dynadapt.open(saved(_odd.tree(state), tmp_path / "a.pt")).fingerprint()
    moment = state.optimizer.state[state.model.up.bias]["exp_avg"]
    moment.view(torch.int32)[3] ^= 1
    assert dynadapt.open(saved(_odd.tree(state), tmp_path / "b.pt")).fingerprint() != whole


def test_hang_metadata_that_ranks_disagree_on(made: Made, tmp_path: Path) -> None:
    """HANG B152, ATOMIC B161: ranks that see other files say so, and none waits for the others."""
    shutil.copytree(made["zero3"], tmp_path / "rank1")
    spoilt = next((tmp_path / "rank1" / "here").glob("*rank_2*optim_states.pt"))
    spoilt.unlink()
    for told in _ranks.pool(2).run(_disagree, str(made["zero3"]), str(tmp_path / "rank1")):
        assert told in {"missing-file", "files-differ"}


def _disagree(rank: int, world: int, one: str, two: str) -> Any:
    model = dynadapt.TrainState(m := _odd.odd(5), jobs.adamw(m))
    try:
        dynadapt.load(model, two if rank else one, timeout=20)
    except dynadapt.MigrationAborted as error:
        return error.reason
    return "loaded"
