"""What the DeepSpeed adapter refuses on real engines, and that it leaves them as they were.

Several cases share one run of the ranks: a run costs more than a case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.adapters import _zero_engines as zero
from tests.adapters._zero_engines import Setup

if TYPE_CHECKING:
    from tests._ranks import Pool


def _refused(call: Any, *args: Any) -> list[tuple[str, str, str]]:
    from dynadapt.errors import Refused

    try:
        call(*args)
    except Refused as error:
        return [(each.reason, each.where, each.cause.partition(":")[0]) for each in error.findings]
    return []


def _quiesce_mid_step(rank: int, world_size: int, setup: Setup) -> dict[str, Any]:
    """Ask at every point of an accumulation; the twin is never asked."""
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    adapter = DeepSpeedZeroAdapter()
    asked, twin = zero.engine_of(setup), zero.engine_of(setup)
    found: dict[str, Any] = {"losses": [], "expected": zero.train(twin, 0, 6)}
    state = TrainState(asked)
    answers = [_refused(adapter.quiesce, state)]
    for step in range(6):
        loss = asked(*zero.batch(step))
        asked.backward(loss)
        answers.append(_refused(adapter.quiesce, state))
        asked.step()
        answers.append(_refused(adapter.quiesce, state))
        found["losses"].append(loss.item())
    asked.backward(asked(*zero.batch(6)))
    answers.append(_refused(adapter.quiesce, state))
    asked.optimizer.zero_grad()  # dropped for good: a boundary again
    answers.append(_refused(adapter.quiesce, state))
    return {**found, "answers": answers}


ACCUMULATE = {"data_types": {"grad_accum_dtype": "fp32"}}

#: An engine, whether it knows the last micro-step before the step, and whether `zero_grad` drops all.
MID_STEP = {
    "stage 3": (Setup(accumulate=2, zero={"stage3_param_persistence_threshold": 12}), True, True),
    "stage 2": (Setup(accumulate=2, zero={"stage": 2}), True, False),
    "stage 2, fp32 sums": (Setup(accumulate=2, zero={"stage": 2}, config=ACCUMULATE), True, False),
    "stage 1": (Setup(accumulate=2, zero={"stage": 1}), True, True),
    "stage 1, by hand": (
        Setup(accumulate=2, zero={"stage": 1, "contiguous_gradients": False}),
        True,
        True,
    ),
    "BF16_Optimizer": (Setup(accumulate=2, zero={"stage": 1}, config=ACCUMULATE), False, True),
    "no ZeRO": (Setup(accumulate=2, zero={"stage": 0}), False, True),
    "no ZeRO, fp32": (Setup(accumulate=2, dtype="float32", zero={"stage": 0}), False, True),
}


@pytest.mark.parametrize("name", MID_STEP)
def test_quiesce_refuses_inside_a_step_and_changes_nothing(ranks2: Pool, name: str) -> None:
    setup, knows_last, drops = MID_STEP[name]
    for rank, found in enumerate(ranks2.run(_quiesce_mid_step, setup, timeout=200)):
        first = [("mid-step", f"rank {rank}", "micro-step 1 of 2")]
        last = [("mid-step", f"rank {rank}", "micro-step 2 of 2")] if knows_last else first
        end = [] if drops else first
        assert found["answers"] == [[], *[first, first, last, []] * 3, first, end]
        assert found["losses"] == found["expected"]


def _one_micro_step(rank: int, world_size: int) -> list[Any]:
    """Without accumulation, gradients of one rank alone are told; stages 1 and 2 reduce them at once."""
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    found = []
    for stage in (0, 1, 2):
        for config in ({}, ACCUMULATE) if stage else ({},):
            engine = zero.engine_of(Setup(zero={"stage": stage}, config=config))
            zero.train(engine, 0, 1)
            engine.backward(engine(*zero.batch(6)))
            found.append(_refused(DeepSpeedZeroAdapter().quiesce, TrainState(engine)))
            engine.step()
            found.append(_refused(DeepSpeedZeroAdapter().quiesce, TrainState(engine)))
    return found


def test_quiesce_names_the_only_micro_step(ranks2: Pool) -> None:
    for rank, found in enumerate(ranks2.run(_one_micro_step, timeout=200)):
        assert found == [[("mid-step", f"rank {rank}", "micro-step 1 of 1")], []] * 5


def _abandon(rank: int, world_size: int) -> dict[str, Any]:
    """Prepare, receive half of the bytes, give up, train: as if nothing had been."""
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    found = {}
    for stepped in (0, 2):
        source, target, twin = (zero.engine_of(Setup(seed=seed)) for seed in (0, 1, 1))
        zero.train(source, 0, 2)
        for engine in (target, twin):
            zero.train(engine, 50, stepped)
        described = DeepSpeedZeroAdapter().describe(TrainState(source))
        DeepSpeedZeroAdapter().quiesce(TrainState(target))
        prepared = DeepSpeedZeroAdapter().prepare(TrainState(target), described.specs)
        if not stepped:
            # Masters of an engine that never stepped are its weights, so they can be had back.
            for name, buffer in prepared.buffers.items():
                if not name.endswith(("/buffer", "/compute")):
                    buffer.tensor()[::2].fill_(rank + 0.5)
        DeepSpeedZeroAdapter().abandon(TrainState(target))
        assert bool(target.optimizer.optimizer.state) == bool(stepped)
        found[f"{stepped} steps"] = (zero.train(target, 0, 3), zero.train(twin, 0, 3))
    return found


def test_abandon_leaves_the_target_as_it_was(ranks2: Pool) -> None:
    for found in ranks2.run(_abandon, timeout=200):
        for name, (losses, expected) in found.items():
            assert losses == expected, name


def _refusals(rank: int, world_size: int) -> dict[str, Any]:
    """Every refusal, on real engines; what cannot be built here is set on one."""
    import torch

    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    adapter = DeepSpeedZeroAdapter()
    found: dict[str, Any] = {}
    engine = zero.engine_of(Setup())
    zero.train(engine, 0, 1)
    state = TrainState(engine)
    keys = adapter.describe(state).specs
    optimizer = engine.optimizer
    for name, value in {
        "swap_optimizer": True,
        "params_in_nvme_and_cpu": True,
        "zenflow": True,
        "offloaded_states": {"lp_params"},
    }.items():
        before = getattr(optimizer, name)
        setattr(optimizer, name, value)
        found[name] = _refused(adapter.describe, state)
        setattr(optimizer, name, before)
    for name, (field, value) in {
        "tensor parallel": ("mp_world_size", 2),
        "experts": ("has_moe_layers", True),
        "no optimizer": ("optimizer", None),
    }.items():
        before = getattr(engine, field)
        setattr(engine, field, value)
        found[name] = _refused(adapter.quiesce, state)
        setattr(engine, field, before)
    flats = optimizer.fp32_partitioned_groups_flat
    for flat in flats:
        optimizer.optimizer.state[flat]["trace"] = torch.zeros(3)
    found["odd state"] = _refused(adapter.describe, state)

    class Unknown(torch.optim.AdamW):
        pass

    for name, extra in {
        "extra of a wrong shape": {"unused.weight": torch.ones(3, 2)},
        "extra of no parameter": {"unused.heavy": torch.ones(2, 3)},
    }.items():
        found[name] = _refused(adapter.describe, TrainState(engine, extra={"ema": extra}))
    fresh = zero.engine_of(Setup())
    fresh.optimizer.optimizer.__class__ = Unknown
    found["unknown"] = _refused(adapter.prepare, TrainState(fresh), keys)
    assert not fresh.optimizer.optimizer.state
    return found


def _empty(rank: int, world_size: int) -> None:
    """DeepSpeed 0.19.8 builds an engine with a parameter of no elements, but cannot run it."""
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    adapter, state = DeepSpeedZeroAdapter(), TrainState(zero.engine_of(Setup(empty=True)))
    adapter.quiesce(state)
    described = adapter.prepare(state, ())
    (spec,) = (spec for spec in described.specs if spec.key.name == "none")
    assert (spec.key.slot, spec.shape, spec.trainable) == ("param", (0, 3), True)
    assert not [row for row in described.rows if row.key.name == "none"]
    assert zero.full_state(described)["none", "param"].shape == (0, 3)
    adapter.finish(state, described.specs, {}, {}, lambda: None)


def test_a_parameter_without_elements_has_a_key_and_no_rows(ranks2: Pool) -> None:
    ranks2.run(_empty)


def test_refusals_name_every_place_at_once(ranks2: Pool) -> None:
    found = ranks2.run(_refusals, timeout=200)[0]
    reasons = {name: [reason for reason, _, _ in each] for name, each in found.items()}
    assert reasons == {
        "swap_optimizer": ["unsupported-offload"],
        "params_in_nvme_and_cpu": ["unsupported-offload"],
        "zenflow": ["unsupported-offload"],
        "offloaded_states": ["unsupported-offload"],
        "tensor parallel": ["unsupported-parallel"],
        "experts": ["unsupported-parallel"],
        "no optimizer": ["unsupported-stage"],
        "odd state": ["unsupported-state"] * 2,
        "unknown": ["unknown-optimizer"] * 2,
        "extra of a wrong shape": ["unsupported-state"] * 2 + ["extra-shape"],
        "extra of no parameter": ["unsupported-state"] * 2 + ["extra-shape"],
    }
    assert [where for _, where, _ in found["odd state"]] == [
        "embed.weight/trace",
        "blocks.0.scale/trace",
    ]
    assert [where for _, where, _ in found["unknown"]] == ["embed.weight", "blocks.0.scale"]


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}


def _refusals_below_3(rank: int, world_size: int) -> dict[str, Any]:
    """Real engines that cannot be carried; a subclass stands for those that keep state elsewhere."""
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    adapter = DeepSpeedZeroAdapter()
    found: dict[str, Any] = {}
    setup = Setup(optimizer="Adagrad", zero={"stage": 2})
    found["Adagrad"] = _refused(adapter.quiesce, TrainState(zero.engine_of(setup)))
    engine = zero.engine_of(Setup(zero={"stage": 2}))
    state = TrainState(engine)
    engine.offload_states()
    found["offloaded"] = _refused(adapter.quiesce, state)
    engine.reload_states()
    found["reloaded"] = _refused(adapter.quiesce, state)
    kind = type(engine.optimizer)
    engine.optimizer.__class__ = type("SelfMade", (kind,), {})
    found["subclass"] = _refused(adapter.quiesce, state)
    # Last: DeepSpeed gives every engine after the first of these a scaler.
    for stage in (0, 1):
        setup = Setup(dtype="float32", zero={"stage": stage}, config=AUTOCAST)
        found[f"autocast {stage}"] = _refused(adapter.quiesce, TrainState(zero.engine_of(setup)))
    return found


def test_what_cannot_be_carried_below_stage_3_is_named(ranks2: Pool) -> None:
    assert ranks2.run(_refusals_below_3, timeout=200)[0] == {
        "autocast 0": [
            (
                "unsupported-scaler",
                "torch_autocast",
                "autocast to float16 scales the loss by a scaler of its own, which is not carried",
            )
        ],
        "autocast 1": [
            (
                "unsupported-scaler",
                "torch_autocast",
                "autocast to float16 scales the loss by a scaler of its own, which is not carried",
            )
        ],
        "Adagrad": [
            (
                "unsupported-optimizer",
                "Adagrad",
                "DeepSpeed has joined its 2 param groups into one, and cannot step it",
            )
        ],
        "offloaded": [
            (
                "unsupported-offload",
                "zero_optimization",
                "engine.offload_states() has moved the state away",
            )
        ],
        "reloaded": [],
        "subclass": [
            (
                "unsupported-stage",
                "the engine's optimizer",
                "it is a SelfMade, which is none of DeepSpeed's own for ZeRO stages 0 to 3",
            )
        ],
    }
