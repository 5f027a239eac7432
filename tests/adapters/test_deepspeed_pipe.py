"""DeepSpeed pipelines as source and target: stages, tied layers, groups and counters of parts of a model.

A twin that is never migrated is the judge: once the state is back in an engine that was built anew, both
have the same losses and the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.adapters import _pipe_engines as pipe
from tests.adapters._pipe_engines import Setup
from tests.declared import _worlds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests._ranks import Pool

WHOLE = Setup(stages=0)
ACCUMULATE = {"data_types": {"grad_accum_dtype": "fp32"}}

#: An engine, and the layouts that its state goes through on its way back into one like it.
FOUR: Mapping[str, tuple[Setup, list[Setup]]] = {
    "2x2 bf16, ZeRO-3 between, clipped": (
        Setup(clip=0.3, scheduler=True, frozen=True),
        [replace(WHOLE, stage=3, scheduler=True, frozen=True)],
    ),
    "2x2 to 4x1 stages, BF16_Optimizer": (
        Setup(config=ACCUMULATE),
        [Setup(stages=4, norm=False), replace(WHOLE, stage=2)],
    ),
    "a group on some stages, fp32 without ZeRO": (
        Setup(stage=0, dtype="fp32", groups="some", scheduler=True),
        [replace(WHOLE, dtype="fp32", groups="some", scheduler=True)],
    ),
}
MORE: Mapping[str, tuple[Setup, list[Setup]]] = {
    "4x1, fp16": (
        Setup(stages=4, dtype="fp16", norm=False),
        [Setup(stages=2, dtype="fp16"), replace(WHOLE, stage=1, dtype="fp16")],
    ),
    "nothing tied, one group, fp32": (
        Setup(tied=False, dtype="fp32", groups="one"),
        [replace(WHOLE, stage=0, dtype="fp32", tied=False, groups="one")],
    ),
    "bf16 without ZeRO": (Setup(stage=0), [replace(WHOLE, stage=0), Setup(stages=1)]),
    "fp16 without ZeRO, fused": (
        Setup(stage=0, dtype="fp16", fused=True),
        [Setup(stages=4, stage=0, dtype="fp16")],
    ),
}
SOME = Setup(stages=3, norm=False, groups="some", scheduler=True)
THREE: Mapping[str, tuple[Setup, list[Setup]]] = {
    "three stages": (SOME, [replace(SOME, stages=0, stage=3, norm=True)]),
}


def _there_and_back(rank: int, world: int, cases: Mapping[str, Any]) -> list[dict[str, Any]]:
    import dynadapt

    found = []
    for name, (setup, between) in cases.items():
        job, twin = pipe.engine_of(setup), pipe.engine_of(setup)
        for step in range(2):
            assert pipe.train(job, step) == pipe.train(twin, step), name
        pipe.evaluate(job)
        reports, wrong = [], []
        expected = pipe.tensors(twin)
        for hop in (*between, replace(setup, seed=5, lr=0.5)):
            target = pipe.engine_of(replace(hop, seed=5))
            reports.append(dynadapt.migrate(job, target, timeout=60))
            job = target
            if hop.stage < 3:
                low = {key: full for key, full in pipe.tensors(job).items() if key[1] != "compute"}
                wrong += pipe.differing(low, {key: expected[key] for key in low})
        losses = [(pipe.train(job, step), pipe.train(twin, step)) for step in (2, 3)]
        found.append(
            {
                "name": name,
                "moved": [(each.bytes_moved, each.bytes_minimum) for each in reports],
                "equal": [e.fingerprint_source == e.fingerprint_target for e in reports],
                "coordinates": reports[0].source["coordinates"],
                "losses": losses,
                "differing": [*wrong, *pipe.differing(pipe.tensors(job), pipe.tensors(twin))],
                "counts": [_counts(job), _counts(twin)],
            }
        )
    return found


def _counts(engine: Any) -> dict[str, Any]:
    names = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
    scheduler = engine.lr_scheduler
    return {
        **{name: getattr(engine, name) for name in names},
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "lr": [group["lr"] for group in engine.optimizer.param_groups],
    }


def _check(answers: list[list[dict[str, Any]]]) -> None:
    for answer in (answer for rank in answers for answer in rank):
        name = answer["name"]
        assert all(moved == minimum for moved, minimum in answer["moved"]), answer
        assert all(answer["equal"]), name
        assert answer["differing"] == [], (name, answer["differing"])
        assert all(one == two for one, two in answer["losses"]), (name, answer["losses"])
        assert answer["counts"][0] == answer["counts"][1], name


def test_there_and_back(ranks4: Pool) -> None:
    answers = ranks4.run(_there_and_back, FOUR, timeout=300)
    _check(answers)
    assert answers[0][0]["coordinates"] == {
        "0": {"dp": 0, "tp": 0, "pp": 0},
        "1": {"dp": 1, "tp": 0, "pp": 0},
        "2": {"dp": 0, "tp": 0, "pp": 1},
        "3": {"dp": 1, "tp": 0, "pp": 1},
    }


@pytest.mark.nightly
def test_there_and_back_in_other_settings(ranks4: Pool) -> None:
    _check(ranks4.run(_there_and_back, MORE, timeout=600))


@pytest.mark.nightly
def test_there_and_back_on_three_ranks() -> None:
    _check(_worlds.run(3, _there_and_back, THREE))


def _to_one_rank(rank: int, world: int) -> list[str]:
    """The whole model on rank 0 alone, then back from there: the other ranks have no part in it."""
    import dynadapt

    setup = Setup()
    job, twin = pipe.engine_of(setup), pipe.engine_of(setup)
    for step in range(2):
        assert pipe.train(job, step) == pipe.train(twin, step)
    alone = None
    if rank == 0:
        model = pipe.stack(replace(setup, seed=4))
        alone = dynadapt.TrainState(model, pipe.optimizer_of(setup, model))
    report = dynadapt.migrate(job, alone, timeout=60)
    assert report.bytes_moved == report.bytes_minimum
    full = pipe.tensors(twin)
    if rank == 0:
        expected = dict(alone.model.named_parameters())
        for name, param in expected.items():
            assert full[name, "param"].equal(param.detach()), name
    back = pipe.engine_of(replace(setup, seed=6))
    report = dynadapt.migrate(alone, back, timeout=60)
    assert report.bytes_moved == report.bytes_minimum
    assert pipe.train(back, 2) == pipe.train(twin, 2)
    return pipe.differing(pipe.tensors(back), pipe.tensors(twin))


def test_a_model_on_one_rank(ranks4: Pool) -> None:
    for found in ranks4.run(_to_one_rank, timeout=200):
        assert found == []


def _described(rank: int, world: int) -> dict[str, Any]:
    """What a stage says of its part, and what all say together."""
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.vps.keys import merge_specs
    from tests.adapters._zero_engines import everyone

    engine = pipe.engine_of(Setup())
    described = DeepSpeedZeroAdapter().describe(_state(engine))
    merged, findings = merge_specs(dict(enumerate(everyone(described.specs))))
    assert not findings
    order = sorted((s.order, s.key.name) for s in merged if s.key.slot == "param")
    whole = [name for name, _ in pipe.stack(Setup()).named_parameters()]
    assert [name for _, name in order] == whole
    own = {spec.key.name for spec in described.specs}
    return {"own": own, "local": dict(engine.module.named_parameters()).keys() <= own}


def _state(engine: Any) -> Any:
    from dynadapt import TrainState

    return TrainState(engine)


def test_a_stage_describes_its_own_layers_in_the_models_order(ranks4: Pool) -> None:
    answers = ranks4.run(_described)
    assert all(answer["local"] for answer in answers)
    assert "1.up.weight" in answers[0]["own"]
    assert "1.up.weight" not in answers[3]["own"]
    assert all("tied_modules.embed.weight" in answer["own"] for answer in answers)


def _refusals(rank: int, world: int) -> dict[str, Any]:
    import dynadapt
    from dynadapt.adapters.live.deepspeed_zero import put_in_force

    found: dict[str, Any] = {}
    job, twin = pipe.engine_of(Setup()), pipe.engine_of(Setup())
    for engine in (job, twin):
        pipe.train(engine, 0)

    # A replica of a tied layer that has drifted on one stage.
    other = pipe.engine_of(Setup(seed=2))
    if rank == 2:
        master = job.optimizer.single_partition_of_fp32_groups[1]
        master.data[0] += 1
    found["drift"] = _refusal(lambda: dynadapt.migrate(job, other, timeout=60))
    if rank == 2:
        master.data[0] -= 1

    # All micro-batches of a batch, and no step yet.
    _without_a_step(job)
    found["mid-step"] = _refusal(lambda: dynadapt.migrate(job, other, timeout=60))

    # A failure after the bytes: both engines are as they were, and the globals the source's.
    third = pipe.engine_of(Setup(stages=4, seed=2, norm=False))
    put_in_force(twin)
    before = pipe.tensors(twin)

    def fail(phase: str) -> None:
        if phase == "certify" and rank == 1:
            raise RuntimeError("no")

    found["failed"] = _refusal(lambda: dynadapt.migrate(twin, third, timeout=60, on_phase=fail))
    found["changed"] = pipe.differing(before, pipe.tensors(twin))
    found["goes on"] = float(twin.train_batch(pipe.batches(2, 0))) > 0
    return found


def _without_a_step(engine: Any) -> None:
    """What `train_batch` does up to the reduction of gradients."""
    from deepspeed.runtime.pipe import schedule

    from dynadapt.adapters.live.deepspeed_zero import put_in_force

    put_in_force(engine)
    late = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)

    class Part(schedule.TrainSchedule):
        def steps(self) -> Any:
            for commands in super().steps():
                yield [each for each in commands if not isinstance(each, late)]

    engine.set_dataiterator(pipe.batches(50, 0))
    engine.total_loss, engine._compute_loss = None, True
    part = Part(engine.micro_batches, engine.num_stages, engine.stage_id)
    engine._exec_schedule(part)


def _refusal(call: Any) -> list[tuple[str, str]]:
    from dynadapt import MigrationAborted

    try:
        call()
    except MigrationAborted as error:
        return [(finding.reason, finding.where) for finding in error.findings]
    return []


def test_what_is_refused_leaves_both_as_they_were(ranks4: Pool) -> None:
    answers = ranks4.run(_refusals, timeout=200)
    for found in answers:
        assert {reason for reason, _ in found["drift"]} == {"replicas-differ"}
        assert {reason for reason, _ in found["mid-step"]} == {"mid-step"}
        assert found["changed"] == []
    assert all(found["goes on"] for found in answers)
