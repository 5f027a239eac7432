"""TIED, FROZEN, BUFFER, NAMES, PEFT and STORAGE on disk: every tensor, once, under its name, to the bit."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch

import dynadapt
from dynadapt.errors import Refused
from tests.live import jobs
from tests.live.cases.test_peft import lora
from tests.offline import _odd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tests.offline.conftest import Made

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain job's torch file."""
    path = tmp_path_factory.mktemp("plain") / "job.pt"
    torch.save(_odd.tree(_odd.plain()), path)
    return path


def saved(tree: dict[str, Any], path: Path) -> Path:
    """A torch file of a tree."""
    torch.save(tree, path)
    return path


def as_is(
    model: Any, entries: Iterable[tuple[str, Any]], rename: Callable[[str], str] = str
) -> OrderedDict[str, Any]:
    """A state dict of other entries that says as much of buffers."""
    found = OrderedDict(entries)
    found._buffer_names = [rename(n) for n in model._buffer_names]  # type: ignore[attr-defined]
    return found


def loads(path: Path) -> dict[str, Any]:
    """A torch file as everybody reads it."""
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize("name", ["zero0", "zero2", "zero3", "fsdp2", "plain"])
def test_tied_tensors_are_one_of_two_names(
    made: Made, file: Path, tmp_path: Path, name: str
) -> None:
    """TIED B01, B03, B04: once in each format, with its state; strict loads by both names; still tied."""
    source = file if name == "plain" else made[name]
    found = dynadapt.open(source)
    names = [str(spec.key) for spec in found.keys]
    assert "embed.weight/exp_avg" in names
    assert not any(key.startswith("head.weight") for key in names)
    assert np.array_equal(found.tensors["head.weight"], found.tensors["embed.weight"])
    dynadapt.convert(source, tmp_path / "weights", "safetensors")
    at = tmp_path / "weights" / "model.safetensors"
    model: Any = jobs.net(5) if name == "fsdp2" else _odd.odd(5)
    assert safetensors.torch.load_model(model, at) == (set(), [])
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, torch.from_numpy(found.tensors["head.weight"].copy()))
    whole = {*model.parameters(), *(b for n, b in model.named_buffers() if n != "table")}
    assert at.stat().st_size < sum(t.numel() * t.element_size() for t in whole) + 2000
    dynadapt.convert(source, tmp_path / "torch", "torch")
    weights = loads(tmp_path / "torch" / "checkpoint.pt")["model"]
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    model.load_state_dict(weights, strict=True)


def test_tied_tensors_by_the_name_that_another_version_keeps(file: Path, tmp_path: Path) -> None:
    """TIED B04, B06: names in another order, the optimizer's under the other name, or under both."""
    whole = dynadapt.open(file).fingerprint()
    for case in ("turned", "state"):
        tree = loads(file)
        if case == "turned":
            tree["model"] = as_is(tree["model"], reversed(tree["model"].items()))
        else:
            for group in tree["optimizer"]["param_groups"]:
                group["param_names"] = [n.replace("embed", "head") for n in group["param_names"]]
        assert dynadapt.open(saved(tree, tmp_path / f"{case}.pt")).fingerprint() == whole, case


def test_tied_name_without_its_tensor_is_named_with_it(made: Made, tmp_path: Path) -> None:
    """TIED B07: DeepSpeed's record of shared tensors leads to one that is not there."""
    shutil.copytree(made["zero2"], tmp_path / "a")
    at = tmp_path / "a" / "here" / "mp_rank_00_model_states.pt"
    tree = torch.load(at, weights_only=False)
    tree["shared_params"] = {"head.weight": "gone.weight"}
    torch.save(tree, at)
    with pytest.raises(Refused) as caught:
        dynadapt.open(tmp_path / "a")
    (finding,) = caught.value.findings
    assert finding.reason == "missing-key"
    assert "head.weight" in str(finding)
    assert "gone.weight" in str(finding)


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_frozen_parameters_and_only_what_trains(made: Made, tmp_path: Path, name: str) -> None:
    """FROZEN B09, B11: all are there and say so; a selection by name is what is written and compared."""
    found = dynadapt.open(made[name])
    frozen = {spec.key.name for spec in found.keys if not spec.trainable and spec.kind != "buffer"}
    assert frozen == {"frozen.weight"}
    expected = made.held(name)["frozen.weight/param"].numpy()
    assert np.array_equal(found.tensors["frozen.weight"], expected)
    trained = sorted({spec.key.name for spec in found.keys if spec.trainable})
    part = tmp_path / "part"
    dynadapt.convert(made[name], part, "safetensors", include=trained)
    weights = safetensors.torch.load_file(part / "model.safetensors")
    assert {*weights} <= {*trained, "head.weight"}
    compared = dynadapt.diff(made[name], part, include=trained, weights_only=True)
    assert compared.same
    left = {
        d.key
        for d in dynadapt.diff(made[name], part, weights_only=True).tensors
        if d.verdict == "only-in-a"
    }
    assert left == {
        "frozen.weight/param",
        *(f"{b}/buffer" for b in ("scale", "third", "seen", "mask")),
    }


def test_frozen_after_it_was_trained_keeps_its_state(tmp_path: Path) -> None:
    """FROZEN B12: what is in the file decides, in every format; a member that never had a state has none."""
    job = _odd.plain()
    job.model.up.weight.requires_grad_(requires_grad=False)
    _odd.advance(job, 9)
    tree = _odd.tree(job)
    path = saved(tree, tmp_path / "job.pt")
    step = dynadapt.open(path).scalars
    assert (step["up.weight"]["step"], step["up.bias"]["step"]) == (_odd.STEPS, _odd.STEPS + 1)
    for number, to in enumerate(("dcp", "torch")):
        dynadapt.convert(path, tmp_path / str(number), to)
        path = tmp_path / str(number)
    back = loads(path / "checkpoint.pt")["optimizer"]
    for id_, entry in tree["optimizer"]["state"].items():
        assert all(torch.equal(back["state"][id_][slot], entry[slot]) for slot in entry)


@pytest.mark.parametrize(
    "to", ["zero2:dp=3", "zero3:dp=2", "universal", "dcp", "torch", "safetensors"]
)
def test_buffers_keep_their_dtypes_and_bits(made: Made, tmp_path: Path, to: str) -> None:
    """BUFFER B14: fp32 thirds, a count beyond 2^32, and truth values, whatever the weights become."""
    options = {"dtype": "bfloat16", "keep_dtype": ["third", "scale"]} if to == "safetensors" else {}
    dynadapt.convert(made["zero3"], tmp_path / "a", to, **options)
    found = dynadapt.open(tmp_path / "a")
    held = made.held("zero3")
    for name in ("third", "seen", "mask", "scale"):
        expected = held[f"{name}/buffer"]
        assert str(expected.dtype) == f"torch.{found.tensors.spec(name).dtype}"
        assert np.array_equal(found.tensors[name], expected.numpy())


def test_buffers_that_lost_bits_are_told_from_other_dtypes(file: Path, tmp_path: Path) -> None:
    """BUFFER B20: rounded to bf16 and put back it differs; in bf16 as such it is rounding, and says so."""
    tree = loads(file)
    lower = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tree["model"].items()}
    file = saved({"model": dict(tree["model"])}, tmp_path / "file.pt")
    there = saved({"model": lower}, tmp_path / "low.pt")
    back = {n: t.float() if t.is_floating_point() else t for n, t in lower.items()}
    and_back = saved({"model": back}, tmp_path / "back.pt")
    told = [
        {d.key: d for d in dynadapt.diff(file, other, weights_only=True).tensors}["third/param"]
        for other in (there, and_back)
    ]
    assert [(d.verdict, d.dtypes) for d in told] == [
        ("rounding", ("float32", "bfloat16")),
        ("different", ("float32", "float32")),
    ]
    assert "round" in told[1].hint
    assert [d.count for d in told] == [5, 5]


def test_buffers_that_a_file_does_not_tell_from_weights(tmp_path: Path) -> None:
    """BUFFER B14: as everybody saves it; a model says which they are, and the job goes on."""
    job, fresh = _odd.plain(), _odd.plain(5, steps=0)
    tree = _odd.tree(job)
    path = saved({**tree, "model": dict(tree["model"])}, tmp_path / "a.pt")
    with pytest.raises(dynadapt.MigrationAborted, match="third/buffer"):
        dynadapt.load(fresh, path)
    dynadapt.load(fresh, path, model=fresh.model)
    assert [_odd.advance(job, n) for n in (2, 3)] == [_odd.advance(fresh, n) for n in (2, 3)]
    weights = tmp_path / "model.safetensors"
    model = dict(tree["model"])
    del model["head.weight"]
    safetensors.torch.save_file(model, weights)
    found = dynadapt.open(weights, model=fresh.model)
    assert {s.key.name for s in found.keys if s.kind == "buffer"} == {
        "third",
        "scale",
        "seen",
        "mask",
    }


def test_buffers_and_norms_of_equal_bytes_are_cut_not_copied(made: Made) -> None:
    """BUFFER B16: a norm of ones over four ranks is told by the metadata, not by its values."""
    found = dynadapt.open(made["ones"])
    assert found.tensors["weight"].tolist() == [1.0] * 8
    spec = found.tensors.spec("weight")
    rows = [
        row.box.shape for e in found.layout.endpoints for row in found.layout.rows_of(spec.key, e)
    ]
    assert rows == [(2,)] * 4


WRAPPED = {
    "data parallel": lambda n: f"module.{n}",
    "compiled": lambda n: f"_orig_mod.{n}",
    "lightning": lambda n: f"_forward_module.{n}",
    "recomputed within": lambda n: n.replace("up.", "up._checkpoint_wrapped_module."),
    "compiled within": lambda n: n.replace("up.", "up._orig_mod."),
    "recomputed, compiled": lambda n: n.replace("up.", "up._checkpoint_wrapped_module._orig_mod."),
    "compiled, recomputed": lambda n: n.replace("up.", "up._orig_mod._checkpoint_wrapped_module."),
    "fsdp1": lambda n: f"_fsdp_wrapped_module.{n.replace('up.', 'up._fsdp_wrapped_module.')}",
    "all of them": lambda n: (
        f"module._orig_mod.{n.replace('up.', 'up._checkpoint_wrapped_module.')}"
    ),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_names_do_not_show_wrappers(file: Path, tmp_path: Path, how: str) -> None:
    """NAMES B76, B78, B79, B81, B82: anywhere in the path, in any order, of weights and of states."""
    wrap = WRAPPED[how]
    whole = dynadapt.open(file)
    for part in ("model", "optimizer", "both"):
        tree = loads(file)
        if part != "optimizer":
            wrapped = {wrap(n): t for n, t in tree["model"].items()}
            tree["model"] = as_is(tree["model"], wrapped.items(), wrap)
        if part != "model":
            for group in tree["optimizer"]["param_groups"]:
                group["param_names"] = [wrap(n) for n in group["param_names"]]
        found = dynadapt.open(saved(tree, tmp_path / f"{part}.pt"))
        assert found.fingerprint() == whole.fingerprint(), part
        assert {spec.key for spec in found.keys} == {spec.key for spec in whole.keys}


def test_names_that_are_expected_and_found_are_counted(made: Made, tmp_path: Path) -> None:
    """NAMES B81: a module wrapped once more; with the prefix off all of it is there, by its own names."""
    wrapped = tmp_path / "wrapped"
    dynadapt.convert(made["zero3"], wrapped, "dcp", add_prefix="model.")
    compared = dynadapt.diff(made["zero3"], wrapped)
    count = compared.count("only-in-a")
    assert count == compared.count("only-in-b") == len(dynadapt.open(made["zero3"]).keys)
    dynadapt.convert(wrapped, tmp_path / "bare", "dcp", strip_prefix="model.")
    assert dynadapt.diff(made["zero3"], tmp_path / "bare").count("identical") == count


def test_peft_adapters_and_their_base(made: Made, tmp_path: Path) -> None:
    """PEFT B84, B86: a LoRA job's whole state in a plain job; adapters alone; what a base lacks, by name."""
    dynadapt.convert(made["lora"], tmp_path / "torch", "torch")
    tree = loads(tmp_path / "torch" / "checkpoint.pt")
    model = lora(5)
    model.load_state_dict(tree["model"], strict=True)
    optimizer = jobs.adamw(model)
    optimizer.load_state_dict(tree["optimizer"])
    assert jobs.differing(made.held("lora"), jobs.torch_tensors(model, optimizer)) == []
    dynadapt.convert(made["lora"], tmp_path / "adapters", "safetensors", include=["*lora_*"])
    part = safetensors.torch.load_file(tmp_path / "adapters" / "model.safetensors")
    named = dict(model.named_parameters())
    assert {*part} == {n for n in named if "lora_" in n}
    assert all(torch.equal(part[n], named[n]) for n in part)
    lacking = dynadapt.diff(made["lora"], tmp_path / "adapters", weights_only=True)
    missing = {d.key.partition("/")[0] for d in lacking.tensors if d.verdict == "only-in-a"}
    assert {n for n in named if "lora_" not in n} <= missing
    fresh = lora(6)
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.load(fresh, tmp_path / "adapters")
    assert {f.reason for f in caught.value.findings} == {"missing-key"}
    dynadapt.load(fresh, tmp_path / "adapters", allow={"missing"})
    assert all(torch.equal(part[n], p) for n, p in fresh.named_parameters() if n in part)


def test_peft_placeholders_are_no_weights(made: Made, tmp_path: Path) -> None:
    """PEFT B87, RESIZE B94, B100: what stage 3 leaves in its model files has no elements, and is none."""
    only = tmp_path / "only"
    shutil.copytree(made["lora"], only)
    for each in (only / "here").glob("*optim_states.pt"):
        each.unlink()
    for path in (only, only / "here" / "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        with pytest.raises(Refused) as caught:
            dynadapt.open(path)
        assert caught.value.reason in {"missing-file", "unsupported-format"}, path


def test_storage_strides_views_and_sizes(tmp_path: Path) -> None:
    """STORAGE B188, B190: columns become contiguous, and a view costs what it shows, in every format."""
    big = torch.arange(1 << 18, dtype=torch.float32)
    tree = {"rows": big[:12].reshape(3, 4).t(), "view": big[100:110], "step": big[70:71]}
    path = saved({"model": tree}, tmp_path / "a.pt")
    for number, to in enumerate(("safetensors", "torch", "dcp")):
        there = tmp_path / str(number)
        dynadapt.convert(path, there, to)
        assert sum(p.stat().st_size for p in there.rglob("*") if p.is_file()) < 20_000, to
        found = dynadapt.open(there)
        assert all(np.array_equal(found.tensors[n], t.numpy()) for n, t in tree.items())
    loaded = safetensors.torch.load_file(tmp_path / "0" / "model.safetensors")
    assert loaded["rows"].is_contiguous()
    assert torch.equal(loaded["rows"], tree["rows"])


def test_storage_of_fragments_is_theirs(made: Made, tmp_path: Path) -> None:
    """STORAGE B190: a universal checkpoint's file of a slot is as large as the tensor."""
    dynadapt.convert(made["zero2"], tmp_path / "u", "universal")
    for folder in (tmp_path / "u").rglob("zero/*"):
        for at in folder.glob("*.pt"):
            held = made.held("zero2").get(f"{folder.name}/param")
            if held is not None and at.name != "step.pt":
                assert at.stat().st_size < 4 * held.numel() + 2500, at


def test_storage_counts_beyond_32_bits(tmp_path: Path) -> None:
    """STORAGE B191: a tensor of 2^32 + 8 elements is planned to the byte; its last ones are read."""
    import json
    import struct

    count = (1 << 32) + 8
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}
    ).encode()
    at = tmp_path / "model.safetensors"
    with at.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        out.seek(8 + len(header) + count - 1)
        out.write(b"\x07")
    found = dynadapt.open(at)
    (spec,) = found.keys
    assert (spec.numel, found.tensors["w"][-2:].tolist()) == (count, [0, 7])
    planned = dynadapt.offline.plan(at, "safetensors")
    assert planned.bytes_read == planned.bytes_written == count


def test_tied_is_not_what_is_equal(tmp_path: Path) -> None:
    """TIED B03: tensors that are equal and not one stay two."""
    same = {"a": torch.ones(3), "b": torch.ones(3)}
    keys = dynadapt.open(saved({"model": same}, tmp_path / "two.pt")).keys
    assert [(spec.key.name, spec.aliases) for spec in keys] == [("a", ()), ("b", ())]
