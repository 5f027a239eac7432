"""Tiny models of transformers, from a config and nothing else, cut by transformers and by DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dynadapt.vps.probe import markers, probe
from tests.declared._torch import read_locals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import nn

    from dynadapt.vps.layout import Row

COMMON = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
}

KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**COMMON, "vocab_size": 50, "intermediate_size": 36},
    "llama tied": {
        **COMMON,
        "vocab_size": 50,
        "intermediate_size": 36,
        "tie_word_embeddings": True,
    },
    "llama odd": {**COMMON, "vocab_size": 51, "intermediate_size": 37},
    "qwen3_moe": {
        **COMMON,
        "vocab_size": 50,
        "intermediate_size": 36,
        "moe_intermediate_size": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },
}


def config_of(kind: str) -> Any:
    """The config of a tiny model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind.split(" ")[0], **KINDS[kind])


def model_of(kind: str, values: Mapping[str, NDArray[Any]] | None = None) -> nn.Module:
    """A tiny model, its parameters filled with values."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(kind))
    if values is not None:
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(torch.from_numpy(values[name]))
    return model


def shapes_of(kind: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a tiny model by name, tied ones once."""
    with torch.device("meta"):
        return {name: tuple(param.shape) for name, param in model_of(kind).named_parameters()}


def observe_hf(
    rank: int, world: int, kind: str, folder: str, distributed: Mapping[str, Any]
) -> tuple[Row, ...]:
    """What transformers' own loader leaves on this rank, under a `DistributedConfig`."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    def load(values: Mapping[str, NDArray[Any]]) -> nn.Module:
        if rank == 0:
            model_of(kind, values).save_pretrained(folder)
        dist.barrier()
        config = DistributedConfig(**distributed)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        dist.barrier()  # before the next pass writes the file
        return model

    return probe(markers(shapes_of(kind)), load, read_locals)


def observe_autotp(rank: int, world: int, kind: str, tp: int, stage: int) -> tuple[Row, ...]:
    """What DeepSpeed's AutoTP and ZeRO make of a model."""
    import deepspeed

    def load(values: Mapping[str, NDArray[Any]]) -> Any:
        model = model_of(kind, values)
        return deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "tensor_parallel": {"autotp_size": tp},
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {
                    "stage": stage,
                    "reduce_bucket_size": 1000,
                    "allgather_bucket_size": 1000,
                    "stage3_param_persistence_threshold": 0,
                },
            },
            dist_init_required=False,
        )[0]

    def read(engine: Any) -> dict[str, NDArray[Any]]:
        if stage == 0:
            return read_locals(engine.module)
        if stage == 3:
            flats = engine.optimizer.fp32_partitioned_groups_flat
        else:
            flats = engine.optimizer.single_partition_of_fp32_groups
        return {str(number): flat.detach().numpy() for number, flat in enumerate(flats)}

    return probe(markers(shapes_of(kind)), load, read)
