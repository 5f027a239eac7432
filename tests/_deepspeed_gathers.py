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


def gathered_below_3(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Every master, state tensor and lower weight by (parameter, slot), on every rank; a collective."""
    stage = engine.zero_optimization_stage()
    every = _joined(engine) if stage else _whole(engine)
    names = {id(param): name for name, param in engine.module.named_parameters()}
    found = {(names[id(param)], slot): full.detach().clone() for param, slot, full in every}
    for name, param in engine.module.named_parameters():
        if (name, "param") not in found:
            found[name, "param"] = param.detach().clone()
        elif found[name, "param"].data_ptr() != param.data_ptr() and _has_copies(engine):
            found[name, "compute"] = param.detach().clone()
    return found


def _has_copies(engine: Any) -> bool:
    return bool(engine.zero_optimization_stage() or hasattr(engine.optimizer, "fp16_groups"))


def _joined(engine: Any) -> Iterator[Found]:
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
            parts = [torch.empty_like(full) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, full.detach())
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
    state = optimizer.state.get(master, {})
    return {slot: value for slot, value in state.items() if getattr(value, "ndim", 0)}
