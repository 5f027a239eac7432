"""The whole state of DeepSpeed engines below ZeRO-3, put together without dynadapt.

DeepSpeed's own `safe_get_full_*` are wrong in stages 1 and 2 in two cases: with `round_robin_gradients`
they look where the parameter would lie in the user's order, and of several param groups only the first
one's states are linked by a first step. So the ranks' parts are joined, and a parameter is looked up in
them where its own weight lies among the weights; where DeepSpeed's masters are right, both must agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

Found = tuple[torch.nn.Parameter, str, torch.Tensor]


def gathered_below_3(engine: Any, group: Any = None) -> dict[tuple[str, str], torch.Tensor]:
    """Every master, state tensor and lower weight by (parameter, slot), on every rank; a collective.

    `group` are the ranks that the state is cut over; by default all.
    """
    cut = engine.zero_optimization_stage() or hasattr(engine.optimizer, "bf16_groups_flat")
    every = _joined(engine, group) if cut else _whole(engine)
    names = {id(param): name for name, param in engine.module.named_parameters()}
    found = {(names[id(param)], slot): full.detach().clone() for param, slot, full in every}
    for name, param in engine.module.named_parameters():
        if (name, "param") not in found:
            found[name, "param"] = param.detach().clone()
        elif found[name, "param"].data_ptr() != param.data_ptr() and _has_copies(engine):
            found[name, "compute"] = param.detach().clone()
    return found


def _has_copies(engine: Any) -> bool:
    optimizer = engine.optimizer
    wrapped = hasattr(optimizer, "fp16_groups") or hasattr(optimizer, "bf16_groups")
    return bool(engine.zero_optimization_stage() or wrapped)


def _joined(engine: Any, group: Any) -> Iterator[Found]:
    """Stages 1 and 2 and `BF16_Optimizer`."""
    from deepspeed.utils import safe_get_full_fp32_param

    optimizer = engine.optimizer
    if hasattr(optimizer, "bf16_groups_flat"):
        own, weights = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups_flat
        groups = optimizer.bf16_groups
    else:
        own, weights = optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups_flat
        groups = optimizer.bit16_groups
    for part, flat, params in zip(own, weights, groups, strict=True):
        for slot, full in {"param": part, **_states(optimizer.optimizer, part)}.items():
            parts = [torch.empty_like(full) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, full.detach(), group=group)
            joined = torch.cat(parts)
            for param in params:
                at = param.storage_offset() - flat.storage_offset()
                found = joined.narrow(0, at, param.numel()).view(param.shape)
                if slot == "param" and not getattr(optimizer, "round_robin_gradients", False):
                    assert torch.equal(safe_get_full_fp32_param(param), found)
                yield param, slot, found


def _whole(engine: Any) -> Iterator[Found]:
    """Without ZeRO, cut apart as DeepSpeed does it in its step."""
    from torch._utils import _unflatten_dense_tensors

    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    if hasattr(optimizer, "fp32_groups_flat"):
        for flat, params in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
            for slot, full in {"param": flat, **_states(inner, flat)}.items():
                for param, part in zip(params, _unflatten_dense_tensors(full, params), strict=True):
                    yield param, slot, part
        return
    masters = [group["params"] for group in inner.param_groups]
    for params, own in zip(getattr(optimizer, "fp16_groups", masters), masters, strict=True):
        for param, master in zip(params, own, strict=True):
            yield param, "param", master
            for slot, full in _states(inner, master).items():
                yield param, slot, full


def _states(optimizer: Any, master: torch.Tensor) -> dict[str, torch.Tensor]:
    # Sorted: the universal loader puts them in the order of a set, another one on each rank.
    state = sorted(optimizer.state.get(master, {}).items())
    return {slot: value for slot, value in state if getattr(value, "ndim", 0)}


Tensors = dict[tuple[str, str], torch.Tensor]


def joined_stages(own: Tensors) -> Tensors:
    """What the stages of a pipeline hold, on every rank; replicas must be equal."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    found: Tensors = {}
    for part in parts:
        for key, full in part.items():
            assert torch.equal(found.setdefault(key, full), full), key
    return found


def joined_tensors(engine: Any, own: Tensors) -> Tensors:
    """What the ranks of AutoTP hold, on every rank, by the gathers of its layers; replicas must be equal.

    A rank may hold nothing of a parameter, which DeepSpeed then does not optimize there.
    """
    params = dict(engine.module.named_parameters())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {key: full.dtype for key, full in own.items()})
    dtypes: dict[tuple[str, str], torch.dtype] = {}
    for part in parts:
        for key, dtype in part.items():
            if key not in dtypes or dtype == torch.float32:
                dtypes[key] = dtype
    whole: Tensors = {}
    for (name, slot), dtype in sorted(dtypes.items()):
        param = params[name]
        full = own.get((name, slot), param.new_zeros(param.shape, dtype=dtype)).to(dtype)
        gather = getattr(param, "gather_params", None)
        if gather is not None:
            kept, param.data = param.data, full.clone()  # it knows its own bias from its weight
            gather([param])
            full, param.data = param.data, kept
        whole[name, slot] = full
    return joined_stages(whole)
