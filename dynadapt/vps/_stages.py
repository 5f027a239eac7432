"""Which pipeline stage and which expert-parallel place each tensor of a model belongs to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from dynadapt.errors import Finding

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dynadapt.vps.model_shape import Family, ModelShape
    from dynadapt.vps.spec import LayoutSpec

__all__ = ["owners_of", "stages_of"]

_EXPERT = re.compile(r"(?:^|\.)(?:local_)?experts\.\{\}")


def owners_of(family: Family, ways: int) -> NDArray[np.int64]:
    """The expert-parallel place of each member of a family of listed experts, else -1 each.

    Experts go to places in equal runs; with more places than fit evenly the last ones have fewer.
    """
    found = _EXPERT.search(family.pattern)
    if found is None or ways == 1:
        return np.full(len(family), -1)
    before = family.pattern[: found.end()].replace("{{", "").replace("}}", "")
    experts = family.index[:, before.count("{}") - 1]
    count = int(experts.max()) + 1
    return np.asarray(experts // -(-count // ways))


def stages_of(
    model: ModelShape, spec: LayoutSpec
) -> tuple[list[tuple[NDArray[np.int64], tuple[int, ...]]], list[Finding]]:
    """Per family the stage of each member, and further stages that hold it (a tie across stages).

    Layers are told apart by the first number of a name. They go to stages in even runs, the first ones
    longer, or as `stages=24-24-23-23` says. What has no number goes with the first stage if it comes
    before the first layer in the model's order, else with the last.
    """
    count = spec.size("pp")
    if count == 1:
        return [(np.zeros(len(family), np.int64), ()) for family in model.families], []
    layered = [family for family in model.families if family.index.shape[1]]
    numbers = np.unique(np.concatenate([np.zeros(0, np.int64), *(f.index[:, 0] for f in layered)]))
    runs, findings = _runs(len(numbers), count, spec)
    of_layer = np.repeat(np.arange(count), runs)
    stage_of = dict(zip(numbers.tolist(), of_layer.tolist(), strict=True))
    first = min((int(family.orders.min()) for family in layered), default=0)
    found: list[tuple[NDArray[np.int64], tuple[int, ...]]] = []
    for family in model.families:
        own = np.where(family.orders < first, 0, count - 1)
        if family.index.shape[1]:
            own = of_layer[np.searchsorted(numbers, family.index[:, 0])]
        if not family.aliases:
            found.append((own, ()))
            continue
        others = {_stage_of_alias(name, stage_of, count) for name in family.aliases}
        every = sorted({int(own[0]), *others})
        found.append((np.full(len(family), every[0]), tuple(every[1:])))
    return found, findings


def _stage_of_alias(name: str, stage_of: dict[int, int], count: int) -> int:
    """A further name of a tied tensor: its layer's stage, or the last for a head without a layer."""
    number = re.search(r"(?:^|\.)([0-9]{1,9})(?:\.|$)", name)
    return stage_of.get(int(number.group(1)), count - 1) if number else count - 1


def _runs(layers: int, count: int, spec: LayoutSpec) -> tuple[list[int], list[Finding]]:
    if layers < count:
        cause = f"the model has {layers} numbered layers for {count} stages"
        return [1] * layers + [0] * (count - layers), [
            Finding("not-declarable", str(spec), cause, "use fewer stages")
        ]
    even = [layers // count + (stage < layers % count) for stage in range(count)]
    text = spec.options.get("stages")
    if text is None:
        return even, []
    parts = text.split("-")
    if all(part.isdecimal() for part in parts):
        runs = [int(part) for part in parts]
        if len(runs) == count and sum(runs) == layers:
            return runs, []
    cause = f"stages={text} does not give {count} stages {layers} layers in all"
    return even, [Finding("bad-spec", str(spec), cause, f"e.g. stages={'-'.join(map(str, even))}")]
