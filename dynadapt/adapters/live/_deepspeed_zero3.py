"""ZeRO stage 3: where a rank's part of each parameter lies, and how its copies are rebuilt.

DeepSpeed cuts every parameter, flattened and padded to a multiple of the ranks, into equal pieces.
The pieces of one sub-group lie one after another in one flat fp32 tensor (the master), in one flat
low-precision tensor (`ds_tensor`, what a forward gathers), and in one flat tensor per optimizer slot.
Parameters outside the optimizer have a `ds_tensor` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dynadapt.adapters._common import by_muon
from dynadapt.adapters.live._deepspeed_flats import Flats
from dynadapt.adapters.live._deepspeed_share import Share
from dynadapt.vps.box import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Zero3", "Zero3Share"]


@dataclass(frozen=True, eq=False)
class Zero3Share(Share):
    """A piece in a sub-group. `padded` counts it with its padding.

    A parameter outside the optimizer has no sub-group, and its piece is its `ds_tensor`.
    """

    padded: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The parameter's own shape, unpadded; the parameter itself may be empty by now."""
        return tuple(self.named.tensor.ds_shape)  # type: ignore[attr-defined]

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """That of `ds_tensor`."""
        return (self.padded,)

    @property
    def partition(self) -> torch.Tensor:
        """The low-precision piece, padding included."""
        return self.named.tensor.ds_tensor.detach()  # type: ignore[attr-defined, no-any-return]

    def copy(self) -> torch.Tensor:
        """The low-precision piece without padding."""
        return self.partition.narrow(0, 0, len(self.span))

    def padding(self, flat: torch.Tensor) -> torch.Tensor:
        """What follows the piece up to the next one, in one of its sub-group's flat tensors."""
        unused = self.padded - len(self.span)
        return flat.detach().narrow(0, self.offset + len(self.span), unused)


class Zero3(Flats):
    """One engine's ZeRO-3 optimizer. Its units are the sub-groups.

    `renew` does not communicate: persistent parameters are gathered by the next forward.
    """

    shares: tuple[Zero3Share, ...]

    @property
    def masters(self) -> Sequence[torch.Tensor]:
        """The flat fp32 tensors."""
        return self.optimizer.fp32_partitioned_groups_flat  # type: ignore[no-any-return]

    @property
    def copies(self) -> Sequence[torch.Tensor]:
        """The flat low-precision tensors."""
        return self.optimizer.fp16_partitioned_groups_flat  # type: ignore[no-any-return]

    @property
    def unit_groups(self) -> Sequence[int]:
        """The param group of each sub-group."""
        found = self.optimizer.sub_group_to_group_id
        return [found[unit] for unit in range(len(self.masters))]

    @property
    def process_group(self) -> Any:
        """The ranks that every parameter is cut over."""
        return self.optimizer.dp_process_group

    def _shares(self) -> Iterator[Zero3Share]:
        place: dict[int, tuple[int, int]] = {}
        for index, members in enumerate(self.optimizer.fp16_groups):
            offset = 0
            for member in members:
                place[id(member)] = (index, offset)
                offset += member.partition_numel()
        for named in self.parameters:
            param: Any = named.tensor
            padded = param.ds_tensor.ds_numel
            start = min(param.ds_zero_partition_rank * padded, param.ds_numel)
            span = Span(start, min(start + padded, param.ds_numel))
            cut = self.cuts.get(id(param))
            if id(param) not in place:
                yield Zero3Share(named, span, cut=cut, padded=padded)
                continue
            index, offset = place[id(param)]
            group = self.optimizer.sub_group_to_group_id[index]
            yield Zero3Share(named, span, index, offset, group, cut, padded)

    def pending_backwards(self) -> int:
        """DeepSpeed counts a backward only when the next forward begins, hence the flag beside the
        count; both are cleared by `step` and by `zero_grad`."""
        optimizer = self.optimizer
        count = optimizer.micro_step_id + bool(optimizer._epilogue_ran_this_backward)
        return max(int(count), int(self.loose_gradients()))

    def state_dtype(self, unit: int, label: str) -> torch.dtype:
        """Muon's momentum has the dtype that gradients are exchanged in."""
        if by_muon(self.inner, self.inner.param_groups[self.unit_groups[unit]]):
            return self.optimizer.communication_data_type  # type: ignore[no-any-return]
        return super().state_dtype(unit, label)

    def drop_copies(self) -> None:
        """Free gathered weights and hpZ's secondary pieces, so that the next forward gathers anew.

        In this order: freeing a gathered weight *makes* its secondary piece. DeepSpeed's own
        `invalidate_secondary_tensor` forgets parameters outside the optimizer.
        """
        self.optimizer._partition_all_parameters()
        for share in self.shares:
            param: Any = share.named.tensor
            param.ds_secondary_tensor = None

    def renew(self) -> None:
        """Renew the weights' pieces from the masters, zero padding and gradients of old weights."""
        self.drop_copies()
        with torch.no_grad():
            for share in self.shares:
                if share.unit < 0:
                    share.padding(share.partition).zero_()
                    continue
                for flat in (self.masters[share.unit], *self.slots(share.unit).values()):
                    share.padding(flat).zero_()
            # A parameter that a forward does not use is stepped with its last gradient again, so
            # gradients of weights that are gone must not stay.
            self.optimizer.grad_partitions_flat_buffer.zero_()
            self.forget_gradients()
        for index in range(len(self.optimizer.fp16_groups)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(index)
