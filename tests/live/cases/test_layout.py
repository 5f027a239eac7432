"""LAYOUT B22, B24, B25, B27, B28, B30, B31: uneven, padded, strided cuts, judged by the tensor before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import dynadapt
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool


class One(nn.Module):
    """A single weight, numbered throughout, and a loss."""

    def __init__(self, *shape: int, start: float = 1.0) -> None:
        super().__init__()
        count = torch.Size(shape).numel()
        self.weight = nn.Parameter((torch.arange(count) + start).reshape(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return (self.weight * x).square().mean()


def _cut(shape: tuple[int, ...], mesh: Any, placements: list[Any]) -> One:
    from torch.distributed.tensor import distribute_tensor

    model = One(*shape)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, placements))
    return model


def _sharded(shape: tuple[int, ...], mesh: Any, tp_dim: int | None) -> One:
    """FSDP2 over the rows of what tensor parallelism has left of them."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard

    model = One(*shape)
    if tp_dim is not None:
        where = Replicate() if tp_dim < 0 else Shard(tp_dim)
        model = _cut(shape, mesh["tp"], [where])
    fully_shard(model, mesh=mesh["dp"])
    return model


def _there_and_back(model: Any, other: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Into a whole model, whose values are known, and into a zeroed copy of the same cut."""
    whole = One(*shape, start=-1000.0)
    out = dynadapt.migrate(model, whole, timeout=30)
    with torch.no_grad():
        other.weight._local_tensor.zero_()
    back = dynadapt.migrate(whole, other, timeout=30)
    same = torch.equal(other.weight._local_tensor, model.weight._local_tensor)
    return {
        "values": torch.equal(whole.weight, One(*shape).weight),
        "local": same,
        "size": model.weight._local_tensor.numel(),
        "waste": [r.bytes_moved - r.bytes_minimum for r in (out, back)],
    }


def _cuts(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    flat = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    answers = {}
    for name, shape in {"B25": (5, 10), "B31": (5,), "one row": (1, 3)}.items():
        pair = [_cut(shape, flat, [Shard(0)]) for _ in range(2)]
        answers[name] = _there_and_back(*pair, shape)
    pair = [_cut((3, 5), flat, [Shard(1)]) for _ in range(2)]
    answers["columns"] = _there_and_back(*pair, (3, 5))
    for name, shape, dim in (
        ("B27", (5,), 0),
        ("B28", (1, 17), -1),
        ("B28 rows", (1, 17), 0),
        ("B31 inner", (10, 3), 0),
        ("B31 other", (5, 6), 1),
    ):
        grids = [_sharded(shape, grid, dim) for _ in range(2)]
        answers[name] = _there_and_back(*grids, shape)
    return answers


SIZES = {"B25": [20, 20, 10, 0], "B31": [2, 2, 1, 0], "columns": [6, 6, 3, 0], "B28 rows": [17, 0]}
"""What a rank holds of some: the global shape is never a multiple of it."""


def test_uneven_cuts_over_one_axis_and_two(ranks4: Pool) -> None:
    """B25, B27, B28, B31: the judge is what the tensor held before it was cut."""
    by_rank = ranks4.run(_cuts, timeout=100)
    for answers in by_rank:
        for name, answer in answers.items():
            assert answer["values"], name
            assert answer["local"], name
            assert answer["waste"] == [0, 0], name
    for name, sizes in SIZES.items():
        assert [answers[name]["size"] for answers in by_rank][: len(sizes)] == sizes, name


def _padded(rank: int, world: int) -> list[dict[str, Any]]:
    answers = []
    source = None
    for kind in ("zero2-fp32", "zero1rr-bf16", "zero3-fp32", "zero2-fp32"):
        torch.manual_seed(len(answers))
        model = nn.Linear(10, 5)  # 55 elements: neither 4 nor 8 divides them
        engine = jobs.deepspeed_engine(
            kind, model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3)
        )
        if source is None:
            source = engine
            loss = engine(torch.ones(2, 10)).square().sum()
            engine.backward(loss)
            engine.step()
            before = jobs.zero_tensors(engine)
            continue
        report = dynadapt.migrate(source, engine, timeout=30)
        moved = jobs.zero_tensors(engine)
        answers.append(
            {
                "kind": kind,
                "differing": jobs.differing(before, moved),
                "waste": report.bytes_moved - report.bytes_minimum,
            }
        )
        source = engine
    return answers


def test_padding_stays_in_its_layout(ranks4: Pool) -> None:
    """B22, B30: 55 elements on four ranks, padded otherwise by every stage; DeepSpeed gathers."""
    for answers in ranks4.run(_padded, timeout=100):
        assert len(answers) == 3
        for answer in answers:
            assert answer["differing"] == [], answer
            assert answer["waste"] == 0, answer


def test_the_tenth_rank_comes_after_the_second() -> None:
    """B24: twelve seats, each with a flat piece, and one that wants the whole."""
    from dynadapt.testing.seats import run_seats
    from dynadapt.testing.states import MemoryAdapter, MemoryState
    from dynadapt.vps.box import Box
    from dynadapt.vps.keys import Key, KeySpec
    from dynadapt.vps.layout import Row, RowLayout

    MemoryAdapter.install()
    spec = KeySpec(Key("w", "param"), (24,), "float32")
    pieces = {
        seat: [Row(spec.key, Box((2 * seat,), (2 * seat + 2,)), "x", 0, (1,))] for seat in range(12)
    }
    whole = [Row(spec.key, Box((0,), (24,)), "x", 0, (1,))]
    values = {spec.key: torch.arange(24.0)}

    def call(session: Any) -> list[float] | None:
        source = MemoryState(RowLayout([spec], pieces), session.seat, values)
        layout = RowLayout([spec], {11: whole})
        target = MemoryState(layout, 11) if session.seat == 11 else None
        dynadapt.migrate(source, target, session=session, timeout=20)
        return None if target is None else target.view(whole[0]).tolist()

    assert run_seats(12, call)[11] == list(map(float, range(24)))
