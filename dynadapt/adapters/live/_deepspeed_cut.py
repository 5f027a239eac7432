"""How tensor parallelism cuts a parameter, from the account that AutoTP leaves at it.

AutoTP replaces linear layers and embeddings by ones that hold a part, and writes at each of their
parameters which blocks of the whole one it is, for its own checkpoints. A parameter without such a note
is whole on every rank. Splits may be uneven, and a rank may hold nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint.affine import ParamAffineMap, contiguous_split_map
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

from dynadapt.adapters._common import named_parameters
from dynadapt.errors import Finding
from dynadapt.vps.box import Box, row_major_strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

__all__ = ["Cut", "cuts_of", "tensor_place"]


@dataclass(frozen=True)
class Cut:
    """Blocks of a whole parameter of `shape`, and where each lies in this rank's `local` tensor.

    `pieces` are (box in the local tensor, box in the whole one), of equal shapes.
    """

    shape: tuple[int, ...]
    local: tuple[int, ...]
    pieces: tuple[tuple[Box, Box], ...]


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
        except _UnknownError as unknown:
            cause = f"AutoTP cuts it in a way that is not known: {unknown}"
            fix = "use a tensor_parallel partition_config with layers it can describe, or autotp_size 1"
            findings.append(Finding("unsupported-parallel", named.name, cause, fix))
            continue
        if cut is not None:
            found[id(named.tensor)] = cut
    return found, findings


class _UnknownError(Exception):
    """Why a parameter's cut cannot be told."""


def _cut(param: torch.Tensor, local: tuple[int, ...], rank: int, size: int) -> Cut | None:
    note: Mapping[str, Any] | None = getattr(param, DS_AUTOTP_UC_META, None)
    if note is None:
        if getattr(param, "tensor_model_parallel", False):
            raise _UnknownError("it is marked as a part, and of what is not said")
        return None
    whole = _map_of(note, size)
    if whole.shard_shapes.get(rank) != local:
        raise _UnknownError(
            f"rank {rank} should hold {list(whole.shard_shapes.get(rank, ()))}, and has {list(local)}"
        )
    pieces = tuple(_boxes(whole, rank))
    if sum(inside.volume for inside, _ in pieces) != prod(local):
        raise _UnknownError("its blocks are not all of it")
    return Cut(whole.logical_shape, local, pieces)


def _map_of(note: Mapping[str, Any], size: int) -> Any:
    conversion = note.get("conversion") or {}
    if reason := conversion.get("unsupported_reason"):
        raise _UnknownError(str(reason))
    if (stored := conversion.get("affine_map")) is not None:
        return ParamAffineMap.from_dict(stored)
    sizes, dim = note.get("partition_sizes"), note.get("partition_dim")
    if sizes is None or dim is None or len(sizes) != size:
        raise _UnknownError("neither its blocks nor its sizes are said")
    return contiguous_split_map(note["logical_shape"], sizes, dim)


def _boxes(whole: Any, rank: int) -> Iterator[tuple[Box, Box]]:
    local = whole.shard_shapes[rank]
    for piece in whole.pieces_by_rank[rank]:
        if not piece.numel:
            continue
        if piece.scale != 1.0:
            raise _UnknownError(f"the rank holds {piece.scale:g} times the value")
        strides = piece.source_strides, piece.dest_strides
        if strides != (row_major_strides(whole.logical_shape), row_major_strides(local)):
            raise _UnknownError("its blocks do not lie row by row")
        yield (
            _box(piece.dest_offset, local, piece.shape),
            _box(piece.source_offset, whole.logical_shape, piece.shape),
        )


def _box(offset: int, within: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    lo = []
    for stride in row_major_strides(within):
        at, offset = divmod(offset, stride)
        lo.append(at)
    return Box(tuple(lo), tuple(a + n for a, n in zip(lo, shape, strict=True)))
