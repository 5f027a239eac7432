"""Putting a process back to how it was before it trained something.

Everything private to torch or DeepSpeed that tests have to reset is in this file.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["freeze_imports", "reset", "reset_deepspeed"]

_frozen = [0]
"""How many modules there were when objects were last frozen."""

_caches: list[Any] = []
_searched = [0]
"""What `_dtensor_caches` found, and how many modules there were then."""


def reset(environ: Mapping[str, str]) -> None:
    """Put the process back to how it was before the run, its environment to `environ`.

    Cheap when DeepSpeed, DTensor and Accelerate were never imported: only what is loaded is reset.
    """
    import torch
    import torch.distributed as dist

    _destroy_engines()
    reset_deepspeed()
    _reset_accelerate()
    _reset_torch_caches()
    gc.collect()  # engines are full of cycles and must not outlive the groups they use
    if dist.is_initialized():
        dist.destroy_process_group()
    freeze_imports()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environ)


def _destroy_engines() -> None:
    """End DeepSpeed's engines as it asks to.

    Hooks on gradients hold an engine in cycles through C++, which no collection sees: it would stay
    with its groups, and each of gloo's has threads of its own.
    """
    if "deepspeed" in sys.modules:
        from deepspeed.comm import comm
        from deepspeed.runtime.engine import DeepSpeedEngine

        # without isinstance, which asks proxies
        for found in gc.get_objects() if comm.cdb is not None else ():
            if issubclass(type(found), DeepSpeedEngine):
                found.destroy()


def freeze_imports() -> None:
    """Spare later collections the objects of what was imported meanwhile.

    Walking a framework's modules takes a tenth of a second, and a reset collects each time.
    """
    if len(sys.modules) > _frozen[0] + 100:
        _frozen[0] = len(sys.modules)
        gc.freeze()


def _reset_torch_caches() -> None:
    """Caches that compare device meshes without their groups: a stale entry fails or hangs."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _random, _redistribute, debug

        debug._clear_sharding_prop_cache()
        _redistribute.clear_redistribute_planner_cache()
        for cache in _dtensor_caches():
            cache.cache_clear()
        _random._rng_tracker = None
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and dynamo.counters["frames"]:
        sys.modules["torch._dynamo"].reset()


def _dtensor_caches() -> list[Any]:
    """DTensor's `lru_cache`s: their keys hold meshes, and those their groups. Most are in closures."""
    if len(sys.modules) > _searched[0]:
        _searched[0] = len(sys.modules)
        gc.unfreeze()
        gc.collect()  # what is frozen is never collected
        kind = type(functools.lru_cache(abs))
        _caches[:] = [
            found
            for found in gc.get_objects()
            if type(found) is kind and found.__module__.startswith("torch.distributed.tensor")
        ]
        gc.freeze()
    return _caches


def reset_deepspeed() -> None:
    """Globals of DeepSpeed that one engine leaves for the next."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.module_inject import layers
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.activation_checkpointing import checkpointing
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.runtime.zero import (
        parameter_offload,
        partition_parameters,
        partitioned_param_coordinator,
    )
    from deepspeed.utils import groups
    from torch import nn

    # An engine of ZeRO-3 puts a linear of its own, which rounds otherwise, in torch's place and leaves it.
    hooks = partition_parameters.InsertPostInitMethodToModuleSubClasses
    if hasattr(hooks, "linear_bk"):
        nn.functional.linear = hooks.linear_bk
    init = partition_parameters.Init
    init.param_id = init.num_persisted_parameters = init.num_persisted_elements = 0
    # Module numbers are kept in a mutable default argument.
    offload = parameter_offload.DeepSpeedZeRoOffload
    offload._register_deepspeed_module.__defaults__[0][0] = 0
    parameter_offload.FWD_MODULE_STACK.clear()  # it keeps the whole last engine alive
    # So does the cache of a method, whose keys are all coordinators that there were.
    coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
    wrapped = vars(coordinator)["_PartitionedParameterCoordinator__params_to_release"]
    for cell in wrapped.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()
    layers.DEEPSPEED_AUTOTP_MODE = layers.AUTOTP_MODE.INFERENCE
    init_utils._TP_MODEL_INIT_ARGS = None
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    p2p._groups = p2p._grid = None
    checkpointing.reset()
    checkpointing.mpu = checkpointing.mp_group = checkpointing.num_layers = None
    checkpointing.mp_rank, checkpointing.mp_size = 0, 1
    checkpointing.deepspeed_checkpointing_enabled = False
    groups._release_process_group_references()
    comm.cdb = None


def _reset_accelerate() -> None:
    """Accelerate's process-wide singletons, and the DeepSpeed config that transformers keeps."""
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        GradientState._reset_state()
        AcceleratorState._reset_state(True)
    if "transformers.integrations.deepspeed" in sys.modules:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
