"""Which ZeRO-3 engines can be worked on: those whose state is made of ordinary flat tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from dynadapt.adapters._common import named_parameters
from dynadapt.errors import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["zero3_findings"]


def zero3_findings(engine: Any) -> list[Finding]:
    """Every reason why an engine's state cannot be read or written; empty if it can."""
    optimizer = engine.optimizer
    if type(optimizer) is not DeepSpeedZeroOptimizer_Stage3:
        return [
            Finding(
                "unsupported-stage",
                "the engine's optimizer",
                f"it is a {type(optimizer).__name__}, not ZeRO-3's own optimizer",
                "build the engine with an optimizer, without MiCS and SuperOffload",
            )
        ]
    return [*_offload(optimizer), *_parallel_or_quantized(engine)]


def _offload(optimizer: Any) -> Iterator[Finding]:
    """Optimizer and parameter offload to host memory are plain tensors; these are not."""
    where = "zero_optimization"
    if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
        yield Finding("unsupported-offload", where, "state is swapped to NVMe", "offload to cpu")
    if optimizer.offload_optimizer and optimizer.partial_offload != 1.0:
        cause = f"{optimizer.partial_offload:.0%} of the optimizer is offloaded"
        yield Finding("unsupported-offload", where, cause, "set offload_optimizer.ratio to 1.0")
    if optimizer.zenflow:
        yield Finding("unsupported-offload", where, "ZenFlow keeps state apart", "turn it off")
    if optimizer.offloaded_states:
        cause = "engine.offload_states() has moved the state away"
        yield Finding("unsupported-offload", where, cause, "call engine.reload_states() first")


def _parallel_or_quantized(engine: Any) -> Iterator[Finding]:
    """Configurations in which a parameter's shape is not the model's, or its piece is quantized."""
    if engine.mp_world_size > 1 or engine.autotp_size() > 1:
        yield Finding(
            "unsupported-parallel",
            "tensor parallelism",
            "the engine's parameters are shards themselves",
            "use ZeRO-3 without tensor parallelism",
        )
    for named in named_parameters(engine.module):
        if hasattr(named.tensor.ds_tensor, "ds_quant_scale"):  # type: ignore[attr-defined]
            yield Finding(
                "unsupported-quantized",
                named.name,
                "the frozen weight is kept quantized",
                "turn zero_quantized_nontrainable_weights off",
            )
        if getattr(named.tensor, "ds_zero_placement_family", "replicated") != "replicated":
            yield Finding(
                "unsupported-parallel",
                named.name,
                "it is spread over an expert-parallel group",
                "use ZeRO-3 without AutoEP",
            )
