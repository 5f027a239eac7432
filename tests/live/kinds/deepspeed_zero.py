"""DeepSpeed engines: without ZeRO, stages 1 to 3, offloaded; in each precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.live import jobs
from tests.live.kinds._base import EngineJob, kind

if TYPE_CHECKING:
    from tests.live.kinds._base import Job, Recipe

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

#: Which precisions: all where the code depends on it, else enough for each setting to meet each other one.
PRECISIONS = {
    "zero0": ("bf16", "fp16", "fp32"),
    "zero0fused": ("bf16", "fp16"),  # the wrapper keeps masters, which fp32 has none of
    "zero1": ("bf16", "fp16", "fp32"),
    "zero1rr": ("bf16", "fp16", "fp32"),
    "zero1acc": ("bf16",),  # with others it is zero1
    "zero2": ("bf16", "fp16", "fp32"),
    "zero2rr": ("bf16", "fp32"),
    "zero2off": ("bf16", "fp32"),
    "zero3": ("bf16", "fp16", "fp32"),
    "zero3off": ("bf16",),
    "zero3offp": ("bf16", "fp32"),
}

ABOUT = {
    "zero0": "DeepSpeed without ZeRO",
    "zero0fused": "the same, its masters in flat buffers as for FusedAdam",
    "zero1": "ZeRO stage 1",
    "zero1rr": "with round_robin_gradients, without contiguous_gradients",
    "zero1acc": "with grad_accum_dtype fp32: BF16_Optimizer",
    "zero2": "ZeRO stage 2",
    "zero2rr": "with round_robin_gradients",
    "zero2off": "with offload_optimizer to the CPU",
    "zero3": "ZeRO stage 3, in several sub-groups, with persistent parameters",
    "zero3off": "with offload_optimizer to the CPU",
    "zero3offp": "with offload_optimizer and offload_param to the CPU",
}

#: Without ZeRO DeepSpeed divides gradients by a scale that the loss was not multiplied by, as
#: `test_framework_faults` shows.
CONFIG = {"zero0-fp16": {"fp16": {"enabled": True, "loss_scale": 1}}}
CONFIG["zero0fused-fp16"] = CONFIG["zero0-fp16"]

for _name, _dtypes in PRECISIONS.items():
    for _dtype in _dtypes:

        @kind(f"{_name}-{_dtype}", dtype=DTYPES[_dtype], about=ABOUT[_name])
        def _engine(model: jobs.Net, recipe: Recipe, name: str = f"{_name}-{_dtype}") -> Job:
            engine = jobs.deepspeed_engine(name, model, recipe(model), **CONFIG.get(name, {}))
            return EngineJob(engine, recipe)
