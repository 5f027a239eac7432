"""Shapes and rules of models: against the real models, and against what torch makes of a plan."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from dynadapt.adapters.model_shapes import (
    from_config,
    from_listing,
    of_module,
    read_model,
    rules_of_parallelize_plan,
    tp_rules,
)
from dynadapt.errors import DynadaptError, Refused
from dynadapt.vps.declare import declare
from dynadapt.vps.model_shape import State
from dynadapt.vps.tp_rules import TpRules
from tests._ranks import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from dynadapt.vps.model_shape import ModelShape
    from tests._ranks import Pool

CONFIGS = ROOT / "benchmarks" / "models"

SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
}
EXPERTS = {**SMALL, "num_experts": 3, "moe_intermediate_size": 10, "head_dim": 4}
BERT = {name: size for name, size in SMALL.items() if name != "num_key_value_heads"}
TINY: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": {**SMALL, "tie_word_embeddings": True},
    "qwen3": {**SMALL, "head_dim": 4},
    "qwen3_moe": EXPERTS,
    "mixtral": {**SMALL, "num_local_experts": 3},
    "gpt2": {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8},
    "bert": BERT,
    "t5": {"vocab_size": 20, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
}


def _tensors(model: ModelShape) -> dict[str, tuple[Any, ...]]:
    """What a model's shape says, tensor by tensor, in the model's order."""
    found = []
    for family in model.families:
        for member in range(len(family)):
            told = (family.shape, family.dtype, family.trainable, family.aliases)
            found.append((int(family.orders[member]), family.name(member), told))
    assert [order for order, _, _ in sorted(found)] == list(range(len(model)))
    return {name: told for _, name, told in sorted(found)}


def _really(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    every = list(module.named_parameters(remove_duplicate=False))
    return {
        name: (
            tuple(param.shape),
            str(param.dtype).removeprefix("torch."),
            param.requires_grad,
            tuple(n for n, other in every if other is param and n != name),
        )
        for name, param in module.named_parameters()
    }


@pytest.mark.parametrize("kind", TINY)
def test_a_config_gives_the_tensors_of_the_real_model(kind: str, tmp_path: Path) -> None:
    """By name, in order, with dtypes and ties; and a module at hand says the same."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **TINY[kind]}))
    config = AutoConfig.for_model(kind, **TINY[kind])
    auto = AutoModel if kind in {"bert", "t5"} else AutoModelForCausalLM
    real = auto.from_config(config)
    model = from_config(tmp_path)
    assert _tensors(model) == _really(real)
    assert _tensors(of_module(real)) == _really(real)
    assert of_module(real).digest() == model.digest()
    assert model.numel == sum(param.numel() for param in real.parameters())


def test_architectures_choose_the_class_and_dtypes_are_told(tmp_path: Path) -> None:
    told = {"model_type": "llama", "architectures": ["LlamaModel"], "dtype": "bfloat16", **SMALL}
    (tmp_path / "config.json").write_text(json.dumps(told))
    model = from_config(tmp_path / "config.json")
    assert "embed_tokens.weight" in _tensors(model)
    assert {family.dtype for family in model.families} == {"bfloat16"}
    own = from_config(tmp_path, dtype="float16")
    assert {family.dtype for family in own.families} == {"float16"}


def test_heads_keep_key_and_value_rows_together() -> None:
    """With the rule `heads` four places share two key-value heads; the model's own plan cuts through."""
    model, rules = read_model({"model_type": "llama", **SMALL})
    assert model.heads == {
        f"model.layers.*.self_attn.{name}.*": 4 for name in ("q_proj", "k_proj", "v_proj")
    }
    front = "model.layers.0.self_attn"

    def held(rules: TpRules) -> dict[int, dict[str, str]]:
        layout = declare("ddp:tp=4", model, rules, states=[State("param")])
        every = {rank: layout.rows(rank) for rank in range(4)}
        return {rank: {row.key.name: str(row.box) for row in rows} for rank, rows in every.items()}

    assert held(rules)[1][f"{front}.k_proj.weight"] == "[2:4,0:16]"
    boxes = held(TpRules({**rules.styles, "k_proj": "heads", "v_proj": "heads"}))
    assert [boxes[rank][f"{front}.k_proj.weight"] for rank in range(4)] == [
        "[0:4,0:16]",
        "[0:4,0:16]",
        "[4:8,0:16]",
        "[4:8,0:16]",
    ]
    assert boxes[3][f"{front}.q_proj.weight"] == "[12:16,0:16]"
    assert boxes[3][f"{front}.o_proj.weight"] == "[0:16,12:16]"


def test_listed_experts_are_the_stack_in_parts() -> None:
    """The same elements under the names of checkpoint files, cut by rules of their own."""
    told = {"model_type": "qwen3_moe", **EXPERTS}
    stacked, rules = read_model(told)
    listed, other = read_model(told, experts="listed")
    assert stacked.numel == listed.numel
    names = _tensors(listed)
    front = "model.layers.1.mlp.experts"
    assert names[f"{front}.2.gate_proj.weight"][0] == names[f"{front}.2.up_proj.weight"][0]
    assert names[f"{front}.2.gate_proj.weight"][0] == (10, 16)
    assert names[f"{front}.2.down_proj.weight"][0] == (16, 10)
    assert not [name for name in names if name.endswith("experts.gate_up_proj")]
    assert [(c.dim, c.blocks, c.axis) for c in rules.cuts(f"{front}.gate_up_proj", 3)] == [
        (1, 2, "tp"),
        (0, 1, "ep"),
    ]
    assert [(c.dim, c.axis) for c in rules.cuts(f"{front}.down_proj", 3)] == [(2, "tp"), (0, "ep")]
    assert [c.dim for c in other.cuts(f"{front}.2.up_proj.weight", 2)] == [0]
    assert [c.dim for c in other.cuts(f"{front}.2.down_proj.weight", 2)] == [1]
    held = declare("ddp:ep=3,tp=2", listed, other, states=[State("param")])
    mine = {row.key.name: str(row.box) for row in held.rows(5) if f"{front}." in row.key.name}
    assert mine == {
        f"{front}.2.gate_proj.weight": "[5:10,0:16]",
        f"{front}.2.up_proj.weight": "[5:10,0:16]",
        f"{front}.2.down_proj.weight": "[0:16,5:10]",
    }


def test_rules_are_the_models_own_plan() -> None:
    """With the prefix of the base model, the head's style from its class, and all patterns of use."""
    model, rules = read_model({"model_type": "llama", **SMALL})
    assert rules.style("lm_head.weight") == "colwise_gather_output"
    assert rules.style("model.layers.1.mlp.down_proj.weight") == "rowwise"
    assert rules.unused(_tensors(model)) == ()
    assert dict(tp_rules({"model_type": "gpt2", **TINY["gpt2"]}).styles) == {}


@pytest.mark.parametrize(
    ("name", "numel", "tensors", "heads"),
    [("llama-3-70b", 70_553_706_496, 723, 3), ("qwen3-235b-a22b", 235_093_634_560, 1037, 3)],
)
def test_the_public_models(name: str, numel: int, tensors: int, heads: int) -> None:
    model, rules = read_model(CONFIGS / f"{name}.json")
    assert (model.numel, len(model), len(model.heads)) == (numel, tensors, heads)
    assert {family.dtype for family in model.families} == {"bfloat16"}
    assert declare("fsdp2:dp=8,tp=8", model, rules).endpoints == tuple(range(64))


def test_a_listing_needs_no_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "model.json"
    tensors = [
        {"name": "embed", "shape": [8, 4], "aliases": ["head"]},
        {"name": "scale", "shape": [], "dtype": "bfloat16", "trainable": False},
    ]
    path.write_text(json.dumps(tensors))
    assert _tensors(from_listing(path)) == {
        "embed": ((8, 4), "float32", True, ("head",)),
        "scale": ((), "bfloat16", False, ()),
    }
    path.write_text(json.dumps({"tensors": tensors, "heads": {"embed": 2}}))
    assert read_model(path).model.heads == {"embed": 2}
    with pytest.raises(DynadaptError, match="pip install") as error:
        from_config({"model_type": "llama"})
    assert error.value.reason == "not-installed"


@pytest.mark.parametrize(
    ("content", "reason", "says"),
    [
        (None, "no-file", "cannot be read"),
        ("{", "bad-json", "is not JSON"),
        ('"llama"', "bad-config", "is not one object"),
        ("{}", "unknown-model", "has no model_type"),
        ('{"model_type": "lllama"}', "unknown-model", "did you mean 'llama'"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "bad-config", "hidden_size"),
        ('{"model_type": "llama", "hidden_act": "no-such"}', "bad-config", "cannot be built"),
    ],
)
def test_what_is_wrong_with_a_config_is_said(
    content: str | None, reason: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(Refused, match=says) as error:
        from_config(path)
    assert error.value.reason == reason
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "is not a list of tensors"),
        ("[3]", "tensor 0: is no object"),
        ('[{"shape": [1]}]', "name is not a text"),
        ('[{"name": "w", "shape": [-1]}]', "is not a list of sizes"),
        ('[{"name": "w", "shape": [1], "dtype": "half"}]', "dtype 'half' is unknown"),
        ('[{"name": "w", "shape": [1], "frozen": true}]', "frozen is unknown"),
        ('[{"name": "w", "shape": [1]}, {"name": "w", "shape": [1]}]', "w: named twice"),
        ('{"tensors": [{"name": "w", "shape": [1]}], "heads": {"w": 0}}', "heads is not"),
    ],
)
def test_what_is_wrong_with_a_listing_is_said(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(content)
    with pytest.raises(Refused, match=says) as error:
        from_listing(path)
    assert error.value.reason == "bad-listing"


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)


class Net(nn.Module):
    """Embeddings cut both ways, odd sizes, a bias that is cut and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.places = nn.Embedding(5, 6)
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.head = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 9, bias=False))


def _plan() -> dict[str, Any]:
    return {
        "words": RowwiseParallel(),
        "places": ColwiseParallel(),
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(),
        "layers.[01].d?wn": RowwiseParallel(),
        "head.0": ColwiseParallel(),
        "head.2": RowwiseParallel(),
    }


def _parallelized(rank: int, world: int) -> dict[str, tuple[tuple[int, ...], list[float]]]:
    """The local shape and content of every parameter whose elements are numbered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    net = Net()
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.arange(param.numel(), dtype=param.dtype).reshape(param.shape))
    parallelize_module(net, init_device_mesh("cpu", (world,)), _plan())
    found = {}
    for name, param in net.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        found[name] = (tuple(local.shape), local.detach().reshape(-1).tolist())
    return found


def test_a_plan_cuts_what_parallelize_module_cuts(ranks2: Pool) -> None:
    net = Net()
    model, rules = of_module(net), rules_of_parallelize_plan(_plan(), net)
    declared = declare("ddp:tp=2", model, rules, states=[State("param")])
    real = ranks2.run(_parallelized)
    for rank, tensors in enumerate(real):
        rows = {row.key.name: row.box for row in declared.rows(rank)}
        for name, param in net.named_parameters():
            shape, elements = tensors[name]
            box = rows.get(name)
            if box is None:
                assert not elements, name
                continue
            whole = torch.arange(param.numel()).reshape(param.shape)
            at = tuple(slice(low, high) for low, high in zip(box.lo, box.hi, strict=True))
            assert (tuple(whole[at].shape), whole[at].reshape(-1).tolist()) == (shape, elements)


class _Own(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return module


def test_what_is_wrong_with_a_plan_is_said_at_once() -> None:
    plan = {
        "layers.*.upp": ColwiseParallel(),
        "layers.0.norm": RowwiseParallel(),
        "layers.*.up": ColwiseParallel(),
        "layers.1.up": RowwiseParallel(),
        "layers.0.down": RowwiseParallel(),
        "head.1": _Own(),
    }
    with pytest.raises(Refused) as error:
        rules_of_parallelize_plan(plan, Net())
    text = str(error.value)
    assert error.value.reason == "bad-tp-rule"
    assert "layers.*.upp: fits no module" in text
    assert "layers.0.norm: RowwiseParallel takes nn.Linear and nn.Embedding" in text
    assert "layers.1.up: is cut as colwise already" in text
    assert "head.1: what _Own cuts is not known" in text
    assert "layers.1.down.weight: is replicate, but layers.0.down.weight" in text


def test_a_plan_of_one_style_is_for_the_module_itself() -> None:
    rules = rules_of_parallelize_plan(ColwiseParallel(), nn.Linear(2, 2))
    assert dict(rules.styles) == {"weight": "colwise", "bias": "colwise"}
    none = rules_of_parallelize_plan({"": PrepareModuleInput()}, nn.Linear(2, 2))
    assert dict(none.styles) == {}
