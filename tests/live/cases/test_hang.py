"""HANG B144, B146, B147, B150 to B153 (B149: test_repl): nothing waits for ever; the root error is told."""

from __future__ import annotations

import re
import resource
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from dynadapt.testing.seats import run_seats
from tests.live.kinds import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests._ranks import Pool


def _exchange(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(2048 * 4096, dtype=torch.float32).reshape(2048, 4096)
    models = []
    for dim, value in ((0, full), (1, torch.zeros_like(full))):
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(value, mesh, [Shard(dim)]))
        models.append(model)
    rows, columns = models
    report = dynadapt.migrate(rows, columns, timeout=60)
    expected = full[:, 2048 * rank : 2048 * (rank + 1)]
    return {
        "bytes": report.bytes_moved,
        "same": torch.equal(columns.weight._local_tensor, expected),
    }


def test_two_ranks_that_both_have_much_to_send(ranks2: Pool) -> None:
    """B146, B147: 8 MB each way at once; blocking sends on both sides would wait for each other."""
    for answer in ranks2.run(_exchange, timeout=100):
        assert answer == {"bytes": 1 << 24, "same": True}


def _other_half(rank: int, world: int) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    halves = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    answers = {}
    torch.manual_seed(rank // 2)
    model = nn.Linear(6, 5)
    before = model.weight.detach().clone()
    fully_shard(model, mesh=halves[rank // 2])
    for number in range(2):  # there and back, between groups that have no rank in common
        mine = rank // 2 == number
        source, target = (model, None) if mine else (None, model)
        dynadapt.migrate(source, target, timeout=30)
    answers["weight"] = model.weight.full_tensor().tolist()
    told: list[Any] = [None] * world
    dist.all_gather_object(told, before.tolist())
    answers["first"] = told[0]
    answers["changed"] = told[0] != told[2]
    return answers


def test_two_groups_without_a_common_rank(ranks4: Pool) -> None:
    """B144: trainer and receiver, each with collectives of its own, and one order over both."""
    for answer in ranks4.run(_other_half, timeout=60):
        assert answer["weight"] == answer["first"]
        assert answer["changed"]


def _models(count: int) -> list[nn.Module]:
    return [nn.Linear(3, 3) for _ in range(count)]


def test_a_rank_that_never_comes_is_named_in_time() -> None:
    """B150, B152: bounded, with the seat; the next call, which all make, goes through."""
    torch.manual_seed(0)
    sources, targets = [nn.Linear(3, 3)] * 3, _models(3)
    reasons: dict[int, str] = {}

    def call(session: Any) -> str:
        at = session.seat
        if at != 2:
            with pytest.raises(dynadapt.MigrationAborted, match="seat 2") as caught:
                dynadapt.migrate(sources[at], targets[at], session=session, timeout=1)
            reasons[at] = caught.value.reason
        else:
            import time

            while len(reasons) < 2:
                time.sleep(0.05)
        report = dynadapt.migrate(sources[at], targets[at], session=session, timeout=20)
        return str(report.fingerprint_target)

    assert len(set(run_seats(3, call))) == 1
    assert set(reasons.values()) <= {"seat-lost", "timeout"}
    assert all(torch.equal(target.weight, sources[0].weight) for target in targets)


def _raising(rank: int, world: int) -> dict[str, Any]:
    source, target = build("plain"), build("fsdp2")

    def on_phase(phase: str) -> None:
        if rank == 1 and phase == "certify":
            raise ValueError("the cause of it all")

    try:
        dynadapt.migrate(source.state, target.state, timeout=10, on_phase=on_phase)
        answer = {"text": "moved", "seats": ""}
    except dynadapt.MigrationAborted as error:
        answer = {"text": str(error), "reason": error.reason}
    source.step(0)
    dynadapt.migrate(source.state, target.state, timeout=30)
    return answer


def test_the_root_error_is_shown_on_every_rank(ranks2: Pool) -> None:
    """B151: not a timeout of the others; and the group they talk over still works."""
    for answer in ranks2.run(_raising, timeout=60):
        assert "the cause of it all" in answer["text"]
        assert answer["reason"] == "failed"


class Corrupting:
    """A store in which one kind of message arrives otherwise than it was sent."""

    def __init__(self, store: Any, damage: Callable[[str, bytes], bytes]) -> None:
        self._store, self._damage = store, damage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: Any) -> None:
        """Store what the damage leaves of a value."""
        self._store.set(key, self._damage(key, value) if isinstance(value, bytes) else value)


def _more_pieces(key: str, value: bytes) -> bytes:
    """The number of pieces, which leads a message, is four billion."""
    return b"\xff\xff\xff\xff" + value[4:]


def _longer_header(key: str, value: bytes) -> bytes:
    """The length of the header is an exabyte."""
    return value[:12] + (1 << 60).to_bytes(8, "little") + value[20:]


def _larger_array(key: str, value: bytes) -> bytes:
    """The first array has an exabyte's sizes."""
    found = re.search(rb'"\$array":\["<i8",\[\d', value)
    return value if found is None else value[: found.end()] + b"9" * 18 + value[found.end() :]


@pytest.mark.parametrize("damage", [_more_pieces, _longer_header, _larger_array])
def test_sizes_that_a_message_cannot_have(damage: Any) -> None:
    """B153: refused by all, and nothing of that size is waited for or allocated."""
    torch.manual_seed(0)
    sources, targets = [nn.Linear(3, 3)] * 2, _models(2)
    before = [target.weight.clone() for target in targets]
    damaged: list[str] = []

    def spoil(key: str, value: bytes) -> bytes:
        spoilt = damage(key, value)
        if spoilt != value:
            damaged.append(key)
        return spoilt

    def call(session: Any) -> str:
        at = session.seat
        if at == 1:
            whole = session.store
            session = replace(session, store=lambda number: Corrupting(whole(number), spoil))
        with pytest.raises(dynadapt.MigrationAborted) as caught:
            dynadapt.migrate(sources[at], targets[at], session=session, timeout=20)
        return caught.value.reason

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reasons = set(run_seats(2, call))
    assert damaged, reasons
    assert len(reasons) == 1
    assert reasons <= {"wire-short", "wire-form", "wire-json", "wire-magic"}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100 << 10
    assert all(torch.equal(*pair) for pair in zip(before, (t.weight for t in targets), strict=True))
