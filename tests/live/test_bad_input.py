"""Input that cannot be migrated: one clear error per cause, on every rank, and training goes on.

One worker call tries all causes against one ZeRO-3 engine; after each, the engine's next loss must be
that of a twin that nobody touched, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from tests.live import jobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests._ranks import Pool


class Homemade(torch.optim.Optimizer):
    """An optimizer class nobody knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        """Plain descent with a state of its own."""
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["velocity"] = torch.zeros_like(param)


def _state(model: nn.Module, optimizer: Any = None, **kwargs: Any) -> dynadapt.TrainState:
    return dynadapt.TrainState(model=model, optimizer=optimizer or jobs.adamw(model), **kwargs)


def _plain(**kwargs: Any) -> dynadapt.TrainState:
    return _state(jobs.net(seed=1, **kwargs))


def _meta(rank: int) -> dynadapt.TrainState:
    with torch.device("meta"):
        model = jobs.Net(extra=True)
    return _state(model)


def _untied(rank: int) -> dynadapt.TrainState:
    model = jobs.net(seed=1)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return _state(model)


def _renamed(rank: int) -> dynadapt.TrainState:
    model = jobs.net(seed=1)
    model.upp = model.up
    del model.up
    return _state(model)


def _bare(rank: int) -> dynadapt.TrainState:
    return dynadapt.TrainState(jobs.net(seed=1))


def _sgd(rank: int) -> dynadapt.TrainState:
    model = jobs.net(seed=1)
    return _state(model, torch.optim.SGD(jobs.groups(model), lr=0.1, momentum=0.9))


def _homemade(rank: int) -> dynadapt.TrainState:
    model = jobs.net(seed=1)
    return _state(model, Homemade(jobs.groups(model)))


def _regrouped(rank: int) -> dynadapt.TrainState:
    model = jobs.net(seed=1)
    trained = [p for p in model.parameters() if p.requires_grad]
    return _state(model, torch.optim.AdamW(trained, lr=0.1))


def _rank_differs(rank: int) -> dynadapt.TrainState:
    return _plain(hidden=20 if rank != 1 else 22)


def _half_precision(rank: int) -> dynadapt.TrainState:
    model = jobs.net(seed=1).to(torch.bfloat16)
    return _state(model)


#: what is wrong -> (target of a rank, arguments, reason, words of the message)
CASES: dict[str, tuple[Callable[[int], Any], dict[str, Any], str, tuple[str, ...]]] = {
    "another width": (
        lambda r: _plain(hidden=24),
        {},
        "shape",
        ("up.weight", "[20, 8]", "[24, 8]"),
    ),
    "more parameters": (
        lambda r: _plain(extra=True),
        {},
        "missing-key",
        ("extra.weight", "extra.bias"),
    ),
    "another name": (
        _renamed,
        {},
        "missing-key",
        ("upp.weight", "nearest", "up.weight", "extra-key"),
    ),
    "another dtype": (lambda r: _plain(integers=True), {}, "dtype", ("scale/buffer", "int64")),
    "ranks disagree": (_rank_differs, {}, "ranks-disagree", ("up.weight", "build the same model")),
    "no value for it": (_meta, {}, "not-materialised", ("extra.weight", "extra.bias")),
    "unknown optimizer": (_homemade, {}, "unknown-optimizer", ("Homemade",)),
    "another optimizer": (_sgd, {}, "optimizer-class", ("Adam", "SGD")),
    "other groups": (_regrouped, {}, "hyper-conflict", ("weight_decay",)),
    "inexact": (_half_precision, {}, "narrowing", ("bfloat16",)),
    "narrowing refused": (_half_precision, {"narrow": "refuse"}, "narrowing", ("would become",)),
    "nothing given": (lambda r: None, {}, "no-state", ("no rank passed a target",)),
    "not a state": (lambda r: object(), {}, "no-adapter", ("builtins.object", "torch_module")),
    "no such mode": (
        lambda r: _plain(),
        {"mode": "fast"},
        "bad-argument",
        ("'keep', 'park' or 'release'",),
    ),
    "no such allowance": (lambda r: _plain(), {"allow": {"all"}}, "bad-argument", ("allow",)),
    "tiny budget": (lambda r: _plain(), {"budget": 10}, "bad-argument", ("budget",)),
}


def _try_all(rank: int, world: int) -> dict[str, Any]:
    engine, twin = jobs.zero3(jobs.net()), jobs.zero3(jobs.net())
    number = 0
    for number in range(2):
        assert jobs.step(engine, number) == jobs.step(twin, number)
    answers: dict[str, Any] = {}
    for name, (build, arguments, _, _) in CASES.items():
        target = build(rank)
        answers[name] = _attempt(engine, target, **arguments)
        number += 1
        answers[name]["trains on"] = jobs.step(engine, number) == jobs.step(twin, number)
        if isinstance(target, dynadapt.TrainState):
            made = [p for p, entry in target.optimizer.state.items() if entry]
            answers[name]["left behind"] = len(made)
    # after all that, the same engine migrates
    report = dynadapt.migrate(engine, _plain(), timeout=20)
    answers["then"] = report.fingerprint_source == report.fingerprint_target
    return answers


def _attempt(source: Any, target: Any, patience: float = 20, **arguments: Any) -> dict[str, Any]:
    try:
        dynadapt.migrate(source, target, timeout=patience, **arguments)
    except dynadapt.DynadaptError as error:
        kind = type(error).__name__
        return {
            "reason": error.reason,
            "text": str(error),
            "kind": kind,
            "phase": getattr(error, "phase", ""),
        }
    return {"reason": None, "text": "it went through", "kind": "", "phase": ""}


@pytest.fixture(scope="module")
def tried() -> list[dict[str, Any]]:
    """Every rank's answers to every case."""
    from tests import _ranks

    return _ranks.pool(4).run(_try_all, timeout=200)


@pytest.mark.parametrize("name", list(CASES))
def test_one_clear_error(tried: list[dict[str, Any]], name: str) -> None:
    """The same error on every rank, naming the place; the source trains on; the target is as before."""
    _, _, reason, words = CASES[name]
    answers = [answer[name] for answer in tried]
    assert {answer["reason"] for answer in answers} == {reason}
    assert len({answer["text"] for answer in answers}) == 1
    for word in words:
        assert word in answers[0]["text"]
    assert all(answer["trains on"] for answer in answers)
    assert all(answer.get("left behind", 0) == 0 for answer in answers)


def test_then_it_migrates(tried: list[dict[str, Any]]) -> None:
    """The engine that was refused sixteen times is fit to migrate."""
    assert all(answer["then"] for answer in tried)


def _mid_step(rank: int, world: int) -> list[dict[str, Any]]:
    config = {"gradient_accumulation_steps": 2}
    engine, twin = jobs.zero3(jobs.net(), **config), jobs.zero3(jobs.net(), **config)
    target = _plain()
    answers = []
    for stop in ("after backward", "between micro-steps"):
        for each in (engine, twin):
            loss = each(jobs.tokens(0, rank))
            each.backward(loss)
            if stop == "between micro-steps":
                each.step()
        answers.append(_attempt(engine, target))
        for each in (engine, twin):
            if stop == "after backward":
                each.step()
            loss = each(jobs.tokens(1, rank))
            each.backward(loss)
            each.step()
        losses = []
        for each in (engine, twin):
            with torch.no_grad():
                losses.append(float(each(jobs.tokens(5, rank))))
        answers[-1]["trains on"] = losses[0] == losses[1]
    ok = dynadapt.migrate(engine, target, timeout=20)
    answers.append({"reason": "then", "ok": ok.fingerprint_source == ok.fingerprint_target})
    model = target.model
    model(jobs.tokens(7, rank)).backward()
    answers.append(_attempt(target, engine))
    return answers


def test_half_accumulated_gradients(ranks4: Pool) -> None:
    """In the middle of a step nothing is touched, and the message names the micro-step or tensor."""
    for first, second, then, plain in ranks4.run(_mid_step):
        for answer in (first, second):
            assert answer["reason"] == "mid-step"
            assert answer["phase"] == "quiesce"
            assert answer["trains on"]
        assert "micro-step 1 of 2" in second["text"]
        assert then["ok"]
        assert plain["reason"] == "mid-step"
        assert "zero_grad" in plain["text"]


def _out_of_step(rank: int, world: int) -> list[dict[str, Any]]:
    """Calls that not every rank makes, or not with the same arguments."""
    source, target = _plain(), _plain()
    answers = []
    if rank == 2:
        answers.append(_attempt(source, target, patience=2))
    else:
        answers.append({"reason": "did not call", "text": ""})
    _meet(world)
    answers.append(_attempt(source, target, **({"mode": "fast"} if rank == 1 else {})))
    answers.append(_attempt(source, target, **({"budget": 1 << 20} if rank == 1 else {})))
    answers.append(_attempt(source, target, patience=-1))
    answers.append(_attempt(source, target, allow={"extra", "missing"}))
    try:
        if rank == 1:
            dynadapt.fingerprint(source, timeout=20)
        else:
            dynadapt.migrate(source, target, timeout=20)
    except dynadapt.MigrationAborted as error:
        answers.append({"reason": error.reason, "text": str(error)})
    report = dynadapt.migrate(source, target, timeout=20)
    answers.append({"reason": "then", "ok": report.fingerprint_source == report.fingerprint_target})
    return answers


def _meet(world: int) -> None:
    import torch.distributed as dist

    assert dist.get_world_size() == world
    dist.barrier()


def test_ranks_out_of_step(ranks4: Pool) -> None:
    """A call that some rank does not make fails in time, and the next one that all make goes through."""
    by_rank = ranks4.run(_out_of_step)
    assert by_rank[2][0]["reason"] == "seat-lost"
    assert "seat 0" in by_rank[2][0]["text"]
    expected = ["bad-argument", "ranks-disagree", "bad-argument", None, "calls-differ"]
    for call, reason in enumerate(expected, 1):
        assert {answers[call]["reason"] for answers in by_rank} == {reason}
    assert "budget" in by_rank[0][2]["text"]
    assert all(answers[6]["ok"] for answers in by_rank)


def _too_big(rank: int, world: int) -> list[dict[str, Any]]:
    from dynadapt.elastic import memory

    engine, twin = jobs.zero3(jobs.net()), jobs.zero3(jobs.net())
    answers = []
    true_figure = memory.available_bytes
    for figure in (1000, 0):
        memory.available_bytes = lambda device="cpu", n=figure: n if rank == 2 else 1 << 40
        try:
            answers.append(_attempt(engine, _plain()))
        finally:
            memory.available_bytes = true_figure
        answers[-1]["trains on"] = jobs.step(engine, 0) == jobs.step(twin, 0)
    answers.append(_attempt(engine, _Greedy.state()))
    answers[-1]["trains on"] = jobs.step(engine, 1) == jobs.step(twin, 1)
    return answers


class _Greedy:
    """A target whose optimizer state cannot be allocated: the address space is all but used up."""

    @staticmethod
    def state() -> dynadapt.TrainState:
        """A plain state; this rank's limit is set while dynadapt prepares it."""
        import torch.distributed as dist

        from dynadapt.adapters.live import torch_module

        state = _plain()
        if dist.get_rank() == 1:
            true_prepare = torch_module.TorchModuleAdapter.prepare

            def prepare(self: Any, x: Any, keys: Any) -> Any:
                torch_module.TorchModuleAdapter.prepare = true_prepare
                torch.empty(1 << 50, dtype=torch.uint8)  # really asks, really is refused
                return true_prepare(self, x, keys)

            torch_module.TorchModuleAdapter.prepare = prepare
        return state


def test_more_memory_than_there_is(ranks4: Pool) -> None:
    """Refused before anything is made where it can be foreseen; undone where an allocation fails."""
    for foreseen, nothing_free, refused in ranks4.run(_too_big):
        for answer in (foreseen, nothing_free):
            assert answer["reason"] == "out-of-memory"
            assert "are free" in answer["text"]
        assert refused["reason"] == "out-of-memory"
        assert refused["phase"] == "prepare"
        assert all(a["trains on"] for a in (foreseen, nothing_free, refused))


def _drifted(rank: int, world: int) -> list[dict[str, Any]]:
    source, target = _plain(), _plain()
    with torch.no_grad():
        if rank == 3:
            source.model.up.weight[4, 1] = 7.5
            source.model.up.weight[6, 0] = 8.5
            source.model.down.weight[0, 3] = float("nan")
        if rank in (1, 3):
            source.optimizer.state[source.model.up.bias] = _moments(source.model.up.bias, rank)
        if rank in (0, 2):
            source.optimizer.state[source.model.up.bias] = _moments(source.model.up.bias, 0)
        source.model.scale[1] = 9 if rank == 3 else 2
    answers = [_attempt(source, target)]
    for on_drift in ("warn", "take-first"):
        planned = dynadapt.plan(source, target, timeout=20, on_drift=on_drift)
        report = dynadapt.migrate(source, target, timeout=20, on_drift=on_drift)
        answers.append(
            {
                "warnings": [str(w) for w in report.warnings],
                "outcomes": [f"{o.path}: {o.note}" for o in report.outcomes],
                "value": target.model.up.weight[4, 1].item(),
                "moment": target.optimizer.state[target.model.up.bias]["exp_avg"][2].item(),
                "moved": (planned.bytes_moved, report.bytes_moved),
            }
        )
    return answers


def _moments(like: torch.Tensor, drift: int) -> dict[str, Any]:
    first = torch.zeros_like(like)
    first[2] = drift
    return {"step": torch.tensor(1.0), "exp_avg": first, "exp_avg_sq": torch.ones_like(like)}


PLACES = {
    "up.weight/param [4,1]": "on endpoints 0, 1, 2; 7.5 on endpoint 3",
    "down.weight/param [0,3]": "nan on endpoint 3",
    "up.bias/exp_avg [2]": "0.0 on endpoints 0, 2; 1.0 on endpoint 1; 3.0 on endpoint 3",
    "scale/buffer [1]": "2.0 on endpoints 0, 1, 2; 9.0 on endpoint 3",
}
"""Where the replicas of `_drifted` first differ, and what is said of it."""


def test_replicas_that_drifted(ranks4: Pool) -> None:
    """REPL: named with place, seats and values; the first holder's is taken with or without a warning."""
    answers = ranks4.run(_drifted)
    for refused, warned, taken in answers:
        assert refused["reason"] == "replicas-differ"
        for place, versions in PLACES.items():
            fatal = place in refused["text"]
            assert fatal != place.startswith("scale")  # buffers drift in healthy jobs
            texts = [refused["text"]] if fatal else []
            texts += [next(w for w in warned["warnings"] if w.startswith(place))]
            texts += [next(o for o in taken["outcomes"] if place in o)]
            assert all(versions in text for text in texts)
        assert not any("replicas-differ" in warning for warning in taken["warnings"])
        assert warned["moved"] == taken["moved"]
        assert warned["moved"][0] == warned["moved"][1]
    for number in (1, 2):
        assert len({answer[number]["value"] for answer in answers}) == 1
        assert {answer[number]["moment"] for answer in answers} == {0.0}


def _stale(rank: int, world: int) -> dict[str, Any]:
    engine = jobs.zero3(jobs.net())
    jobs.step(engine, 0)
    target = _plain()
    if rank == 2:
        engine.module.norm.weight.ds_tensor.add_(1)
    told = dynadapt.migrate(engine, target, timeout=20)
    wanted = dynadapt.migrate(engine, target, timeout=20, on_drift="take-first")
    true = engine.optimizer._reassign_or_swap_out_partitioned_parameters
    if rank == 2:
        engine.optimizer._reassign_or_swap_out_partitioned_parameters = lambda *_: None
        engine.module.norm.weight.ds_tensor.add_(1)
    refused = _attempt(target, engine)
    engine.optimizer._reassign_or_swap_out_partitioned_parameters = true
    again = dynadapt.migrate(target, engine, timeout=20)
    return {
        "warnings": [str(w) for w in told.warnings],
        "outcomes": [f"{o.path}: {o.note}" for o in wanted.outcomes],
        "silent": [str(w) for w in wanted.warnings],
        "refused": refused,
        "again": [str(w) for w in again.warnings],
    }


def test_stale_copies(ranks4: Pool) -> None:
    """Low-precision weights that do not follow their masters: told of a source, an error in a target."""
    for answer in ranks4.run(_stale):
        place = "norm.weight/compute [4]"  # the first element of rank 2's piece
        (told,) = [w for w in answer["warnings"] if w.startswith(place)]
        assert "on seat 2, and its master" in told
        assert any(place in outcome for outcome in answer["outcomes"])
        assert answer["silent"] == []
        assert answer["refused"]["reason"] == "stale-copy"
        assert answer["refused"]["phase"] == "certify"
        assert place in answer["refused"]["text"]
        assert answer["again"] == []


def _stale_replica(rank: int, world: int) -> list[str]:
    engine = jobs.deepspeed_engine("zero1-bf16", jobs.net())
    jobs.step(engine, 0)
    if rank == 1:
        engine.module.down.weight.data[3, 5] = 6
    return [str(w) for w in dynadapt.migrate(engine, _plain(), timeout=20).warnings]


def test_a_replica_of_a_copy_that_is_stale(ranks4: Pool) -> None:
    """One rank's weights do not follow the masters: found, though all others' do."""
    for warnings in ranks4.run(_stale_replica):
        (told,) = [w for w in warnings if w.startswith("down.weight/compute [3,5]")]
        assert "6.0 on endpoint 1" in told
        assert "stale-copy" in told
