"""Where FSDP1 keeps each tensor: units, their flat parameters, and this rank's part of every tensor.

The authoritative bytes are in `flat_param._local_shard`, in the parameters' own dtype, whatever the
flat parameter or the modules' attributes show at the moment. Before the first forward there is no
such attribute yet, and the flat parameter is the shard itself. Where a tensor lies in it is FSDP1's
own metadata, `_shard_param_infos`; padding is in none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from dynadapt.adapters._common import NamedTensor, named_once
from dynadapt.errors import Finding, Refused
from dynadapt.vps.box import Box, Span, row_major_strides
from dynadapt.vps.keys import canonical_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Part", "local_shard", "named_parts", "units"]


def units(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Every FSDP1 unit that has a flat parameter, with its module's canonical name."""
    for raw, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield canonical_name(f"{raw}.").removesuffix("."), module


def local_shard(handle: Any) -> torch.Tensor:
    """This rank's shard of a flat parameter, 1-D, padding included; of `NO_SHARD` the whole flat."""
    flat = handle.flat_param
    shard: torch.Tensor = getattr(flat, "_local_shard", flat)
    return shard.detach()


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of one tensor of a flat: elements `span` of it, from `offset` of the shard on.

    Spans count in memory order, which is row-major but for tensors of other strides: there `dims` are
    the dims from the slowest to the fastest. `parameter` is what an optimizer has: the flat parameter
    (`flat`), or with `use_orig_params` the tensor's own one.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    span: Span
    offset: int
    shard: torch.Tensor
    parameter: torch.Tensor
    flat: bool

    @property
    def piece(self) -> torch.Tensor:
        """The part itself, a 1-D view of the shard."""
        return self.of_flat(self.shard)

    @property
    def is_here(self) -> bool:
        """Whether an optimizer keeps state for the tensor on this rank, once it was trained."""
        return self.flat or len(self.span) > 0 or not prod(self.shape)

    def of_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that lies as the shard does: an optimizer's state of a flat."""
        return flat.detach().narrow(0, self.offset, len(self.span))

    def views(self, piece: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes that a 1-D tensor of the part's length holds, each with its view."""
        at = int(piece.storage_offset())
        for box in self.span.boxes(tuple(self.shape[dim] for dim in self.dims)):
            strides = dict(zip(self.dims, row_major_strides(box.shape), strict=True))
            lo, hi = (dict(zip(self.dims, ends, strict=True)) for ends in (box.lo, box.hi))
            every = range(len(self.dims))
            found = Box(tuple(lo[dim] for dim in every), tuple(hi[dim] for dim in every))
            view = piece.as_strided(found.shape, tuple(strides[dim] for dim in every), at)
            yield found, view
            at += box.volume


def named_parts(model: torch.nn.Module) -> tuple[tuple[NamedTensor, Part | None], ...]:
    """All parameters under the names of the unwrapped model, in its order, with their parts.

    The tensor of a parameter in a flat is its part on this rank, a 1-D leaf that requires a gradient
    as the parameter does. A parameter outside all units has no part: it is whole on every rank.
    """
    parts: dict[int, Part] = {}
    pieces: dict[int, torch.Tensor] = {}  # by the parameter's own id, with `use_orig_params`
    entries: dict[int, dict[str, torch.Tensor]] = {}  # by module: attribute -> piece
    flats: set[int] = set()
    for path, unit in units(model):
        handle = unit._handle
        flat = handle.flat_param
        flats.add(id(flat))
        primary: dict[tuple[int, str], torch.Tensor] = {}
        for index, (attribute, module, _) in enumerate(flat._param_infos):
            part = _part(handle, index, path)
            own = flat if part.flat else part.parameter
            piece = part.piece.requires_grad_(own.requires_grad)
            parts[id(piece)] = part
            primary[id(module), attribute] = piece
            entries.setdefault(id(module), {})[attribute] = piece
            if not part.flat:
                pieces[id(part.parameter)] = piece
        for attribute, module, _, first, first_module, _ in flat._shared_param_infos:
            entries.setdefault(id(module), {})[attribute] = primary[id(first_module), first]
    named: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = dict(entries.get(id(module), {}))
        for attribute, parameter in module._parameters.items():
            # While a forward's views stand in for the parameters, they are plain tensors.
            if isinstance(parameter, torch.nn.Parameter) and id(parameter) not in flats:
                own.setdefault(attribute, pieces.get(id(parameter), parameter))
        named.update({f"{path}.{name}" if path else name: own[name] for name in own})
    return tuple((each, parts.get(id(each.tensor))) for each in named_once(named.items()))


def _part(handle: Any, index: int, unit: str) -> Part:
    flat = handle.flat_param
    info = flat._shard_param_infos[index]
    start = info.intra_param_start_idx if info.in_shard else 0
    shape = tuple(flat._shapes[index])
    name = canonical_name(f"{unit}.{flat._fqns[index]}" if unit else flat._fqns[index])
    return Part(
        shape=shape,
        dims=_slowest_first(name, shape, flat._strides[index]),
        span=Span(start, start + (info.numel_in_shard if info.in_shard else 0)),
        offset=info.offset_in_shard if info.in_shard else 0,
        shard=local_shard(handle),
        parameter=flat if flat._params is None else flat._params[index],
        flat=flat._params is None,
    )


def _slowest_first(name: str, shape: tuple[int, ...], strides: Sequence[int]) -> tuple[int, ...]:
    """The dims in memory order; FSDP1 flattens a tensor of other strides as it lies in memory."""
    dims = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)))
    dense = row_major_strides(tuple(shape[dim] for dim in dims))
    every = zip(dims, dense, strict=True)
    gaps = any(shape[dim] > 1 and strides[dim] != stride for dim, stride in every)
    if gaps and 0 not in shape:
        cause = f"its strides {tuple(strides)} leave gaps, which FSDP1 flattens with it"
        fix = "make it contiguous before the model is wrapped"
        raise Refused([Finding("unsupported-tensor", name, cause, fix)])
    return dims
