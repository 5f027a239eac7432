"""The simulator: exact bytes, bounds that hold, and times that can be told by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from dynadapt.errors import DynadaptError
from dynadapt.transport import simulate as simulate_module
from dynadapt.transport.cost import Link
from dynadapt.transport.factored import factored_plan
from dynadapt.transport.plan import EvenHosts, Options
from dynadapt.transport.simulate import Cluster, simulate
from dynadapt.vps.declare import declare
from dynadapt.vps.model_shape import ModelShape, Named, State
from dynadapt.vps.tp_rules import TpRules

if TYPE_CHECKING:
    from dynadapt.vps.mesh_layout import MeshLayout

ONE = (State("param", "float32"),)
RULES = TpRules({"up": "colwise", "down": "rowwise"})
FLAT = Cluster(1, Link(1e9, 0.0), Link(1e9, 0.0))
HOSTS = Cluster(4, Link(10e9, 0.0), Link(1e9, 0.0))


def model(layers: int = 4, width: int = 256) -> ModelShape:
    tensors = []
    for i in range(layers):
        tensors.append(Named(f"layers.{i}.up", (4 * width, width)))
        tensors.append(Named(f"layers.{i}.down", (width, 4 * width)))
    return ModelShape.of(tensors)


def layouts(source: str, target: str) -> tuple[MeshLayout, MeshLayout]:
    return declare(source, model(), RULES, states=ONE), declare(target, model(), RULES, states=ONE)


def test_one_pair_takes_its_bytes_over_the_link() -> None:
    """Two seats, each sends the other half of all: out and in at once."""
    run = simulate(*layouts("zero3:dp=2", "ddp:dp=2"), FLAT, budget=1 << 20)
    half = model().numel * 4 // 2
    assert run.loads.tolist() == [[0, 0, half, half]] * 2
    assert run.lower_bound == pytest.approx(half / 1e9)
    assert run.seconds == pytest.approx(half / 1e9, rel=0.05)
    assert run.balance == 1.0
    assert run.minimum.tolist() == [half] * 2
    assert run.held.tolist() == [[half, 2 * half]] * 2
    assert run.peak_memory == 3 * half + run.staging.max()
    assert run.staging.max() <= 1 << 20


def test_a_seat_of_its_own_is_slow_and_the_rest_waits_for_it() -> None:
    """One holder and three that want all: the holder's link sets the time."""
    source = declare("ddp:dp=1", model(), states=ONE)
    target = declare("ddp:dp=3", model(), states=ONE, endpoints=(1, 2, 3))
    run = simulate(source, target, FLAT, budget=1 << 22)
    whole = model().numel * 4
    assert run.busiest == (0, "to other hosts", 3 * whole)
    assert run.seconds == pytest.approx(3 * whole / 1e9, rel=0.05)


def test_links_within_a_host_are_told_apart() -> None:
    source = declare("ddp:dp=1", model(), states=ONE)
    target = declare("ddp:dp=5", model(), states=ONE)
    run = simulate(source, target, HOSTS, budget=1 << 22)
    whole = model().numel * 4
    assert run.loads[0].tolist() == [0, 3 * whole, 0, whole]
    assert run.loads[4].tolist() == [0, 0, whole, 0]
    assert run.lower_bound == pytest.approx(whole / 1e9)


def test_nothing_to_move_takes_no_time() -> None:
    run = simulate(*layouts("ddp:dp=4", "zero3:dp=4"), FLAT)
    assert (run.seconds, run.lower_bound, run.ratio) == (0.0, 0.0, 1.0)
    assert run.to_json()["bytes_in_worst"] == 0


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("zero3:dp=16", "ddp:dp=4,tp=4"),
        ("ddp:dp=4,tp=4", "zero1:dp=16"),
        ("fsdp2:dp=12", "zero3:dp=16"),
        ("hsdp:rep=4,dp=4", "ddp:dp=2,tp=8"),
    ],
)
def test_it_is_near_its_bound_and_never_below(source: str, target: str) -> None:
    budget = 1 << 19
    run = simulate(*layouts(source, target), FLAT, budget=budget)
    assert run.lower_bound <= run.seconds * 1.001 <= 1.3 * run.lower_bound
    assert run.staging.max() <= budget
    assert run.starts[0] == 0
    assert (run.starts[: len(run.ends)] <= run.ends).all()
    assert run.loads[:, [0, 2]].sum() == run.loads[:, [1, 3]].sum()  # what leaves arrives


def test_it_runs_the_real_plans() -> None:
    before, after = layouts("zero3:dp=8", "ddp:dp=2,tp=4")
    run = simulate(before, after, HOSTS)
    for seat in range(8):
        plan = factored_plan(seat, before, after, Options(hosts=EvenHosts(4, 8)))
        assert run.loads[seat, [0, 2]].sum() == plan.bytes_in == run.minimum[seat]
        assert run.loads[seat, [1, 3]].sum() == plan.bytes_out
        assert run.resident[seat] == plan.bytes_resident


def test_replicas_share_the_sending() -> None:
    """Every source of a TP x DP layout sends about as much, where no host is nearer."""
    run = simulate(*layouts("ddp:dp=16,tp=4", "zero3:dp=64"), FLAT)
    assert run.balance <= 1.1


def test_a_large_world_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = simulate(*layouts("zero3:dp=64", "ddp:dp=16,tp=4"), FLAT, budget=1 << 20)
    monkeypatch.setattr(simulate_module, "WHOLE", 8)
    sample = simulate(*layouts("zero3:dp=64", "ddp:dp=16,tp=4"), FLAT, budget=1 << 20)
    assert not whole.sampled
    assert sample.sampled
    assert sample.to_json()["planned_seats"] == len(sample.seats) < 64
    assert {0, 63} <= set(sample.seats.tolist())
    assert sample.lower_bound == pytest.approx(whole.lower_bound, rel=0.05)
    assert sample.seconds == pytest.approx(whole.seconds, rel=0.2)


def test_a_sample_has_a_seat_of_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage is ten times as large; a sample that missed it would promise too little."""
    monkeypatch.setattr(simulate_module, "WHOLE", 8)
    monkeypatch.setattr(simulate_module, "SAMPLE", 4)
    tensors = [Named(f"layers.{i}.w", (64, 1000 if i == 13 else 100)) for i in range(32)]
    shape = ModelShape.of(tensors)
    before, after = (declare(s, shape, states=ONE) for s in ("zero3:dp=64", "zero3:pp=32,dp=2"))
    run = simulate(before, after, FLAT)
    assert run.sampled
    seat = int(run.seats[np.argmax(run.minimum)])
    assert seat in {26, 27}
    assert run.minimum.max() >= 64 * 1000 * 4 // 2 - 64 * 1000 * 4 // 64


def test_latency_counts_each_message() -> None:
    slow = Cluster(1, Link(1e9, 1e-3), Link(1e9, 1e-3))
    fast = simulate(*layouts("zero3:dp=8", "ddp:dp=8"), FLAT, budget=1 << 20)
    late = simulate(*layouts("zero3:dp=8", "ddp:dp=8"), slow, budget=1 << 20)
    each = late.messages[:, [0, 2]].sum(1).max()
    assert late.seconds == pytest.approx(fast.seconds + each * 1e-3, rel=0.1)


def test_an_unknown_cluster_is_named() -> None:
    with pytest.raises(DynadaptError, match="h100") as caught:
        simulate(*layouts("ddp:dp=2", "zero3:dp=2"), "lan-party")
    assert caught.value.reason == "unknown-cluster"


def test_meshes_that_do_not_ascend_are_refused() -> None:
    """Their plans are made by rows; a column of places would name the wrong ranks."""
    mixed = declare("ddp:dp=2", model(), states=ONE, endpoints=(1, 0))
    with pytest.raises(DynadaptError) as caught:
        simulate(mixed, layouts("ddp:dp=2", "ddp:dp=2")[1], FLAT)
    assert caught.value.reason == "mesh-order"


def test_other_models_are_refused() -> None:
    other = declare("ddp:dp=2", model(layers=5), states=ONE)
    with pytest.raises(DynadaptError) as caught:
        simulate(layouts("ddp:dp=2", "ddp:dp=2")[0], other, FLAT)
    assert caught.value.reason == "model-differs"
    assert np.isfinite(simulate(*layouts("ddp:dp=2", "zero3:dp=2"), FLAT).seconds)
