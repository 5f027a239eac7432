"""DDP, FSDP2, HSDP and tensor parallelism: marks, the adapter and what is declared are one."""

from __future__ import annotations

import pytest

from dynadapt.vps.declare import declare
from dynadapt.vps.model_shape import ModelShape, Named
from dynadapt.vps.tp_rules import TpRules
from tests.declared import _worlds
from tests.declared._declared import PARAM, assert_same
from tests.declared._torch import RULES, World, observe_torch, shapes_of

CASES = {
    "ddp": World(cut=False),
    "fsdp2": World(),
    "fsdp2 tied": World(tied=True),
    "hsdp": World(replicas=2),
    "tp": World(tp=2, cut=False),
    "tp 3": World(tp=3, cut=False, inner=8),
    "tp tied": World(tp=2, cut=False, tied=True),
    "tp x fsdp2": World(tp=2, vocabulary=10, inner=10),
    "tp x hsdp": World(tp=2, replicas=2, vocabulary=10, inner=10),
}

#: Case and ranks.
MOST = [
    *[("fsdp2", world) for world in (1, 2, 3, 4, 8)],
    ("ddp", 3),
    ("fsdp2 tied", 3),
    ("hsdp", 4),
    ("hsdp", 6),
    ("tp", 2),
    ("tp 3", 3),
    ("tp tied", 2),
    ("tp x fsdp2", 4),
    ("tp x hsdp", 8),
]
REST = [
    *[("fsdp2", world) for world in (5, 6, 7)],
    *[("fsdp2 tied", world) for world in (2, 4, 8)],
    *[("ddp", world) for world in (1, 2, 4, 8)],
    ("hsdp", 2),
    ("hsdp", 8),
    ("tp x fsdp2", 6),
    ("tp x fsdp2", 8),
    ("tp x hsdp", 4),
]


def spec_of(case: World, world: int) -> str:
    if not case.cut:
        return f"ddp:dp={world // case.tp},tp={case.tp}"
    ways = world // case.tp // case.replicas
    kind = f"hsdp:rep={case.replicas}," if case.replicas > 1 else "fsdp2:"
    return f"{kind}dp={ways},tp={case.tp}"


def check(name: str, world: int) -> None:
    case = CASES[name]
    observed = _worlds.run(world, observe_torch, case)
    rows = [learnt for learnt, _ in observed]
    for rank, (learnt, described) in enumerate(observed):
        boxes = sorted((row.key, row.box) for row in learnt)
        assert sorted(described) == boxes, f"rank {rank}"
    model = ModelShape.of(
        Named(name, shape, trainable=name != "frozen") for name, shape in shapes_of(case).items()
    )
    assert_same(declare(spec_of(case, world), model, TpRules(RULES), states=PARAM), rows)


@pytest.mark.parametrize(("name", "world"), MOST)
def test_models_hold_what_is_declared(name: str, world: int) -> None:
    check(name, world)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "world"), REST)
def test_models_hold_what_is_declared_on_other_numbers_of_ranks(name: str, world: int) -> None:
    check(name, world)
