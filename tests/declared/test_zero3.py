"""ZeRO-3: what marks show, what the adapter describes and what the formulas say are one."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dynadapt.vps.declare import declare
from dynadapt.vps.flat import FlatGroup, zero3_groups, zero3_part
from tests.declared import _worlds
from tests.declared._declared import PARAM, assert_same, shape_of
from tests.declared._expected import Place, of_group, places
from tests.declared._models import EVEN, TINY, Tensors
from tests.declared._zero3 import Zero3, observe_zero3

if TYPE_CHECKING:
    from collections.abc import Iterator

CASES = {
    "plain": Zero3(),
    "groups": Zero3(groups=3),
    "sub-groups": Zero3(sub_group_size=12, dtype="bfloat16"),
    "sub-groups of groups": Zero3(sub_group_size=10, groups=2),
    "a sub-group a tensor": Zero3(sub_group_size=1, tensors=TINY),
    "tiny": Zero3(tensors=TINY),
    "even": Zero3(tensors=EVEN, dtype="bfloat16", sub_group_size=70),
}

MOST = [(name, world) for world in (2, 3) for name in CASES]
FEW = [("plain", 1), ("sub-groups of groups", 4), ("plain", 8), ("tiny", 8)]
REST = sorted({(name, world) for name in CASES for world in range(1, 9)} - {*MOST, *FEW})


def expected(case: Zero3, world: int, rank: int) -> tuple[list[list[str]], Iterator[Place]]:
    """The sub-groups' names, and all masters; frozen tensors lie in a buffer of their own."""
    shapes = case.tensors.shapes
    found: list[list[str]] = []
    own: list[Place] = []
    for names in case.names():
        numels = np.array([prod(shapes[name]) for name in names])
        cut = zero3_groups(numels, world, case.sub_group_size)
        base = len(found)
        found += [[names[i] for i in np.flatnonzero(cut.index == g)] for g in range(len(cut.sizes))]
        for at, name in enumerate(names):
            buffer = str(base + cut.index[at])
            own += [
                place._replace(offset=place.offset + int(cut.offsets[at]))
                for place in _cut(case, name, world, rank, buffer)
            ]
    for name in case.tensors.frozen:
        own += _cut(case, name, world, rank, name)
    return found, iter(own)


def _cut(case: Zero3, name: str, world: int, rank: int, buffer: str) -> Iterator[Place]:
    shapes = case.tensors.shapes
    alone = FlatGroup(np.zeros(1, np.int64), zero3_part(prod(shapes[name]), world))
    return of_group([name], shapes, alone, rank, "param", buffer)


def check(name: str, world: int) -> None:
    observed = _worlds.run(world, observe_zero3, CASES[name])
    for rank, (names, rows, described) in enumerate(observed):
        groups, own = expected(CASES[name], world, rank)
        assert names == groups
        assert places(rows) == sorted(own), f"rank {rank}"
        # The adapter calls tied tensors by their first name in the alphabet, and so do we here.
        boxes = sorted((row.key, row.box) for row in rows)
        assert sorted((row.key, row.box) for row in described) == boxes
    layout = declare(f"zero3:dp={world}", shape_of(CASES[name].tensors), states=PARAM)
    assert_same(layout, [rows for _, rows, _ in observed])


@pytest.mark.parametrize(("name", "world"), MOST + FEW)
def test_engines_hold_what_the_formulas_say(name: str, world: int) -> None:
    check(name, world)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "world"), REST)
def test_engines_hold_what_the_formulas_say_on_every_number_of_ranks(name: str, world: int) -> None:
    check(name, world)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_scalar_is_refused_by_the_framework(stage: int) -> None:
    """Its first broadcast views each weight as bytes, which torch refuses for no dims."""
    case = Zero3(stage=stage, tensors=Tensors({"a": (), "b": (3,)}))
    (error,) = _worlds.run(1, _worlds.error_of, observe_zero3, case)
    assert "self.dim() cannot be 0" in error
