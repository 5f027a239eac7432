"""The cases with ranks: a whole live migration, its transfer, and its real peak memory.

Source: FSDP2 x 4. Target: TP 2 x FSDP2 2, or TP 2 x replicated DP 2. The state is that of AdamW in fp32.
All memory has been written before it is timed, the target's too.
"""

from __future__ import annotations

import ctypes
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import dynadapt
from benchmarks._results import Result, middle

if TYPE_CHECKING:
    from collections.abc import Callable

Job = tuple[nn.Module, torch.optim.Optimizer]

__all__ = ["cases"]

WORLD = 4
FOLDERS = {
    "on a RAM disk": Path("/dev/shm/dynadapt-bench"),
    "on disk": Path(__file__).resolve().parent.parent / "build" / "dynadapt-bench",
}


class Block(nn.Module):
    """The linear layers and norms of a transformer block; it is never run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)


class Stack(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width, bias=False)


def fsdp2(width: int, depth: int) -> Job:
    """The stack under `fully_shard`, after one step on random gradients."""
    from torch.distributed.fsdp import fully_shard

    model = Stack(width, depth)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensor_parallel(width: int, depth: int, sharded: bool) -> Job:
    """The stack as TP 2 x DP 2, replicated or `sharded` by FSDP2; the optimizer has no state yet."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    rules = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        **{f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")},
        **{f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")},
        "head": ColwiseParallel(),
    }
    model = Stack(width, depth)
    parallelize_module(model, mesh["tp"], rules)
    if sharded:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    else:
        replicate(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def cases(rounds: int, quick: bool) -> list[Result]:
    """Run the ranks and collect."""
    small = _case(256 if quick else 1024, 3, rounds, sharded=False)
    return [*_case(256 if quick else 1024, 3 if quick else 16, rounds, sharded=True), small[-1]]


def _case(width: int, depth: int, rounds: int, sharded: bool) -> list[Result]:
    from tests._ranks import close_pools, spawn_fresh

    with spawn_fresh(WORLD) as pool:
        answers = pool.run(measure, width, depth, rounds, sharded, timeout=900)
    close_pools()
    first = answers[0]
    params = f"{first['params'] / 1e6:.0f}M parameters"
    slowest = {
        name: [max(times) for times in zip(*(a["times"][name] for a in answers), strict=True)]
        for name in first["times"]
    }
    phases = ", ".join(f"{name} {value:.3f}" for name, value in first["phases"].items())
    growth = max(answer["growth"] for answer in answers)
    change = f"FSDP2 x 4 -> TP 2 x {'FSDP2' if sharded else 'DP'} 2, {params}"
    raw, ours, whole = slowest["raw"], slowest["transfer"], slowest["migrate"]
    return [
        middle(
            f"transfer, {change}, s (beside a plain batch_isend_irecv)",
            ours,
            raw,
            bar=1.5,
            note=f"{first['bytes'] / 1e6:.0f} MB between {first['pairs']} pairs in one message each, on a "
            f"group that has carried them before; {first['resident'] / 1e6:.0f} MB that stay are copied by "
            "both. Ours is timed in the executor, from the first message to the last byte placed, the "
            "slowest rank.",
        ),
        *(
            middle(
                f"{what}, {change}, s (beside DCP save + load {where})",
                times,
                slowest[where],
                bar=bar,
                note=note,
            )
            for what, times, bar, note in (
                ("whole migrate", whole, 1 / 1.5, f"median run of rank 0 by phase: {phases}"),
                ("transfer alone", ours, 1 / 4, ""),
            )
            for where in FOLDERS
        ),
        Result(
            f"real peak of a rank's first migration, {change}, MB (beside peak_extra_bytes)",
            growth / 1e6,
            first["promised"] / 1e6,
            bar=1.05,
            note="growth of VmHWM over what the rank held before, the largest of all ranks.",
        ),
    ]


def measure(
    rank: int, world: int, width: int, depth: int, rounds: int, sharded: bool
) -> dict[str, Any]:
    """One rank's part of all rounds."""
    import torch.distributed.checkpoint  # noqa: F401  (not to be counted as memory of a migration)

    _migrate(fsdp2(64, 1), tensor_parallel(64, 1, sharded))  # imports, the session
    source, target = fsdp2(width, depth), tensor_parallel(width, depth, sharded)
    dist.barrier()
    before = _high_water(reset=True)
    report = _migrate(source, target)
    growth = _high_water() - before
    pairs, resident = _pairs(_state(source), _state(target), rank)
    raw = _Raw(pairs, resident, rank)
    times: dict[str, list[float]] = {}
    reports = []

    def timed(name: str, what: Callable[[], Any]) -> Any:
        dist.barrier()
        began = time.perf_counter()
        found = what()
        times.setdefault(name, []).append(time.perf_counter() - began)
        return found

    for number in range(rounds + 1):
        if number == 1:
            times.clear()
            reports.clear()
        reports.append(timed("migrate", lambda: _migrate(source, target)))
        times.setdefault("transfer", []).append(reports[-1].transfer_seconds)
        timed("raw", raw.exchange)
        for name, folder in FOLDERS.items():
            timed(name, lambda folder=folder: _checkpoint(source, target, folder))
            if rank == 0:
                shutil.rmtree(folder)
    reports.sort(key=lambda each: each.pause_seconds)
    return {
        "times": times,
        "phases": reports[len(reports) // 2].seconds,
        "growth": growth,
        "promised": report.peak_extra_bytes,
        "params": sum(p.numel() for p in source[0].parameters()),
        "bytes": sum(pairs.values()),
        "resident": report.bytes_resident,
        "pairs": len(pairs),
    }


def _state(job: Job) -> dynadapt.TrainState:
    return dynadapt.TrainState(model=job[0], optimizer=job[1])


def _migrate(source: Job, target: Job) -> Any:
    return dynadapt.migrate(_state(source), _state(target))


def _pairs(
    source: dynadapt.TrainState, target: dynadapt.TrainState, rank: int
) -> tuple[dict[tuple[int, int], int], int]:
    """(source seat, target seat) -> bytes that cross; and the bytes that stay in this seat."""
    found: dict[tuple[int, int], int] = {}
    seats = dynadapt.plan(source, target).seats
    for plan in seats.values():
        for move in plan.receives:
            pair = (move.source, move.target)
            found[pair] = found.get(pair, 0) + move.nbytes
    return found, sum(move.nbytes for move in seats[rank].local)


class _Raw:
    """The bytes of a plan in one message a pair, and a copy of what stays: `torch.distributed` alone."""

    def __init__(self, pairs: dict[tuple[int, int], int], resident: int, rank: int) -> None:
        own = {pair: torch.ones(n, dtype=torch.uint8) for pair, n in pairs.items() if rank in pair}
        self.into = [(source, own[source, to]) for source, to in own if to == rank]
        self.out = [(to, own[source, to]) for source, to in own if source == rank]
        self.stays = torch.ones(2, resident, dtype=torch.uint8)

    def exchange(self) -> None:
        works = dist.batch_isend_irecv(
            [
                *(dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in self.into),
                *(dist.P2POp(dist.isend, tensor, peer) for peer, tensor in self.out),
            ]
        )
        self.stays[1].copy_(self.stays[0])
        for work in works:
            work.wait()


def _checkpoint(source: Job, target: Job, folder: Path) -> None:
    """What one would do without dynadapt: save the one job, load into the other."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = get_state_dict(*source)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    model, optimizer = get_state_dict(*target)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(*target, model_state_dict=model, optim_state_dict=optimizer)


def _high_water(reset: bool = False) -> int:
    """The most memory this process has held since the last reset, in bytes."""
    if reset:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is taken now
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM here")
