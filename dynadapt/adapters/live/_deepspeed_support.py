"""Which DeepSpeed engines can be worked on, and by what: those whose state is ordinary tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from dynadapt.adapters._common import by_muon, named_parameters, whole_only
from dynadapt.adapters._odd_tensors import odd_tensors
from dynadapt.adapters.live._deepspeed_pipe import is_pipeline
from dynadapt.adapters.live._deepspeed_zero0 import Fused, Plain, Unfused
from dynadapt.adapters.live._deepspeed_zero3 import Zero3
from dynadapt.adapters.live._deepspeed_zero12 import Bf16, Zero12
from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynadapt.adapters.live._deepspeed_flats import Flats

__all__ = ["view_of"]

_VIEWS: dict[type, type[Flats]] = {
    DeepSpeedZeroOptimizer_Stage3: Zero3,
    DeepSpeedZeroOptimizer: Zero12,
    BF16_Optimizer: Bf16,
    FP16_Optimizer: Fused,
    FP16_UnfusedOptimizer: Unfused,
}
"""By exact class: subclasses (ZenFlow, SuperOffload) keep state elsewhere."""


def view_of(engine: Any) -> Flats:
    """The engine's optimizer as shares. Raises `Refused` with every reason why it cannot be read."""
    optimizer = engine.optimizer
    kind = _VIEWS.get(type(optimizer))
    if kind is None and isinstance(optimizer, torch.optim.Optimizer):
        kind = Plain
    if kind is None:
        raise Refused([_unknown(engine)])
    inner = getattr(optimizer, "optimizer", optimizer)
    findings = [
        *_anywhere(engine),
        *_muon(engine, inner),
        *odd_tensors(engine.module),
        *whole_only(inner, matrices=kind not in {Plain, Unfused}),
    ]
    if kind is Zero3:
        findings += [*_zero3_offload(optimizer), *_zero3_pieces(engine)]
    elif kind is Zero12:
        findings += _zero12(optimizer)
    if findings:
        raise Refused(findings)
    view = kind(engine)
    if view.bad_cuts:
        raise Refused(view.bad_cuts)
    return view


def _unknown(engine: Any) -> Finding:
    optimizer, where = engine.optimizer, "the engine's optimizer"
    name = type(optimizer).__name__
    if optimizer is None or name in {"DummyOptim", "DeepSpeedZeRoOffload"}:
        cause = "the engine was built without one"
        return Finding("unsupported-stage", where, cause, "build the engine with an optimizer")
    return Finding(
        "unsupported-stage",
        where,
        f"it is a {name}, which is none of DeepSpeed's own for ZeRO stages 0 to 3",
        "build the engine without ZenFlow and SuperOffload",
    )


def _anywhere(engine: Any) -> Iterator[Finding]:
    """Set-ups in which a rank's parameters are not the model's, or state lies outside the optimizer."""
    yield from _unknown_cuts(engine)
    if engine.has_moe_layers:
        yield Finding(
            "unsupported-parallel",
            "mixture of experts",
            "experts are spread over an expert-parallel group",
            "use a model without deepspeed.moe layers",
        )
    for owner in (engine.optimizer, engine):
        for name in ("torch_autocast_gradscaler", "torch_autocast_z0_gradscaler"):
            if getattr(owner, name, None) is not None:
                yield Finding(
                    "unsupported-scaler",
                    "torch_autocast",
                    "autocast to float16 scales the loss by a scaler of its own, which is not carried",
                    "use the fp16 section of the config, or torch_autocast with bfloat16",
                )
    if getattr(engine.optimizer, "offloaded_states", None):
        cause = "engine.offload_states() has moved the state away"
        fix = "call engine.reload_states() first"
        yield Finding("unsupported-offload", "zero_optimization", cause, fix)


def _unknown_cuts(engine: Any) -> Iterator[Finding]:
    """Tensor parallelism that nobody tells the layout of."""
    pipeline = is_pipeline(engine)
    slices = engine.module.mpu().get_slice_parallel_world_size() if pipeline else 1
    if slices > 1 or (not pipeline and engine.mp_world_size > 1 and engine.autotp_size() <= 1):
        yield Finding(
            "unsupported-parallel",
            "tensor parallelism",
            "the model cuts its own parameters, and DeepSpeed is not told how",
            "let DeepSpeed cut them (tensor_parallel.autotp_size), or move the state without",
        )
    if pipeline and engine.autotp_size() > 1:
        yield Finding(
            "unsupported-parallel",
            "tensor parallelism",
            "AutoTP in a pipeline takes the stages for data-parallel ranks",
            "use a PipelineModule without tensor_parallel, or AutoTP without a pipeline",
        )


def _muon(engine: Any, inner: Any) -> Iterator[Finding]:
    """Momentum that is of other gradients than elsewhere, or that lies beside the optimizer."""
    if not any(by_muon(inner, group) for group in inner.param_groups):
        return
    if engine.get_data_types()[0] == torch.float16:
        yield Finding(
            "unsupported-optimizer",
            "Muon",
            "in fp16 its momentum is of gradients times a loss scale that changes under way",
            "use Muon with bf16 or fp32",
        )
    if engine.autotp_size() > 1:
        yield Finding(
            "unsupported-optimizer",
            "Muon",
            "under AutoTP it makes each rank's part of a matrix orthogonal by itself, which is another step",
            "use Muon without tensor_parallel, or another optimizer",
        )
    if getattr(engine.optimizer, "save_muon_momentum_buffer_in_memory", False):
        yield Finding(
            "unsupported-optimizer",
            "Muon",
            "ZeRO-3 keeps a second reference to its momentum beside the optimizer's state",
            "turn save_muon_momentum_buffer_in_memory off",
        )


def _zero3_offload(optimizer: Any) -> Iterator[Finding]:
    """Optimizer and parameter offload to host memory are plain tensors; these are not."""
    where = "zero_optimization"
    if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
        yield Finding("unsupported-offload", where, "state is swapped to NVMe", "offload to cpu")
    if optimizer.offload_optimizer and optimizer.partial_offload != 1.0:
        cause = f"{optimizer.partial_offload:.0%} of the optimizer is offloaded"
        yield Finding("unsupported-offload", where, cause, "set offload_optimizer.ratio to 1.0")
    if optimizer.zenflow:
        yield Finding("unsupported-offload", where, "ZenFlow keeps state apart", "turn it off")


def _zero3_pieces(engine: Any) -> Iterator[Finding]:
    """Pieces that are not parts of the weight itself."""
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


def _zero12(optimizer: Any) -> Iterator[Finding]:
    if len(optimizer.optimizer.param_groups) != len(optimizer.bit16_groups):
        # DeepSpeed 0.19 makes Adagrad anew, over one group: its own step fails then.
        yield Finding(
            "unsupported-optimizer",
            type(optimizer.optimizer).__name__,
            f"DeepSpeed has joined its {len(optimizer.bit16_groups)} param groups into one, and "
            "cannot step it",
            "give it one param group, or use another optimizer",
        )
