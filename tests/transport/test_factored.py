"""Plans in columns against the planner by rows, and both against every element by itself."""

from __future__ import annotations

import random
from math import prod
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynadapt.testing import strategies as more
from dynadapt.testing.layouts import random_layout, random_mesh, random_specs
from dynadapt.transport.factored import factored_plan
from dynadapt.transport.match import match
from dynadapt.transport.plan import EvenHosts, Options
from dynadapt.transport.planner import plan_for
from dynadapt.vps.declare import declare
from dynadapt.vps.layout import RowLayout
from dynadapt.vps.mesh_layout import MeshLayout
from dynadapt.vps.model_shape import ModelShape, Named, State
from dynadapt.vps.tp_rules import TpRules
from tests.transport._brute import by_elements, check_plans

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.vps.keys import Key, KeySpec
    from dynadapt.vps.placement import Placement


@st.composite
def meshes(draw: st.DrawFn, specs: tuple[KeySpec, ...], among: int = 12) -> MeshLayout:
    """A declared layout of these keys on some of the seats."""
    names = draw(st.permutations(["pp", "dp", "tp"]))
    sizes = draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)))
    axes = dict(zip(names, sizes, strict=True))
    own: dict[Key, tuple[Placement, ...]] = {}
    for spec in specs:
        if own and draw(st.booleans()):  # many tensors are placed alike
            known = draw(st.sampled_from(list(own)))
            same = next(s for s in specs if s.key == known)
            if same.shape == spec.shape:
                own[spec.key] = own[known]
                continue
        own[spec.key] = draw(more.placements(spec.shape, axes))
    count = prod(sizes)
    first = draw(st.integers(0, 3))
    step = draw(st.sampled_from([1, 1, 2]))
    seats = tuple(first + step * number for number in range(count))
    return MeshLayout(axes, specs, own, seats if draw(st.booleans()) else None)


@st.composite
def changes(draw: st.DrawFn) -> tuple[MeshLayout, MeshLayout, Options]:
    specs = draw(more.key_sets(max_tensors=4, max_volume=300))
    source, target = draw(meshes(specs)), draw(meshes(specs))
    per = draw(st.integers(1, 5))
    hosts: Mapping[int, str] = draw(
        st.sampled_from([{}, EvenHosts(per, 40), {s: f"h{s % per}" for s in range(0, 40, 2)}])
    )
    return source, target, Options(hosts=hosts)


def _same_as_by_rows(source: MeshLayout, target: MeshLayout, options: Options) -> None:
    matched = match(source.keys, target.keys, options)
    rows = source.explicit(), target.explicit()
    for seat in sorted({*source.endpoints, *target.endpoints}):
        ours = plan_for(seat, source, target, matched, options)
        theirs = plan_for(seat, *rows, matched, options)
        assert ours.moves == theirs.moves
        assert ours.fills == theirs.fills
        assert ours.minimum == theirs.minimum
        assert bool(ours.findings) == bool(theirs.findings)
        assert ours.bytes_in == ours.minimum or ours.findings


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes())
def test_the_moves_are_those_of_the_planner_by_rows(
    change: tuple[MeshLayout, MeshLayout, Options],
) -> None:
    _same_as_by_rows(*change)


def _twin_llama(layers: int = 2) -> ModelShape:
    """A Llama in small: the same families, sizes that do not divide by everything."""
    width, hidden, vocab = 16, 24, 34
    tensors = [Named("embed.weight", (vocab, width))]
    for i in range(layers):
        sizes = {"q": (16, width), "k": (4, width), "v": (4, width), "o": (width, 16)}
        sizes |= {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
        tensors += [Named(f"layers.{i}.{n}_proj.weight", shape) for n, shape in sizes.items()]
        tensors.append(Named(f"layers.{i}.norm.weight", (width,)))
    tensors += [Named("norm.weight", (width,)), Named("head.weight", (vocab, width))]
    return ModelShape.of(tensors, {"*.k_proj.*": 2, "*.v_proj.*": 2})


def _twin_moe(layers: int = 3, experts: int = 4) -> ModelShape:
    width, inner = 8, 6
    tensors = [Named("embed.weight", (20, width))]
    for i in range(layers):
        sizes = {"q": (16, width), "k": (4, width), "o": (width, 16)}
        tensors += [Named(f"layers.{i}.{n}_proj.weight", shape) for n, shape in sizes.items()]
        tensors += [
            Named(f"layers.{i}.norm.weight", (width,)),
            Named(f"layers.{i}.mlp.gate.weight", (experts, width)),
        ]
        for e in range(experts):
            name = f"layers.{i}.mlp.experts.{e}"
            tensors += [
                Named(f"{name}.up_proj.weight", (4 * inner, width)),
                Named(f"{name}.down_proj.weight", (width, 4 * inner)),
            ]
    return ModelShape.of([*tensors, Named("head.weight", (20, width))], {"*.k_proj.*": 2})


RULES = TpRules(
    {
        **dict.fromkeys(["q_proj", "gate_proj", "up_proj"], "colwise"),
        **dict.fromkeys(["k_proj", "v_proj"], "heads"),
        **dict.fromkeys(["o_proj", "down_proj"], "rowwise"),
        **dict.fromkeys(["embed", "head"], "vocab"),
    }
)


@pytest.mark.parametrize("hosts", [0, 4])
@pytest.mark.parametrize(
    ("moe", "source", "target"),
    [
        (False, "zero3:dp=16", "ddp:dp=2,tp=8"),
        (False, "ddp:dp=2,tp=8", "zero3:dp=16"),
        (False, "ddp:dp=4,tp=2", "fsdp2:dp=6,tp=2"),
        (False, "hsdp:rep=2,dp=3", "zero1:dp=4,tp=2,round_robin=true"),
        (False, "fsdp1:dp=5,rep=2", "ddp:pp=2,dp=3"),
        (True, "zero1:dp=2,tp=2,pp=2,ep=2", "ddp:dp=2,tp=4,pp=1,ep=4"),
        (True, "zero3:dp=24", "ddp:dp=2,tp=2,pp=3,ep=2"),
        (True, "ddp:dp=2,pp=2,ep=4", "zero1:dp=2,tp=2,pp=3,ep=2"),
        (True, "fsdp2:dp=3,ep=2", "zero2:dp=2,pp=2,groups=decay"),
    ],
)
def test_a_small_twin_has_the_moves_of_the_planner_by_elements(
    moe: bool, source: str, target: str, hosts: int
) -> None:
    """The benchmark's layouts in small: no plan is fast by leaving something out."""
    model = _twin_moe() if moe else _twin_llama()
    states = (State("param", "float32"), State("exp_avg", "float32"))
    before, after = (declare(text, model, RULES, states=states) for text in (source, target))
    options = Options(hosts=EvenHosts(hosts, 64) if hosts else {})
    matched = match(before.keys, after.keys, options)
    rows = before.explicit(), after.explicit()
    pairs = [(pair.source.key, pair.target.key) for pair in matched.pairs]
    wanted = by_elements(*rows, pairs, options.hosts)
    seats = sorted({*before.endpoints, *after.endpoints})
    plans = {seat: plan_for(seat, before, after, matched, options) for seat in seats}
    check_plans(plans, rows[1], wanted)
    for seat, plan in plans.items():
        columns = factored_plan(seat, before, after, options)  # by families, not by pairs
        assert columns.bytes_in == plan.bytes_in == plan.minimum == columns.minimum
        assert columns.bytes_out == plan.bytes_out
        assert columns.num_moves == len(plan.moves)
        for out in (False, True):
            peers, sizes = columns.by_peer(out)
            own: dict[int, int] = {}
            for move in plan.sends if out else plan.receives:
                peer = move.target if out else move.source
                own[peer] = own.get(peer, 0) + move.nbytes
            assert dict(zip(peers.tolist(), sizes.tolist(), strict=True)) == own


def _random_pair(seed: int) -> None:
    """Any two layouts of some small tensors: the plans of all seats against the planner by elements."""
    rng = random.Random(seed)
    specs = random_specs(seed, rng.randint(1, 2), max_volume=40)
    layouts = []
    for number in range(2):
        seats = sorted(rng.sample(range(7), rng.randint(1, 5)))
        if rng.random() < 0.5:
            layouts.append(random_layout(seed + number, specs, seats))
        else:
            layouts.append(random_mesh(seed + number, specs))
    per = rng.randint(0, 4)
    options = Options(hosts={seat: f"host{seat // per}" for seat in range(12)} if per else {})
    matched = match(layouts[0].keys, layouts[1].keys, options)
    before, after = (each if isinstance(each, RowLayout) else each.explicit() for each in layouts)
    pairs = [(pair.source.key, pair.target.key) for pair in matched.pairs if not pair.fill]
    wanted = by_elements(before, after, pairs, options.hosts)
    seats = sorted({*before.endpoints, *after.endpoints})
    plans = {seat: plan_for(seat, *layouts, matched, options) for seat in seats}
    check_plans(plans, after, wanted)
    for plan in plans.values():
        assert plan.bytes_in == plan.minimum


def test_random_pairs_of_layouts() -> None:
    for seed in range(500):
        _random_pair(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(100))
def test_a_hundred_thousand_random_pairs(block: int) -> None:
    for seed in range(1000 * block, 1000 * (block + 1)):
        _random_pair(1_000_000 + seed)
