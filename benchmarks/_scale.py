"""Planning and simulating at the size of clusters, beside the planners that others have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._cold_plan import CASES
from benchmarks._models import RULES, model_shape
from benchmarks._results import Result, middle
from dynadapt.transport.factored import factored_plan, lanes
from dynadapt.transport.plan import Options
from dynadapt.transport.simulate import simulate
from dynadapt.vps.declare import declare
from dynadapt.vps.model_shape import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynadapt.transport.factored import Lane
    from dynadapt.vps.mesh_layout import MeshLayout
    from dynadapt.vps.model_shape import ModelShape

__all__ = ["cold_plans", "simulations"]

MEMORY_BAR = 150e6
DCP_CHUNKS = 2_000_000
"""Chunks of saved tensors from which the peer's own description takes too much memory to make."""


def cold_plans(rounds: int, quick: bool) -> list[Result]:
    """Both sides of one seat's plan, worst of eight seats, layouts included; and what peers can do of it."""
    found: list[Result] = []
    bare = _bare()
    for number, (name, (model, source, target, bar)) in enumerate(CASES.items()):
        runs = [_run(number, bare) for _ in range(1 if quick else 3)]
        worst = float(np.median([max(run["seconds"]) for run in runs]))
        extra = max(run["extra_bytes"] for run in runs)
        note = f"{runs[0]['moves']:,} moves of a seat at most"
        found.append(Result(f"cold plan, {name}, s", worst, bar=bar, note=note))
        found.append(
            Result(f"memory over the interpreter's, {name}, MB", extra / 1e6, bar=MEMORY_BAR / 1e6)
        )
        if not quick or number == 0:
            found += _beside_dcp(name, model, source, target)
    found.append(_beside_affine(rounds))
    return found


def _bare() -> int:
    """The peak memory of an interpreter that has loaded numpy."""
    code = (
        "import numpy, re, pathlib; "
        "text = pathlib.Path('/proc/self/status').read_text(); "
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', text)[1]) * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


def _run(number: int, bare: int) -> dict[str, Any]:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._cold_plan", str(number), str(bare)],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _beside_dcp(name: str, model: str, source: str, target: str) -> list[Result]:
    """The reads that torch DCP's load planner lists for the same seat; what was saved is ready made."""
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    shape = model_shape(model)
    before, after = declare(source, shape, RULES), declare(target, shape, RULES)
    seat = len(after.order) // 2
    if _num_chunks(before, after, seat) > DCP_CHUNKS:
        return []
    began = time.perf_counter()
    plan = factored_plan(
        seat, declare(source, shape, RULES), declare(target, shape, RULES), Options()
    )
    ours = time.perf_counter() - began
    wanted = list(_as_chunks(before, after, seat))
    began = time.perf_counter()
    reads = sum(len(create_read_items_for_chunk_list(*each)) for each in wanted)
    peer = time.perf_counter() - began
    note = (
        f"The peer lists {reads:,} reads of seat {seat}, from descriptions that are not timed; it plans "
        f"no sends and chooses among no replicas. Ours has {plan.num_moves:,} moves, both ways."
    )
    return [Result(f"{name}, s (beside DCP's load planner)", ours, peer, note=note)]


def _own(after: MeshLayout, lane: Lane, seat: int) -> np.ndarray:
    place = after.place(seat)
    assert place is not None
    found: np.ndarray = np.flatnonzero(lane.target.pins == lane.target.geometry.pinned(place))
    return found


def _num_chunks(before: MeshLayout, after: MeshLayout, seat: int) -> int:
    over = lanes(before, after) or []
    total = 0
    for lane in over:
        own = _own(after, lane, seat)
        if len(own):
            total += len(own) * len(lane.states) * len(_saved(lane, int(own[0])))
    return total


def _saved(lane: Lane, member: int) -> list[tuple[list[int], list[int]]]:
    """All boxes of one tensor in the source, as offsets and sizes."""
    geometry = lane.source.geometry
    lo = np.zeros((1, geometry.ndim), np.int64)
    hi = np.array([geometry.shape], np.int64)
    flats = lane.source.flats
    found = geometry.meet(lo, hi, None if flats is None else flats.take(np.array([member])))
    return list(zip(found.lo.tolist(), (found.hi - found.lo).tolist(), strict=True))


def _as_chunks(
    before: MeshLayout, after: MeshLayout, seat: int
) -> Iterator[tuple[str, Any, list[Any]]]:
    import torch
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    def chunk(low: list[int], size: list[int]) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(low), torch.Size(size))

    place = after.place(seat)
    assert place is not None
    for lane in lanes(before, after) or []:
        stack = lane.target
        held = stack.geometry.held(place)
        mine = [
            chunk(*each)
            for each in zip(held.lo.tolist(), (held.hi - held.lo).tolist(), strict=True)
        ]
        for member in _own(after, lane, seat).tolist():
            saved = [chunk(*each) for each in _saved(lane, member)]
            whole = torch.Size(stack.geometry.shape)
            meta = TensorStorageMetadata(TensorProperties(), whole, saved)
            for specs, _ in lane.states:
                yield str(specs[member].key), meta, mine


def _beside_affine(rounds: int) -> Result:
    """DeepSpeed's affine planner on what it can do: tensor-parallel layouts, all ranks at once."""
    from deepspeed.checkpoint.affine_transfer import plan_transfer

    shape = model_shape("llama-3-70b")
    states = (State("param"),)
    maps = _affine_maps(shape, "ddp:tp=8"), _affine_maps(shape, "ddp:tp=4")
    ours, peer = [], []
    segments = moves = 0
    for number in range(min(rounds, 3) + 1):
        began = time.perf_counter()
        before = declare("ddp:tp=8", shape, RULES, states=states)
        after = declare("ddp:tp=4", shape, RULES, states=states)
        plans = [factored_plan(seat, before, after, Options()) for seat in range(8)]
        middle_time = time.perf_counter() - began
        moves = sum(block.num_moves for plan in plans for block in plan.receives)
        began = time.perf_counter()
        theirs = [plan_transfer(target, source) for source, target in zip(*maps, strict=True)]
        if number:
            ours.append(middle_time)
            peer.append(time.perf_counter() - began)
        segments = sum(len(plan.segments) for plan in theirs)
    note = (
        f"{moves:,} moves of all 8 ranks (from themselves where they hold it), {segments:,} segments of "
        "the peer. It plans no flat partitions, takes the lowest rank, and its maps are not timed."
    )
    name = (
        "plans of all ranks, Llama-3-70B weights, TP8 -> TP4, s (beside DeepSpeed's plan_transfer)"
    )
    return middle(name, ours, peer, note=note)


def _affine_maps(shape: ModelShape, spec: str) -> list[Any]:
    from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap

    from dynadapt.vps.box import linear_index, row_major_strides

    layout = declare(spec, shape, RULES, states=(State("param"),))
    found = []
    for stack in layout.stacks:
        whole = stack.geometry.shape
        strides = row_major_strides(whole)
        held = {e: stack.geometry.held(layout.place(e) or 0) for e in layout.endpoints}
        boxes = {e: (own.lo[0].tolist(), own.hi[0].tolist()) for e, own in held.items()}
        pieces, shards = {}, {}
        for endpoint, (low, high) in boxes.items():
            size = [b - a for a, b in zip(low, high, strict=True)]
            same = [e for e, box in boxes.items() if box == (low, high)]
            at = linear_index(low, whole)
            shards[endpoint] = size
            pieces[endpoint] = [AffinePiece(size, at, strides, 0, row_major_strides(size), same)]
        found += [ParamAffineMap(whole, shards, pieces)] * len(stack)
    return found


def simulations(rounds: int, quick: bool) -> list[Result]:
    """Simulated seconds beside the lower bound of the links, and beside what DynaTrain published."""
    del rounds
    llama = model_shape("llama-3-70b")
    cases = [("zero3:dp=128", "ddp:dp=16,tp=8", 1.15), ("ddp:dp=16,tp=8", "zero3:dp=128", None)]
    found = []
    for source, target, bar in cases[: 1 if quick else 2]:
        before, after = declare(source, llama, RULES), declare(target, llama, RULES)
        run = simulate(before, after, "flat-200g", budget=1 << 30)
        name = f"simulated Llama-3-70B, {source} -> {target}, 25 GB/s a rank"
        note = (
            f"{run.chunks} chunks of which two are staged, {int(run.staging.max()) / 2**20:.0f} MiB of a "
            f"budget of 1,024; {run.to_json()['messages_worst']:,} messages of a rank at most"
        )
        found.append(
            Result(f"{name}, s (beside its lower bound)", run.seconds, run.lower_bound, bar, note)
        )
        found.append(Result(f"{name}: most sent by one rank, by the mean", run.balance, bar=1.1))
    if quick:
        return found
    published = [
        ("llama-3-70b", "zero1:dp=4,tp=8,pp=4", "zero1:dp=8,tp=8,pp=2", 2.0, "70B: under 2 s"),
        ("llama-3-70b", "zero1:dp=2,tp=8,pp=4", "zero1:dp=4,tp=8,pp=4", 2.0, "70B: under 2 s"),
        ("llama-3-70b", "zero3:dp=128", "zero1:dp=16,tp=8", 2.0, "70B: under 2 s"),
        (
            "qwen3-235b-a22b",
            "zero1:dp=2,tp=4,pp=4,ep=4",
            "zero1:dp=2,tp=4,pp=2,ep=8",
            4.36,
            "235B: 4.36 s",
        ),
        (
            "qwen3-235b-a22b",
            "zero1:tp=4,pp=4,ep=4",
            "zero1:dp=2,tp=4,pp=4,ep=4",
            4.36,
            "235B: 4.36 s",
        ),
    ]
    for model, source, target, seconds, text in published:
        shape = model_shape(model)
        run = simulate(declare(source, shape, RULES), declare(target, shape, RULES), "a800")
        note = (
            f"Published for {text}, for a change that is not named, on up to 128 A800 with 200 Gb/s "
            f"each, measured. Ours is the transfer alone, on a model of those links; lower bound "
            f"{run.lower_bound:.3f} s, {run.world} ranks."
        )
        name = f"simulated {model}, {source} -> {target}, s (beside DynaTrain's figure)"
        found.append(Result(name, run.seconds, seconds, note=note))
    return found
