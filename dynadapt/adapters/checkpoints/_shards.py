"""Sharded tensors as torch pickles them, a part in the file of each rank: `ShardedTensor` and `DTensor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._pickle import Global, Opaque, StoredTensor
from dynadapt.errors import Finding, Refused
from dynadapt.vps.box import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Part", "coordinate_of", "part_of"]


@dataclass(frozen=True)
class Part:
    """What one rank has of a tensor: its whole shape, and boxes of it with their elements."""

    shape: tuple[int, ...]
    dtype: str
    held: tuple[tuple[Box, StoredTensor], ...]
    sharded: bool = True
    trainable: bool | None = None


def part_of(value: Any, where: str, mesh: Sequence[int]) -> Part | None:
    """The part in a value of a state dict; None for what is no tensor.

    `mesh` are the sizes of the ranks' mesh. Raises `Refused` (`unsupported-format`, `geometry`).
    """
    if isinstance(value, StoredTensor):
        whole = ((Box.whole(value.shape), value),)
        return Part(value.shape, value.dtype, whole, sharded=False)
    found = _wrapped(value)
    if found is None:
        return None
    kind, dtype, shape, requires_grad, state = found
    if kind == "ShardedTensor":
        shards = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(shards, list):
            raise _odd(where, "a ShardedTensor without a list of shards")
        held = tuple(_shard(shard, where) for shard in shards)
    elif kind == "DTensor":
        held = _local(state, shape, where, mesh)
    else:
        raise _odd(where, f"a {kind}, a tensor that only its own class can read")
    for box, tensor in held:
        inside = box.ndim == len(shape) and Box.whole(shape).contains(box)
        if not inside or tensor.shape != box.shape or tensor.dtype != dtype:
            cause = f"a part of {list(tensor.shape)} is not {box} of {list(shape)}"
            raise Refused([Finding("geometry", where, cause, "it may be damaged: copy it again")])
    return Part(shape, dtype, tuple((b, t) for b, t in held if b.volume), trainable=requires_grad)


def coordinate_of(value: Any) -> tuple[int, ...] | None:
    """A rank's place in the mesh of a `DTensor`; None for anything else."""
    found = _wrapped(value)
    if found is None or found[0] != "DTensor":
        return None
    mesh = _get(_get(found[4], "_spec"), "mesh")
    told = _get(mesh, "_coordinate_on_dim")
    if not isinstance(told, list | tuple) or any(type(n) is not int or n < 0 for n in told):
        return None
    return tuple(told)


def _wrapped(value: Any) -> tuple[str, str, tuple[int, ...], bool, Any] | None:
    """Class, dtype, shape, whether it is trained, and state of a pickled subclass of tensors."""
    if not isinstance(value, Opaque) or not value.is_a("_rebuild_from_type_v2"):
        return None
    if len(value.args) < 4 or not isinstance(value.args[1], Global):
        return None
    made, kind, args, state = value.args[:4]
    if not isinstance(made, Global) or made.name != "_rebuild_wrapper_subclass":
        return None
    dtype, shape = (args[1], args[2]) if isinstance(args, tuple) and len(args) > 2 else (None, ())
    sizes = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if not isinstance(dtype, Global) or not sizes:
        return None
    return kind.name, dtype.name, tuple(shape), bool(args[-1] is True), state


def _get(value: Any, name: str) -> Any:
    """An attribute of an object, or out of a state."""
    if isinstance(value, Opaque):
        return value.get(name)
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, dict) and name in part:
            return part[name]
    return None


def _shard(shard: Any, where: str) -> tuple[Box, StoredTensor]:
    tensor, metadata = _get(shard, "tensor"), _get(shard, "metadata")
    low, sizes = _get(metadata, "shard_offsets"), _get(metadata, "shard_sizes")
    numbers = isinstance(low, list | tuple) and isinstance(sizes, list | tuple)
    if not isinstance(tensor, StoredTensor) or not numbers or len(low) != len(sizes):
        raise _odd(where, "a shard without a tensor, offsets and sizes")
    if any(type(n) is not int or n < 0 for n in (*low, *sizes)):
        raise _odd(where, "a shard with bad offsets or sizes")
    return Box(tuple(low), tuple(a + n for a, n in zip(low, sizes, strict=True))), tensor


def _local(
    state: Any, shape: tuple[int, ...], where: str, mesh: Sequence[int]
) -> tuple[tuple[Box, StoredTensor], ...]:
    """The part of a `DTensor`: its dims are cut in the order of the mesh's, as `torch.chunk` does."""
    tensor, spec = _get(state, "_local_tensor"), _get(state, "_spec")
    placements = _get(spec, "placements")
    told = _get(_get(spec, "mesh"), "_coordinate_on_dim")
    if not isinstance(tensor, StoredTensor) or not isinstance(placements, tuple | list):
        raise _odd(where, "a DTensor without a local tensor and placements")
    if not isinstance(told, list | tuple) or len(told) != len(placements) or len(mesh) != len(told):
        raise _odd(where, "a DTensor that does not say where its rank is")
    low, high = [0] * len(shape), list(shape)
    for placement, at, ways in zip(placements, told, mesh, strict=True):
        if isinstance(placement, Opaque) and placement.is_a("Replicate"):
            continue
        dim = _get(placement, "dim")
        if not isinstance(placement, Opaque) or not placement.is_a("Shard"):
            raise _odd(where, f"a DTensor that is placed by {str(placement)[:60]}")
        if type(dim) is not int or not 0 <= dim < len(shape):
            raise _odd(where, "a DTensor that is cut along a dim which it has not")
        step = -(-(high[dim] - low[dim]) // ways)
        begin = min(low[dim] + at * step, high[dim])
        low[dim], high[dim] = begin, min(begin + step, high[dim])
    return ((Box(tuple(low), tuple(high)), tensor),)


def _odd(where: str, what: str) -> Refused:
    fix = "gather it in its job (FULL_STATE_DICT), or save it with torch.distributed.checkpoint"
    return Refused([Finding("unsupported-format", where, f"is {what}"[:300], fix)])
