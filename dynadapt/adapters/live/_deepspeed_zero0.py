"""DeepSpeed without ZeRO: every rank has all weights, all masters and all optimizer states.

In bf16 and fp16 an `FP16_Optimizer` keeps masters, in one flat tensor per param group for DeepSpeed's
fused Adam and tensor by tensor for every other optimizer. In fp32 the engine steps the user's optimizer
over the model's own parameters.

Both kinds of `FP16_Optimizer` step with gradients of zero when they are built, to make states. With
weight decay the masters shrink by it, and the weights do not follow until the first real step.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dynadapt.adapters.live._deepspeed_flats import Flats
from dynadapt.adapters.live._deepspeed_share import Share, laid_out
from dynadapt.vps.box import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Fused", "Plain", "Unfused"]


class _Whole(Flats):
    """What is whole on every rank."""

    def pending_backwards(self) -> int:
        """Gradients wait at the parameters."""
        return int(self.loose_gradients())

    def renew(self) -> None:
        """Cast the masters. No communication: every rank has them all."""
        with torch.no_grad():
            for share in self.shares:
                if share.unit >= 0:
                    copy = share.copy()
                    copy.copy_(share.within(self.masters[share.unit]).view(copy.shape))


class Fused(_Whole):
    """One engine's fused `FP16_Optimizer`; the units are the param groups."""

    hidden_step: ClassVar[bool] = True

    @property
    def masters(self) -> Sequence[torch.Tensor]:
        """One flat fp32 tensor a group."""
        return self.optimizer.fp32_groups_flat  # type: ignore[no-any-return]

    @property
    def copies(self) -> Sequence[torch.Tensor]:
        """One flat low-precision tensor a group, which the parameters are views of."""
        return self.optimizer.fp16_groups_flat  # type: ignore[no-any-return]

    @property
    def unit_groups(self) -> Sequence[int]:
        """Each group is a unit."""
        return range(len(self.masters))

    def _shares(self) -> Iterator[Share]:
        place: dict[int, tuple[int, int]] = {}
        for group, params in enumerate(self.optimizer.fp16_groups):
            offsets = [0, *accumulate(param.numel() for param in params)]
            for param, _, at in laid_out(params, offsets[:-1], offsets[-1], 0):
                place[id(param)] = (group, at)
        for named in self.parameters:
            group, at = place.get(id(named.tensor), (-1, 0))
            cut = self.cuts.get(id(named.tensor))
            yield Share(named, Span(0, named.tensor.numel()), group, at, group, cut)


class _WholeShare(Share):
    """A parameter that is a unit of its own, in its own shape."""

    def within(self, unit: torch.Tensor) -> torch.Tensor:
        """All of the unit."""
        return unit.detach()


class _Single(_Whole):
    """Every parameter of the optimizer is a unit of its own."""

    flat_step: ClassVar[bool] = False

    def __init__(self, engine: Any) -> None:
        self._params = tuple(self._units(engine.optimizer))
        super().__init__(engine)

    @abstractmethod
    def _units(self, optimizer: Any) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Of each unit its param group, its parameter of the model and its master."""

    @cached_property
    def masters(self) -> Sequence[torch.Tensor]:
        """The fp32 tensors, one a parameter."""
        return [master for _, _, master in self._params]

    @cached_property
    def copies(self) -> Sequence[torch.Tensor]:
        """The model's parameters."""
        return [param for _, param, _ in self._params]

    @cached_property
    def unit_groups(self) -> Sequence[int]:
        """By the optimizer's groups."""
        return [group for group, _, _ in self._params]

    def _shares(self) -> Iterator[Share]:
        place = {id(param): (unit, group) for unit, (group, param, _) in enumerate(self._params)}
        for named in self.parameters:
            unit, group = place.get(id(named.tensor), (-1, -1))
            cut = self.cuts.get(id(named.tensor))
            yield _WholeShare(named, Span(0, named.tensor.numel()), unit, 0, group, cut)


class Unfused(_Single):
    """One engine's `FP16_UnfusedOptimizer`."""

    hidden_step: ClassVar[bool] = True

    def _units(self, optimizer: Any) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        for number, (params, masters) in enumerate(groups):
            for param, master in zip(params, masters, strict=True):
                yield number, param, master


class Plain(_Single):
    """The user's optimizer over the model's own parameters, which are the masters themselves."""

    def _units(self, optimizer: Any) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param.requires_grad and param.numel():
                    yield number, param, param

    def renew(self) -> None:
        """Nothing is copied."""
