"""FSDP1: what real units hold is what `fsdp1_unit` says, and what the adapter describes."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import pytest

from dynadapt.vps.declare import declare
from dynadapt.vps.flat import fsdp1_unit
from dynadapt.vps.keys import ITEMSIZE
from tests.declared import _worlds
from tests.declared._declared import PARAM, assert_same, shape_of
from tests.declared._expected import Place, of_group, places
from tests.declared._fsdp1 import Fsdp1, observe_fsdp1
from tests.declared._models import EVEN, ODD, TINY, Tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynadapt.vps.mesh_layout import MeshLayout

#: Without `use_orig_params` a unit is frozen or trained as a whole.
ALL_TRAINED = replace(ODD, frozen=())

CASES = {
    "orig params": Fsdp1(),
    "no orig params": Fsdp1(tensors=ALL_TRAINED, orig_params=False),
    "one unit": Fsdp1(units=()),
    "bf16 forward": Fsdp1(forward_dtype="bfloat16"),
    "SHARD_GRAD_OP": Fsdp1(strategy="SHARD_GRAD_OP", orig_params=False, tensors=ALL_TRAINED),
    "NO_SHARD": Fsdp1(strategy="NO_SHARD"),
    "tiny": Fsdp1(TINY, units=()),
    "tiny, no orig params": Fsdp1(TINY, units=(), orig_params=False),
    "even": Fsdp1(EVEN, units=("up",)),
    "HYBRID_SHARD": Fsdp1(strategy="HYBRID_SHARD", replicas=2),
    "_HYBRID_SHARD_ZERO2": Fsdp1(
        ALL_TRAINED, strategy="_HYBRID_SHARD_ZERO2", replicas=2, orig_params=False
    ),
}
HYBRID = [name for name in CASES if "HYBRID" in name]

MOST = [(name, world) for world in (2, 3, 4) for name in CASES if name not in HYBRID or world == 4]
FEW = [("tiny", 1), ("NO_SHARD", 1), ("orig params", 8), ("tiny", 8), ("HYBRID_SHARD", 6)]
ALL = {(name, world) for name in CASES for world in range(1, 9)}
REST = sorted(
    (name, world)
    for name, world in ALL - {*MOST, *FEW}
    if name not in HYBRID or world in {2, 4, 6, 8}
)


def expected(case: Fsdp1, world: int, rank: int) -> Iterator[Place]:
    ways = 1 if case.strategy == "NO_SHARD" else world // case.replicas
    for unit, names in case.names().items():
        numels = [prod(case.tensors.shapes[name]) for name in names]
        group = fsdp1_unit(
            numels, ways, itemsize=ITEMSIZE[case.forward_dtype], aligned=case.orig_params
        )
        yield from of_group(names, case.tensors.shapes, group, rank % ways, "param", unit)


def declared(case: Fsdp1, world: int) -> MeshLayout:
    ways = world // case.replicas
    axes = f"dp={ways},rep={case.replicas}" if case.replicas > 1 else f"dp={ways}"
    spec = f"fsdp1:{axes},orig={str(case.orig_params).lower()},compute={case.forward_dtype}"
    spec = f"ddp:dp={world}" if case.strategy == "NO_SHARD" else spec
    return declare(spec, shape_of(case.tensors), states=PARAM, units=case.units)


def check(name: str, world: int) -> None:
    case = CASES[name]
    observed = _worlds.run(world, observe_fsdp1, case)
    for rank, (rows, described) in enumerate(observed):
        assert places(rows) == sorted(expected(case, world, rank)), f"rank {rank}"
        assert sorted(described) == sorted((row.key, row.box) for row in rows), f"rank {rank}"
    assert_same(declared(case, world), [rows for rows, _ in observed])


@pytest.mark.parametrize(("name", "world"), MOST + FEW)
def test_units_hold_what_the_formula_says(name: str, world: int) -> None:
    check(name, world)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "world"), REST)
def test_units_hold_what_the_formula_says_on_every_number_of_ranks(name: str, world: int) -> None:
    check(name, world)


def test_a_scalar_is_refused_by_the_framework() -> None:
    case = Fsdp1(Tensors({"a": (), "b": (3,)}), units=())
    (error,) = _worlds.run(1, _worlds.error_of, observe_fsdp1, case)
    assert "doesn't support scalar parameters" in error
