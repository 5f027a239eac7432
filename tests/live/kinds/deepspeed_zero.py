"""DeepSpeed engines: without ZeRO, stages 1 to 3, offloaded; in each precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.live import jobs
from tests.live.kinds._base import EngineJob, kind

if TYPE_CHECKING:
    from tests.live.kinds._base import Job, Recipe

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

#: What there is of an engine other than every precision.
ONLY = {
    "zero0fused": ("bf16", "fp16"),  # the wrapper keeps masters, which fp32 has none of
    "zero1acc": ("bf16",),  # with others it is zero1
}

for _name in jobs.ENGINES:
    for _dtype in ONLY.get(_name, tuple(DTYPES)):

        @kind(f"{_name}-{_dtype}", dtype=DTYPES[_dtype])
        def _engine(model: jobs.Net, recipe: Recipe, name: str = f"{_name}-{_dtype}") -> Job:
            return EngineJob(jobs.deepspeed_engine(name, model, recipe(model)), recipe)
