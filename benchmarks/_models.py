"""The shapes of two public models, written down from their configs: no framework is loaded for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynadapt.vps.model_shape import ModelShape, Named
from dynadapt.vps.tp_rules import TpRules

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MODELS", "RULES", "model_shape"]

CONFIGS = Path(__file__).resolve().parent / "models"
MODELS = {"llama-3-70b": "Llama-3-70B", "qwen3-235b-a22b": "Qwen3-235B-A22B"}

#: As Megatron cuts: attention and MLP by columns, then rows; the vocabulary by rows.
RULES = TpRules(
    {
        **dict.fromkeys(["q_proj", "gate_proj", "up_proj"], "colwise"),
        **dict.fromkeys(["k_proj", "v_proj"], "heads"),
        **dict.fromkeys(["o_proj", "down_proj"], "rowwise"),
        **dict.fromkeys(["embed_tokens", "lm_head"], "vocab"),
    }
)


def model_shape(name: str) -> ModelShape:
    """All tensors of a model by its config's name, experts listed one by one."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = {f"*.{each}_proj.weight": head for each in "kv"}
    return ModelShape.of(_tensors(config, head), heads)


def _tensors(config: dict[str, Any], head: int) -> Iterator[Named]:
    width, vocab = config["hidden_size"], config["vocab_size"]
    experts = config.get("num_experts", 0)
    yield Named("model.embed_tokens.weight", (vocab, width))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        queries = config["num_attention_heads"] * head
        keys = config["num_key_value_heads"] * head
        for each, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield Named(f"{at}.self_attn.{each}_proj.weight", (rows, width))
        yield Named(f"{at}.self_attn.o_proj.weight", (width, queries))
        if experts:
            for each in "qk":
                yield Named(f"{at}.self_attn.{each}_norm.weight", (head,))
            yield Named(f"{at}.mlp.gate.weight", (experts, width))
        inner = config["moe_intermediate_size" if experts else "intermediate_size"]
        for expert in range(max(experts, 1)):
            own = f"{at}.mlp.experts.{expert}" if experts else f"{at}.mlp"
            yield Named(f"{own}.gate_proj.weight", (inner, width))
            yield Named(f"{own}.up_proj.weight", (inner, width))
            yield Named(f"{own}.down_proj.weight", (width, inner))
        yield Named(f"{at}.input_layernorm.weight", (width,))
        yield Named(f"{at}.post_attention_layernorm.weight", (width,))
    yield Named("model.norm.weight", (width,))
    yield Named("lm_head.weight", (vocab, width))
