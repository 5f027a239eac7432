"""Checkpoints of older DeepSpeed are read as what they are, or refused for what they lack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import dynadapt
from dynadapt.elastic.checkpoint import open_checkpoint
from dynadapt.elastic.conversion import convert
from dynadapt.elastic.targets import target_of
from dynadapt.errors import Refused
from tests import _ranks
from tests.live import jobs
from tests.offline._older import VERSIONS, aged

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def _save(rank: int, world: int, kind: str, where: str, how: Mapping[str, bool]) -> str:
    """Train and save; the live job's fingerprint."""
    model = jobs.net()
    if how["all_trained"]:
        model.requires_grad_()
    config = {}
    if how.get("elastic"):
        stage, options, _ = jobs.ENGINES[kind.partition("-")[0]]
        config["zero_optimization"] = {"stage": stage, **options, "elastic_checkpoint": True}
    optimizer = jobs.even(model) if how["one_group"] else None
    engine = jobs.deepspeed_engine(kind, model, optimizer, **config)
    for number in range(2):
        jobs.step(engine, number)
    engine.save_checkpoint(where)
    return dynadapt.fingerprint(engine)


TWO = {"all_trained": False, "one_group": False}
ALL_TWO = {"all_trained": True, "one_group": False}
ALL_ONE = {"all_trained": True, "one_group": True}

CASES = [
    ("zero1-bf16", 2, TWO, ("0.8.3", "0.6.7", "0.5.10", "0.4.5")),
    ("zero2rr-fp32", 3, TWO, ("0.6.7", "0.4.5")),
    ("zero2-fp16", 4, TWO, ("0.5.10", "0.4.5")),
    ("zero1acc-bf16", 2, TWO, ("0.8.3", "0.6.7")),
    ("zero3-bf16", 2, ALL_TWO, ("0.8.3", "0.6.7", "0.5.10", "0.4.5")),
    ("zero2-bf16", 3, ALL_ONE, ("0.4.5", "0.3.16")),
    ("zero3-fp32", 2, ALL_ONE, ("0.3.16",)),
]


@pytest.mark.parametrize(("kind", "ranks", "how", "versions"), CASES)
def test_what_older_versions_wrote_is_the_same_state(
    tmp_path: Path, kind: str, ranks: int, how: dict[str, bool], versions: tuple[str, ...]
) -> None:
    """Shapes elsewhere or in one list, other padding, no lists of ties, buffers and frozen weights."""
    new = tmp_path / "new"
    live = _ranks.pool(ranks).run(_save, kind, str(new), how, timeout=200)[0]
    now = open_checkpoint(new)
    assert now.fingerprint() == live
    for version in versions:
        assert version in VERSIONS
        found = open_checkpoint(aged(new, tmp_path / version, version))
        assert found.fingerprint() == live, version
        assert found.scalars == now.scalars
        have = {s.key: (s.aliases, s.trainable, s.group, s.order) for s in found.layout.keys}
        assert have == {s.key: (s.aliases, s.trainable, s.group, s.order) for s in now.layout.keys}
        elastic = kind[:5] != "zero3" and version in {"0.4.5", "0.3.16"}
        assert found.aux.get("param_groups") == (None if elastic else now.aux["param_groups"])


def test_todays_elastic_checkpoints(tmp_path: Path) -> None:
    """As DeepSpeed itself writes them: states by group, and no hyperparameters, which a report says."""
    where = str(tmp_path / "old")
    live = _ranks.pool(3).run(_save, "zero2-bf16", where, {**TWO, "elastic": True}, timeout=200)[0]
    found = open_checkpoint(where)
    assert found.fingerprint() == live
    assert "param_groups" not in found.aux
    report = convert(found, target_of(tmp_path / "new", "zero3:dp=2"))
    assert report.fingerprint == live
    assert [o.kind for o in report.outcomes if o.path == "param_groups"] == ["dropped"]


def test_what_an_older_version_left_out_is_refused(tmp_path: Path) -> None:
    """Frozen weights at stage 3; all parameters of all groups in one list; sub-partitions of stage 1."""
    _ranks.pool(2).run(_save, "zero3-bf16", str(tmp_path / "3"), TWO, timeout=200)
    _ranks.pool(2).run(_save, "zero1-bf16", str(tmp_path / "1"), TWO, timeout=200)
    sub = aged(tmp_path / "1", tmp_path / "sub", "0.4.5")
    for path in sub.glob("*/*optim_states.pt"):
        tree = torch.load(path, weights_only=False)
        state = tree["optimizer_state_dict"]
        flats = state.pop("single_partition_of_fp32_groups")
        state["local_sub_partitions_of_fp32_groups"] = [[flat] for flat in flats]
        torch.save(tree, path)
    for folder, reason, words in (
        (aged(tmp_path / "3", tmp_path / "frozen", "0.6.7"), "missing-key", "frozen.weight"),
        (aged(tmp_path / "1", tmp_path / "all", "0.3.16"), "geometry", "lists"),
        (sub, "unsupported-stage", "sub-partitions"),
    ):
        with pytest.raises(Refused, match=words) as caught:
            open_checkpoint(folder)
        assert caught.value.reason == reason
