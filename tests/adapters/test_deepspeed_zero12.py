"""ZeRO-1, ZeRO-2 and BF16_Optimizer against real engines.

Judges are the weights' own places, DeepSpeed's gathers where they are right, and training that goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.adapters import _zero_engines as zero
from tests.adapters._zero_engines import Setup
from tests.adapters._zero_moves import check_described, moves

if TYPE_CHECKING:
    from tests._ranks import Pool

ACCUMULATE = {"data_types": {"grad_accum_dtype": "fp32"}}
RR = {"round_robin_gradients": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}

DESCRIBED = {
    "bf16, two groups, frozen": Setup(frozen=True, zero={"stage": 1}),
    "round robin": Setup(groups="reversed", zero={"stage": 2, **RR}),
    "round robin, frozen": Setup(frozen=True, dtype="float32", zero={"stage": 1, **RR}),
    "fp32": Setup(dtype="float32", optimizer="Adam", groups="one", tied=False, zero={"stage": 2}),
    "fp16": Setup(dtype="float16", hyper={"amsgrad": True}, zero={"stage": 2}),
    "BF16_Optimizer": Setup(config=ACCUMULATE, frozen=True, zero={"stage": 1}),
    "stage 2 accumulated in fp32": Setup(config=ACCUMULATE, accumulate=2, zero={"stage": 2}),
    "SGD": Setup(
        optimizer="SGD", hyper={"momentum": 0.9}, accumulate=2, clip=0.5, zero={"stage": 1}
    ),
    "SGD without state": Setup(optimizer="SGD", zero={"stage": 2}),
    "Adagrad": Setup(optimizer="Adagrad", groups="one", zero={"stage": 1}),
    "aligned": Setup(zero={"stage": 2, "parameter_alignment": True, **RR}),
    "other buckets": Setup(zero={"stage": 2, "contiguous_gradients": False, "overlap_comm": True}),
    "offload": Setup(zero={"stage": 2, **OFFLOAD}),
    "outside the optimizer": Setup(groups="partial", zero={"stage": 2}),
    "outside BF16_Optimizer": Setup(groups="partial", config=ACCUMULATE, zero={"stage": 1}),
    # DeepSpeed does not swap in these stages.
    "NVMe": Setup(zero={"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "."}}),
}


def _described(rank: int, world_size: int, setups: dict[str, Setup]) -> dict[str, list[str]]:
    return {name: check_described(setup) for name, setup in setups.items()}


def test_described_is_what_the_ranks_hold_together(ranks2: Pool) -> None:
    slots = ranks2.run(_described, DESCRIBED, timeout=300)[0]
    adam = ["buffer", "compute", "exp_avg", "exp_avg_sq", "param"]
    for name in ("bf16, two groups, frozen", "fp32", "BF16_Optimizer", "round robin"):
        assert slots[name] == adam
    assert slots["SGD without state"] == ["buffer", "compute", "param"]


TINY = {
    f"{name} of {hidden}": Setup(hidden=hidden, zero={"stage": stage, **options}, config=config)
    for name, stage, options, config in (
        ("zero1", 1, {}, {}),
        ("round robin", 2, RR, {}),
        ("BF16_Optimizer", 1, {}, ACCUMULATE),
    )
    for hidden in (1, 3)
}


def test_described_on_four_ranks_that_own_little(ranks4: Pool) -> None:
    ranks4.run(_described, TINY, timeout=300)


MOVES = {
    "stage 1, other groups": (
        Setup(frozen=True, scheduler=True, zero={"stage": 1}),
        Setup(
            frozen=True,
            scheduler=True,
            seed=1,
            groups="reversed",
            hyper={"lr": 0.5, "eps": 0.1},
            zero={"stage": 1, "contiguous_gradients": False},
        ),
    ),
    "stage 2 into round robin": (
        Setup(accumulate=2, clip=0.1, groups="one", zero={"stage": 2}),
        Setup(accumulate=2, clip=0.1, groups="one", seed=1, zero={"stage": 2, **RR}),
    ),
    "fp32": (
        Setup(dtype="float32", optimizer="Adam", groups="one", frozen=True, zero={"stage": 1}),
        Setup(dtype="float32", optimizer="Adam", frozen=True, seed=1, zero={"stage": 2, **RR}),
    ),
    "fp16": (
        Setup(dtype="float16", zero={"stage": 1}),
        Setup(dtype="float16", seed=1, zero={"stage": 2}),
    ),
    "BF16_Optimizer": (
        Setup(config=ACCUMULATE, accumulate=2, zero={"stage": 1}),
        Setup(config=ACCUMULATE, accumulate=2, seed=1, groups="reversed", zero={"stage": 1}),
    ),
    "SGD": (
        Setup(optimizer="SGD", hyper={"momentum": 0.9}, zero={"stage": 1}),
        Setup(optimizer="SGD", hyper={"momentum": 0.9}, seed=1, zero={"stage": 1, **RR}),
    ),
    "NAdam": (
        Setup(optimizer="NAdam", zero={"stage": 2}),
        Setup(optimizer="NAdam", seed=1, groups="reversed", zero={"stage": 2}),
    ),
    "Adagrad": (
        Setup(optimizer="Adagrad", groups="one", zero={"stage": 1}),
        Setup(optimizer="Adagrad", groups="one", seed=1, zero={"stage": 2}),
    ),
    "offload": (Setup(zero={"stage": 2}), Setup(seed=1, zero={"stage": 2, **OFFLOAD})),
    "to stage 3": (
        Setup(zero={"stage": 1, **RR}),
        Setup(seed=1, groups="reversed", zero={"stage": 3, "sub_group_size": 40}),
    ),
    "from stage 3": (Setup(frozen=True), Setup(frozen=True, seed=1, zero={"stage": 2, **RR})),
}


@pytest.mark.parametrize("stepped", [0, 2], ids=["into fresh engines", "into stepped engines"])
def test_training_goes_on_bit_for_bit(ranks2: Pool, stepped: int) -> None:
    for losses in ranks2.run(moves, MOVES, stepped, timeout=400):
        for name, (source, target) in losses.items():
            assert source == target, name


OPERATORS = {
    "FusedAdam": (
        Setup(optimizer="FusedAdam", zero={"stage": 1}),
        Setup(optimizer="FusedAdam", seed=1, groups="reversed", zero={"stage": 1, **RR}),
    ),
    "FusedAdam without ZeRO": (
        Setup(optimizer="FusedAdam", zero={"stage": 0}),
        Setup(optimizer="FusedAdam", seed=1, zero={"stage": 0}),
    ),
    "DeepSpeedCPUAdam": (
        Setup(optimizer="DeepSpeedCPUAdam", zero={"stage": 2, **OFFLOAD}),
        Setup(optimizer="DeepSpeedCPUAdam", seed=1, zero={"stage": 2, **OFFLOAD, **RR}),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("stepped", [0, 2], ids=["into fresh engines", "into stepped engines"])
def test_training_goes_on_with_compiled_optimizers(ranks2: Pool, stepped: int) -> None:
    """DeepSpeed compiles these at first use, which takes minutes."""
    for losses in ranks2.run(moves, OPERATORS, stepped, timeout=600):
        for name, (source, target) in losses.items():
            assert source == target, name


def _linked(rank: int, world_size: int) -> None:
    """After a migration DeepSpeed's own gathers of states are right, also of all param groups."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    import dynadapt

    for config in ({}, ACCUMULATE):
        source = zero.engine_of(Setup(zero={"stage": 1}, config=config))
        target = zero.engine_of(Setup(seed=1, zero={"stage": 1}, config=config))
        zero.train(source, 0, 2)
        report = dynadapt.migrate(source, target)
        assert report.bytes_moved == report.bytes_minimum == 0
        expected = zero.gathered(source)
        for name, param in target.module.named_parameters():
            for slot, full in {
                "param": safe_get_full_fp32_param(param),
                "exp_avg": safe_get_full_optimizer_state(param, "exp_avg"),
                "exp_avg_sq": safe_get_full_optimizer_state(param, "exp_avg_sq"),
            }.items():
                assert full.tolist() == expected[name, slot].tolist(), (name, slot)


def test_deepspeed_gathers_what_has_landed(ranks2: Pool) -> None:
    ranks2.run(_linked)


def _abandon(rank: int, world_size: int, setups: list[Setup]) -> list[Any]:
    """Prepare, receive half of the bytes, give up, train: as if nothing had been."""
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    found = []
    for setup in setups:
        source = zero.engine_of(Setup(dtype=setup.dtype))
        target, twin = zero.engine_of(setup), zero.engine_of(setup)
        zero.train(source, 0, 2)
        described = DeepSpeedZeroAdapter().describe(TrainState(source))
        DeepSpeedZeroAdapter().quiesce(TrainState(target))
        prepared = DeepSpeedZeroAdapter().prepare(TrainState(target), described.specs)
        assert prepared.allocated
        for name, buffer in prepared.buffers.items():
            if not name.endswith(("/buffer", "/compute")):
                buffer.tensor()[::2].fill_(rank + 0.5)
        DeepSpeedZeroAdapter().abandon(TrainState(target))
        assert not target.optimizer.optimizer.state
        found.append((zero.train(target, 0, 3), zero.train(twin, 0, 3)))
    return found


def test_abandon_leaves_the_target_as_it_was(ranks2: Pool) -> None:
    setups = [
        Setup(seed=1, zero={"stage": 1, **RR}),
        Setup(seed=1, zero={"stage": 2}, dtype="float32"),
        Setup(seed=1, zero={"stage": 1}, config=ACCUMULATE),
    ]
    for found in ranks2.run(_abandon, setups, timeout=200):
        for losses, expected in found:
            assert losses == expected


def _abandon_late(rank: int, world_size: int) -> None:
    """After `finish` has linked states that `abandon` then takes away, a step links its own."""
    from deepspeed.utils import safe_get_full_optimizer_state

    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    adapter = DeepSpeedZeroAdapter()
    for config in ({}, ACCUMULATE):
        # Of several groups DeepSpeed's own first step links the first one only.
        setup = Setup(groups="one", zero={"stage": 1}, config=config)
        source, target = zero.engine_of(setup), zero.engine_of(setup)
        zero.train(source, 0, 2)
        described = adapter.describe(TrainState(source))
        state = TrainState(target)
        adapter.prepare(state, described.specs)
        adapter.finish(state, described.specs, described.scalars, {})
        adapter.abandon(state)
        zero.train(target, 0, 1)
        expected = zero.gathered(target)
        for name, param in target.module.named_parameters():
            full = safe_get_full_optimizer_state(param, "exp_avg")
            assert full.tolist() == expected[name, "exp_avg"].tolist(), name


def test_states_that_were_taken_back_are_not_linked(ranks2: Pool) -> None:
    ranks2.run(_abandon_late)
