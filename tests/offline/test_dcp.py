"""Torch distributed checkpoints: real FSDP2, FSDP1 and DDP write them, and torch's own loader judges."""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

from dynadapt.adapters.checkpoints import _dcp_write
from dynadapt.elastic.checkpoint import Checkpoint, open_checkpoint
from dynadapt.elastic.conversion import convert
from dynadapt.elastic.targets import target_of
from dynadapt.errors import Refused
from dynadapt.transport.sources import Sources
from dynadapt.vps.box import Box
from tests import _ranks
from tests.live import jobs
from tests.offline import _dcp, _made

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


GOES_ON = [
    ("fsdp2", "adamw", 4, "dcp", "fsdp2", 4),
    ("fsdp2", "sgd", 4, "dcp/fsdp2:dp=3", "fsdp2", 4),
    ("fsdp2-bf16", "adamw", 4, "dcp/fsdp2:dp=4", "fsdp2-bf16", 4),
    ("fsdp1-FULL_SHARD", "adamw", 2, "dcp/fsdp1:dp=2", "fsdp1-FULL_SHARD", 2),
    ("ddp", "adamw", 2, "dcp/ddp:dp=3", "ddp", 2),
]


@pytest.mark.parametrize(("kind", "recipe", "ranks", "spec", "to", "to_ranks"), GOES_ON)
def test_the_job_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, kind: str, recipe: str, ranks: int, spec: str, to: str, to_ranks: int
) -> None:
    """Every loss and every bit, two steps on; and torch reads what is written as we do."""
    old, new = tmp_path / "old", tmp_path / "new"
    live = _ranks.pool(ranks).run(_dcp.save, kind, recipe, "app", str(old), 2, timeout=200)[0]
    report = convert(open_checkpoint(old), target_of(new, spec))
    assert report.fingerprint == live == open_checkpoint(new).fingerprint()
    assert open_checkpoint(new).own.written == (
        "dcp" if "ddp" in spec else spec.replace("p1", "p2")
    )
    assert open_checkpoint(new).aux["user/loader"].value == {"at": [1, 2]}
    pool = _ranks.pool(to_ranks)
    answers = pool.run(_dcp.load, to, recipe, "model", str(new), 2, timeout=200)
    whole = pool.run(_dcp.unbroken, kind, recipe, 2, timeout=200)
    for answer, true in zip(answers, whole, strict=True):
        assert answer["live"] == live
        assert jobs.differing(answer["tensors"], true["tensors"]) == []
        assert answer["losses"] == true["losses"]
        assert jobs.differing(answer["after"], true["after"]) == []


@pytest.mark.parametrize(
    ("kind", "ranks", "spec", "to", "to_ranks"),
    [
        ("zero3-fp32", 4, "dcp/fsdp2:dp=4", "fsdp2", 4),
        ("zero3-bf16", 4, "dcp/fsdp2:dp=4", "fsdp2-bf16", 2),
        ("zero2-bf16", 2, "dcp", "fsdp2-bf16", 4),
        ("zero3-fp32", 2, "dcp/fsdp2:dp=2", "fsdp1-FULL_SHARD", 4),
        ("zero3-fp32", 2, "dcp/hsdp:rep=2,dp=2", "hsdp", 4),
    ],
)
def test_from_deepspeed_to_torch(
    tmp_path: Path, kind: str, ranks: int, spec: str, to: str, to_ranks: int
) -> None:
    """torch's loader gets every master and moment, and the next step is the one they give."""
    old, new = tmp_path / "old", tmp_path / "new"
    pool = _ranks.pool(ranks)
    held = pool.run(_made.save_deepspeed, kind, str(old), 2, {}, timeout=200)[0]
    report = convert(open_checkpoint(old), target_of(new, spec))
    assert report.fingerprint == open_checkpoint(new).fingerprint()
    answers = _ranks.pool(to_ranks).run(_dcp.load, to, "adamw", "model", str(new), 2, timeout=200)
    for answer in answers:
        assert jobs.differing(held, answer["tensors"]) == []
        # What is frozen is bf16 in a bf16 engine, and fp32 where FSDP2 computes in bf16.
        assert (answer["live"] == report.fingerprint) == (kind == "zero3-fp32")
        assert answer["hyper"] == [0.1, 0.0]
        assert answer["steps"] == {2.0}
        assert answer["wrong"] == []


def test_from_torch_to_deepspeed(tmp_path: Path) -> None:
    """A checkpoint of FSDP2 on 4 ranks in DeepSpeed engines on 2, which hold it and step on."""
    old, new = tmp_path / "old", tmp_path / "new"
    _ranks.pool(4).run(_dcp.save, "fsdp2", "adamw", "app", str(old), 2, timeout=200)
    found = open_checkpoint(old)
    convert(found, target_of(new, "zero3:dp=2,sub_group_size=100"))
    ours = _arrays(found)
    held = {key: torch.from_numpy(a) for key, a in ours.items() if not key.endswith("/buffer")}
    pool = _ranks.pool(2)
    for answer in pool.run(_made.load_deepspeed, "zero3-fp32", str(new), 2, {}, timeout=200):
        assert answer["loaded"]
        assert jobs.differing(held, answer["tensors"]) == []
        assert [group["weight_decay"] for group in answer["hyper"]] == [0.1, 0.0]


def test_there_and_back_a_deepspeed_job_goes_on(saved: Path, tmp_path: Path) -> None:
    """ZeRO-3 as a distributed checkpoint and as ZeRO-3 again: nothing was lost, counts included."""
    between, back = tmp_path / "between", tmp_path / "back"
    pool = _ranks.pool(2)
    convert(open_checkpoint(saved), target_of(between, "dcp/fsdp2:dp=4"))
    spec = "zero3:dp=2,sub_group_size=100,dtype=bfloat16"
    convert(open_checkpoint(between), target_of(back, spec))
    untouched = pool.run(_made.load_deepspeed, "zero3-bf16", str(saved), 2, {}, timeout=200)
    returned = pool.run(_made.load_deepspeed, "zero3-bf16", str(back), 2, {}, timeout=200)
    for one, two in zip(untouched, returned, strict=True):
        assert one["counters"] == two["counters"]
        assert one["losses"] == two["losses"]
        assert jobs.differing(one["after"], two["after"]) == []


def _same_to_torch(old: Path, new: Path) -> Any:
    """Torch gathers the same bits from both; the entry of our own that it gathers beside them."""
    dcp_to_torch_save(old, old.with_suffix(".pt"))
    dcp_to_torch_save(new, new.with_suffix(".pt"))
    one, two = (torch.load(at.with_suffix(".pt"), weights_only=True) for at in (old, new))
    own = two.pop("dynadapt", None)
    (one, _), (two, _) = flatten_state_dict(one), flatten_state_dict(two)
    assert one.keys() == two.keys()
    for name, value in one.items():
        same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
        assert same(value, two[name]), name
    return own


def test_large_ones_have_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several are filled at the same time; torch's loader asks for none by name."""
    monkeypatch.setattr(_dcp_write, "FULL", 1)
    old, new = _plain(tmp_path / "old"), tmp_path / "new"
    convert(open_checkpoint(old), target_of(new, "dcp"))
    assert sorted(p.name for p in new.glob("*.distcp")) == [f"__0_{i}.distcp" for i in range(5)]
    _same_to_torch(old, new)


def test_written_as_torch_writes(tmp_path: Path) -> None:
    """The same entries, each rank's chunks in that rank's file, and torch gathers the same bits."""
    old, new = tmp_path / "old", tmp_path / "new"
    _ranks.pool(4).run(_dcp.save, "fsdp2", "adamw", "model", str(old), 2, timeout=200)
    convert(open_checkpoint(old), target_of(new, "dcp/fsdp2:dp=4"))
    theirs, ours = (pickle.loads((at / ".metadata").read_bytes()) for at in (old, new))
    assert theirs.state_dict_metadata.keys() == ours.state_dict_metadata.keys() - {"dynadapt"}
    assert {**theirs.planner_data, "dynadapt": ("dynadapt",)} == ours.planner_data
    for name, told in theirs.state_dict_metadata.items():
        own = ours.state_dict_metadata[name]
        if hasattr(told, "chunks"):
            assert (told.size, told.properties) == (own.size, own.properties)
            assert told.chunks == own.chunks
    for index, info in theirs.storage_data.items():
        if len(getattr(theirs.state_dict_metadata[index.fqn], "chunks", ())) > 1:
            assert ours.storage_data[index].relative_path == info.relative_path
    assert _same_to_torch(old, new)["buffers"] == ["scale"]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    where = _plain(tmp_path / "saved")
    for spec in ("dcp/zero3:dp=2", "dcp/fsdp2:dp=2,tp=2", "dcp/fsdp2:dp=2,dtype=bfloat16"):
        with pytest.raises(Refused) as caught:
            convert(open_checkpoint(where), target_of(tmp_path / "new", spec))
        assert caught.value.reason == "bad-spec"
        assert not (tmp_path / "new").exists()


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


def test_copies_and_what_else_is_saved(tmp_path: Path) -> None:
    """An EMA, a generator's state, a schedule; and all of it again in what is written."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    schedule.step()
    weights, states = get_state_dict(model, optimizer)
    ema = {name: tensor * 2 for name, tensor in weights.items() if tensor.ndim}
    rng = torch.arange(40, dtype=torch.uint8)
    tree = {"net": weights, "opt": states, "ema": ema, "rng": {"cpu": rng, "seed": 4}}
    tree |= {"lr_sched": schedule.state_dict(), "big": {"kept": torch.randn(300, 100)}}
    old, new = tmp_path / "old", tmp_path / "new"
    dcp.save(tree, checkpoint_id=old, no_dist=True)
    convert(open_checkpoint(old), target_of(new, "dcp/fsdp2:dp=2"))
    for where in (old, new):
        found = open_checkpoint(where)
        kinds = {str(spec.key): spec.kind for spec in found.layout.keys}
        assert kinds["1.running_mean/buffer"] == kinds["1.num_batches_tracked/buffer"] == "buffer"
        arrays = _arrays(found)
        assert np.array_equal(arrays["0.weight/extra:ema"], ema["0.weight"].numpy())
        assert np.array_equal(arrays["kept/extra:big"], tree["big"]["kept"].numpy())
        value = found.aux["user/rng"].value
        assert value == {"cpu": {"torch.Tensor": ["uint8", [40], bytes(range(40))]}, "seed": 4}
        assert found.aux["scheduler"].value["state"]["last_epoch"] == 1
        assert found.aux["param_groups"].value[0]["hyper"]["initial_lr"] == 0.1
    back = {"rng": {"cpu": torch.zeros_like(rng), "seed": 0}, "lr_scheduler": schedule.state_dict()}
    back["lr_scheduler"]["last_epoch"] = 7
    dcp.load(back, checkpoint_id=new, no_dist=True)
    assert torch.equal(back["rng"]["cpu"], rng)
    assert back["rng"]["seed"] == 4
    assert back["lr_scheduler"] == schedule.state_dict()


def test_several_models_are_refused_by_name(tmp_path: Path) -> None:
    tree = {}
    for name in ("actor", "critic"):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2)})
        weights, states = get_state_dict(model, torch.optim.SGD(model.parameters(), momentum=0.9))
        tree[name] = {"model": weights, "optim": states}
    dcp.save(tree, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(Refused, match=r"actor\.model") as caught:
        open_checkpoint(tmp_path / "saved")
    assert caught.value.reason == "unsupported-format"


def test_each_rank_with_metadata_of_its_own(tmp_path: Path) -> None:
    """As `dcp.save(use_collectives=False)` leaves it."""
    where = tmp_path / "saved"
    _ranks.pool(2).run(_dcp.save_apart, str(where), timeout=200)
    assert not (where / ".metadata").exists()
    found = _arrays(open_checkpoint(where))
    assert np.array_equal(found["w/param"], np.arange(14, dtype="f4").reshape(7, 2))


def _older(where: Path, *entries: str) -> Path:
    """A checkpoint of a torch whose AdamW did not have these entries in its groups yet."""

    def drop(meta: Any) -> None:
        for name in [n for n in meta.state_dict_metadata if n.rpartition(".")[2] in entries]:
            del meta.state_dict_metadata[name], meta.planner_data[name]

    _changed(where, drop)
    return where


def test_an_older_torch_had_fewer_entries(tmp_path: Path) -> None:
    """torch does not load its own checkpoint then; it loads what is written from it."""
    old = _older(_plain(tmp_path / "old"), "fused", "foreach", "maximize")
    convert(open_checkpoint(old), target_of(tmp_path / "new", "dcp"))
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for where, loads in ((old, False), (tmp_path / "new", True)):
        weights, states = get_state_dict(model, optimizer)
        tree = {"model": weights, "optimizer": states}
        with contextlib.nullcontext() if loads else pytest.raises(CheckpointException):
            dcp.load(tree, checkpoint_id=where, no_dist=True)


def test_adam_is_not_taken_for_adamw(tmp_path: Path) -> None:
    """Where a source does not say which, nor does what is written, and the report tells."""
    old = _older(_plain(tmp_path / "old"), "decoupled_weight_decay")
    report = convert(open_checkpoint(old), target_of(tmp_path / "new", "dcp"))
    (told,) = (o for o in report.outcomes if o.path == "param_groups")
    assert (told.kind, "decoupled" in told.note) == ("derived", True)
    hyper = open_checkpoint(tmp_path / "new").aux["param_groups"].value[0]["hyper"]
    assert "decoupled_weight_decay" not in hyper


def test_safetensors_of_every_rank(tmp_path: Path) -> None:
    """As torch's writer for Hugging Face leaves them: every rank has its part of each tensor."""
    where = tmp_path / "saved"
    held = _ranks.pool(4).run(_dcp.save_safetensors, str(where), timeout=200)[0]
    found = open_checkpoint(where)
    assert found.problems() == ()
    ours = {key.rpartition("/")[0]: array for key, array in _arrays(found).items()}
    assert ours.keys() == held.keys()
    assert all(np.array_equal(array, held[name].numpy()) for name, array in ours.items())
    next(where.glob("shard-00002*")).unlink()
    assert {problem.reason for problem in open_checkpoint(where).problems()} == {"uncovered"}


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
