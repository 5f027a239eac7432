"""Models of which a rank has parts: pipeline stages, several on a rank; seen as one module.

A stage is given as torch's `PipelineStage`, as a schedule that runs some, as its submodule, or as a list
of these. Stages that keep the names of the whole model, as those of `pipeline()` and pruned copies do,
need nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dynadapt.errors import Finding, Refused
from dynadapt.protocols import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dynadapt.adapters._common import NamedTensor

__all__ = ["Several", "apart", "clash", "place_of", "tied_by_user", "united", "whole_of"]

_PER_STAGE = 1 << 32
"""More tensors than a stage has."""


class Several(torch.nn.Module):
    """Several modules, under the names that each has alone. It has nothing of its own."""

    def __init__(self, parts: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self._parts = tuple(parts)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """Those of one part after another."""
        memo, *rest = args or (kwargs.pop("memo", None),)
        memo = set() if memo is None else memo
        for part in self._parts:
            yield from part.named_modules(memo, *rest, **kwargs)


@dataclass(frozen=True)
class _Stage:
    """A part of a model, and its number in the pipeline where that is known."""

    module: torch.nn.Module
    number: int


def _stages(model: Any) -> tuple[_Stage, ...]:
    """The parts of a model on this rank, in the pipeline's order."""
    parts = parts_of(model)
    numbers = [getattr(each, "stage_index", at) for at, each in enumerate(parts)]
    found = (_Stage(getattr(p, "submod", p), n) for p, n in zip(parts, numbers, strict=True))
    return tuple(sorted(found, key=lambda stage: stage.number))


def whole_of(model: Any) -> torch.nn.Module:
    """All that this rank has of a model, as one module."""
    stages = _stages(model)
    return stages[0].module if len(stages) == 1 else Several([stage.module for stage in stages])


def united(
    model: Any, named: Callable[[torch.nn.Module], Iterable[NamedTensor]]
) -> tuple[NamedTensor, ...]:
    """What `named` finds in each part; a tensor of several parts once. `order` sorts those of all ranks.

    Two tensors may have one name; see `apart`.
    """
    found: dict[int, NamedTensor] = {}
    for stage in _stages(model):
        for each in named(stage.module):
            known = found.get(id(each.tensor))
            if known is None:
                order = stage.number * _PER_STAGE + each.order
                found[id(each.tensor)] = replace(each, order=order)
                continue
            first, *others = sorted({known.name, *known.aliases, each.name, *each.aliases})
            kept = known.persistent or each.persistent
            found[id(each.tensor)] = replace(
                known, name=first, aliases=tuple(others), persistent=kept
            )
    return tuple(found.values())


def apart(
    named: Iterable[NamedTensor],
) -> tuple[tuple[NamedTensor, ...], tuple[tuple[NamedTensor, NamedTensor], ...]]:
    """The first tensor of each name, and those that stages on this rank have of the same name."""
    first: dict[str, NamedTensor] = {}
    again = []
    for each in named:
        known = first.setdefault(each.name, each)
        if known is not each:
            again.append((known, each))
    return tuple(first.values()), tuple(again)


def tied_by_user(
    named: Iterable[NamedTensor], tied: Iterable[Sequence[str]]
) -> tuple[NamedTensor, ...]:
    """Tensors under the names that the user ties them by, for those that no shared memory ties.

    An embedding on the first stage and a head on the last are then one tensor with two replicas. Raises
    `Refused` where one rank has two tensors of one name: `name-clash`, or `tied-apart` by such a tie.
    """
    groups = {name: sorted(set(names)) for names in tied for name in names}
    found = []
    for each in named:
        names = {each.name, *each.aliases}
        names |= {other for name in names for other in groups.get(name, ())}
        first, *others = sorted(names)
        found.append(replace(each, name=first, aliases=tuple(others)))
    _, again = apart(found)
    if again:
        raise Refused(_two_of_a_name(first, groups) for first, _ in again)
    return tuple(found)


def _two_of_a_name(named: NamedTensor, groups: dict[str, list[str]]) -> Finding:
    if named.name not in groups:
        return clash(named)
    cause = f"{' and '.join(groups[named.name])} are two tensors of one rank"
    fix = "let them be one parameter there, and leave them out of tied"
    return Finding("tied-apart", named.name, cause, fix)


def clash(named: NamedTensor) -> Finding:
    """Two stages of a rank have different tensors under one name."""
    cause = "two stages of this rank have tensors of this name"
    fix = "keep the whole model's names in its stages"
    return Finding("name-clash", named.name, cause, fix)


def place_of(model: Any) -> dict[str, int]:
    """This rank's place in its pipeline: `pp`, and the number of the pipeline as `dp`; {} without one."""
    stage = next((part for part in parts_of(model) if hasattr(part, "group_rank")), None)
    if stage is None:
        return {}
    ranks = dist.get_process_group_ranks(stage.group or dist.group.WORLD)
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    pipeline = ranks[0] // len(ranks) if step == 1 else ranks[0] % step
    return {"dp": pipeline, "pp": stage.group_rank}
