"""Failures in every phase: the source trains on as if nothing had happened, or every survivor is told.

Judged by twins: after a failed migration the source's next loss equals, bit for bit, that of an engine
nobody touched.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from dynadapt.elastic.migration import PHASES
from tests import _ranks
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool


class Boom(Exception):
    """What a test makes a rank raise."""


def _target(seed: int = 1) -> dynadapt.TrainState:
    model, optimizer, _ = jobs.tensor_parallel(jobs.net(seed=seed))
    return dynadapt.TrainState(model=model, optimizer=optimizer)


def _error(
    source: Any, target: Any, on_phase: Any, timeout: float = 20, **more: Any
) -> dict[str, Any]:
    try:
        dynadapt.migrate(source, target, timeout=timeout, on_phase=on_phase, **more)
    except dynadapt.MigrationAborted as error:
        return {
            "seat": error.seat,
            "phase": error.phase,
            "text": str(error),
            "reason": error.reason,
        }
    return {"seat": None, "phase": "none", "text": "", "reason": ""}


def _raise_everywhere(rank: int, world: int, mode: str) -> list[dict[str, Any]]:
    engine, twin = jobs.zero3(jobs.net()), jobs.zero3(jobs.net())
    for number in range(2):
        jobs.step(engine, number)
        jobs.step(twin, number)
    target = _target()
    answers = []
    for phase in PHASES:
        for bad in (0, 3):

            def on_phase(name: str, phase: str = phase, bad: int = bad) -> None:
                if name == phase and rank == bad:
                    raise Boom(f"on purpose in {phase}")

            answer = _error(engine, target, on_phase, mode=mode)
            number += 1
            answer["trains on"] = jobs.step(engine, number) == jobs.step(twin, number)
            answer["fresh"] = not any(target.optimizer.state.values())
            answers.append({**answer, "bad": bad, "wanted": phase})
    report = dynadapt.migrate(engine, target, timeout=20, mode=mode)
    answers.append({"then": report.fingerprint_source == report.fingerprint_target})
    return answers


@pytest.mark.parametrize("mode", ["keep", "park"])
def test_a_raise_in_any_phase(ranks4: Pool, mode: str) -> None:
    """One rank raises: every rank gets the same error naming it, and the source trains on."""
    by_rank = ranks4.run(_raise_everywhere, mode, timeout=200)
    for answers in zip(*by_rank, strict=True):
        if "then" in answers[0]:
            assert all(answer["then"] for answer in answers)
            continue
        assert {(a["seat"], a["phase"]) for a in answers} == {
            (a["bad"], a["wanted"]) for a in answers
        }
        assert len({a["text"] for a in answers}) == 1
        assert "on purpose" in answers[0]["text"]
        assert all(a["trains on"] for a in answers), answers[0]["wanted"]
        assert all(a["fresh"] for a in answers), answers[0]["wanted"]


def _break_inside(rank: int, world: int, where: str) -> dict[str, Any]:
    """Raise on rank 2 deep inside: while packing, in the adapter's finish, in the target's certificate."""
    engine, twin = jobs.zero3(jobs.net()), jobs.zero3(jobs.net())
    jobs.step(engine, 0)
    jobs.step(twin, 0)
    state = _target()
    holder, name = _place(where)
    true = getattr(holder, name)
    calls = [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == (3 if where == "packing" else 1):
            raise Boom(where)
        return true(*args, **kwargs)

    if rank == 2:
        setattr(holder, name, broken)
    try:
        answer = _error(engine, state, None, timeout=200)
    finally:
        setattr(holder, name, true)
    answer["trains on"] = all(jobs.step(engine, n) == jobs.step(twin, n) for n in (1, 2))
    then = dynadapt.migrate(engine, state, timeout=20)
    answer["then"] = then.fingerprint_source == then.fingerprint_target
    return answer


def _place(where: str) -> tuple[Any, str]:
    from dynadapt.adapters.live import _torch_adapter
    from dynadapt.transport import executor

    return {
        "packing": (executor._Run, "_copy"),
        "waiting": (executor._Run, "settle"),
        "finishing": (_torch_adapter, "apply_groups"),
        "undoing": (_torch_adapter, "apply_scheduler"),
    }[where]


@pytest.mark.parametrize("where", ["packing", "waiting", "finishing", "undoing"])
def test_a_raise_deep_inside(ranks4: Pool, where: str) -> None:
    """Peers that wait for the broken rank are woken at once, long before their timeout."""
    answers = ranks4.run(_break_inside, where, timeout=40)  # far less than the migration's own
    assert {a["seat"] for a in answers} == {2}
    assert len({a["text"] for a in answers}) == 1
    assert f"Boom: {where}" in answers[0]["text"]
    assert all(a["trains on"] and a["then"] for a in answers)


def _sleep(rank: int, world: int, phase: str) -> dict[str, Any]:
    engine, twin = jobs.zero3(jobs.net()), jobs.zero3(jobs.net())
    jobs.step(engine, 0)
    jobs.step(twin, 0)

    def on_phase(name: str) -> None:
        if name == phase and rank == 1:
            time.sleep(8)

    answer = _error(engine, _target(), on_phase, timeout=3)
    answer["trains on"] = all(jobs.step(engine, n) == jobs.step(twin, n) for n in (1, 2))
    return answer


@pytest.mark.parametrize("phase", ["plan", "move", "commit"])
def test_a_rank_that_is_too_slow(ranks4: Pool, phase: str) -> None:
    """A phase that runs over its time is aborted for all, the late rank included."""
    answers = ranks4.run(_sleep, phase)
    assert {(a["seat"], a["phase"]) for a in answers} == {(1, phase)}
    assert len({a["text"] for a in answers}) == 1
    assert all(a["trains on"] for a in answers)


def _stuck(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 never enters the exchange, though it lives."""
    from dynadapt.transport import executor

    engine, twin = jobs.zero3(jobs.net()), jobs.zero3(jobs.net())
    jobs.step(engine, 0)
    jobs.step(twin, 0)
    true = executor._Run.start
    if rank == 1:
        executor._Run.start = lambda self, half, chunk: time.sleep(9)
    try:
        answer = _error(engine, _target(), None, timeout=3)
    finally:
        executor._Run.start = true
    answer["trains on"] = all(jobs.step(engine, n) == jobs.step(twin, n) for n in (1, 2))
    return answer


def test_a_stuck_exchange_names_peer_and_tensor(ranks4: Pool) -> None:
    """Seats that waited in vain say for whom and for what."""
    answers = ranks4.run(_stuck)
    assert {a["phase"] for a in answers} == {"move"}
    assert len({a["text"] for a in answers}) == 1
    assert "seat 1" in answers[0]["text"]
    assert all(a["trains on"] for a in answers)


def _die(rank: int, world: int, phase: str, kind: str) -> dict[str, Any]:
    if kind == "zero3":
        source: Any = jobs.zero3(jobs.net())
        jobs.step(source, 0)
    else:
        source = _target(seed=0)
    before = _own_bytes(source)

    def on_phase(name: str) -> None:
        if name == phase and rank == 2:
            os._exit(9)

    answer = _error(source, _target(), on_phase, timeout=5)
    answer["intact"] = before == _own_bytes(source)
    return answer


def _own_bytes(source: Any) -> dict[str, bytes]:
    """Every buffer of this rank's own shards, as bytes."""
    from dynadapt.registry import adapter_for

    state = dynadapt.TrainState.of(source)
    own = adapter_for(state).describe(state)
    found = {}
    for name, buffer in own.buffers.items():
        found[name] = buffer.tensor().contiguous().view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.parametrize(
    ("phase", "kind"), [("describe", "torch"), ("move", "zero3"), ("certify", "torch")]
)
def test_a_killed_rank(phase: str, kind: str) -> None:
    """Every survivor gets one error, within the timeout, and keeps its own shards."""
    with _ranks.spawn_fresh(4) as pool:
        pool.start(_die, phase, kind)
        outcomes = pool.outcomes(timeout=90, grace=60)
    assert outcomes[2].died
    answers = [o.value for o in outcomes if o.rank != 2]
    assert all(answer is not None for answer in answers), [o.detail for o in outcomes]
    assert {(a["seat"], a["phase"]) for a in answers} == {(2, phase)}
    assert len({a["text"] for a in answers}) == 1
    assert all(a["reason"] == "seat-lost" for a in answers)
    assert all(a["intact"] for a in answers)
