"""How tensor parallelism cuts a parameter, from the account that AutoTP leaves at it.

AutoTP replaces linear layers and embeddings by ones that hold a part, and writes at each of their
parameters which blocks of the whole one it is, for its own checkpoints. A parameter without such a note
is whole on every rank. Splits may be uneven, and a rank may hold nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

from dynadapt.adapters._common import named_parameters
from dynadapt.adapters._cut import Cut, UnknownCutError, along, cut_of_map
from dynadapt.errors import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["Cut", "cuts_of", "tensor_place"]


def tensor_place(engine: Any) -> tuple[int, int]:
    """This rank's number among the ranks that share tensors, and how many they are: (0, 1) without."""
    for module in engine.module.modules():
        size = getattr(module, "tp_world_size", None)
        if size is not None and hasattr(module, "tp_index"):
            return int(module.tp_index), int(size)
    return 0, 1


def cuts_of(engine: Any) -> tuple[dict[int, Cut], list[Finding]]:
    """The cuts of an engine's parameters by `id`, and those that cannot be described."""
    rank, size = tensor_place(engine)
    found: dict[int, Cut] = {}
    findings: list[Finding] = []
    if size == 1:
        return found, findings
    for named in named_parameters(engine.module):
        shape = tuple(getattr(named.tensor, "ds_shape", named.tensor.shape))
        try:
            cut = _cut(named.tensor, shape, rank, size)
        except UnknownCutError as unknown:
            cause = f"AutoTP cuts it in a way that is not known: {unknown}"
            fix = "use a tensor_parallel partition_config with layers it can describe, or autotp_size 1"
            findings.append(Finding("unsupported-parallel", named.name, cause, fix))
            continue
        if cut is not None:
            found[id(named.tensor)] = cut
    return found, findings


def _cut(param: torch.Tensor, local: tuple[int, ...], rank: int, size: int) -> Cut | None:
    note: Mapping[str, Any] | None = getattr(param, DS_AUTOTP_UC_META, None)
    if note is None:
        if getattr(param, "tensor_model_parallel", False):
            raise UnknownCutError("it is marked as a part, and of what is not said")
        return None
    conversion = note.get("conversion") or {}
    if reason := conversion.get("unsupported_reason"):
        raise UnknownCutError(str(reason))
    if (stored := conversion.get("affine_map")) is not None:
        return cut_of_map(stored, rank, local)
    sizes, dim = note.get("partition_sizes"), note.get("partition_dim")
    if sizes is None or dim is None or len(sizes) != size:
        raise UnknownCutError("neither its blocks nor its sizes are said")
    cut = along(note["logical_shape"], [tuple(sizes)], dim, rank)
    if cut.local != local:
        raise UnknownCutError(f"rank {rank} should hold {list(cut.local)}, and has {list(local)}")
    return cut
