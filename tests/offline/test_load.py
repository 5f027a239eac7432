"""`dynadapt.load`: a checkpoint that DeepSpeed wrote, into live jobs of every framework and number of ranks.

The judges are the frameworks' own gathers, and the run that never stopped: the two steps after it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import dynadapt
from dynadapt.elastic.place import MANIFEST
from tests import _ranks
from tests.live import jobs
from tests.offline import _live

Saved = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    where = str(tmp_path_factory.mktemp("fp32") / "zero3")
    run = _ranks.pool(4).run
    return where, run(_live.saved_by_deepspeed, "zero3-fp32", where, "adamw", timeout=200)[0]


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    where = str(tmp_path_factory.mktemp("bf16") / "zero3")
    run = _ranks.pool(4).run
    return where, run(_live.saved_by_deepspeed, "zero3-bf16", where, "adamw", timeout=200)[0]


def _judged(
    saved: Saved,
    world: int,
    kinds: list[str],
    *,
    exact: bool,
    recipe: str = "adamw",
    **options: Any,
) -> list[list[dict[str, Any]]]:
    where, then = saved
    answers: list[list[dict[str, Any]]] = _ranks.pool(world).run(
        _live.loaded, kinds, where, recipe, options, timeout=400
    )
    for answer in (answer for rank in answers for answer in rank):
        assert not _live.wrong(then, answer, 0.0 if exact else _live.far(answer["kind"]))
    return answers


#: Jobs that add up gradients as the saved one did, so that their steps are equal to its own, bit for bit.
ALIKE = [
    *("zero0-fp32", "zero1rr-fp32", "zero2-fp32", "zero3-fp32", "fsdp2", "fsdp2-off", "hsdp"),
    *("fsdp1-FULL_SHARD", "fsdp1-HYBRID_SHARD", "ddp", "ddp-owners", "plain"),
]


def test_bit_for_bit_as_if_it_had_never_stopped(fp32: Saved) -> None:
    """Four ranks into four, of every live adapter."""
    answers = _judged(fp32, 4, ALIKE, exact=True)
    fsdp2 = next(answer for answer in answers[0] if answer["kind"] == "fsdp2")
    assert not fsdp2["warnings"]
    assert fsdp2["outcomes"]["counters"] == "exact"
    whole = sum(t.numel() * 4 for t in fp32[1]["held"].values())
    read = {a["kind"]: a["read"] for a in answers[0]}
    assert whole <= read["fsdp2"] <= whole + 4 * 4 * 3  # the buffer goes to every rank
    assert read["plain"] == 4 * (whole + 3 * 4)


def test_into_two_ranks(fp32: Saved) -> None:
    _judged(fp32, 2, ["fsdp2", "plain", "zero3-fp32"], exact=True)


def test_into_three_ranks(fp32: Saved) -> None:
    _judged(fp32, 3, ["fsdp2", "zero3-fp32", "zero2-fp32", "fsdp1-SHARD_GRAD_OP"], exact=False)


def test_into_tensor_and_pipeline_parallel_jobs(fp32: Saved) -> None:
    """Where a rank has parts of tensors that no file has, parts of the model, and other names."""
    _judged(fp32, 4, ["tpfsdp", "pp", "ppfsdp", "pipe2-zero1-fp32"], exact=False)


def test_half_precision(bf16: Saved) -> None:
    """Masters are loaded, and the copies that training computes with follow them."""
    kinds = ["fsdp2-bf16", "zero1acc-bf16", "zero0fused-bf16", "zero3-bf16"]
    _judged(bf16, 4, kinds, exact=True)
    _judged(bf16, 4, ["autotp2-zero1-bf16"], exact=False)


def test_one_group_for_flat_parameters(tmp_path: Path) -> None:
    """What has one state for many parameters takes a checkpoint whose groups are one."""
    where = str(tmp_path / "saved")
    run = _ranks.pool(4).run
    then = run(_live.saved_by_deepspeed, "zero2-fp32", where, "even", timeout=200)[0]
    _judged((where, then), 4, ["fsdp1-FULL_SHARD-flat"], exact=True, recipe="even")


@pytest.mark.parametrize("to", ["universal", "zero1:dp=3"])
def test_a_conversion_of_it(fp32: Saved, tmp_path: Path, to: str) -> None:
    dynadapt.convert(fp32[0], tmp_path / "other", to)
    _judged((str(tmp_path / "other"), fp32[1]), 2, ["fsdp2"], exact=True)


def test_weights_alone(fp32: Saved, tmp_path: Path) -> None:
    """They are refused by a job with an optimizer, unless it is to keep its own state."""
    dynadapt.convert(fp32[0], tmp_path / "weights", "safetensors")
    told = _ranks.pool(2).run(
        _live.loaded_alone, "fsdp2", [str(tmp_path / "weights")], (-1, ""), timeout=200
    )
    assert [answer["reason"] for answer in told] == ["missing-key"] * 2
    assert not told[0]["changed"]
    where = str(tmp_path / "weights")
    options = {"allow": {"missing"}}
    answers = _ranks.pool(2).run(_live.loaded, ["fsdp2"], where, "adamw", options, timeout=200)
    held = answers[0][0]["held"]
    weights = {name: held[name] for name in fp32[1]["held"] if name.endswith("/param")}
    assert not jobs.differing({n: fp32[1]["held"][n] for n in weights}, weights)


@pytest.mark.parametrize("phase", ["describe", "move", "finish", "certify", "commit"])
def test_a_rank_that_fails(bf16: Saved, phase: str) -> None:
    """All get its error; the job can still be loaded, and then goes on as it should."""
    where, then = bf16
    told = _ranks.pool(4).run(
        _live.loaded_alone, "zero3-bf16", [where], (2, phase), where, timeout=200
    )
    for answer in told:
        assert (answer["phase"], answer["seat"] % 4) == (phase, 2)
        assert "on purpose" in answer["text"]
        assert phase != "describe" or not answer["changed"]
        assert not jobs.differing(then["held"], answer["held"])
        assert answer["losses"] == then["losses"]


def _copy(saved: Saved, tmp_path: Path, name: str = "copy") -> Path:
    shutil.copytree(saved[0], tmp_path / name)
    return tmp_path / name


def _optimizer_file(folder: Path) -> Path:
    return next(folder.glob("here/*pp_rank_1*optim*.pt"))


def _truncated(folder: Path) -> None:
    file = _optimizer_file(folder)
    file.write_bytes(file.read_bytes()[:-1000])


def _garbled(folder: Path) -> None:
    file = _optimizer_file(folder)
    data = bytearray(file.read_bytes())
    at = data.find(b"data.pkl") + 80
    data[at : at + 64] = bytes(64)
    file.write_bytes(data)


def _lost(folder: Path) -> None:
    _optimizer_file(folder).unlink()


@pytest.mark.parametrize("spoil", [_truncated, _garbled, _lost])
def test_a_spoilt_checkpoint_changes_nothing(bf16: Saved, tmp_path: Path, spoil: Any) -> None:
    where = _copy(bf16, tmp_path)
    spoil(where)
    told = _ranks.pool(2).run(_live.loaded_alone, "fsdp2-bf16", [str(where)], (-1, ""), timeout=200)
    assert told[0]["phase"] == "describe"
    assert not told[0]["changed"]
    assert {answer["text"] for answer in told} == {told[0]["text"]}


def test_a_bit_that_flipped_since_it_was_written(bf16: Saved, tmp_path: Path) -> None:
    """The manifest of a checkpoint that dynadapt wrote has the sum of every tensor; torch's file its own."""
    where = tmp_path / "spoilt"
    dynadapt.convert(bf16[0], where, "zero3:dp=2")
    buffer = next(b for n, b in dynadapt.open(where).buffers.items() if "#exp_avg.0" in n)
    with Path(buffer.path).open("r+b") as file:
        file.seek(buffer.offset + 5)
        byte = file.read(1)
        file.seek(buffer.offset + 5)
        file.write(bytes([byte[0] ^ 1]))
    told = _ranks.pool(2).run(_live.loaded_alone, "fsdp2-bf16", [str(where)], (-1, ""), timeout=200)
    assert (told[0]["phase"], told[0]["reason"]) == ("plan", "certificate")
    assert told[0]["findings"][0]["where"].endswith("/exp_avg")
    assert "when it was written" in told[0]["text"]
    assert not told[0]["changed"]
    (where / MANIFEST).unlink()
    told = _ranks.pool(2).run(_live.loaded_alone, "fsdp2-bf16", [str(where)], (-1, ""), timeout=200)
    assert (told[1]["phase"], told[1]["reason"]) == ("plan", "certificate")
    assert "is written beside" in told[1]["text"]
    assert not told[1]["changed"]


def test_ranks_that_see_other_files(bf16: Saved, tmp_path: Path) -> None:
    """A file system that is not shared: one is on step, the other has a file cut short or none at all."""
    where = _copy(bf16, tmp_path)
    with _optimizer_file(where).open("ab") as file:
        file.write(bytes(8))  # a zip is found from its end, so this may still be read
    paths = [bf16[0], str(where)]
    told = _ranks.pool(2).run(_live.loaded_alone, "fsdp2-bf16", paths, (-1, ""), timeout=200)
    assert [answer["reason"] for answer in told] == ["files-differ"] * 2
    assert "on seat" in told[0]["text"]
    assert "optim_states.pt" in told[0]["text"]
    paths = [bf16[0], str(tmp_path / "nothing")]
    told = _ranks.pool(2).run(_live.loaded_alone, "fsdp2-bf16", paths, (-1, ""), timeout=200)
    assert "there is no such file or folder" in told[0]["text"]
    assert told[0]["seat"] % 2 == 1


def test_another_model(bf16: Saved, tmp_path: Path) -> None:
    """Everything that does not fit, by name; nothing is changed."""
    dynadapt.convert(bf16[0], tmp_path / "part", "zero1:dp=1", exclude=["up.*"])
    told = _ranks.pool(2).run(
        _live.loaded_alone, "fsdp2-bf16", [str(tmp_path / "part")], (-1, ""), timeout=200
    )
    assert told[0]["reason"] == "missing-key"
    assert {f["where"].partition("/")[0] for f in told[0]["findings"]} == {"up.weight", "up.bias"}
    assert not told[0]["changed"]


@pytest.mark.parametrize("to", ["universal", "deepspeed/zero1:dp=1"])
def test_counts_go_on(tmp_path: Path, to: str) -> None:
    """Of a job that skipped steps DeepSpeed saves, when it was loaded, what it saved before."""
    kinds = ["zero2-fp16", "zero3-fp16"]
    one, two = _ranks.pool(2).run(_live.saved_again, kinds, str(tmp_path), to, timeout=200)[0]
    assert one == two
    assert 0 < one["skipped_steps"] < one["global_steps"] == 5
    assert one["lr_scheduler"]["last_batch_iteration"] == 4 - one["skipped_steps"]
