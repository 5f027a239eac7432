"""Tensors whose bytes are not their values: quantised weights, 8-bit optimizer states, tensor subclasses.

Their packed bytes mean nothing without scales that are kept somewhere else and cut in some other way, so
they are refused by name. Float8 tensors of torch's own dtypes are ordinary ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from dynadapt.adapters._common import named_buffers, named_parameters
from dynadapt.errors import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["odd_state", "odd_tensor", "odd_tensors"]

_PLAIN = {torch.Tensor, torch.nn.Parameter, DTensor}

#: Layers of bitsandbytes, whose weights FSDP1 turns into flats of bytes.
_QUANTISED_LAYERS = frozenset({"Linear4bit", "Linear8bitLt", "LinearFP4", "LinearNF4"})

#: How block-quantised optimizers call the scales and code books beside their states.
_SCALES = ("absmax", "qmap")

_DEQUANTISE = "dequantize it first, or load the base model in bf16"


def odd_tensor(where: str, tensor: torch.Tensor) -> Finding | None:
    """Why a tensor cannot be moved as the bytes it has; None for an ordinary one.

    >>> odd_tensor("w", torch.zeros(2)) is None
    True
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    kind = type(local)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if (
        hasattr(local, "quant_state")
        or hasattr(local, "SCB")
        or kind.__module__.startswith("torchao")
    ):
        cause = f"it is a {name}: quantised bytes, with scales that are kept apart"
        return Finding("unsupported-quantized", where, cause, _DEQUANTISE)
    if local.is_quantized:
        cause = f"it is of dtype {local.dtype}, with scales that are kept apart"
        return Finding("unsupported-quantized", where, cause, _DEQUANTISE)
    if local.layout is not torch.strided:
        cause = f"it is of layout {local.layout}"
        return Finding("unsupported-tensor", where, cause, "use a dense tensor")
    if kind not in _PLAIN:
        cause = f"it is a {name}, and what its bytes mean only that class knows"
        return Finding("unsupported-tensor", where, cause, "use an ordinary tensor or parameter")
    return None


def odd_tensors(model: torch.nn.Module) -> Iterator[Finding]:
    """Every parameter and buffer of a model that cannot be moved, and every quantised layer."""
    for named in (*named_parameters(model), *named_buffers(model)):
        finding = odd_tensor(named.name, named.tensor)
        if finding is not None:
            yield finding
    for name, module in model.named_modules():
        if type(module).__name__ in _QUANTISED_LAYERS:
            cause = f"it is a {type(module).__name__}, which keeps quantised bytes"
            yield Finding("unsupported-quantized", name or "the root module", cause, _DEQUANTISE)


def odd_state(where: str, label: str, value: Any) -> Finding | None:
    """Why an entry of an optimizer's state cannot be moved as it is; None for an ordinary one.

    >>> odd_state("w", "state1", torch.zeros(2, dtype=torch.uint8)).reason
    'unsupported-quantized'
    """
    if not isinstance(value, torch.Tensor):
        return None
    finding = odd_tensor(f"{where}/{label}", value)
    quantised = finding is not None and finding.reason == "unsupported-quantized"
    if quantised or value.dtype is torch.uint8 or label.startswith(_SCALES):
        return Finding(
            "unsupported-quantized",
            f"{where}/{label}",
            "the optimizer keeps its state in 8-bit blocks, with one scale a block",
            "use the optimizer without quantised states (AdamW for AdamW8bit)",
        )
    return finding
