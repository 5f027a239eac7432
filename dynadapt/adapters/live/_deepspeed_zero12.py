"""ZeRO stages 1 and 2: each rank steps one even part of every param group, all ranks have the weights.

A param group's weights lie one after another in one flat low-precision tensor, padded at its end. Rank
`r` owns the `r`-th part of it: as an fp32 master, and as one flat tensor per optimizer slot. A part ends
in the middle of a tensor, and the last ranks may own nothing but padding. Frozen parameters, and those
that no optimizer was given, are ordinary whole tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from deepspeed import comm

from dynadapt.adapters._common import by_muon
from dynadapt.adapters.live._deepspeed_flats import Flats
from dynadapt.adapters.live._deepspeed_share import Share, laid_out
from dynadapt.vps.box import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

__all__ = ["Bf16", "Zero12"]


class _Parts(Flats):
    """Param groups as flat weights, of which this rank owns one part: the units are the groups."""

    communicates: ClassVar[bool] = True

    @abstractmethod
    def _order(self, group: int) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
        """A group's parameters, and where each begins in the whole flat."""

    @property
    @abstractmethod
    def _parts(self) -> Sequence[Sequence[torch.Tensor]]:
        """The weights of each group, cut into the ranks' parts."""

    @property
    def process_group(self) -> Any:
        """The ranks that every param group is cut over."""
        return self.optimizer.dp_process_group

    @property
    def unit_groups(self) -> Sequence[int]:
        """Each group is a unit."""
        return range(len(self.masters))

    @property
    def copies(self) -> Sequence[torch.Tensor]:
        """The weights of this rank's own parts."""
        ranks = map(self._rank_in, range(len(self._parts)))
        return [parts[rank] for parts, rank in zip(self._parts, ranks, strict=True)]

    def _rank_in(self, group: int) -> int:
        return int(comm.get_rank(group=self.optimizer.real_dp_process_group[group]))

    def _shares(self) -> Iterator[Share]:
        # By the optimizer's own order and offsets. `_hp_mapping` is another account of them, which
        # is wrong with round_robin_gradients: it takes the parameters in the order of the user.
        place: dict[int, tuple[Span, int, int]] = {}
        for group, master in enumerate(self.masters):
            params, offsets = self._order(group)
            for param, span, at in laid_out(params, offsets, master.numel(), self._rank_in(group)):
                place[id(param)] = (span, group, at)
        for named in self.parameters:
            cut = self.cuts.get(id(named.tensor))
            if id(named.tensor) in place:
                span, group, at = place[id(named.tensor)]
                yield Share(named, span, group, at, group, cut)
            else:
                yield Share(named, Span(0, named.tensor.numel()), cut=cut)

    def state_changed(self) -> None:
        """DeepSpeed links parameters to states at a step, and only once."""
        self.optimizer._hp_optimizer_states_linked = False

    def renew(self) -> None:
        """Cast this rank's masters, gather everybody's weights."""
        self.forget_gradients()
        self.optimizer.update_lp_params()
        self.state_changed()
        if all(self.state(unit) for unit in range(len(self.masters))):
            # Else the next step does it: now it would link what is not there yet.
            self.optimizer._lazy_init_hp_params_optimizer_state()


class Zero12(_Parts):
    """One engine's ZeRO-1 or ZeRO-2 optimizer."""

    @property
    def masters(self) -> Sequence[torch.Tensor]:
        """The fp32 parts."""
        return self.optimizer.single_partition_of_fp32_groups  # type: ignore[no-any-return]

    @property
    def _parts(self) -> Sequence[Sequence[torch.Tensor]]:
        return self.optimizer.parallel_partitioned_bit16_groups  # type: ignore[no-any-return]

    def _order(self, group: int) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
        optimizer = self.optimizer
        return (
            optimizer.round_robin_bit16_groups[group],
            optimizer.round_robin_bit16_offsets[group],
        )

    def whole_slots(self, unit: int) -> frozenset[str]:
        """Muon's momentum, one matrix after another; a matrix over two ranks is on both, as it must be
        whole to be stepped. Offloaded it is cut as the master is."""
        group = self.inner.param_groups[unit]
        muon = by_muon(self.inner, group) and not self.optimizer.cpu_offload
        return frozenset({"momentum_buffer"} if muon else ())

    def state_dtype(self, unit: int, label: str) -> torch.dtype:
        """Muon's momentum has the dtype of the gradients."""
        if label not in self.whole_slots(unit):
            return super().state_dtype(unit, label)
        optimizer = self.optimizer
        apart = optimizer.use_grad_accum_attribute
        return optimizer.gradient_accumulation_dtype if apart else optimizer.dtype  # type: ignore[no-any-return]

    def within(self, share: Share, label: str, tensor: torch.Tensor) -> torch.Tensor:
        """A whole matrix, on the ranks that have a piece of it."""
        if label not in self.whole_slots(share.unit):
            return super().within(share, label, tensor)
        at = 0
        for member in self.optimizer.params_in_partition[share.unit]:
            if member is share.named.tensor:
                return tensor.detach().narrow(0, at, member.numel()).view(share.shape)
            at += member.numel()
        return tensor.detach().narrow(0, 0, 0)

    def fresh_state(self, unit: int) -> dict[str, Any]:
        """DeepSpeed makes Muon's momentum as long as the matrices that begin or go on in the part."""
        state = super().fresh_state(unit)
        members = self.optimizer.params_in_partition[unit]
        for label in self.whole_slots(unit):
            state[label] = state[label].new_zeros(sum(member.numel() for member in members))
        return state

    def pending_backwards(self) -> int:
        """Stage 2 counts backwards and keeps their reduced gradients apart, where `zero_grad` does not
        clear them; stage 1 leaves them at the parameters, and reduces them only for the step."""
        optimizer = self.optimizer
        whole = any(
            s.named.tensor.grad_accum is not None  # type: ignore[attr-defined]
            for s in self.shares
            if s.unit >= 0
        )
        kept = [*optimizer.averaged_gradients.values(), *optimizer.all_grad_tensors.values()]
        reduced = any(each is not None for each in kept)
        if optimizer.partition_gradients or optimizer.cpu_offload:
            return max(int(optimizer.micro_step_id) + 1, int(reduced))
        if reduced:
            return int(self.engine.gradient_accumulation_steps())
        return int(whole or self.loose_gradients())


class Bf16(_Parts):
    """One engine's `BF16_Optimizer`: stage 1 with bf16 weights and gradients accumulated in fp32."""

    @property
    def masters(self) -> Sequence[torch.Tensor]:
        """The fp32 parts."""
        return self.optimizer.fp32_groups_flat_partition  # type: ignore[no-any-return]

    @property
    def _parts(self) -> Sequence[Sequence[torch.Tensor]]:
        return self.optimizer.bf16_partitioned_groups  # type: ignore[no-any-return]

    def _order(self, group: int) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
        params = self.optimizer.bf16_groups[group]
        return params, [0, *accumulate(param.numel() for param in params)][:-1]

    def pending_backwards(self) -> int:
        """Gradients move from the parameters to a flat buffer after each backward."""
        kept = any(any(each) for each in self.optimizer.fp32_groups_has_gradients)
        return int(kept or self.loose_gradients())
