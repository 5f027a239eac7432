"""DeepSpeed without ZeRO against real engines: fused and unfused masters, and plain fp32.

Judges are DeepSpeed's own way of cutting its masters apart, and training that goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.adapters import _zero_engines as zero
from tests.adapters._zero_engines import Setup
from tests.adapters._zero_moves import check_described, move

if TYPE_CHECKING:
    from tests._ranks import Pool

NONE = {"stage": 0}

DESCRIBED = {
    "bf16": Setup(frozen=True, zero=NONE),
    "bf16 fused": Setup(frozen=True, groups="reversed", fused=True, zero=NONE),
    "fp16": Setup(dtype="float16", hyper={"amsgrad": True}, zero=NONE),
    "fp16 fused": Setup(dtype="float16", tied=False, fused=True, zero=NONE),
    "fp32": Setup(dtype="float32", frozen=True, accumulate=2, zero=NONE),
    "SGD": Setup(optimizer="SGD", hyper={"momentum": 0.9}, clip=0.5, zero=NONE),
    "SGD without state": Setup(optimizer="SGD", fused=True, zero=NONE),
    "outside the optimizer": Setup(groups="partial", zero=NONE),
    "fp32, outside the optimizer": Setup(dtype="float32", groups="partial", zero=NONE),
}


def _described(rank: int, world_size: int, setups: dict[str, Setup]) -> dict[str, list[str]]:
    return {name: check_described(setup) for name, setup in setups.items()}


def test_described_is_what_deepspeed_holds(ranks2: Pool) -> None:
    slots = ranks2.run(_described, DESCRIBED, timeout=300)[0]
    assert slots["bf16"] == ["buffer", "compute", "exp_avg", "exp_avg_sq", "param"]
    # The model's own parameters are the masters.
    assert slots["fp32"] == ["buffer", "exp_avg", "exp_avg_sq", "param"]


MOVES = {
    "bf16, other groups": (
        Setup(frozen=True, scheduler=True, zero=NONE),
        Setup(
            frozen=True,
            scheduler=True,
            seed=1,
            groups="reversed",
            hyper={"lr": 0.5, "eps": 0.1},
            zero=NONE,
        ),
    ),
    "fused to unfused": (
        Setup(accumulate=2, clip=0.1, groups="one", fused=True, zero=NONE),
        Setup(accumulate=2, clip=0.1, groups="one", seed=1, zero=NONE),
    ),
    "unfused to fused": (Setup(zero=NONE), Setup(seed=1, fused=True, zero=NONE)),
    "fp32": (
        Setup(dtype="float32", frozen=True, optimizer="Adam", groups="one", zero=NONE),
        Setup(dtype="float32", frozen=True, optimizer="Adam", seed=1, zero=NONE),
    ),
    "fp16": (
        Setup(dtype="float16", fused=True, zero=NONE),
        Setup(dtype="float16", seed=1, zero=NONE),
    ),
    "SGD": (
        Setup(optimizer="SGD", hyper={"momentum": 0.9}, zero=NONE),
        Setup(optimizer="SGD", hyper={"momentum": 0.9}, seed=1, groups="reversed", zero=NONE),
    ),
    "to stage 1": (Setup(zero=NONE), Setup(seed=1, zero={"stage": 1})),
    "from stage 2": (Setup(zero={"stage": 2}), Setup(seed=1, groups="reversed", zero=NONE)),
    "from stage 3": (Setup(frozen=True), Setup(frozen=True, seed=1, fused=True, zero=NONE)),
}


def _moves(rank: int, world_size: int, stepped: int) -> dict[str, tuple[list[float], list[float]]]:
    return {name: move(*case, stepped) for name, case in MOVES.items()}


@pytest.mark.parametrize("stepped", [0, 2], ids=["into fresh engines", "into stepped engines"])
def test_training_goes_on_bit_for_bit(ranks2: Pool, stepped: int) -> None:
    for losses in ranks2.run(_moves, stepped, timeout=400):
        for name, (source, target) in losses.items():
            assert source == target, name


def _hidden(rank: int, world_size: int) -> list[Any]:
    """Engines that never trained, whose masters have decayed and whose weights have not."""
    import torch

    import dynadapt

    found = []
    for fused in (False, True):
        setup = Setup(fused=fused, hyper={"weight_decay": 0.5, "lr": 0.1}, zero=NONE)
        source, plain = zero.engine_of(setup), zero.model_of(Setup(seed=1))
        optimizer = torch.optim.AdamW(zero.groups_of(setup, plain), lr=1.0)
        report = dynadapt.migrate(source, dynadapt.TrainState(plain, optimizer, counters={}))
        masters = {n: v for (n, slot), v in zero.gathered(source).items() if slot == "param"}
        for name, param in plain.named_parameters():
            assert param.tolist() == masters[name].tolist(), name
        steps = {float(optimizer.state[param]["step"]) for param in plain.parameters()}
        found.append((sorted({w.reason for w in report.warnings}), steps))
    return found


def test_the_hidden_step_is_carried_and_told(ranks2: Pool) -> None:
    """DeepSpeed has made a step when it is built: masters and step count are what they are."""
    for found in ranks2.run(_hidden):
        assert found == [(["stale-copy"], {1.0})] * 2


def _abandon(rank: int, world_size: int) -> list[Any]:
    """Prepare, receive nothing or all, give up: masters, states and steps are a fresh engine's."""
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    found = []
    for fused in (False, True):
        for landed in (False, True):
            setup = Setup(seed=1, fused=fused, hyper={"weight_decay": 0.5, "lr": 0.1}, zero=NONE)
            source = zero.engine_of(Setup(zero=NONE))
            target, twin = zero.engine_of(setup), zero.engine_of(setup)
            zero.train(source, 0, 2)
            adapter = DeepSpeedZeroAdapter()
            adapter.quiesce(TrainState(target))
            described = adapter.describe(TrainState(source))
            full = zero.full_state(described)
            prepared = adapter.prepare(TrainState(target), described.specs)
            assert not prepared.allocated  # the hidden step has made the states
            if landed:
                zero.write_rows(prepared, full)
                aux = {item.path: item for item in described.aux}
                aux.pop("param_groups")
                adapter.finish(TrainState(target), described.specs, described.scalars, aux)
                zero.write_rows(prepared, {key: value + 1 for key, value in full.items()})
            adapter.abandon(TrainState(target))
            adapter.abandon(TrainState(target))
            own, other = (adapter.describe(TrainState(engine)) for engine in (target, twin))
            assert own.scalars == other.scalars
            equal = {
                slot: all(
                    a.tolist() == b.tolist()
                    for (key, a), b in zip(
                        zero.full_state(own).items(), zero.full_state(other).values(), strict=True
                    )
                    if key[1] == slot
                )
                for slot in ("param", "exp_avg", "exp_avg_sq", "compute")
            }
            found.append((landed, equal))
    return found


def test_abandon_leaves_a_fresh_target(ranks2: Pool) -> None:
    for found in ranks2.run(_abandon, timeout=200):
        for landed, equal in found:
            assert equal["exp_avg"]
            assert equal["exp_avg_sq"]
            assert (equal["param"], equal["compute"]) == (not landed, not landed)
