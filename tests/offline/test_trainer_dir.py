"""Folders of transformers' Trainer: real ones are read, and Trainer itself resumes what is written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

import dynadapt
from dynadapt.errors import Refused
from tests import _ranks
from tests.offline import _accelerate, _trainer

if TYPE_CHECKING:
    from pathlib import Path

LAST = 4
"""Steps of the run that never stops; it saves after two."""


def _run(kind: str, where: Path, steps: int = LAST, resume: Path | None = None) -> dict[str, Any]:
    at = None if resume is None else str(resume)
    told = _ranks.pool(2).run(_trainer.run, kind, str(where), steps, at, timeout=200)
    assert told[0]["fingerprint"] == told[1]["fingerprint"]
    answer: dict[str, Any] = told[0]
    return answer


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs by kind, each made once: their folder, and what they did."""

    @cache
    def of(kind: str) -> tuple[Path, dict[str, Any]]:
        where = tmp_path_factory.mktemp(kind)
        return where, _run(kind, where)

    return of


def test_what_is_read_is_what_trainer_held(ran: Any) -> None:
    """The states are numbered, the weights in no order: the config beside them says it."""
    where, told = ran("plain")
    found = dynadapt.open(where / f"checkpoint-{LAST}")
    assert found.format == "trainer"
    assert found.fingerprint() == told["fingerprint"]
    assert found.aux["counters"].value == {"global_steps": LAST}
    assert found.aux["scheduler"].value["state"]["last_epoch"] == LAST
    assert [len(group["names"]) for group in found.aux["param_groups"].value] == [15, 5]
    assert dynadapt.diff(where, where / f"checkpoint-{LAST}").same  # the last of several


@pytest.mark.parametrize(
    ("kind", "between", "back"),
    [
        ("plain", "zero3:dp=3", "trainer/ddp:dp=2"),
        pytest.param("zero2", "universal", "trainer/zero2:dp=2", marks=pytest.mark.nightly),
    ],
)
def test_trainer_resumes_as_if_nothing_had_been(
    ran: Any, tmp_path: Path, kind: str, between: str, back: str
) -> None:
    """Through another format and back: the same losses and bits, dropout and schedule included."""
    where, told = ran(kind)
    source = dynadapt.open(where / "checkpoint-2")
    dynadapt.convert(source, tmp_path / "a", between)
    report = dynadapt.convert(tmp_path / "a", tmp_path / "checkpoint-2", back)
    assert report.fingerprint == source.fingerprint()
    assert [o for o in report.outcomes if o.kind == "dropped" and "rng_state" in o.path] == []
    answer = _run(kind, tmp_path / "new", resume=tmp_path / "checkpoint-2")
    for step in (3, 4):
        assert answer["losses"][step] == told["losses"][step]
    assert answer["fingerprint"] == told["fingerprint"]


@pytest.mark.nightly
def test_a_job_without_deepspeed_becomes_one_with_it(ran: Any, tmp_path: Path) -> None:
    where, told = ran("plain")
    dynadapt.convert(where / "checkpoint-2", tmp_path / "a", "trainer/zero2:dp=2")
    answer = _run("zero2", tmp_path / "new", resume=tmp_path / "a")
    assert answer["losses"][3] == told["losses"][3]  # the same weights
    assert answer["losses"][4] == pytest.approx(told["losses"][4], rel=1e-5)  # and moments


def test_sharded_states_of_fsdp(tmp_path: Path) -> None:
    """Trainer saves them by Accelerate's functions, with its own files beside them."""
    folder = tmp_path / "checkpoint-2"
    told = _ranks.pool(2).run(_accelerate.save, "fsdp2", str(folder), 2, timeout=200)
    (folder / "scheduler.bin").rename(folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
    found = dynadapt.open(folder)
    assert found.format == "trainer"
    assert found.fingerprint() == told[0]["fingerprint"]
    assert found.aux["counters"].value == {"global_steps": 2}


def test_without_a_config_the_user_says_the_order(ran: Any, tmp_path: Path) -> None:
    where, _ = ran("plain")
    copy = tmp_path / "checkpoint-2"
    shutil.copytree(where / "checkpoint-2", copy)
    for config in ("{}", '{"model_type": "llama", "num_hidden_layers": 1000000000}'):
        (copy / "config.json").write_text(config)
        with pytest.raises(Refused) as caught:
            dynadapt.open(copy)
        assert [f.reason for f in caught.value.findings] == ["ambiguous-order", "no-order"]
    found = dynadapt.open(copy, model=_trainer.model_of(3))
    assert found.fingerprint() == dynadapt.open(where / "checkpoint-2").fingerprint()


def test_a_job_that_was_not_trainers_gets_the_step(ran: Any, tmp_path: Path) -> None:
    """And it is said what Trainer will miss."""
    where, _ = ran("plain")
    source = dynadapt.open(where / "checkpoint-2")
    kept = ("param_groups", "optimizer")
    aux = tuple(item for item in source.own.aux if item.path in kept)
    source = replace(source, own=replace(source.own, aux=aux))
    report = dynadapt.convert(source, tmp_path / "new", "trainer")
    assert json.loads((tmp_path / "new" / "trainer_state.json").read_text()) == {"global_step": 2}
    kinds = {outcome.path: outcome.kind for outcome in report.outcomes}
    assert kinds["user/trainer/trainer_state.json"] == "derived"
    assert kinds["scheduler"] == "dropped"
    (tmp_path / "new" / "trainer_state.json").unlink()
    assert dynadapt.open(tmp_path / "new").format == "safetensors"
