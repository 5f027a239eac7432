"""What a target needs that its source does not say: the order of parameters, their groups, a layout."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import dynadapt
from dynadapt import cli, offline
from dynadapt.elastic.arrangement import like
from dynadapt.elastic.order_files import order_in_file
from dynadapt.errors import Refused
from tests.offline import _plain
from tests.offline._made import load_deepspeed, save_deepspeed

if TYPE_CHECKING:
    from pathlib import Path

    from tests._ranks import Pool


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shapes = {"z.weight": (4, 3), "a.weight": (3, 5), "a.bias": (3,), "m.norm": (5,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, str(folder / "model.safetensors"))
    return tensors


def _group_names(path: Path) -> list[list[str]]:
    return [list(group["names"]) for group in offline.open(path).aux["param_groups"].value]


def test_a_flat_target_asks_for_the_order_that_its_source_lacks(tmp_path: Path) -> None:
    _weights(tmp_path / "a")
    with pytest.raises(Refused) as refused:
        offline.convert(tmp_path / "a", tmp_path / "b", "zero3:dp=2")
    (finding,) = refused.value.findings
    assert finding.reason == "no-order"
    assert "--model" in finding.fix
    assert "--like" in finding.fix
    assert not (tmp_path / "b").exists()


def test_the_order_is_that_of_the_flats(tmp_path: Path) -> None:
    """The first flat begins with the first tensor of the order, and masters are the weights."""
    tensors = _weights(tmp_path / "a")
    order = ["m.norm", "z.weight", "a.bias", "a.weight"]
    offline.convert(tmp_path / "a", tmp_path / "b", "zero1:dp=1,dtype=float32", order=order)
    (file,) = (tmp_path / "b").rglob("*optim_states.pt")
    flat = torch.load(file, weights_only=False)["optimizer_state_dict"][
        "single_partition_of_fp32_groups"
    ][0]
    whole = torch.cat([tensors[name].reshape(-1) for name in order])
    assert torch.equal(flat[: whole.numel()], whole)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (["m.norm", "z.weight", "a.bias"], "a.weight"),
        ([], "in which order the model has its parameters"),
    ],
)
def test_an_order_lists_every_parameter(tmp_path: Path, order: list[str], says: str) -> None:
    _weights(tmp_path / "a")
    with pytest.raises(Refused, match="no-order") as refused:
        offline.convert(tmp_path / "a", tmp_path / "b", "zero2:dp=2", order=order)
    assert says in str(refused.value)


def test_groups_of_a_spec(tmp_path: Path) -> None:
    """`decay` parts matrices from all else; a parameter in no group, or of a group that lies, is told."""
    _weights(tmp_path / "a")
    order = ["m.norm", "z.weight", "a.bias", "a.weight"]
    one, two = tmp_path / "one", tmp_path / "two"
    offline.convert(tmp_path / "a", two, "zero3:dp=2,groups=decay", order=order)
    with pytest.raises(Refused) as refused:
        offline.convert(two, one, "zero3:dp=1", groups=[["a.weight", "who"], ["m.norm"]])
    found = {(f.reason, f.where) for f in refused.value.findings}
    assert ("groups", "who") in found
    offline.convert(two, one, "zero3:dp=1,groups=1")
    sizes = {
        name: [
            len(flat)
            for flat in torch.load(next(path.rglob("*rank_0*optim_states.pt")), weights_only=False)[
                "optimizer_state_dict"
            ]["fp32_flat_groups"]
        ]
        for name, path in (("two", two), ("one", one))
    }
    assert len(sizes["two"]) == 2
    assert len(sizes["one"]) == 1


def test_order_files(tmp_path: Path) -> None:
    at = tmp_path / "order"
    at.write_text("a\nb\n\n\nc\n")
    assert order_in_file(at) == (("a", "b", "c"), (("a", "b"), ("c",)))
    at.write_text("a\nb")
    assert order_in_file(at) == (("a", "b"), ())
    at.write_text(json.dumps({"order": ["a", "b"], "groups": [["b"], ["a"]]}))
    assert order_in_file(at) == (("a", "b"), (("b",), ("a",)))
    at.write_text(json.dumps(["a", "b"]))
    assert order_in_file(at) == (("a", "b"), ())
    at.write_text("a 4x3\nb\n\nc  scalar\nd 5\n")
    shaped = {"a": (4, 3), "b": None, "c": (), "d": (5,)}
    assert order_in_file(at) == (shaped, (("a", "b"), ("c", "d")))
    at.write_text(json.dumps({"order": list("abcd"), "shapes": {"a": [4, 3], "c": [], "d": [5]}}))
    assert order_in_file(at) == (shaped, ())
    for twice in ("a 4\na 4\n", "a\nb\na\n", '["a", "a"]'):
        at.write_text(twice)
        with pytest.raises(Refused, match="duplicate-name"):
            order_in_file(at)
    at.write_text(json.dumps({"order": ["a", "b"], "groups": [["a", "b"], ["a"]]}))
    with pytest.raises(Refused, match="stands in the groups more than once"):
        order_in_file(at)
    for bad in (
        *("[1]", "{", '{"order": 3}', '{"groups": []}', '{"order": [], "shapes": {"a": 3}}'),
        *('{"order": "ab"}', '{"order": ["a"], "groups": ["a"]}', '{"order": ["a"], "shapes": 1}'),
        *('{"order": ["a"], "shapes": {"b": [1]}}', '{"order": ["a"], "shapes": {"a": ""}}'),
    ):
        at.write_text(bad)
        with pytest.raises(Refused, match="bad-json"):
            order_in_file(at)
    for nothing in ("", "\n \n", "[]", '{"order": [], "groups": [["a"]]}'):
        at.write_text(nothing)
        with pytest.raises(Refused, match="has no name in it"):
            order_in_file(at)
    with pytest.raises(Refused, match="no-file"):
        order_in_file(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["zero2-bf16", "zero3-bf16"])
def test_shapes_that_a_file_says(ranks2: Pool, tmp_path: Path, kind: str) -> None:
    """Flats whose files do not list what is in them, as DeepSpeed wrote them before 0.3.13."""
    a, bare = tmp_path / "a", tmp_path / "bare"
    ranks2.run(save_deepspeed, kind, str(a), 2, {})
    shutil.copytree(a, bare)
    for path in bare.rglob("*_model_states.pt"):
        states = torch.load(path, weights_only=False)
        del states["param_shapes"]
        torch.save(states, path)
    with pytest.raises(Refused, match="--order"):
        offline.open(bare)
    whole = offline.open(a)
    shapes = {spec.key.name: "x".join(map(str, spec.shape)) for spec in whole.keys}
    lines = ["\n".join(f"{name} {shapes[name]}" for name in own) for own in like(whole)[2]]
    (tmp_path / "order").write_text("\n\n".join(lines))
    order, groups = order_in_file(tmp_path / "order")
    assert len(groups) == 2
    with pytest.raises(Refused, match="--order"):
        offline.open(bare, order=list(order), groups=groups)
    found = offline.open(bare, order=order, groups=groups)
    assert found.fingerprint() == whole.fingerprint()
    said = ["--order", str(tmp_path / "order")]
    words = ["dynadapt", "diff", str(a), str(bare), *said]
    with mock.patch.object(sys, "argv", words), pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in {None, 0}


def test_like_another_checkpoint(ranks2: Pool, tmp_path: Path) -> None:
    """Weights and moments of a ZeRO-1 job, laid out as a ZeRO-3 job's checkpoint; DeepSpeed trains on."""
    a, b, c = (str(tmp_path / name) for name in "abc")
    ranks2.run(save_deepspeed, "zero1-bf16", a, 2, {})
    ranks2.run(save_deepspeed, "zero3-bf16", b, 1, {})
    report = offline.convert(a, c, like=b)
    assert report.verified
    assert report.fingerprint == offline.open(a).fingerprint()
    assert like(offline.open(c)) == like(offline.open(b))
    assert like(offline.open(c))[0].startswith("deepspeed/zero3:dp=2")
    stayed = ranks2.run(load_deepspeed, "zero1-bf16", a, 2, {})
    gone = ranks2.run(load_deepspeed, "zero3-bf16", c, 2, {})
    for rank in range(2):
        assert gone[rank]["losses"] == stayed[rank]["losses"]
    offline.convert(a, tmp_path / "weights", "safetensors")  # which do not say what is trained
    offline.convert(tmp_path / "weights", tmp_path / "d", like=b)
    assert like(offline.open(tmp_path / "d")).frozen == like(offline.open(b)).frozen
    assert like(offline.open(b)).frozen == ("frozen.weight",)


@pytest.mark.parametrize("to", ["universal", "zero3:dp=3", "zero2:dp=4", "safetensors"])
def test_a_plan_is_what_the_conversion_then_does(ranks2: Pool, tmp_path: Path, to: str) -> None:
    """Bytes and files to the last one, and nothing is written."""
    a, b = str(tmp_path / "a"), tmp_path / "b"
    ranks2.run(save_deepspeed, "zero2-bf16", a, 1, {})
    before = sorted(os.listdir(tmp_path))
    planned = offline.plan(a, to)
    assert sorted(os.listdir(tmp_path)) == before
    report = offline.convert(a, b, to)
    assert (planned.bytes_read, planned.bytes_written) == (report.bytes_read, report.bytes_written)
    made = [p for p in b.rglob("*") if p.is_file() and p.name not in {"latest", "dynadapt.json"}]
    assert 0 < planned.files <= len(made)
    assert planned.seconds > 0


def test_an_order_of_a_source_has_every_name_once(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(Refused) as caught:
        offline.open(tmp_path / "x.safetensors", order=["a", "b", "a", "c"])
    assert [finding.reason for finding in caught.value.findings] == ["duplicate-name", "no-match"]


def test_a_parameter_is_in_one_group(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2), "b": torch.ones(2)}}, tmp_path / "x.pt")
    groups = [["a", "b"], ["a"]]
    for to in ("zero1:dp=2", "torch"):
        with pytest.raises(Refused, match="stands in the groups more than once") as caught:
            offline.convert(tmp_path / "x.pt", tmp_path / "y", to, groups=groups)
        assert caught.value.reason == "groups"


@pytest.mark.parametrize("through", ["torch", "zero2:dp=2"])
def test_a_group_lists_any_name_of_a_tied_parameter(tmp_path: Path, through: str) -> None:
    """Where the source's key is not the name that `named_parameters` has, or all names are listed."""
    a = tmp_path / "a"
    offline.convert(_plain.Job().save(tmp_path / "a.pt"), a, through)
    found = offline.open(a)
    (tied,) = (s for s in found.keys if s.aliases and s.key.slot == "param")
    name, other = tied.key.name, tied.aliases[0]
    own = _group_names(a)
    for number, names in enumerate(([other], [other, name], [name, other])):
        groups = [[n for x in g for n in (names if x == name else [x])] for g in own]
        at = tmp_path / f"order-{number}"
        at.write_text("\n\n".join("\n".join(group) for group in [*groups, ["frozen.weight"]]))
        order, _ = order_in_file(at)
        b = tmp_path / f"b-{number}"
        report = offline.convert(a, b, "zero1:dp=2", order=order, groups=groups)
        assert report.fingerprint == found.fingerprint()
        assert _group_names(b) == own
    parted = [[other, *(n for n in own[0] if n != name)], [name, *(n for n in own[1] if n != name)]]
    with pytest.raises(Refused, match="stands in the groups more than once"):
        offline.convert(a, tmp_path / "c", "zero1:dp=2", groups=parted)
    lacking = [[n for n in g if n != name] for g in own]
    with pytest.raises(Refused) as refused:
        offline.convert(a, tmp_path / "c", "zero1:dp=2", groups=lacking)
    assert [(f.where, f.cause) for f in refused.value.findings] == [(name, "is in no group")]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_model_names_its_experts_as_jobs_and_as_files_do(tmp_path: Path, kind: str) -> None:
    """A job of transformers 5 has stacks of experts; the folder that it saves has each by itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "intermediate_size": 24}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(kind, **sizes, **heads, **experts, moe_intermediate_size=8)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8)[None]).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.save_pretrained(tmp_path / "hf")
    job = tmp_path / "job.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, job)
    report = offline.convert(job, tmp_path / "a", "zero3:dp=2", model=tmp_path / "hf")
    assert report.fingerprint == dynadapt.fingerprint(dynadapt.TrainState(model, optimizer))
    files = [spec.key.name for spec in offline.open(tmp_path / "hf").keys]
    assert any(".experts.2." in name for name in files)
    if kind == "mixtral":  # whose files have names of their own, which no model tells
        with pytest.raises(Refused, match=r"block_sparse_moe\.experts\.0\.w1\.weight"):
            offline.convert(tmp_path / "hf", tmp_path / "b", "zero3:dp=2", model=tmp_path / "hf")
    else:
        offline.convert(tmp_path / "hf", tmp_path / "b", "zero3:dp=2", model=tmp_path / "hf")
