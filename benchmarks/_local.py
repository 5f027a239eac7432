"""The cases without ranks: the certificate's speed, and the planner's."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._results import Result, middle
from dynadapt.transport.certificate import weighted_sum
from dynadapt.transport.match import match
from dynadapt.transport.plan import Options
from dynadapt.transport.planner import plan_for
from dynadapt.vps.box import Box
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.mesh_layout import Flat, MeshLayout, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dynadapt.vps.layout import RowLayout

__all__ = ["certificate", "planning"]


def certificate(rounds: int, quick: bool) -> list[Result]:
    """Hashing of one array on one core, beside copying it and beside SHA-256."""
    rows = 512 if quick else 4096
    found = []
    for name, kind in (("fp32", np.float32), ("bf16", np.uint16)):
        array = np.random.default_rng(0).integers(0, 1 << 16, (rows, 4096)).astype(kind)
        box, key, other = Box.whole(array.shape), Key("w", "param"), np.empty_like(array)
        times = _in_turn(
            rounds,
            lambda a=array, b=box, k=key: weighted_sum(a, b, k),
            lambda a=array, o=other: np.copyto(o, a),
            lambda a=array: hashlib.sha256(a.data).digest(),
        )
        ours, copy, sha = ([array.nbytes / t / 1e9 for t in each] for each in times)
        found.append(middle(f"certificate of {name}, GB/s (beside memcpy)", ours, copy))
        found.append(middle(f"certificate of {name}, GB/s (beside SHA-256)", ours, sha))
    return found


def _in_turn(rounds: int, *tasks: Callable[[], Any]) -> tuple[list[float], ...]:
    """Seconds of each task, run by turns after a warm-up."""
    times: tuple[list[float], ...] = tuple([] for _ in tasks)
    for number in range(rounds + 1):
        for task, own in zip(tasks, times, strict=True):
            began = time.perf_counter()
            task()
            if number:
                own.append(time.perf_counter() - began)
    return times


def _llama(layers: int) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """Names, shapes and TP dims of a Llama of 7B width."""
    width, hidden, vocab = 4096, 11008, 32000
    yield "embed", (vocab, width), 0
    for i in range(layers):
        for name in ("q", "k", "v"):
            yield f"layers.{i}.{name}", (width, width), 0
        yield f"layers.{i}.o", (width, width), 1
        for name in ("gate", "up"):
            yield f"layers.{i}.{name}", (hidden, width), 0
        yield f"layers.{i}.down", (width, hidden), 1
        yield f"layers.{i}.norm_1", (width,), None
        yield f"layers.{i}.norm_2", (width,), None
    yield "norm", (width,), None
    yield "head", (vocab, width), 0


def _layouts(layers: int) -> tuple[RowLayout, RowLayout]:
    specs, split, flat = [], {}, {}
    for name, shape, dim in _llama(layers):
        for slot in ("param", "exp_avg", "exp_avg_sq"):
            key = Key(name, slot)
            specs.append(KeySpec(key, shape, "float32"))
            flat[key] = (Flat("dp"),)
            split[key] = () if dim is None else (Shard("tp", dim),)
    source = MeshLayout({"dp": 8}, specs, flat)
    target = MeshLayout({"dp": 2, "tp": 4}, specs, split)
    return source.explicit(), target.explicit()


def planning(rounds: int, quick: bool) -> list[Result]:
    """One seat's plan, ZeRO-3 x 8 -> TP 4 x DP 2, from layouts that were never asked before."""
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    ours: list[float] = []
    peer: list[float] = []
    plan, reads = None, 0
    for number in range(rounds + 1):
        source, target = _layouts(4 if quick else 32)
        began = time.perf_counter()
        matched = match(source.keys, target.keys, Options())
        plan = plan_for(0, source, target, matched, Options())
        middle_time = time.perf_counter() - began
        chunks = _as_chunks(source, target)
        began = time.perf_counter()
        reads = sum(len(create_read_items_for_chunk_list(*each)) for each in chunks)
        if number:
            ours.append(middle_time)
            peer.append(time.perf_counter() - began)
    assert plan is not None
    return [
        middle(
            f"cold plan of one seat, ZeRO-3 x 8 -> TP 4 x DP 2, {len(matched.pairs)} tensors, s "
            "(beside DCP's load planner)",
            ours,
            peer,
            note=f"{len(plan.moves)} moves. The peer lists the {reads} reads of one rank; it plans "
            "no sends, chooses among no replicas and proves no coverage.",
        )
    ]


def _as_chunks(source: RowLayout, target: RowLayout) -> list[tuple[str, Any, list[Any]]]:
    """The same question in the peer's terms: what was saved, and what rank 0 wants of it."""
    import torch
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    def chunk(box: Box) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(box.lo), torch.Size(box.shape))

    found = []
    for row in target.rows(0):
        whole = Box.whole(target.by_name[row.key].shape)
        saved = [chunk(holder.box) for holder in source.holders(row.key, whole)]
        meta = TensorStorageMetadata(TensorProperties(), torch.Size(whole.shape), saved)
        found.append((str(row.key), meta, [chunk(row.box)]))
    return found
