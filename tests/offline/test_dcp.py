"""Torch distributed checkpoints: real FSDP2, FSDP1 and DDP write them, and torch's own loader judges."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

from dynadapt.elastic.checkpoint import Checkpoint, open_checkpoint
from dynadapt.errors import Refused
from dynadapt.transport.stream import Sources
from dynadapt.vps.box import Box
from tests import _ranks
from tests.offline import _dcp

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _arrays(found: Checkpoint) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of a checkpoint, by key."""
    sources = Sources(found.layout, found.buffers)
    return {
        str(spec.key): sources.read(spec.key, Box.whole(spec.shape))
        for spec in found.layout.keys
        if spec.moves
    }


SAVED = [
    ("fsdp2", "adamw", 4, "app"),
    ("fsdp2", "sgd", 4, "model"),
    ("fsdp2-bf16", "adamw", 2, "flat"),
    ("fsdp2", "adamw", 3, "root"),
    ("hsdp", "adamw", 4, "flat"),
    ("tpfsdp", "adamw", 4, "model"),
    ("fsdp2dim1", "adamw", 4, "app"),
    ("fsdp1-FULL_SHARD", "adamw", 4, "model"),
    ("fsdp1-SHARD_GRAD_OP-flat", "even", 3, "app"),
    ("fsdp1-HYBRID_SHARD", "sgd", 4, "flat"),
    ("ddp", "adamw", 2, "app"),
    ("ddp", "even", 2, "raw"),
    ("plain", "adamw", 1, "model"),
]


@pytest.mark.parametrize(("kind", "recipe", "ranks", "form"), SAVED)
def test_what_was_saved_is_the_live_state(
    tmp_path: Path, kind: str, recipe: str, ranks: int, form: str
) -> None:
    """The fingerprint is the live job's; hyperparameters, steps, ties and buffers are told right."""
    where = str(tmp_path / "saved")
    live = _ranks.pool(ranks).run(_dcp.save, kind, recipe, form, where, 2, timeout=200)[0]
    found = open_checkpoint(where)
    assert found.problems() == ()
    assert found.fingerprint() == live
    by_key = {str(spec.key): spec for spec in found.layout.keys}
    assert by_key["embed.weight/param"].aliases == ("head.weight",)
    assert by_key["scale/buffer"].kind == "buffer"
    assert not by_key["frozen.weight/param"].trainable
    groups = found.aux["param_groups"].value
    decays = {"adamw": [0.1, 0.0], "sgd": [0.1, 0.0], "even": [0.1]}[recipe]
    assert [group["hyper"]["weight_decay"] for group in groups] == decays
    assert "embed.weight" in groups[0]["names"]
    steps = {values["step"] for values in found.scalars.values()}
    assert steps == (set() if recipe == "sgd" else {2})
    assert found.aux["optimizer"].value == ("SGD" if recipe == "sgd" else "Adam")
    if form == "app":
        assert found.aux["user/epoch"].value == 3
        assert found.aux["user/loader"].value == {"at": [1, 2]}


@pytest.mark.parametrize(
    ("kind", "ranks", "form"),
    [
        ("fsdp2", 4, "app"),
        ("fsdp1-FULL_SHARD", 4, "flat"),
        ("ddp", 2, "weights"),
        ("tpfsdp", 4, "weights"),
    ],
)
def test_torch_reads_the_same_bits(tmp_path: Path, kind: str, ranks: int, form: str) -> None:
    """`dcp_to_torch_save` of the same files."""
    where, file = tmp_path / "saved", tmp_path / "all.pt"
    _ranks.pool(ranks).run(_dcp.save, kind, "adamw", form, str(where), 2, timeout=200)
    dcp_to_torch_save(where, file)
    tree = torch.load(file, weights_only=True)
    tree = tree.get("app", tree)
    weights = tree.get("model", tree)
    states = tree.get("optim", tree.get("optimizer", {}))
    ours, seen = _arrays(open_checkpoint(where)), set()
    for key, array in ours.items():
        name, _, slot = key.rpartition("/")
        theirs = weights[name] if slot in {"param", "buffer"} else None
        if theirs is None and form == "flat":
            theirs = states[f"state.{name}.{slot}"]
        elif theirs is None:
            theirs = states["state"][name][slot]
        assert np.array_equal(theirs.numpy().view("u4"), array.view("u4")), key
        seen.add(name)
    assert seen | {"head.weight"} == set(weights) - ({"optimizer"} if form == "root" else set())


class _Marks:
    """Would leave a file behind if anything called it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


def test_nothing_in_a_hostile_checkpoint_is_executed(tmp_path: Path) -> None:
    """Neither what `.metadata` pickles, nor an object in a `.distcp`; torch's own loader runs both."""
    marks = [str(tmp_path / name) for name in ("first", "second", "third")]
    where = tmp_path / "saved"
    tree = {"model": {"w": torch.randn(3, 4)}, "note": _Marks(marks[0])}
    dcp.save(tree, checkpoint_id=where, no_dist=True)
    meta = pickle.loads((where / ".metadata").read_bytes())
    meta.storage_meta = _Marks(marks[1])
    meta.planner_data["else"] = (_Marks(marks[2]),)
    (where / ".metadata").write_bytes(pickle.dumps(meta))
    found = open_checkpoint(where)
    assert [str(spec.key) for spec in found.layout.keys] == ["w/param"]
    assert np.array_equal(_arrays(found)["w/param"], tree["model"]["w"].numpy())
    assert not any(os.path.exists(path) for path in marks)


def _plain(where: Path) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    names, states = get_state_dict(model, optimizer)
    dcp.save({"model": names, "optimizer": states}, checkpoint_id=where, no_dist=True)
    return where


def test_every_cut_and_flip_is_a_finding(tmp_path: Path) -> None:
    """Cut at any length and changed at any place: findings, or a checkpoint, and never a traceback."""
    where = _plain(tmp_path / "saved")
    whole = open_checkpoint(where).fingerprint()
    random = np.random.default_rng(0)
    reasons: set[str] = set()
    for name in (".metadata", "__0_0.distcp"):
        path = where / name
        data = path.read_bytes()
        cuts = [data[:n] for n in random.integers(0, len(data), 60)]
        flips = []
        for at, value in zip(
            random.integers(0, len(data), 240), random.integers(0, 256, 240), strict=True
        ):
            flips.append(data[:at] + bytes([value]) + data[at + 1 :])
        for changed in (*cuts, *flips):
            path.write_bytes(changed)
            try:
                found = open_checkpoint(where)
                if not found.problems():
                    found.sums()
            except Refused as error:
                reasons |= {finding.reason for finding in error.findings}
        path.write_bytes(data)
    assert open_checkpoint(where).fingerprint() == whole
    assert {"bad-pickle", "bad-file", "truncated-file"} <= reasons


def _changed(where: Path, change: Any) -> None:
    meta = pickle.loads((where / ".metadata").read_bytes())
    change(meta)
    (where / ".metadata").write_bytes(pickle.dumps(meta))


def _first(meta: Any) -> Any:
    return next(iter(meta.storage_data.values()))


def _chunk(meta: Any) -> Any:
    return meta.state_dict_metadata["model.weight"].chunks[0]


LIES = {
    "up": (lambda m: setattr(_first(m), "relative_path", "../other/x.distcp"), "path-traversal"),
    "root": (lambda m: setattr(_first(m), "relative_path", "/etc/passwd"), "path-traversal"),
    "gone": (lambda m: setattr(_first(m), "relative_path", "gone.distcp"), "missing-file"),
    "far": (lambda m: setattr(_first(m), "offset", 1 << 62), "truncated-file"),
    "before": (lambda m: setattr(_first(m), "offset", -1), "bad-file"),
    "zstd": (
        lambda m: setattr(_first(m), "transform_descriptors", ["zstd"]),
        "unsupported-format",
    ),
    "wide": (lambda m: setattr(_chunk(m), "sizes", torch.Size([3, 6])), "bad-file"),
    "part": (lambda m: setattr(_chunk(m), "sizes", torch.Size([2, 5])), "bad-file"),
    "nowhere": (lambda m: m.storage_data.clear(), "bad-file"),
    "below": (
        lambda m: m.planner_data.update({"model.bias": ("model", "weight", "x")}),
        "bad-file",
    ),
    "deep": (lambda m: m.planner_data.update({"model.bias": ("a",) * 100_000}), "bad-file"),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies(tmp_path: Path, lie: str) -> None:
    change, reason = LIES[lie]
    where = _plain(tmp_path / "saved")
    _changed(where, change)
    with pytest.raises(Refused) as caught:
        open_checkpoint(where)
    assert reason in {finding.reason for finding in caught.value.findings}


def test_a_chunk_that_nobody_saved_is_missed(tmp_path: Path) -> None:
    where = _plain(tmp_path / "saved")
    _changed(where, lambda m: setattr(m.state_dict_metadata["model.weight"], "chunks", []))
    (problem,) = open_checkpoint(where).problems()
    assert problem.reason == "uncovered"
    assert "weight/param" in problem.where


def test_files_without_their_metadata(tmp_path: Path) -> None:
    where = _plain(tmp_path / "saved")
    (where / ".metadata").unlink()
    with pytest.raises(Refused) as caught:
        open_checkpoint(where)
    assert caught.value.reason == "missing-file"
