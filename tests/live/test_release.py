"""`mode="release"`: the source's memory goes while its state moves, and comes back if anything fails.

Judged by twins that nobody touched: their next steps are the source's, bit for bit.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from dynadapt.elastic import release
from dynadapt.elastic.migration import PHASES
from tests import _ranks
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool

HIDDEN = 1000
"""Makes some 100 KB of state in several tensors: two rounds."""


class Boom(Exception):
    """What a test makes a rank raise."""


def _net(seed: int) -> jobs.Net:
    """A model whose frozen part keeps its values in bf16, as ZeRO-3 has it."""
    model = jobs.net(seed=seed, hidden=HIDDEN)
    with torch.no_grad():
        model.frozen.weight.copy_(model.frozen.weight.bfloat16().float())
    return model


def _fsdp2(seed: int) -> dynadapt.TrainState:
    from torch.distributed.fsdp import fully_shard

    model = _net(seed)
    fully_shard(model.up)
    fully_shard(model)
    return dynadapt.TrainState(model, jobs.adamw(model), counters={})


def _tensor_parallel(seed: int) -> dynadapt.TrainState:
    model, optimizer, _ = jobs.tensor_parallel(_net(seed))
    return dynadapt.TrainState(model, optimizer, counters={})


def _plain(seed: int) -> dynadapt.TrainState:
    model = _net(seed)
    return dynadapt.TrainState(model, jobs.adamw(model), counters={})


def _zero3(seed: int) -> dynadapt.TrainState:
    return dynadapt.TrainState(jobs.zero3(_net(seed)), counters={})


KINDS = {"fsdp2": _fsdp2, "tp": _tensor_parallel, "plain": _plain, "zero3": _zero3}


def _step(state: dynadapt.TrainState, number: int) -> float:
    if state.optimizer is None:
        return jobs.step(state.model, number)
    loss = state.model(jobs.tokens(number))
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return float(loss.detach())


def _pair(kind: str) -> tuple[dynadapt.TrainState, dynadapt.TrainState]:
    source, twin = KINDS[kind](0), KINDS[kind](0)
    for number in range(2):
        assert _step(source, number) == _step(twin, number)
    return source, twin


def _there(rank: int, world: int, source_kind: str, target_kind: str) -> dict[str, Any]:
    source, twin = _pair(source_kind)
    target = KINDS[target_kind](1)
    report = dynadapt.migrate(source, target, timeout=30, mode="release")
    try:
        dynadapt.migrate(source, target, timeout=30)
    except dynadapt.MigrationAborted as error:
        again = error.reason
    back = dynadapt.migrate(target, source, timeout=30, mode="release")
    return {
        "equal": [r.fingerprint_source == r.fingerprint_target for r in (report, back)],
        "minimal": report.bytes_moved == report.bytes_minimum,
        "again": again,
        "same": [_step(source, n) == _step(twin, n) for n in range(2, 5)],
    }


@pytest.mark.parametrize(
    ("source", "target"),
    [("fsdp2", "tp"), ("zero3", "plain"), ("tp", "zero3")],
)
def test_released_there_and_back(ranks4: Pool, source: str, target: str) -> None:
    """Every tensor arrives, the source holds nothing, and gets it all again on the way back."""
    for answer in ranks4.run(_there, source, target):
        assert answer["equal"] == [True, True]
        assert answer["minimal"]
        assert answer["again"] == "parked"
        assert all(answer["same"])


def _fail(source: Any, target: Any, bad: bool, where: str, **more: Any) -> dict[str, Any]:
    """Migrate, with one rank raising in a phase, or as a round begins (`round 1`)."""
    true_fill = release.Release.fill

    def fill(self: release.Release, number: int) -> None:
        if where == f"round {number}":
            raise Boom(where)
        true_fill(self, number)

    def on_phase(name: str) -> None:
        if name == where and bad:
            raise Boom(where)

    if bad:
        release.Release.fill = fill  # type: ignore[method-assign]
    try:
        dynadapt.migrate(source, target, timeout=20, mode="release", on_phase=on_phase, **more)
    except dynadapt.MigrationAborted as error:
        return {"seat": error.seat, "text": str(error), "reason": error.reason}
    finally:
        release.Release.fill = true_fill  # type: ignore[method-assign]
    return {"seat": None, "text": "it went through", "reason": ""}


FAILURES = (*PHASES, "round 0", "round 1")


def _raise_everywhere(rank: int, world: int, source_kind: str, target_kind: str) -> list[Any]:
    source, twin = _pair(source_kind)
    target = KINDS[target_kind](1)
    answers = []
    freed: list[int] = []
    true_free = release.Release.free

    def counting(self: release.Release, number: int) -> None:
        true_free(self, number)
        freed.append(len(self.freed))

    release.Release.free = counting  # type: ignore[method-assign]
    try:
        for number, where in enumerate(FAILURES, 2):
            freed.clear()
            answer = _fail(source, target, rank == number % world, where)
            answer["freed"] = max(freed, default=0)
            answer["trains on"] = _step(source, number) == _step(twin, number)
            answer["wanted"] = (number % world, where)
            answers.append(answer)
        then = dynadapt.migrate(source, target, timeout=20, mode="release")
    finally:
        release.Release.free = true_free  # type: ignore[method-assign]
    answers.append({"then": then.fingerprint_source == then.fingerprint_target})
    answers.append({"trains": _step(target, 90)})
    return answers


@pytest.mark.parametrize(("source", "target"), [("fsdp2", "tp"), ("zero3", "fsdp2")])
def test_a_raise_anywhere(ranks4: Pool, source: str, target: str) -> None:
    """Whatever had been freed by then comes back from the target, and the source trains on."""
    by_rank = ranks4.run(_raise_everywhere, source, target, timeout=200)
    for answers in zip(*by_rank, strict=True):
        if "wanted" not in answers[0]:
            assert all(answer.get("then", True) for answer in answers)
            continue
        seat, where = answers[0]["wanted"]
        assert {(a["seat"], a["text"]) for a in answers} == {(seat, answers[0]["text"])}
        assert where in answers[0]["text"]
        assert all(a["trains on"] for a in answers), where
        if where in {"finish", "certify", "commit"}:
            assert all(a["freed"] for a in answers), where  # there was something to give back


def _flip(rank: int, world: int, bad: tuple[int, ...]) -> dict[str, Any]:
    source, _ = _pair("fsdp2")
    target = _tensor_parallel(1)

    def on_phase(name: str) -> None:
        if name == "certify" and rank in bad:
            shard = target.model.up.weight.to_local().detach()
            shard.view(torch.int32).view(-1)[5] ^= 1 << 9

    answer: dict[str, Any] = {"again": ""}
    try:
        dynadapt.migrate(source, target, timeout=20, mode="release", on_phase=on_phase)
    except dynadapt.MigrationAborted as error:
        answer |= {"reason": error.reason, "text": str(error)}
    try:
        dynadapt.plan(source, target, timeout=20)
    except dynadapt.MigrationAborted as error:
        answer["again"] = error.reason
    return answer


def test_a_target_that_changed_after_the_move(ranks4: Pool) -> None:
    """The only copies are spoilt: said plainly, with the tensor, and nothing is taken from the source."""
    answers = ranks4.run(_flip, (1, 3))  # both that hold the element
    assert len({a["text"] for a in answers}) == 1
    for answer in answers:
        assert answer["reason"] == "source-lost"
        assert "up.weight/param" in answer["text"]
        assert answer["again"] == "parked"


def _die(rank: int, world: int, where: str) -> dict[str, Any]:
    source, _ = _pair("fsdp2")

    def on_phase(name: str) -> None:
        if name == where and rank == 2:
            os._exit(9)

    try:
        dynadapt.migrate(source, _tensor_parallel(1), timeout=5, mode="release", on_phase=on_phase)
    except dynadapt.MigrationAborted as error:
        whole = all(p.to_local().untyped_storage().nbytes() for p in source.model.parameters())
        return {"seat": error.seat, "text": str(error), "reason": error.reason, "whole": whole}
    raise AssertionError


@pytest.mark.parametrize(("where", "reason"), [("move", "seat-lost"), ("finish", "source-lost")])
def test_a_killed_rank(where: str, reason: str) -> None:
    """Before anything was freed nothing is lost; afterwards the survivors say so, and who is gone."""
    with _ranks.spawn_fresh(4) as pool:
        pool.start(_die, where)
        outcomes = pool.outcomes(timeout=90, grace=60)
    answers = [o.value for o in outcomes if o.rank != 2]
    assert all(answer is not None for answer in answers), [o.detail for o in outcomes]
    assert {(a["seat"], a["reason"]) for a in answers} == {(2, reason)}
    assert len({a["text"] for a in answers}) == 1
    if reason == "source-lost":
        assert "go back to a checkpoint" in answers[0]["text"]
    else:
        assert all(a["whole"] for a in answers)


def _refused(rank: int, world: int) -> dict[str, str]:
    answers = {}
    half = jobs.net(seed=1, hidden=HIDDEN).to(torch.bfloat16)
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "narrow": (_plain(0), half, {"narrow": "allow", "allow": {"extra"}}),
        "limit": (_zero3(0), _plain(1), {"max_extra_bytes": 1000}),
    }
    shared = _plain(0)
    other = jobs.net(seed=1, hidden=HIDDEN)
    other.up.weight = shared.model.up.weight
    cases["shared"] = (shared, dynadapt.TrainState(other, jobs.adamw(other)), {})
    for name, (source, target, more) in cases.items():
        before = [p.detach().clone() for p in source.model.parameters()]
        try:
            dynadapt.migrate(source, target, timeout=20, mode="release", **more)
        except dynadapt.MigrationAborted as error:
            answers[name] = str(error.reason)
        same = zip(before, source.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in same)
    return answers


def test_what_cannot_be_undone_is_refused(ranks4: Pool) -> None:
    """A lossy cast, shared memory, too little room: before anything is freed."""
    for answer in ranks4.run(_refused):
        assert answer == {"narrow": "cannot-undo", "limit": "over-limit", "shared": "bad-argument"}


def _left_behind(rank: int, world: int) -> list[str]:
    source, twin = _pair("zero3")
    target = _plain(1)
    average = {n: p.detach().clone() for n, p in _plain(3).model.named_parameters()}
    source.extra = {"ema": average}
    kept = {n: t.clone() for n, t in average.items()}
    answer = _fail(source, target, rank == 1, "commit", allow={"extra"})
    assert "commit" in answer["text"]
    assert all(torch.equal(average[n], kept[n]) for n in kept)
    assert _step(source, 2) == _step(twin, 2)
    report = dynadapt.migrate(source, target, timeout=20, mode="release", allow={"extra"})
    return [f"{o.path} {o.kind}: {o.note}" for o in report.outcomes if o.kind == "kept"]


def test_what_is_not_covered_stays_and_is_told(ranks4: Pool) -> None:
    """Derived copies and what is left behind are in no target: they stay until the commit."""
    for told in ranks4.run(_left_behind):
        (line,) = [line for line in told if "rows that do not move" in line]
        assert "bytes until the commit" in line
