"""Files that each rank of FSDP1 wrote by itself: FSDP's own gathers of the same job are the judge."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dynadapt
from dynadapt.errors import Refused
from tests import _ranks
from tests.live import jobs
from tests.offline import _ranks_files

if TYPE_CHECKING:
    from pathlib import Path

    from dynadapt.elastic.checkpoint import Checkpoint

CASES = [
    ("SHARDED", True, False, "accelerate", 2),
    ("SHARDED", False, True, "world", 3),
    pytest.param(("SHARDED", True, True, "one", 4), marks=pytest.mark.nightly),
    ("LOCAL", True, False, "accelerate", 3),
    pytest.param(("LOCAL", False, False, "one", 2), marks=pytest.mark.nightly),
]
FLATS = ("LOCAL", False, False, "one", 2)


def _save(where: Path, case: tuple[Any, ...]) -> list[dict[str, Any]]:
    *how, style, ranks = case
    pool = _ranks.pool(ranks)
    answers: list[dict[str, Any]] = pool.run(
        _ranks_files.save, *how, str(where), style, timeout=200
    )
    return answers


@pytest.fixture(scope="module")
def flats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Local flats, saved once, and what the ranks had."""
    where = tmp_path_factory.mktemp("flats")
    return where, _save(where, FLATS)


def _check(found: Checkpoint, answer: dict[str, Any]) -> None:
    assert not found.problems()
    names = {alias: spec.key.name for spec in found.keys for alias in spec.aliases}
    for key, tensor in answer["tensors"].items():
        name, _, slot = key.rpartition("/")
        own = found.tensors[f"{names.get(name, name)}/{slot}"]
        assert np.array_equal(own, tensor.numpy()), key
    assert found.fingerprint() == answer["live"]
    assert {v["step"] for v in found.scalars.values()} == {2}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_what_ranks_saved_is_what_they_held(tmp_path: Path, case: tuple[Any, ...]) -> None:
    answers = _save(tmp_path / "saved", case)
    model = jobs.net() if case[0] == "LOCAL" else None
    found = dynadapt.open(tmp_path / "saved", model=model)
    _check(found, answers[0])
    out = tmp_path / "out"
    report = dynadapt.convert(tmp_path / "saved", out, "dcp/fsdp2:dp=2", model=model)
    assert report.fingerprint == answers[0]["live"] == dynadapt.open(out).fingerprint()


def test_training_goes_on_under_fsdp2(flats: tuple[Path, list[dict[str, Any]]]) -> None:
    where, answers = flats
    _check(dynadapt.open(where, model=jobs.net()), answers[0])
    losses = _ranks.pool(2).run(_ranks_files.load, str(where), True, timeout=200)
    assert losses == [answer["losses"] for answer in answers]


def test_states_that_fsdp2_numbers_get_their_names(tmp_path: Path) -> None:
    live = _ranks.pool(3).run(_ranks_files.save_fsdp2, str(tmp_path), timeout=200)
    found = dynadapt.open(tmp_path)
    assert {found.fingerprint()} == set(live)


def test_flats_without_the_model_are_refused_by_name(
    flats: tuple[Path, list[dict[str, Any]]],
) -> None:
    with pytest.raises(Refused, match="--model") as caught:
        dynadapt.open(flats[0])
    assert caught.value.reason == "no-order"


@pytest.mark.parametrize(
    ("orig", "ranks"),
    [
        (False, 2),
        (True, 2),
        *(pytest.param(o, 3, marks=pytest.mark.nightly) for o in (False, True)),
    ],
)
def test_numbered_states_of_flats(tmp_path: Path, orig: bool, ranks: int) -> None:
    """Of flats, or of what each rank has of each parameter; where the model is not known, refused by name."""
    answers = _save(tmp_path, ("LOCAL", orig, False, "numbered", ranks))
    _check(dynadapt.open(tmp_path, model=jobs.net()), answers[0])
    if ranks == 2:
        losses = _ranks.pool(2).run(_ranks_files.load, str(tmp_path), True, timeout=200)
        assert losses == [answer["losses"] for answer in answers]
    with pytest.raises(Refused, match="--model") as caught:
        dynadapt.open(tmp_path)
    assert caught.value.reason == "no-order"


def test_numbered_states_of_sharded_tensors_are_refused_by_name(tmp_path: Path) -> None:
    """Nothing says which flats there were."""
    _save(tmp_path, ("SHARDED", True, False, "numbered", 2))
    with pytest.raises(Refused, match="optim_state_dict") as caught:
        dynadapt.open(tmp_path, model=jobs.net())
    assert caught.value.reason == "unsupported-state"


def test_files_that_changed_places_are_told(
    flats: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """By the name that torch wrote into each."""
    for rank in (0, 1):
        shutil.copy(flats[0] / f"state_rank_{rank}.pt", tmp_path / f"state_rank_{1 - rank}.pt")
    with pytest.raises(Refused, match="was written as state_rank_1") as caught:
        dynadapt.open(tmp_path, model=jobs.net())
    assert caught.value.reason == "mixed-files"


def test_a_rank_that_is_missing_is_told(
    flats: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    for rank in (0, 2):
        shutil.copy(flats[0] / "state_rank_0.pt", tmp_path / f"state_rank_{rank}.pt")
    with pytest.raises(Refused, match="rank") as caught:
        dynadapt.open(tmp_path)
    assert caught.value.reason == "missing-file"
