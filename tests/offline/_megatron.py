"""Real checkpoints of real Megatron-Core: a small GPT on gloo ranks, its optimizer stepped, saved by its own
`dist_checkpointing`. Weights and gradients are those of one model however it is cut, so that what is saved
is one state in many layouts.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import logging
import multiprocessing.dummy
import os
import tempfile
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

from tests import _ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BLOCKS", "CASES", "FEW", "Case", "few", "save"]

Piece = tuple[str, tuple[Any, ...], bytes]
"""A global key, the place of a rank's tensor in it, and the tensor's bytes."""


@dataclass(frozen=True)
class Case:
    """Ranks, how the model is cut, its optimizer, and what Megatron is told of how to save it."""

    ranks: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    distributed: bool = False
    bf16: bool = True
    model: str = "gpt"
    bucket: int | None = None
    how: dict[str, Any] = field(default_factory=dict)


def _sharding(kind: str, **more: Any) -> dict[str, Any]:
    return {"distrib_optim_sharding_type": kind, **more}


LISTED = {"non_homogeneous_layers": True}
CASES = {
    "fp32": Case(1, bf16=False),
    "listed": Case(2, how=LISTED),
    "tp": Case(2, tp=2),
    "pp": Case(2, pp=2),
    "tied": Case(2, pp=2, model="tied"),
    "gated": Case(2, tp=2, model="gated"),
    "experts": Case(2, ep=2, model="experts"),
    "experts-listed": Case(
        2, ep=2, model="experts", how={**LISTED, "singleton_local_shards": True}
    ),
    "gathered": Case(2, distributed=True, how=_sharding("fully_reshardable")),
    "gathered-tp": Case(4, tp=2, distributed=True, how=_sharding("fully_reshardable")),
    "flats": Case(2, distributed=True, how=_sharding("dp_reshardable")),
    "flats-tp": Case(4, tp=2, distributed=True, how=_sharding("dp_reshardable")),
    "flats-pp": Case(2, pp=2, distributed=True, how=_sharding("dp_reshardable")),
    "flats-gated": Case(2, tp=2, distributed=True, model="gated", how=_sharding("dp_reshardable")),
    "flats-buckets": Case(2, distributed=True, bucket=500, how=_sharding("dp_reshardable")),
    "gathered-buckets": Case(2, distributed=True, bucket=500, how=_sharding("fully_reshardable")),
    "object": Case(2, distributed=True, how=_sharding("dp_zero_gather_scatter")),
    "object-buckets": Case(
        2, distributed=True, bucket=500, how=_sharding("dp_zero_gather_scatter")
    ),
}


FEW = ("tp", "gathered", "flats")
"""What every run of the tests makes; the others are made by night."""

BLOCKS = "blocks"


@functools.cache
def few() -> tuple[Path, dict[str, list[Any]]]:
    """A folder with the checkpoints of `FEW` and `BLOCKS`, made once, and what the ranks held.

    In ranks of their own: Megatron's imports and globals stay out of the other tests'.
    """
    place = tempfile.TemporaryDirectory()
    atexit.register(place.cleanup)
    root = Path(place.name)
    with _ranks.spawn_fresh(2) as pool:
        held = {name: pool.run(save, CASES[name], str(root / name), 2, timeout=300) for name in FEW}
        pool.run(blocks, CASES["gathered"], str(root / BLOCKS), timeout=300)
    return root, held


class _AsCuda(TorchFunctionMode):
    """Processors under the name of the only device that Megatron trains on."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _NoStream:
    """A stream of the device that is not there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def _pretend() -> None:
    """What Megatron calls of `torch.cuda`, until the run is over."""
    new = {
        "synchronize": lambda *args: None,
        "current_device": lambda: "cpu",
        "Stream": _NoStream,
    }
    for name, value in new.items():
        before = getattr(torch.cuda, name)
        setattr(torch.cuda, name, value)
        _ranks.at_reset(lambda name=name, before=before: setattr(torch.cuda, name, before))


def blocks(rank: int, world: int, case: Case, where: str) -> None:
    """Save as Megatron-Core 0.6 to 0.15 saved a distributed optimizer (`fully_sharded_model_space`), which
    0.16 does not any more: each rank a range of every block of a tensor, flattened. (Compared entry by entry
    with what 0.14 writes.)
    """
    import pickle

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    with _started(case):
        model, optimizer = _trained(case, 2)
        states = _states(model, optimizer, case.how)
        shapes: dict[str, dict[str, Any]] = {}
        for entry in states["optimizer"]["param_state"].values():
            for label, each in [*entry.items()]:
                key = each.key.replace("optimizer.state.param.", "optimizer.state.fp32_param.")
                shapes[key] = {"nd_reformulated_orig_global_shape": each.global_shape}
                local = (1,) * each.prepend_axis_num + tuple(each.local_shape)
                grid = tuple(a // b for a, b in zip(each.global_shape, local, strict=True))
                at = tuple(a // b for a, b in zip(each.global_offset, local, strict=True))
                numel = each.data.numel()
                start, stop = (numel * n // 2 for n in (rank, rank + 1))
                own = each.data.reshape((*(1,) * len(grid), -1))[..., start:stop].contiguous()
                whole, low = (*grid, numel), (*at, start)
                entry[label] = ShardedTensor(
                    key, own, own.dtype, tuple(own.shape), whole, low, None, replica_id=0
                )
        if rank == 0:
            os.makedirs(where)
        dist.barrier()
        dist_checkpointing.save(states, where, validate_access_integrity=False)
        if rank == 0:
            path = Path(where, ".metadata")
            fields = vars(pickle.loads(path.read_bytes())) | {"mcore_data": shapes}
            path.write_bytes(pickle.dumps(MCoreMetadata(**fields)))


class MCoreMetadata:
    """As Megatron-Core before 0.16 calls the metadata."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


def save(
    rank: int, world: int, case: Case, where: str, steps: int
) -> tuple[list[Piece], list[Any]]:
    """Train a model and save it; what this rank held of it, and its optimizer's groups by key."""
    from megatron.core import dist_checkpointing

    with _started(case):
        model, optimizer = _trained(case, steps)
        states = _states(model, optimizer, case.how)
        if rank == 0:
            os.makedirs(where)
        dist.barrier()
        dist_checkpointing.save(states, where, content_metadata=case.how)
        return _held(model, optimizer, case), _groups(optimizer, _places(model, case))


@contextlib.contextmanager
def _started(case: Case) -> Iterator[None]:
    """Megatron's groups, on processors."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    _pretend()
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world)}
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Its writers are forked beside gloo's threads, and then hang now and again: threads write the same.
    filesystem_async.mp = multiprocessing.dummy
    multiprocessing.dummy.get_context = lambda kind: multiprocessing.dummy  # type: ignore[attr-defined]
    parallel_state.initialize_model_parallel(
        case.tp, case.pp, expert_model_parallel_size=case.ep, create_gloo_process_groups=True
    )
    _ranks.at_reset(parallel_state.destroy_model_parallel)
    with _AsCuda():
        yield


def _trained(case: Case, steps: int) -> tuple[Any, Any]:
    model, optimizer = _built(case)
    places = _places(model, case)
    _fill(places, "weight", "data")
    optimizer.reload_model_params()
    for number in range(steps):
        _fill(places, f"step {number}", "main_grad")
        optimizer.step()
    return model, optimizer


def _built(case: Case) -> tuple[Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    more: dict[str, Any] = {}
    if case.model == "experts":
        more = {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": case.ep,
            "add_bias_linear": False,
        }
    elif case.model == "gated":
        more = {
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
        }
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        bf16=case.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        **more,
    )
    inner = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=more.get("num_moe_experts")),
        vocab_size=16,
        max_sequence_length=8,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case.model == "tied",
    )
    wrapping = DistributedDataParallelConfig(
        use_distributed_optimizer=case.distributed,
        grad_reduce_in_fp32=True,
        bucket_size=case.bucket,
        overlap_grad_reduce=case.bucket is not None,
    )
    model = DistributedDataParallel(config, wrapping, inner.bfloat16() if case.bf16 else inner)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        weight_decay=0.1,
        bf16=case.bf16,
        use_distributed_optimizer=case.distributed,
        params_dtype=dtype,
        clip_grad=0.0,
    )
    return model, get_megatron_optimizer(settings, [model])


def _sharded(value: Any, kind: type) -> Iterator[Any]:
    """The sharded tensors of a state dict."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _sharded(part, kind)


def _places(model: Any, case: Case) -> dict[torch.nn.Parameter, Any]:
    """For each parameter of this rank, its place in the whole model."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    states = model.module.sharded_state_dict(metadata=case.how)
    params = {id(p): p for p in model.parameters()}
    found = {
        params[id(each.data)]: each
        for kind in (ShardedTensor, ShardedTensorFactory)
        for each in _sharded(states, kind)
        if id(each.data) in params
    }
    assert len(found) == len(params)
    return found


def _fill(places: dict[torch.nn.Parameter, Any], salt: str, what: str) -> None:
    """Give each parameter, or its gradient, its part of the whole model's."""
    for param, place in places.items():
        target = getattr(param, what)
        parts = place.build() if hasattr(place, "build") else [place]
        views = _views(target, parts)
        for part, view in zip(parts, views, strict=True):
            seed = zlib.crc32(f"{part.key} {salt}".encode())
            whole = torch.randn(part.global_shape, generator=torch.Generator().manual_seed(seed))
            view.copy_(whole[part.global_slice()].reshape(view.shape))


def _views(tensor: torch.Tensor, parts: list[Any]) -> list[torch.Tensor]:
    """A tensor in the pieces that a factory cuts its first dim into."""
    return [*tensor.split([part.local_shape[0] for part in parts])] if len(parts) > 1 else [tensor]


def _states(model: Any, optimizer: Any, how: dict[str, Any]) -> dict[str, Any]:
    """What a script saves."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    own = model.module.sharded_state_dict(metadata=how)
    stage, part = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    shape = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    streams = [{"torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {}}]
    return {
        "model": own,
        "optimizer": optimizer.sharded_state_dict(own, metadata=how),
        "args": argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16),
        "iteration": 7,
        "checkpoint_version": 3.0,
        "opt_param_scheduler": {"max_lr": 0.01, "num_steps": 12, "lr_decay_style": "linear"},
        "rng_state": ShardedObject("rng_state", streams, shape, (stage, part), replica),
    }


def _held(model: Any, optimizer: Any, case: Case) -> list[Piece]:
    """The tensors of this rank by global key, gathered by Megatron where its optimizer is distributed."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    how = case.how | (_sharding("fully_reshardable") if case.distributed else {})
    states = _states(model, optimizer, how)
    apply_factories(states)
    return [
        (
            each.key,
            each.global_slice(),
            _bytes(each.data),
        )
        for each in _sharded({k: states[k] for k in ("model", "optimizer")}, ShardedTensor)
    ]


def _bytes(tensor: torch.Tensor) -> bytes:
    """As numpy has them: without bfloat16."""
    plain = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()
    found: Any = plain.contiguous().numpy()
    return bytes(found.tobytes())


def _groups(optimizer: Any, places: dict[torch.nn.Parameter, Any]) -> list[Any]:
    """Weight decay's multiple, and the keys of the parameters that have it."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    found: list[Any] = []
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(each, DistributedOptimizer):
            for param, (group, _) in each.model_param_group_index_map.items():
                multiple = each.optimizer.param_groups[group]["wd_mult"]
                found.append((multiple, places[param].key))
            continue
        lists = getattr(each, "float16_groups", None) or [g["params"] for g in each.param_groups]
        for group, params in zip(each.param_groups, lists, strict=True):
            found += [(group["wd_mult"], places[p].key) for p in params]
    return found
