"""A rank's piece of one parameter in one of DeepSpeed's optimizers, and single entries of their states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynadapt.errors import Finding
from dynadapt.torch_dtypes import dtype_name
from dynadapt.vps.box import Box, Span
from dynadapt.vps.flat import FlatGroup
from dynadapt.vps.keys import Key, KeySpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynadapt.adapters._common import BufferTable, NamedTensor
    from dynadapt.adapters.live._deepspeed_cut import Cut

__all__ = [
    "Share",
    "bad_extra",
    "is_scalar",
    "is_slot",
    "kind_of",
    "laid_out",
    "put",
    "replaced",
    "same_memory",
    "spec_of",
    "state_keys",
    "unknown_optimizer",
]


@dataclass(frozen=True, eq=False)
class Share:
    """This rank's piece of one parameter: elements `span`, at `offset` in unit number `unit`.

    A parameter outside the optimizer has no unit (-1); `group` is the param group of the unit. `span` is
    of this rank's own parameter, which is itself a part where `cut` says so.
    """

    named: NamedTensor
    span: Span
    unit: int = -1
    offset: int = 0
    group: int = -1
    cut: Cut | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's parameter, whatever its memory is by now."""
        return tuple(self.named.tensor.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's shape; that of this rank's unless tensor parallelism cuts it."""
        return self.local_shape if self.cut is None else self.cut.shape

    @property
    def nothing(self) -> bool:
        """Tensor parallelism left this rank nothing of a parameter: DeepSpeed then does not optimize it."""
        return self.cut is not None and 0 in self.local_shape

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the parameter."""
        return (self.named.name, *self.named.aliases)

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """The shape of a user's tensor that is cut as the framework cuts the parameter's weight."""
        return self.local_shape

    def copy(self) -> torch.Tensor:
        """What a forward is made from on this rank: the whole parameter, or the elements `span`."""
        return self.named.tensor.detach()

    def within(self, unit: torch.Tensor) -> torch.Tensor:
        """The piece's elements in its unit, or in a state tensor of it."""
        return unit.detach().narrow(0, self.offset, len(self.span))


def laid_out(
    params: Sequence[torch.Tensor], offsets: Sequence[int], part: int, rank: int
) -> Iterator[tuple[torch.Tensor, Span, int]]:
    """Parameters in one flat buffer that is cut into parts: each one's elements on a rank, and where."""
    group = FlatGroup(np.asarray(offsets, np.int64), part)
    spans = group.spans([param.numel() for param in params], rank)
    for param, start, stop, at in zip(params, *(each.tolist() for each in spans), strict=True):
        yield param, Span(start, stop), at


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are views of one storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def put(table: BufferTable, key: Key, share: Share, tensor: torch.Tensor) -> None:
    """A tensor in the parameter's own shape is all of it; any other one has the share's elements."""
    shape = tuple(tensor.shape)
    if shape == share.local_shape:
        _put_box(table, key, share, Box.whole(shape), tensor)
    elif shape == share.shape:
        table.add(key, Box.whole(shape), tensor)
    elif share.cut is None:
        if len(share.span):
            table.add_flat(key, share.span.boxes(share.shape), tensor)
    else:
        at = 0
        for box in share.span.boxes(share.local_shape):
            part = tensor.narrow(0, at, box.volume).view(box.shape)
            _put_box(table, key, share, box, part)
            at += box.volume


def _put_box(table: BufferTable, key: Key, share: Share, box: Box, tensor: torch.Tensor) -> None:
    """A tensor that is a box of this rank's own parameter, under its coordinates in the whole one."""
    if share.cut is None:
        table.add(key, box, tensor)
        return
    for local, whole in share.cut.pieces:
        inner = box.intersect(local)
        if inner is not None:
            ends = zip(inner.lo, inner.hi, box.lo, strict=True)
            view = tensor[tuple(slice(lo - start, hi - start) for lo, hi, start in ends)]
            table.add(key, inner.shifted(local.lo, whole.lo), view)


def spec_of(share: Share, slot: str, dtype: torch.dtype, trainable: bool, **more: Any) -> KeySpec:
    """The spec of one tensor of a share's parameter."""
    return KeySpec(
        Key(share.named.name, slot),
        share.shape,
        dtype_name(dtype),
        trainable=trainable,
        order=share.named.order,
        group=share.group,
        aliases=share.named.aliases,
        **more,
    )


def state_keys(spec: KeySpec) -> tuple[Key, ...]:
    """The key of an optimizer's tensor under each of its names, if the source really holds it."""
    if spec.kind != "state" or not spec.moves or spec.key.slot.startswith("extra:"):
        return ()
    return tuple(Key(name, spec.key.slot) for name in (spec.key.name, *spec.aliases))


def is_scalar(label: str, value: Any) -> bool:
    """A number, in whatever form; a flat tensor of one element is none, unless it is a step."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 or (label == "step" and value.numel() == 1)
    return isinstance(value, int | float)


def is_slot(label: str, value: Any, master: torch.Tensor) -> bool:
    """A state tensor in the shape of its master."""
    is_tensor = isinstance(value, torch.Tensor) and not is_scalar(label, value)
    return is_tensor and bool(value.shape == master.shape)


def replaced(old: Any, value: int | float) -> Any:
    """The new number in the form of the old one; a tensor keeps its identity."""
    if isinstance(old, torch.Tensor):
        return old.fill_(value)
    return type(old)(value)


def kind_of(value: Any) -> str:
    """A value of a state, in words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def unknown_optimizer(optimizer: Any, share: Share) -> Finding:
    """A target's optimizer whose state cannot be made."""
    return Finding(
        "unknown-optimizer",
        share.named.name,
        f"{type(optimizer).__name__} has not stepped yet and its state cannot be made for it",
        "take one step with the target before the migration, or use an optimizer of torch or DeepSpeed",
    )


def bad_extra(name: str, label: str, share: Share | None, shape: tuple[int, ...]) -> Finding:
    """A user's tensor that is in no form of a parameter."""
    cause = "the model has no such parameter"
    if share is not None:
        cut = f" nor this rank's {list(share.cut_shape)}" if share.cut_shape != share.shape else ""
        cause = f"shape {list(shape)} is not {list(share.shape)}{cut}"
    return Finding("extra-shape", f"{name}/extra:{label}", cause, "keep one tensor per parameter")
