"""Distributed checkpoints of Megatron-Core: the real one writes them, and says what its ranks held."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import dynadapt
from dynadapt.elastic.checkpoint import Checkpoint, open_checkpoint
from dynadapt.errors import Refused
from tests import _ranks
from tests.offline import _megatron

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MASTERS = {"param", "fp32_param"}


@pytest.fixture(scope="module")
def root() -> Path:
    return _megatron.few()[0]


def _key_of(name: str) -> tuple[str, str]:
    """The key here of a key there; the slot is empty for a weight."""
    _, found, rest = name.partition("optimizer.state.")
    if not found:
        return name, ""
    slot, _, own = rest.partition(".")
    return own, "param" if slot in MASTERS else slot


def _differing(found: Checkpoint, answers: list[Any]) -> set[str]:
    """The keys of which a rank held other bits than the checkpoint is read to hold."""
    slots = {spec.key.slot for spec in found.keys}
    wrong, seen = set(), set()
    for held, _ in answers:
        for name, at, data in held:
            own, slot = _key_of(name)
            slot = slot or ("compute" if "compute" in slots else "param")
            seen.add(f"{own}/{slot}")
            if found.tensors[f"{own}/{slot}"][at].tobytes() != data:
                wrong.add(name)
    return wrong | ({str(spec.key) for spec in found.keys} ^ seen)


def _whole(found: Checkpoint, answers: list[Any]) -> Checkpoint:
    """Nothing is missing, and bits, groups and steps are those of the job."""
    assert found.format == "megatron"
    assert not found.problems()
    assert not _differing(found, answers)
    groups = found.aux["param_groups"].value
    told = {(g["hyper"]["wd_mult"], own) for g in groups for own in g["names"]}
    assert told == {pair for _, pairs in answers for pair in pairs}
    assert {v["step"] for v in found.scalars.values()} == {2}
    assert set(found.scalars) == {own for _, own in told}
    return found


def test_every_layout_of_one_state_has_one_fingerprint() -> None:
    """Tensor parallel; flats, found by their values; blocks, as Megatron-Core 0.14 wrote them."""
    root, held = _megatron.few()
    prints = {_whole(open_checkpoint(root / n), held[n]).fingerprint() for n in _megatron.FEW}
    assert prints == {open_checkpoint(root / _megatron.BLOCKS).fingerprint()}


@pytest.mark.nightly
def test_every_layout(tmp_path: Path) -> None:
    prints = {}
    pools = {n: _ranks.spawn_fresh(n) for n in {case.ranks for case in _megatron.CASES.values()}}
    try:
        for name, case in _megatron.CASES.items():
            where, pool = tmp_path / name, pools[case.ranks]
            answers = pool.run(_megatron.save, case, str(where), 2, timeout=300)
            if name == "gathered-buckets":
                continue
            found = open_checkpoint(where)
            if case.bucket is None:  # of several buckets Megatron's own gather is wrong
                _whole(found, answers)
            prints[name] = found.fingerprint()
        kinds = {
            (case.model, case.bf16, "non_homogeneous_layers" in case.how)
            for case in (_megatron.CASES[name] for name in prints)
        }
        assert len(set(prints.values())) == len(kinds), prints
        _check_fault(tmp_path)
    finally:
        for pool in pools.values():
            pool.close()


def _check_fault(root: Path) -> None:
    """Megatron-Core 0.16.1 itself: `fully_reshardable` has masters of several buckets that are no one's."""
    shown = {}
    for name in ("gathered", "gathered-buckets"):
        state = {
            key: torch.zeros(16, 8, dtype=dtype)
            for key, dtype in (
                ("embedding.word_embeddings.weight", torch.bfloat16),
                ("optimizer.state.param.embedding.word_embeddings.weight", torch.float32),
            )
        }
        dcp.load(state, checkpoint_id=root / name, no_dist=True)
        weight, master = state.values()
        shown[name] = torch.equal(weight, master.bfloat16())
    assert shown == {"gathered": True, "gathered-buckets": False}
    _check_weights(root / "gathered-buckets", root / "weights")


def _check_weights(source: Path, target: Path) -> None:
    """Masters that are not the weights' are refused, unless the weights alone are wanted."""
    with pytest.raises(Refused, match="--weights-only") as caught:
        dynadapt.convert(source, target, "torch")
    assert caught.value.reason == "stale-copy"
    report = dynadapt.convert(source, target, "torch", weights_only=True)
    assert [finding.reason for finding in report.warnings] == ["stale-copy"]
    found = dynadapt.open(target)
    name = "embedding.word_embeddings.weight"
    told = {name: torch.zeros(16, 8, dtype=torch.bfloat16)}
    dcp.load(told, checkpoint_id=source, no_dist=True)
    own = torch.from_numpy(found.tensors[f"{name}/param"].copy())
    assert torch.equal(own, told[name].float())
    (spec,) = (spec for spec in found.keys if str(spec.key) == f"{name}/param")
    assert spec.dtype == "bfloat16"
    assert dynadapt.diff(source, target, weights_only=True).same


def test_weights_of_which_the_masters_have_nothing(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "gathered", tmp_path / "a")
    found = dynadapt.open(tmp_path / "a")
    key = next(s.key for s in found.keys if str(s.key) == "embedding.word_embeddings.weight/param")
    for _, row in found.layout.held(key):
        buffer = found.buffers[row.buffer]
        data = bytearray(Path(buffer.path).read_bytes())
        data[buffer.offset : buffer.offset + buffer.nbytes] = np.full(
            buffer.numel, 3, "<f4"
        ).tobytes()
        Path(buffer.path).write_bytes(bytes(data))
    _check_weights(tmp_path / "a", tmp_path / "weights")


@pytest.mark.parametrize("to", ["dcp/fsdp2:dp=2", "torch", "zero3:dp=2", "universal"])
def test_conversions_keep_the_fingerprint(root: Path, tmp_path: Path, to: str) -> None:
    report = dynadapt.convert(root / "flats", tmp_path / "out", to)
    assert report.verified
    assert report.fingerprint == dynadapt.open(root / "tp").fingerprint()
    compared = dynadapt.diff(root / "gathered", tmp_path / "out", weights_only=True)
    assert compared.same, compared


def test_torch_loads_what_was_converted(root: Path, tmp_path: Path) -> None:
    name = "decoder.layers.self_attention.linear_qkv.weight"
    dynadapt.convert(root / "flats", tmp_path / "out", "dcp")
    told = torch.zeros(2, 24, 8)
    state = {"model": {name: torch.zeros(2, 24, 8)}}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    original = {f"optimizer.state.fp32_param.{name}": told}
    dcp.load(original, checkpoint_id=root / "tp", no_dist=True)
    assert torch.equal(told, state["model"][name])
    assert told.abs().sum() > 0


def test_what_is_no_tensor_comes_along(root: Path) -> None:
    aux = open_checkpoint(root / "tp").aux
    assert aux["user/args"].value == {"num_layers": 2, "params_dtype": "torch.bfloat16"}
    assert aux["counters"].value == {"iteration": 7}
    assert aux["user/opt_param_scheduler"].value["num_steps"] == 12
    objects = aux["user/megatron objects"].value
    assert {"rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"} <= set(objects)


def test_the_folder_above_names_the_newest(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "tp", tmp_path / "iter_0000007")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert open_checkpoint(tmp_path).fingerprint() == open_checkpoint(root / "tp").fingerprint()


def test_groups_that_no_rule_tells_are_named(root: Path, tmp_path: Path) -> None:
    where = tmp_path / "own"
    shutil.copytree(root / "tp", where)
    common = torch.load(where / "common.pt", weights_only=False)
    groups = common["optimizer"]["optimizer"]["param_groups"]
    groups[1]["lr_mult"] = 0.5
    torch.save(common, where / "common.pt")
    with pytest.raises(Refused) as caught:
        open_checkpoint(where)
    assert caught.value.reason == "ambiguous-order"
    names = [g["names"] for g in open_checkpoint(root / "tp").aux["param_groups"].value]
    swapped = [[*names[0], names[1][0]], names[1][1:]]
    found = dynadapt.open(where, groups=swapped)
    assert [g["names"] for g in found.aux["param_groups"].value] == swapped
    with pytest.raises(Refused) as caught:
        dynadapt.open(where, groups=[names[0], names[1][1:]])
    assert caught.value.reason == "groups"


def test_equal_values_in_flats_are_told_apart_by_the_order(root: Path, tmp_path: Path) -> None:
    """Two biases of zeros: refused, or as the model's order has them, the last first."""
    names = ("linear_proj.bias", "linear_qkv.layer_norm_bias")
    one, two = (f"decoder.layers.self_attention.{name}" for name in names)
    where = tmp_path / "zeros"
    shutil.copytree(root / "flats", where)
    found = open_checkpoint(where)
    values = {found.tensors[f"{n}/param"].tobytes() for n in (one, two)}
    for name in (one, two):
        for slot in ("param", "compute"):
            _zero(where, found, f"{name}/{slot}")
    assert len(values) == 2
    with pytest.raises(Refused) as caught:
        open_checkpoint(where)
    assert caught.value.reason == "ambiguous-order"
    order = [one, two]
    whole = open_checkpoint(root / "gathered")
    told = [dynadapt.open(where, order=o).tensors[f"{one}/exp_avg"] for o in (order, order[::-1])]
    same = [np.array_equal(each, whole.tensors[f"{one}/exp_avg"]) for each in told]
    assert same == [False, True]  # a module has its norm before what it leads into


def _zero(root: Path, found: Checkpoint, key: str) -> None:
    """Zeros in place of a tensor's elements."""
    for rows in found.own.files.values():
        for row in rows:
            if str(row.key) == key:
                buffer = found.buffers[row.buffer]
                size = buffer.nbytes // buffer.numel
                with open(buffer.path, "r+b") as file:
                    file.seek(buffer.offset + row.offset * size)
                    file.write(bytes(row.box.volume * size))


@pytest.mark.parametrize("kind", ["legacy", "zarr"])
def test_other_forms_are_refused_by_name(root: Path, tmp_path: Path, kind: str) -> None:
    if kind == "legacy":
        (tmp_path / "mp_rank_00").mkdir()
        (tmp_path / "mp_rank_00" / "model_optim_rng.pt").touch()
    else:
        shutil.copy(root / "tp" / "common.pt", tmp_path)
        config: dict[str, Any] = json.loads((root / "tp" / "metadata.json").read_text())
        (tmp_path / "metadata.json").write_text(json.dumps(config | {"sharded_backend": "zarr"}))
    with pytest.raises(Refused, match="torch_dist") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.reason == "unsupported-format"


def test_none_is_written(root: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="not written") as caught:
        dynadapt.convert(root / "tp", tmp_path / "out", "megatron")
    assert caught.value.reason == "unsupported-format"
    assert not (tmp_path / "out").exists()
