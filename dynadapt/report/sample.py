"""A small Llama-like model, so that layouts can be looked at without any model at hand."""

from __future__ import annotations

from dynadapt.vps.model_shape import ModelShape, Named
from dynadapt.vps.tp_rules import TpRules

__all__ = ["sample_model"]

_HIDDEN, _INNER, _VOCAB, _LAYERS, _HEAD, _KV = 64, 160, 256, 2, 16, 2

_LAYER = {
    "self_attn.q_proj.weight": (_HIDDEN, _HIDDEN),
    "self_attn.k_proj.weight": (_HEAD * _KV, _HIDDEN),
    "self_attn.v_proj.weight": (_HEAD * _KV, _HIDDEN),
    "self_attn.o_proj.weight": (_HIDDEN, _HIDDEN),
    "mlp.gate_proj.weight": (_INNER, _HIDDEN),
    "mlp.up_proj.weight": (_INNER, _HIDDEN),
    "mlp.down_proj.weight": (_HIDDEN, _INNER),
    "input_layernorm.weight": (_HIDDEN,),
    "post_attention_layernorm.weight": (_HIDDEN,),
}

_STYLES = {
    "embed_tokens": "embedding_rowwise",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise",
}


def sample_model() -> tuple[ModelShape, TpRules]:
    """Its shapes and its rules: 2 layers, hidden size 64, 4 heads of 16 with 2 of keys and values.

    >>> sample_model()[0].numel
    119104
    """
    tensors = [Named("model.embed_tokens.weight", (_VOCAB, _HIDDEN))]
    for layer in range(_LAYERS):
        tensors += [Named(f"model.layers.{layer}.{name}", _LAYER[name]) for name in _LAYER]
    tensors.append(Named("model.norm.weight", (_HIDDEN,)))
    tensors.append(Named("lm_head.weight", (_VOCAB, _HIDDEN)))
    heads = {f"*.self_attn.{name}.*": _HEAD for name in ("q_proj", "k_proj", "v_proj")}
    return ModelShape.of(tensors, heads), TpRules(_STYLES)
