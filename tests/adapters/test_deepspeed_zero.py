"""The ZeRO-3 adapter against real engines; DeepSpeed's own gathers are the judge.

Several cases share one run of the ranks: a run costs more than a case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.adapters import _zero_engines as zero
from tests.adapters._zero_engines import Setup
from tests.adapters._zero_moves import check_described, move, moves

if TYPE_CHECKING:
    from tests._ranks import Pool

# --- described == gathered by DeepSpeed -------------------------------------------------------

DESCRIBED = {
    "bf16, two groups, frozen": Setup(frozen=True),
    "bf16, sub-groups, persistent": Setup(
        groups="reversed", zero={"sub_group_size": 40, "stage3_param_persistence_threshold": 12}
    ),
    "fp32": Setup(dtype="float32", optimizer="Adam", groups="one", tied=False, frozen=True),
    "fp16": Setup(dtype="float16", hyper={"amsgrad": True}),
    "SGD": Setup(optimizer="SGD", hyper={"momentum": 0.9}, accumulate=2, clip=0.5),
    "SGD without state": Setup(optimizer="SGD"),
    "RMSprop": Setup(optimizer="RMSprop", hyper={"momentum": 0.9, "centered": True}),
    "Adagrad": Setup(optimizer="Adagrad", groups="one"),
    "NAdam": Setup(optimizer="NAdam"),
    "outside the optimizer": Setup(groups="partial"),
    "other buckets": Setup(zero={"contiguous_gradients": False, "overlap_comm": True}),
    "offload": Setup(
        zero={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    ),
}

HPZ = Setup(
    hidden=8,
    frozen=True,
    zero={"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 8},
)


def _described(rank: int, world_size: int, setups: dict[str, Setup]) -> dict[str, list[str]]:
    return {name: check_described(setup) for name, setup in setups.items()}


def test_described_is_what_deepspeed_gathers(ranks2: Pool) -> None:
    slots = ranks2.run(_described, DESCRIBED, timeout=300)[0]
    base = ["buffer", "compute", "param"]
    assert slots["bf16, two groups, frozen"] == [
        "buffer",
        "compute",
        "exp_avg",
        "exp_avg_sq",
        "param",
    ]
    # Also pure fp32 weights are a copy of the masters here.
    assert slots["fp32"] == ["buffer", "compute", "exp_avg", "exp_avg_sq", "param"]
    assert "max_exp_avg_sq" in slots["fp16"]
    assert slots["SGD"] == ["buffer", "compute", "momentum_buffer", "param"]
    assert slots["SGD without state"] == base
    assert {"grad_avg", "square_avg", "momentum_buffer"} < set(slots["RMSprop"])


def test_described_on_four_ranks_with_secondary_partitions(ranks4: Pool) -> None:
    uneven = Setup(hidden=3, zero={"sub_group_size": 20})
    ranks4.run(_described, {"hpZ": HPZ, "ranks that own nothing": uneven}, timeout=300)


def _outlive(rank: int, world_size: int) -> None:
    import gc
    import weakref

    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState
    from tests import _ranks

    adapter, engine = DeepSpeedZeroAdapter(), zero.engine_of(Setup(frozen=True))
    zero.train(engine, 0, 2)
    adapter.quiesce(TrainState(engine))
    described = adapter.describe(TrainState(engine))
    full = zero.full_state(described)
    module, optimizer = weakref.ref(engine.module), weakref.ref(engine.optimizer)
    engine.destroy()
    del engine
    _ranks.reset_deepspeed()  # DeepSpeed's globals hold the engine
    gc.collect()
    assert module() is None
    assert optimizer() is None
    for key, value in zero.full_state(described).items():
        np.testing.assert_array_equal(value, full[key], str(key))


def test_described_outlives_the_engine(ranks2: Pool) -> None:
    ranks2.run(_outlive)


# --- there and on -----------------------------------------------------------------------------

MOVES = {
    "bf16, other groups and sub-groups": (
        Setup(frozen=True, scheduler=True),
        Setup(
            frozen=True,
            scheduler=True,
            seed=1,
            groups="reversed",
            hyper={"lr": 0.5, "eps": 0.1},
            zero={"sub_group_size": 40, "stage3_param_persistence_threshold": 12},
        ),
    ),
    "bf16, accumulation and clipping": (
        Setup(accumulate=2, clip=0.1, groups="one"),
        Setup(accumulate=2, clip=0.1, groups="one", seed=1, zero={"overlap_comm": True}),
    ),
    "fp32": (
        Setup(dtype="float32", optimizer="Adam", groups="one", frozen=True),
        Setup(
            dtype="float32",
            optimizer="Adam",
            groups="decay",
            frozen=True,
            seed=1,
            zero={"sub_group_size": 30},
        ),
    ),
    "fp16": (
        Setup(dtype="float16"),
        Setup(dtype="float16", seed=1, zero={"sub_group_size": 30}),
    ),
    "SGD": (
        Setup(optimizer="SGD", hyper={"momentum": 0.9}),
        Setup(optimizer="SGD", hyper={"momentum": 0.9}, seed=1, groups="reversed"),
    ),
    "NAdam": (Setup(optimizer="NAdam"), Setup(optimizer="NAdam", seed=1, groups="reversed")),
    "Adagrad": (
        Setup(optimizer="Adagrad", groups="one"),
        Setup(optimizer="Adagrad", groups="one", seed=1, zero={"sub_group_size": 30}),
    ),
    "offload": (
        Setup(),
        Setup(
            seed=1,
            zero={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        ),
    ),
}


@pytest.mark.parametrize("stepped", [0, 2], ids=["into fresh engines", "into stepped engines"])
def test_training_goes_on_bit_for_bit(ranks2: Pool, stepped: int) -> None:
    for losses in ranks2.run(moves, MOVES, stepped, timeout=400):
        for name, (source, target) in losses.items():
            assert source == target, name


SECONDARY = {
    "hpZ to plain": (HPZ, Setup(hidden=8, frozen=True, seed=1, zero={"sub_group_size": 30})),
    "plain to hpZ": (
        Setup(hidden=8, frozen=True, zero={"sub_group_size": 30}),
        Setup(hidden=8, frozen=True, seed=1, zero=HPZ.zero),
    ),
    "hpZ to hpZ": (HPZ, Setup(hidden=8, frozen=True, seed=1, groups="reversed", zero=HPZ.zero)),
    "ranks that own nothing": (
        Setup(hidden=3, zero={"sub_group_size": 20}),
        Setup(hidden=3, seed=1, zero={"stage3_param_persistence_threshold": 100}),
    ),
}


def _moves_with_secondary(rank: int, world_size: int) -> dict[str, tuple[list[float], list[float]]]:
    return {
        name: move(*case, stepped=stepped) for stepped in (0, 1) for name, case in SECONDARY.items()
    }


def test_training_goes_on_with_secondary_partitions(ranks4: Pool) -> None:
    for losses in ranks4.run(_moves_with_secondary, timeout=300):
        for name, (source, target) in losses.items():
            assert source == target, name


# With equal samples on all ranks, and powers of two of them, gradients do not depend on the ranks.
WIDE = Setup(frozen=True, scheduler=True, accumulate=2)
NARROW = Setup(
    frozen=True,
    scheduler=True,
    accumulate=2,
    seed=1,
    groups="reversed",
    zero={"sub_group_size": 50},
)


def _leave(rank: int, world_size: int, setup: Setup) -> tuple[Any, ...]:
    """Train on this many ranks; what is described of it, and how training would go on."""
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    adapter, engine = DeepSpeedZeroAdapter(), zero.engine_of(setup)
    zero.train(engine, 0, 4, same=True)
    state = TrainState(engine)
    adapter.quiesce(state)
    described = adapter.describe(state)
    found = (zero.rows_of(described), described.specs, described.scalars, described.aux)
    return *found, zero.train(engine, 4, 4, same=True)


def _arrive(
    rank: int, world_size: int, setup: Setup, full: Any, specs: Any, scalars: Any, aux: Any
) -> tuple[list[float], list[str]]:
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    adapter, engine = DeepSpeedZeroAdapter(), zero.engine_of(setup)
    state = TrainState(engine)
    adapter.quiesce(state)
    zero.write_rows(adapter.prepare(state, specs), full)
    by_path = {item.path: item for item in aux}
    outcomes = adapter.finish(state, specs, scalars, by_path, lambda: None)
    told = [str(outcome.path) for outcome in outcomes if outcome.kind != "exact"]
    return zero.train(engine, 4, 4, same=True), told


@pytest.mark.parametrize("wide_first", [True, False], ids=["4 to 2", "2 to 4"])
def test_training_goes_on_on_other_numbers_of_ranks(
    ranks2: Pool, ranks4: Pool, wide_first: bool
) -> None:
    first, second = (ranks4, ranks2) if wide_first else (ranks2, ranks4)
    left = first.run(_leave, WIDE, timeout=300)
    specs, scalars, aux, expected = left[0][1:]
    full = zero.assemble([rows for rows, *_ in left], specs)
    for losses, told in second.run(_arrive, NARROW, full, specs, scalars, aux, timeout=300):
        assert losses == expected
        assert told == ["behaviour/train_batch_size"]


OPERATORS = {
    "FusedAdam": (
        Setup(optimizer="FusedAdam"),
        Setup(optimizer="FusedAdam", seed=1, groups="reversed", zero={"sub_group_size": 30}),
    ),
    "DeepSpeedCPUAdam": (
        Setup(optimizer="DeepSpeedCPUAdam", zero={"offload_optimizer": {"device": "cpu"}}),
        Setup(optimizer="DeepSpeedCPUAdam", seed=1, zero={"sub_group_size": 30}),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("stepped", [0, 2], ids=["into fresh engines", "into stepped engines"])
def test_training_goes_on_with_compiled_optimizers(ranks2: Pool, stepped: int) -> None:
    """DeepSpeed compiles these at first use, which takes minutes."""
    for losses in ranks2.run(moves, OPERATORS, stepped, timeout=600):
        for name, (source, target) in losses.items():
            assert source == target, name


def _aside(rank: int, world_size: int) -> dict[str, list[str]]:
    """Moves between engines that differ in what is not a tensor; what is said of each."""
    return {
        "fp16 to bf16": _told(Setup(dtype="float16", accumulate=2, clip=0.5), Setup(accumulate=4)),
        "bf16 to fp16": _told(Setup(scheduler=True), Setup(dtype="float16")),
        "static scale": _told(
            Setup(dtype="float16"),
            Setup(dtype="float16", config={"fp16": {"enabled": True, "loss_scale": 8}}),
        ),
        "never stepped": _told(Setup(), Setup(seed=1), steps=0),
    }


def _told(setup: Setup, other: Setup, steps: int = 3) -> list[str]:
    """Move, check what must hold whatever the difference, and return what was not exact."""
    import torch

    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    adapter = DeepSpeedZeroAdapter()
    source, target = zero.engine_of(setup), zero.engine_of(other)
    zero.train(source, 0, steps * setup.accumulate)
    ema = {"unused.weight": torch.ones(2, 3), "blocks.0.scale": torch.full((1,), 2.0)}
    counter = zero.Counter(7)
    here = TrainState(
        source, extra={"ema": ema}, samples=40, user={"c": counter}, counters={"epoch": 3}
    )
    there = TrainState(target, user={"c": zero.Counter(0)}, counters={"epoch": 0})
    adapter.quiesce(here)
    adapter.quiesce(there)
    described = adapter.describe(here)
    full = zero.full_state(described)
    assert full["unused.weight", "extra:ema"].tolist() == torch.ones(2, 3).tolist()
    prepared = adapter.prepare(there, described.specs)
    assert bool(prepared.allocated) == bool(steps) == bool(described.scalars)
    zero.write_rows(prepared, full)
    aux = {item.path: item for item in described.aux}
    outcomes = adapter.finish(there, described.specs, described.scalars, aux, lambda: None)
    assert there.user["c"].value == 7
    assert there.counters == {"epoch": 3}
    assert (target.global_steps, target.global_samples) == (steps, source.global_samples)
    adapter.quiesce(there)  # still at a step boundary in its own accumulation
    zero.train(target, 0, other.accumulate)
    assert target.global_steps == steps + 1
    return sorted(str(outcome.path) for outcome in outcomes if outcome.kind != "exact")


def test_what_differs_is_said(ranks2: Pool) -> None:
    always = ["extra:ema"]
    behaviour = ["gradient_accumulation_steps", "gradient_clipping", "loss_scaling", "precision"]
    assert ranks2.run(_aside, timeout=200)[0] == {
        "fp16 to bf16": [
            *(f"behaviour/{name}" for name in [*behaviour, "train_batch_size"]),
            "counters/micro_steps",
            *always,
            "scaler",
        ],
        "bf16 to fp16": ["behaviour/precision", *always, "scaler", "scheduler"],
        "static scale": ["behaviour/loss_scaling", *always, "scaler"],
        "never stepped": always,
    }
