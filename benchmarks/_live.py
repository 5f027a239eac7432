"""The cases with ranks: a whole live migration, its move phase, and its real peak memory.

Source: FSDP2 x 4. Target: TP 2 x replicated DP 2. The state is that of AdamW in fp32. All memory has
been written before it is timed, the target's too.
"""

from __future__ import annotations

import ctypes
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import dynadapt
from benchmarks._results import Result, middle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["cases"]

WORLD = 4
FOLDER = Path("/dev/shm/dynadapt-bench")


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


def fsdp2(width: int, depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
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


def tensor_parallel(width: int, depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The stack as TP 2 x replicated DP; the optimizer has no state yet."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
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
    replicate(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def cases(rounds: int, quick: bool) -> list[Result]:
    """Run the ranks and collect."""
    from tests._ranks import spawn_fresh

    width, depth = (256, 3) if quick else (1024, 3)
    with spawn_fresh(WORLD) as pool:
        answers = pool.run(measure, width, depth, rounds, timeout=280)
    first = answers[0]
    params = f"{first['params'] / 1e6:.0f}M parameters"
    slowest = {
        name: [max(times) for times in zip(*(a["times"][name] for a in answers), strict=True)]
        for name in first["times"]
    }
    phases = ", ".join(f"{name} {value:.3f}" for name, value in first["phases"].items())
    growth = max(answer["growth"] for answer in answers)
    return [
        middle(
            f"live migrate, FSDP2 x 4 -> TP 2 x DP 2, {params}, s (beside DCP save + load)",
            slowest["migrate"],
            slowest["checkpoint"],
            note=f"seconds by phase, median run of rank 0: {phases}. The peer writes to and reads "
            "from shared memory, with one thread a rank, and compares nothing.",
        ),
        middle(
            "its move phase, s (beside a raw gloo exchange)",
            slowest["move"],
            slowest["raw"],
            bar=1.5,
            note=f"{first['bytes'] / 1e6:.0f} MB between {first['pairs']} pairs. The peer's group "
            "has carried the same bytes before; a migration opens its own.",
        ),
        middle(
            "its move phase, s (beside the same over a new group)",
            slowest["move"],
            slowest["raw on a new group"],
        ),
        Result(
            "real peak of a rank's first migration, MB (beside peak_extra_bytes)",
            growth / 1e6,
            first["promised"] / 1e6,
            bar=1.05,
            note="growth of VmHWM over what the rank held before, the largest of all ranks.",
        ),
    ]


def measure(rank: int, world: int, width: int, depth: int, rounds: int) -> dict[str, Any]:
    """One rank's part of all rounds."""
    import torch.distributed.checkpoint  # noqa: F401  (not to be counted as memory of a migration)

    _migrate(fsdp2(64, 1), tensor_parallel(64, 1))  # imports, the session
    source, target = fsdp2(width, depth), tensor_parallel(width, depth)
    dist.barrier()
    before = _high_water(reset=True)
    report = _migrate(source, target)
    growth = _high_water() - before
    pairs = _pairs(_state(source), _state(target))
    raw = _Raw(pairs, rank, "warm")
    times: dict[str, list[float]] = {}
    reports = [report]

    def timed(name: str, what: Callable[[], Any]) -> Any:
        dist.barrier()
        began = time.perf_counter()
        found = what()
        times.setdefault(name, []).append(time.perf_counter() - began)
        return found

    for number in range(rounds + 1):
        if number == 1:
            times.clear()
        reports.append(timed("migrate", lambda: _migrate(source, target)))
        times.setdefault("move", []).append(reports[-1].seconds["move"])
        timed("raw", raw.exchange)
        new = _Raw(pairs, rank, f"new{number}", memory=raw)
        timed("raw on a new group", new.exchange)
        timed("checkpoint", lambda: _checkpoint(source, target))
        if rank == 0:
            shutil.rmtree(FOLDER)
    reports = sorted(reports[2:], key=lambda r: r.pause_seconds)
    return {
        "times": times,
        "phases": reports[len(reports) // 2].seconds,
        "growth": growth,
        "promised": report.peak_extra_bytes,
        "params": sum(p.numel() for p in source[0].parameters()),
        "bytes": sum(pairs.values()),
        "pairs": len(pairs),
    }


Job = tuple[nn.Module, torch.optim.Optimizer]


def _state(job: Job) -> dynadapt.TrainState:
    return dynadapt.TrainState(model=job[0], optimizer=job[1])


def _migrate(source: Job, target: Job) -> Any:
    return dynadapt.migrate(_state(source), _state(target))


def _pairs(source: dynadapt.TrainState, target: dynadapt.TrainState) -> dict[tuple[int, int], int]:
    """(source seat, target seat) -> bytes that cross."""
    found: dict[tuple[int, int], int] = {}
    for plan in dynadapt.plan(source, target).seats.values():
        for move in plan.receives:
            pair = (move.source, move.target)
            found[pair] = found.get(pair, 0) + move.nbytes
    return found


class _Raw:
    """The bytes of a plan in one message a pair, over a gloo group and nothing else."""

    def __init__(
        self, pairs: dict[tuple[int, int], int], rank: int, name: str, memory: _Raw | None = None
    ) -> None:
        self.pairs, self.rank = pairs, rank
        store = dist.distributed_c10d._get_default_store()
        prefix = dist.PrefixStore(f"raw-{name}", store)
        self.group = dist.ProcessGroupGloo(prefix, rank, WORLD, timedelta(seconds=60))
        self.memory = memory.memory if memory is not None else dict(self._touched())

    def _touched(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        for pair, nbytes in self.pairs.items():
            if self.rank in pair:
                yield pair, torch.ones(nbytes, dtype=torch.uint8)

    def exchange(self) -> None:
        works = [
            self.group.recv([tensor], source, 0)
            for (source, target), tensor in self.memory.items()
            if target == self.rank
        ]
        works += [
            self.group.send([tensor], target, 0)
            for (source, target), tensor in self.memory.items()
            if source == self.rank
        ]
        for work in works:
            work.wait()


def _checkpoint(source: Job, target: Job) -> None:
    """What one would do without dynadapt: save the one job, load into the other."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = get_state_dict(*source)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=FOLDER)
    model, optimizer = get_state_dict(*target)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=FOLDER)
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
