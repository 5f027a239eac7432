"""Several models of one job, each of a framework of its own, move at once: all of them, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from tests.live import _oracle, _walk, jobs
from tests.live.kinds import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests._ranks import Pool
    from tests.live.kinds import Job

Jobs = dict[str, "Job"]

STEPS = {"actor": 2, "critic": 3}
"""Unequal on purpose: a flat buffer keeps one step, but not one for two models."""


def _jobs(steps: bool = False, **kinds: str) -> Jobs:
    """A job of a kind for each name; with weights of the name's own."""
    made = {name: build(kind, seed=len(name)) for name, kind in kinds.items()}
    for name, job in made.items():
        for number in range(STEPS[name] if steps else 0):
            job.step(number)
        job.evaluate()
    return made


def _state(models: Jobs, **more: Any) -> dynadapt.TrainState:
    return dynadapt.TrainState({name: job.state for name, job in models.items()}, **more)


def _tensors(models: Jobs) -> jobs.Tensors:
    """All tensors of all models, by their frameworks' gathers."""
    return {f"{n}/{key}": t for n, job in models.items() for key, t in job.tensors().items()}


def _steps(models: Jobs, count: int = 2) -> list[float]:
    """Losses of the next steps of every model."""
    return [j.step(STEPS[n] + i) for n, j in sorted(models.items()) for i in range(count)]


def _there_and_back(rank: int, world: int) -> dict[str, Any]:
    job = _jobs(steps=True, actor="zero3-bf16", critic="plain")
    twin = _jobs(steps=True, actor="zero3-bf16", critic="plain")
    held = _tensors(job)
    there = _jobs(critic="ddp", actor="fsdp2")
    source, target = _state(job, samples=7, counters={"epoch": 3}), _state(there)
    planned = dynadapt.plan(source, target)
    reports = [dynadapt.migrate(source, target, timeout=60)]
    moved = jobs.differing(held, _tensors(there))
    print_there = dynadapt.fingerprint(target)
    back = _jobs(actor="zero3-bf16", critic="plain")
    reports.append(dynadapt.migrate(target, _state(back), timeout=60))
    oracle = {}
    for name, each in there.items():
        own = {k.removeprefix(f"{name}/"): v for k, v in held.items() if k.startswith(name)}
        taken = STEPS[name]
        expected, loss = _oracle.step(
            own, each.recipe, {}, taken=taken, number=taken, dtype=each.kind.dtype
        )
        gap = abs(each.step(taken) - loss)
        oracle[name] = {"loss": gap, **_walk.gaps(expected, each.tensors())}
    return {
        "planned": planned.bytes_moved == reports[0].bytes_moved,
        "minimal": all(each.bytes_moved == each.bytes_minimum for each in reports),
        "equal": all(each.fingerprint_source == each.fingerprint_target for each in reports),
        "prints": print_there == reports[0].fingerprint_target,
        "moved": moved,
        "job": (target.samples, target.counters["epoch"]),
        "exact": sorted(o.path for o in reports[0].outcomes if o.kind == "exact"),
        "oracle": oracle,
        "losses": _steps(back) == _steps(twin),
        "after": jobs.differing(_tensors(back), _tensors(twin)),
        "names": {
            spec.key.name.partition("/")[0] for spec in dynadapt.describe(target).layout.keys
        },
    }


def test_each_model_changes_its_framework_and_comes_back(ranks4: Pool) -> None:
    """ZeRO-3 and plain -> FSDP2 and DDP -> ZeRO-3 and plain, whose next steps are a twin's."""
    for answer in ranks4.run(_there_and_back, timeout=120):
        for kind in ("planned", "minimal", "equal", "prints", "losses"):
            assert answer[kind], kind
        assert answer["moved"] == answer["after"] == []
        assert answer["job"] == (7, 3)
        assert {"actor/param_groups[1]", "critic/scalars/step", "data"} <= {*answer["exact"]}
        assert answer["names"] == {"actor", "critic"}
        for gaps in answer["oracle"].values():
            assert all(gap <= _walk.TOLERANCE[torch.float32] for gap in gaps.values()), gaps


class BoomError(Exception):
    """What a test raises."""


class Broken:
    """A user's object that cannot take a state on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, int]:
        """Nothing of interest."""
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Fails on the second rank."""
        if self.rank == 1 and state["at"] == 1:
            self.rank = 0  # as after a repair
            raise BoomError


def _fails_in_the_second(rank: int, world: int, modes: list[str]) -> list[dict[str, Any]]:
    answers = []
    for mode in modes:
        job = _jobs(steps=True, actor="zero2-bf16", critic="fsdp2")
        twin = _jobs(steps=True, actor="zero2-bf16", critic="fsdp2")
        there = _jobs(actor="zero1-bf16", critic="zero2-bf16")
        for side in (job, there):
            side["critic"].state.user = {"position": Broken(rank)}
        for group in there["actor"].engine.optimizer.param_groups:
            group["lr"] = 0.5
        source, target = _state(job), _state(there)
        try:
            dynadapt.migrate(source, target, timeout=60, mode=mode)
        except dynadapt.MigrationAborted as error:
            text, phase = str(error), error.phase
        rates = {group["lr"] for group in there["actor"].engine.optimizer.param_groups}
        trains = _steps(job) == _steps(twin)
        same = jobs.differing(_tensors(job), _tensors(twin))
        then = dynadapt.migrate(source, target, timeout=60, mode=mode)
        kept = jobs.differing(_tensors(twin), _tensors(there))
        answers.append(
            {
                "boom": "BoomError" in text,
                "phase": phase,
                "rates": rates == {0.5},
                "trains": trains,
                "same": same,
                "then": then.fingerprint_source == then.fingerprint_target,
                "kept": kept,
            }
        )
    return answers


def test_a_failure_in_the_second_model_leaves_both(ranks4: Pool) -> None:
    """In its `finish`, on one rank: no rank is left in a collective of the first, both train on."""
    for answer in ranks4.run(_fails_in_the_second, ["keep", "park", "release"], timeout=200):
        for each in answer:
            assert each == {
                "boom": True,
                "phase": "finish",
                "rates": True,
                "trains": True,
                "same": [],
                "then": True,
                "kept": [],
            }


def _some_ranks(rank: int, world: int) -> dict[str, Any]:
    """Each model on one of two ranks, changed over."""
    own, other = ("actor", "critic") if rank == 0 else ("critic", "actor")
    models = {name: _plain(seed, 3) for seed, name in enumerate(("actor", "critic"))}
    twins = {name: _plain(seed, 3) for seed, name in enumerate(("actor", "critic"))}
    target = {other: _plain(7, 0)}
    report = dynadapt.migrate({own: models[own]}, target, timeout=60)
    return {
        "moved": report.bytes_moved == report.bytes_minimum > 0,
        "equal": report.fingerprint_source == report.fingerprint_target,
        "trains": _train(target[other]) == _train(twins[other]),
    }


def test_models_on_different_ranks(ranks2: Pool) -> None:
    """A rank passes what it has; the models change places."""
    for answer in ranks2.run(_some_ranks):
        assert all(answer.values()), answer


def _plain(seed: int, steps: int, kind: Any = torch.optim.AdamW) -> dynadapt.TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = dynadapt.TrainState(model, optimizer, scheduler)
    for _ in range(steps):
        _train(state)
    return state


def _train(state: dynadapt.TrainState) -> float:
    loss = state.model(torch.linspace(-1, 1, 12).reshape(4, 3)).square().mean()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.scheduler.step()
    return float(loss.detach())


def _refused(source: Any, target: Any, **more: Any) -> list[tuple[str, str]]:
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(source, target, **more)
    return [(finding.reason, finding.where) for finding in caught.value.findings]


def test_one_model_that_the_other_side_lacks() -> None:
    """Is extra or missing, by its own names; allowed, it is left behind, or keeps what it has."""
    both = {"actor": _plain(0, 2), "critic": _plain(1, 2)}
    one = {"actor": _plain(2, 0)}
    assert {("extra-key", "critic/0.bias/{param, exp_avg, exp_avg_sq}")} <= {*_refused(both, one)}
    report = dynadapt.migrate(both, one, allow={"extra"})
    left = {o.path.partition("/")[0] for o in report.outcomes if o.kind == "dropped"}
    assert left == {"critic"}
    critic = _plain(1, 2)
    there = {"actor": _plain(3, 0), "critic": critic}
    assert ("missing-key", "critic/optimizer") in _refused(one, there)
    report = dynadapt.migrate(one, there, allow={"missing"})
    assert ("critic", "kept") in {(o.path, o.kind) for o in report.outcomes}
    assert _train(critic) == _train(both["critic"])
    assert _train(there["actor"]) == _train(both["actor"]) == _train(one["actor"])


def _mid_step(state: dynadapt.TrainState) -> None:
    state.model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda s: _mid_step(s["actor"]), {("mid-step", "actor/")}),
        (
            lambda s: [*map(_mid_step, s.values())],
            {("mid-step", "actor/"), ("mid-step", "critic/")},
        ),
        (lambda s: s.update(user=_plain(2, 0)), {("bad-argument", "model 'user'")}),
        (lambda s: s.update({"a/b": _plain(2, 0)}), {("bad-argument", "model 'a/b'")}),
        (lambda s: s.update(both={"a": _plain(2, 0)}), {("bad-argument", "model 'both'")}),
        (lambda s: s.clear(), {("bad-argument", "model")}),
        (lambda s: s.update(twice=s["actor"]), {("shared-by-models", "twice/")}),
        (
            lambda s: s.update(critic=_plain(1, 1, torch.optim.Adagrad)),
            {("optimizer-class", "critic/optimizer")},
        ),
    ],
)
def test_what_is_refused_says_in_which_model(
    spoil: Callable[[dict[str, Any]], Any], found: set[tuple[str, str]]
) -> None:
    """All of it together, and nothing has changed."""
    source, target = ({n: _plain(i, 1) for i, n in enumerate(STEPS)} for _ in range(2))
    spoil(source)
    told = {(reason, where) for reason, where in _refused(source, target)}
    for reason, start in found:
        assert any(r == reason and w.startswith(start) for r, w in told), told


def test_what_belongs_to_a_model_is_refused_for_the_job() -> None:
    """With the form that is meant."""
    states = {"actor": _plain(0, 1)}
    state = dynadapt.TrainState(states, optimizer={"actor": states["actor"].optimizer})
    with pytest.raises(dynadapt.MigrationAborted, match=r"TrainState\(model, optimizer=\.\.\.\)"):
        dynadapt.migrate(state, {"actor": _plain(1, 0)})


def test_an_unknown_model_is_named() -> None:
    """Which one no adapter reads."""
    with pytest.raises(dynadapt.MigrationAborted, match="model 'critic': no adapter reads"):
        dynadapt.migrate({"actor": _plain(0, 1), "critic": 3}, {"actor": _plain(1, 0)})


def test_what_still_points_at_the_source_says_of_which_model() -> None:
    """A hook on the critic, and a list for clipping."""
    source, target = ({n: _plain(i, 1) for i, n in enumerate(STEPS)} for _ in range(2))
    clipped = [*source["critic"].model.parameters()]
    source["critic"].model[0].register_forward_hook(_log)
    report = dynadapt.migrate(source, target)
    told = [w.where for w in report.warnings if w.reason == "points-at-source"]
    assert any("_log" in where and "'critic'" in where for where in told), told
    assert any("'clipped'" in where for where in told), told
    assert clipped


def _log(*_: Any) -> None:
    """A user's hook."""


def test_a_parked_model_alone_comes_back() -> None:
    """Each of several is known to be parked, and may come back without the others."""
    source, target = ({n: _plain(i, 2) for i, n in enumerate(STEPS)} for _ in range(2))
    twins = {n: _plain(i, 2) for i, n in enumerate(STEPS)}
    dynadapt.migrate(source, target, mode="park")
    dynadapt.migrate({"critic": target["critic"]}, {"critic": source["critic"]})
    assert _train(source["critic"]) == _train(twins["critic"])
    assert source["actor"].model[0].weight.untyped_storage().nbytes() == 0
    assert _refused(source, target)[0][0] == "parked"


def test_drift_is_placed_in_its_model(ranks2: Pool) -> None:
    """Replicas of the critic differ on one rank."""
    for told in ranks2.run(_drifted):
        assert all(where.startswith("critic/0.weight/param") for _, where in told), told
        assert told


def _drifted(rank: int, world: int) -> list[tuple[str, str]]:
    source, target = ({n: _plain(i, 1) for i, n in enumerate(STEPS)} for _ in range(2))
    with torch.no_grad():
        source["critic"].model[0].weight[1, 2] += rank
    try:
        dynadapt.migrate(source, target, timeout=30)
    except dynadapt.MigrationAborted as error:
        return [(finding.reason, finding.where) for finding in error.findings]
    return []
