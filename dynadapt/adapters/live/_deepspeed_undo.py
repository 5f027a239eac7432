"""What `prepare` found in a DeepSpeed target, for `abandon` to put back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dynadapt.adapters.live._deepspeed_share import same_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynadapt.adapters.live._deepspeed_flats import Flats

__all__ = ["Before"]


@dataclass(frozen=True)
class Before:
    """Numbers and marks of a target's optimizer, taken before bytes may land in it.

    `blank` are state tensors of zeros, as an engine has that only made them; `unlike` the sums of
    masters that do not agree with their weights, by unit.
    """

    scalars: dict[int, dict[str, int | float]]
    group_steps: dict[int, Any]
    blank: tuple[torch.Tensor, ...]
    unlike: dict[int, int]

    @classmethod
    def of(cls, view: Flats) -> Before:
        """Look at a target; no change."""
        units = range(len(view.masters))
        slots: Iterable[torch.Tensor] = ()
        if not view.engine.global_steps:  # later ones are not zero, and take long to look through
            slots = [tensor for unit in units for tensor in view.slots(unit).values()]
        return cls(
            scalars={unit: view.scalars(unit) for unit in units},
            group_steps={
                number: group["step"]
                for number, group in enumerate(view.inner.param_groups)
                if "step" in group
            },
            blank=tuple(tensor for tensor in slots if not torch.any(tensor)),
            unlike=_unlike(view) if view.hidden_step else {},
        )

    def put_back(self, view: Flats, made: Iterable[int]) -> None:
        """Take back the states of the units `made`, restore numbers and masters. No communication."""
        view.drop_state(made)
        for unit, values in self.scalars.items():
            view.write_scalars(unit, values)
        for number, step in self.group_steps.items():
            view.inner.param_groups[number]["step"] = step
        for tensor in self.blank:
            tensor.zero_()
        for unit, master in enumerate(view.masters):
            if unit not in self.unlike or self.unlike[unit] != _sum(master):
                view.restore_master(unit)


def _unlike(view: Flats) -> dict[int, int]:
    found = {}
    for unit, (master, copy) in enumerate(zip(view.masters, view.copies, strict=True)):
        if not same_memory(master, copy) and not torch.equal(master.detach().to(copy.dtype), copy):
            found[unit] = _sum(master)
    return found


def _sum(tensor: torch.Tensor) -> int:
    return int(torch.hash_tensor(tensor.detach()).item())
