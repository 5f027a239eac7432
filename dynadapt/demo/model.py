"""The demo's model, text and engines: a small Llama on bytes, as ZeRO-3 and as TP x DP."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Batches", "build_model", "param_groups", "tensor_parallel", "zero3"]

SEQUENCE = 64
GLOBAL_BATCH = 8
LR = 2e-3


def build_model(seed: int = 0) -> torch.nn.Module:
    """A Llama with tied embeddings and grouped-query attention; equal on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        use_cache=False,
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    assert isinstance(model, torch.nn.Module)
    return model


def param_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups, as usual: matrices decay, norms do not."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]


class Batches:
    """Bytes of the text that ships with Python's own help; a batch is a function of its step.

    Every data rank takes its rows of the same global batch, so a run does not depend on the layout.
    """

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def train(self, step: int, rank: int, size: int) -> torch.Tensor:
        """Rows `[rank/size, (rank+1)/size)` of the batch of a step, (rows, SEQUENCE) int64."""
        rows = GLOBAL_BATCH // size
        first = step * GLOBAL_BATCH + rank * rows
        return torch.stack([self._row(first + i) for i in range(rows)])

    def held_out(self, rank: int, size: int) -> torch.Tensor:
        """The same for an evaluation batch from the end of the text."""
        rows = GLOBAL_BATCH // size
        return torch.stack([self._row(-1 - rank * rows - i) for i in range(rows)])

    def _row(self, number: int) -> torch.Tensor:
        at = number * SEQUENCE if number >= 0 else len(self._bytes) + number * SEQUENCE
        return self._bytes[at : at + SEQUENCE].to(torch.int64)


def zero3(model: torch.nn.Module) -> Any:
    """A real DeepSpeed ZeRO-3 engine in bf16 around the model."""
    import deepspeed
    import torch.distributed as dist

    optimizer = torch.optim.AdamW(param_groups(model), lr=LR, betas=(0.9, 0.95))
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 150_000,
                "stage3_param_persistence_threshold": 200,
            },
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        },
        dist_init_required=False,
    )
    return engine


def tensor_parallel(model: Any, tp: int = 2) -> tuple[torch.nn.Module, Any, Any]:
    """The model in TP `tp` x replicated DP over DTensors, computing in bf16; its optimizer; the mesh."""
    import torch.distributed as dist
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    rules: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(model.config.num_hidden_layers):
        layer = f"model.layers.{i}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            rules[f"{layer}.{name}"] = ColwiseParallel()
        rules[f"{layer}.self_attn.o_proj"] = RowwiseParallel()
        rules[f"{layer}.mlp.gate_proj"] = ColwiseParallel()
        rules[f"{layer}.mlp.up_proj"] = ColwiseParallel()
        rules[f"{layer}.mlp.down_proj"] = RowwiseParallel()
    parallelize_module(model, mesh["tp"], rules)
    model.lm_head.weight = model.model.embed_tokens.weight  # parallelize_module unties them
    replicate(
        model,
        mesh=mesh["dp"],
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    optimizer = torch.optim.AdamW(param_groups(model), lr=LR, betas=(0.9, 0.95))
    return model, optimizer, mesh
