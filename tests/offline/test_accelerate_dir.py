"""Folders of `Accelerator.save_state`: `load_state` and the next steps of real Accelerate jobs judge."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from dynadapt.elastic.checkpoint import open_checkpoint
from dynadapt.elastic.conversion import convert
from dynadapt.elastic.order_files import order_in_file
from dynadapt.elastic.targets import target_of
from dynadapt.errors import Refused
from tests import _ranks
from tests.live import jobs
from tests.offline import _accelerate

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 2

#: On a CPU torch itself dies of what Accelerate asks of FSDP1 with more ranks: whole state dicts, offloaded.
RANKS = {"fsdp1full": 1}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders that real jobs saved, by kind, each made once: (path, what rank 0 and the others had)."""

    @cache
    def of(kind: str, safe: bool = True) -> tuple[str, list[dict[str, Any]]]:
        where = str(tmp_path_factory.mktemp(kind) / "state")
        told = _ranks.pool(RANKS.get(kind, 2)).run(
            _accelerate.save, kind, where, STEPS, safe, timeout=200
        )
        return where, told

    return of


def loaded(
    kind: str, where: Any, ranks: int | None = None, by: str = "accelerate"
) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = _ranks.pool(ranks or RANKS.get(kind, 2)).run(
        _accelerate.load, kind, str(where), STEPS, by, timeout=200
    )
    return answers


def same(told: list[dict[str, Any]], answers: list[dict[str, Any]], *, steps: bool = True) -> None:
    """Every tensor, the script's object, rates and generators; and the steps after, bit for bit."""
    for one, two in zip(told, answers, strict=True):
        assert jobs.differing(one["tensors"], two["tensors"]) == []
        for name in ("batches", "random", "rates"):
            assert one[name] == two[name], name
        if steps:
            assert one["losses"] == two["losses"]
            assert one["rates after"] == two["rates after"]
            assert jobs.differing(one["after"], two["after"]) == []


READ = [
    "zero0-fp32",
    "zero1-bf16",
    "zero2-fp32",
    "zero3-bf16",
    "zero3-fp32",
    "fsdp2full",
    "fsdp1full",
    "fsdp2",
]


@pytest.mark.parametrize("kind", READ)
def test_what_is_read_is_what_the_job_held(saved: Any, kind: str) -> None:
    where, told = saved(kind)
    found = open_checkpoint(where)
    assert found.format == "accelerate"
    assert found.fingerprint() == told[0]["fingerprint"]
    assert found.aux["scheduler"].value["state"]["last_epoch"] == len(told) * STEPS
    assert [len(group["names"]) for group in found.aux["param_groups"].value] == [3, 3]


def test_a_plain_job_is_read_from_either_file(saved: Any) -> None:
    """Weights in others' safetensors are in no order: vectors of one shape are not told apart."""
    where, told = saved("ddp", False)
    assert open_checkpoint(where).fingerprint() == told[0]["fingerprint"]
    where, told = saved("ddp")
    with pytest.raises(Refused) as caught:  # `norm.weight` and `norm.bias` have one shape
        open_checkpoint(where)
    assert caught.value.reason == "ambiguous-order"


ORDER = [name for name, _ in jobs.net().named_parameters()]


def test_the_models_order_names_the_states_of_a_plain_job(saved: Any, tmp_path: Path) -> None:
    """What is written of it goes on bit for bit, and so does a job that loads it as it is."""
    where, told = saved("ddp")
    whole = saved("ddp", False)[0]
    assert dynadapt.open(where, order=ORDER).fingerprint() == told[0]["fingerprint"]
    assert dynadapt.open(where, model=jobs.net()).fingerprint() == told[0]["fingerprint"]
    assert dynadapt.diff(where, whole, order=ORDER).same
    report = dynadapt.convert(where, tmp_path / "a", "accelerate/fsdp2:dp=2", model=jobs.net())
    assert report.fingerprint == told[0]["fingerprint"]
    same(told, loaded("fsdp2", tmp_path / "a"), steps=False)
    dynadapt.convert(tmp_path / "a", tmp_path / "b", "accelerate/ddp:dp=2")
    same(told, loaded("ddp", tmp_path / "b"))
    for one, two in zip(told, loaded("ddp", where, by="dynadapt"), strict=True):
        assert one["fingerprint"] == two["fingerprint"]
        assert jobs.differing(one["tensors"], two["tensors"]) == []
        assert one["losses"] == two["losses"]


def test_an_order_that_leaves_one_out_is_refused(saved: Any, tmp_path: Path) -> None:
    where, _ = saved("ddp")
    with pytest.raises(Refused) as caught:
        dynadapt.open(where, order=ORDER[1:])
    assert [(f.reason, f.where) for f in caught.value.findings] == [("no-order", ORDER[0])]
    (tmp_path / "order.txt").write_text("\n".join(f"net.{name}" for name in ORDER))
    with pytest.raises(Refused):  # names of the target, which the source has without the prefix
        dynadapt.open(where, order=order_in_file(tmp_path / "order.txt")[0])
    order = [f"net.{name}" for name in ORDER]
    dynadapt.convert(where, tmp_path / "a", "dcp", order=order, add_prefix="net.")


SAME = [
    ("ddp", "accelerate/ddp:dp=2", "ddp"),
    ("ddp", "accelerate", "ddp"),
    ("ddp", "accelerate/zero3:dp=2,sub_group_size=100", "zero3-fp32"),
    ("zero3-fp32", "accelerate", "ddp"),
    ("zero2-bf16", "accelerate/zero3:dp=2,sub_group_size=100", "zero3-bf16"),
    ("zero3-bf16", "accelerate/zero1:dp=2", "zero1-bf16"),
    ("ddp", "accelerate/zero0:dp=2", "zero0-fp32"),
    ("ddp", "accelerate/fsdp1:dp=2", "fsdp2full"),
    ("fsdp2full", "accelerate/ddp:dp=2", "ddp"),
    ("fsdp2", "accelerate/zero3:dp=2,sub_group_size=100", "zero3-fp32"),
    ("ddp", "accelerate/fsdp2:dp=2", "fsdp2"),
    ("fsdp2full", "accelerate/zero2:dp=2", "zero2-fp32"),
]


@pytest.mark.parametrize(("kind", "spec", "to"), SAME)
def test_a_job_of_another_kind_goes_on(
    saved: Any, tmp_path: Path, kind: str, spec: str, to: str
) -> None:
    """All that it held arrives, and after a way back the first job goes on as if it never stopped."""
    where, told = saved(kind, False)
    source = open_checkpoint(where)
    report = convert(source, target_of(tmp_path / "new", spec))
    new = open_checkpoint(tmp_path / "new")
    assert report.fingerprint == source.fingerprint() == new.fingerprint()
    precision = (kind.partition("-")[2] or "fp32") == (to.partition("-")[2] or "fp32")
    same(told, loaded(to, tmp_path / "new"), steps=kind == to and precision)
    back = {"zero3": "zero3:dp=2,sub_group_size=100", "zero2": "zero2:dp=2"}
    form = kind.partition("-")[0]
    named = back.get(form, {"fsdp2": "fsdp2:dp=2", "fsdp2full": "fsdp1:dp=2"}.get(form, "ddp:dp=2"))
    convert(new, target_of(tmp_path / "back", f"accelerate/{named}"))
    same(told, loaded(kind, tmp_path / "back"))


def test_fsdp1_in_one_file(saved: Any, tmp_path: Path) -> None:
    where, told = saved("fsdp1full")
    convert(open_checkpoint(where), target_of(tmp_path / "new", "accelerate/ddp:dp=1"))
    convert(
        open_checkpoint(tmp_path / "new"), target_of(tmp_path / "back", "accelerate/fsdp1:dp=1")
    )
    same(told, loaded("fsdp1full", tmp_path / "back"))
    (answer,) = loaded("ddp", tmp_path / "new", ranks=1)
    assert jobs.differing(told[0]["tensors"], answer["tensors"]) == []


def test_another_number_of_ranks(saved: Any, tmp_path: Path) -> None:
    """Generators of ranks that there were not start anew, and the report says so."""
    where, told = saved("zero3-fp32")
    spec = "accelerate/zero3:dp=3,sub_group_size=100"
    report = convert(open_checkpoint(where), target_of(tmp_path / "new", spec))
    kinds = {o.path: o.kind for o in report.outcomes}
    assert kinds["user/accelerate/random_states_1.pkl"] == "exact"
    assert kinds["user/accelerate/random_states_2.pkl"] == "reseeded"
    answers = loaded("zero3-fp32", tmp_path / "new", ranks=3)
    for answer, one in zip(answers, told, strict=False):
        assert answer["random"] == one["random"]
    for answer in answers:
        assert jobs.differing(told[0]["tensors"], answer["tensors"]) == []
        assert answer["batches"] == STEPS


def test_small_files_survive_other_formats(saved: Any, tmp_path: Path) -> None:
    """Through DeepSpeed's own form and a plain torch file, and back."""
    where, told = saved("ddp", False)
    convert(open_checkpoint(where), target_of(tmp_path / "a", "zero3:dp=4,sub_group_size=100"))
    convert(open_checkpoint(tmp_path / "a"), target_of(tmp_path / "b", "torch"))
    torch.load(tmp_path / "b" / "checkpoint.pt", weights_only=True)
    convert(open_checkpoint(tmp_path / "b"), target_of(tmp_path / "c", "accelerate/ddp:dp=2"))
    same(told, loaded("ddp", tmp_path / "c"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model_1.safetensors", "several-models"),
        ("optimizer_1.bin", "several-models"),
        ("pytorch_model_fsdp_rank0.bin", "bad-file"),
    ],
)
def test_what_is_not_read_says_so(tmp_path: Path, name: str, reason: str) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    torch.save({"state": {}, "param_groups": [{"params": [0]}]}, tmp_path / "optimizer.bin")
    assert open_checkpoint(tmp_path).format == "accelerate"
    (tmp_path / name).write_bytes(b"")
    if reason == "bad-file":  # a file of a rank that is empty
        (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(Refused) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.reason == reason


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin", "pytorch_model.bin"])
def test_a_damaged_file_is_a_finding(saved: Any, tmp_path: Path, name: str) -> None:
    import shutil

    where, _ = saved("ddp", False)
    shutil.copytree(where, tmp_path / "x")
    whole = (tmp_path / "x" / name).read_bytes()
    (tmp_path / "x" / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Refused) as caught:
        open_checkpoint(tmp_path / "x")
    assert caught.value.reason == "bad-file"
    assert name in caught.value.findings[0].where


def test_a_layout_without_a_form_is_refused(saved: Any, tmp_path: Path) -> None:
    where, _ = saved("ddp", False)
    with pytest.raises(Refused) as caught:
        convert(open_checkpoint(where), target_of(tmp_path / "x", "accelerate/hsdp:rep=2,dp=2"))
    assert caught.value.reason == "bad-spec"
