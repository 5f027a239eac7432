"""ZeRO-1, ZeRO-2 and BF16_Optimizer: what real engines hold is what `zero_group` says."""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod
from typing import TYPE_CHECKING

import pytest

from dynadapt.vps.box import Box
from dynadapt.vps.declare import declare
from dynadapt.vps.flat import zero_group
from dynadapt.vps.keys import ITEMSIZE, Key
from tests.declared import _worlds
from tests.declared._declared import PARAM, assert_same, shape_of
from tests.declared._expected import Place, of_group, places
from tests.declared._models import EVEN, ODD, TINY
from tests.declared._zero import Zero, observe_zero

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dynadapt.vps.layout import Row
    from dynadapt.vps.mesh_layout import MeshLayout

BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}

CASES = {
    "zero1": Zero(),
    "zero2": Zero(stage=2),
    "groups": Zero(groups=3),
    "decay": Zero(decay=True, dtype="bfloat16"),
    "round robin": Zero(stage=2, round_robin=True),
    "round robin groups": Zero(round_robin=True, groups=2, dtype="bfloat16"),
    "bf16": Zero(stage=2, dtype="bfloat16", groups=2),
    "fp16": Zero(dtype="float16"),
    "aligned": Zero(parameter_alignment=True),
    "aligned bf16": Zero(stage=2, parameter_alignment=True, dtype="bfloat16", round_robin=True),
    "BF16_Optimizer": Zero(dtype="bfloat16", config=BF16_OPTIMIZER, groups=2),
    "tiny": Zero(tensors=TINY),
    "tiny round robin": Zero(tensors=TINY, round_robin=True, stage=2),
    "tiny BF16_Optimizer": Zero(tensors=TINY, dtype="bfloat16", config=BF16_OPTIMIZER),
    "even": Zero(tensors=EVEN, groups=2),
}

#: All on 2 and 3 ranks; on others, those that differ in how they treat many or few ranks.
MOST = [(name, world) for world in (2, 3) for name in CASES]
FEW = [(name, world) for world in (1, 4, 8) for name in ("zero1", "round robin groups", "tiny")]
REST = sorted({(name, world) for name in CASES for world in range(1, 9)} - {*MOST, *FEW})


def expected(case: Zero, world: int, rank: int) -> Iterator[Place]:
    """Every group's pieces as masters, and all of it as what a forward uses."""
    shapes = case.tensors.shapes
    between = 16 // gcd(16, ITEMSIZE[case.dtype]) if case.parameter_alignment else 1
    for number, names in enumerate(case.names()):
        numels = [prod(shapes[name]) for name in names]
        group = zero_group(numels, world, round_robin=case.round_robin, between=between)
        whole = replace(group, part=group.part * world)
        yield from of_group(names, shapes, group, rank, "param", f"param {number}")
        yield from of_group(names, shapes, whole, 0, "compute", f"compute {number}")
    for name in case.tensors.frozen:
        yield Place(Key(name, "param"), Box.whole(shapes[name]), name, 0)


def declared(case: Zero, world: int) -> MeshLayout:
    spec = f"zero{case.stage}:dp={world},round_robin={str(case.round_robin).lower()}"
    if case.decay:
        return declare(f"{spec},groups=decay", shape_of(case.tensors), states=PARAM)
    return declare(spec, shape_of(case.tensors), states=PARAM, groups=case.names())


def boxes_of(rows: Iterable[Row]) -> list[tuple[Key, Box]]:
    """Of masters and of what no optimizer has."""
    return sorted((row.key, row.box) for row in rows if row.key.slot == "param")


def check(name: str, world: int) -> None:
    case = CASES[name]
    observed = _worlds.run(world, observe_zero, case)
    kind = "BF16_Optimizer" if "BF16_Optimizer" in name else "DeepSpeedZeroOptimizer"
    assert {found for found, _, _ in observed} == {kind}
    for rank, (_, rows, described) in enumerate(observed):
        assert places(rows) == sorted(expected(case, world, rank)), f"rank {rank}"
        # The adapter calls tied tensors by their first name in the alphabet, and so do we here. Whole
        # weights are one box to it.
        assert boxes_of(described) == boxes_of(rows), f"rank {rank}"
        shapes = case.tensors.shapes
        weights = {row.key.name: row.box for row in described if row.key.slot == "compute"}
        trained = {name for names in case.names() for name in names if prod(shapes[name])}
        assert weights == {name: Box.whole(shapes[name]) for name in trained}
    if not case.parameter_alignment:
        masters = [[r for r in described if r.key.slot == "param"] for _, _, described in observed]
        assert_same(declared(case, world), masters)


@pytest.mark.parametrize(("name", "world"), MOST + FEW)
def test_engines_hold_what_the_formula_says(name: str, world: int) -> None:
    check(name, world)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "world"), REST)
def test_engines_hold_what_the_formula_says_on_every_number_of_ranks(name: str, world: int) -> None:
    check(name, world)


def test_the_cases_have_what_makes_layouts_hard() -> None:
    """Padding alone on some rank, a tensor over three ranks, none of its tensors whole on a rank."""
    held = [list(expected(CASES["tiny"], 8, rank)) for rank in range(8)]
    masters = [[place for place in own if place.key.slot == "param"] for own in held]
    assert [] in masters
    cuts = [len({rank for rank in range(4) if _held(rank, name)}) for name in ODD.trained]
    assert max(cuts) >= 2
    assert min(cuts) == 1


def _held(rank: int, name: str) -> bool:
    return any(place.key == (name, "param") for place in expected(CASES["zero1"], 4, rank))
