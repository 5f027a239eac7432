"""One small whole checkpoint of every format and form that is read, to be damaged."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from dynadapt.elastic.checkpoint import open_checkpoint
from dynadapt.elastic.conversion import convert
from dynadapt.elastic.place import MANIFEST
from dynadapt.elastic.targets import target_of
from tests import _ranks
from tests.offline import _made, _megatron, _parallel, _ranks_files
from tests.offline._older import aged

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FORMATS", "PARALLEL", "make_seeds"]

MEGATRON = {"megatron": "tp", "megatron-flats": "flats", "megatron-blocks": _megatron.BLOCKS}
ACCELERATE = {
    "accelerate": "ddp",
    "accelerate-zero2": "zero2",
    "accelerate-fsdp1": "fsdp1",
    "accelerate-fsdp2": "fsdp2",
}
TRAINER = {"trainer": "ddp", "trainer-zero3": "zero3", "trainer-fsdp2": "fsdp2"}
PARALLEL = {
    "pipeline": "pipe zero1",
    "pipeline-zero0": "pipe in fp32, four stages",
    "autotp": "tp zero2, tied",
    "autotp-zero3": "tp zero3",
    "autotp-zero0": "tp without ZeRO",
}

#: Seed -> the format that reads it.
FORMATS = {
    "zero0": "deepspeed",
    "zero0-fused": "deepspeed",
    "zero2": "deepspeed",
    "zero2-0.4.5": "deepspeed",
    "zero3": "deepspeed",
    "universal": "universal",
    "safetensors": "safetensors",
    "torch": "torch",
    "dcp": "dcp",
    "fsdp-sharded": "fsdp",
    "fsdp-dtensors": "fsdp",
    **dict.fromkeys(MEGATRON, "megatron"),
    **dict.fromkeys(ACCELERATE, "accelerate"),
    **dict.fromkeys(TRAINER, "trainer"),
    **dict.fromkeys(PARALLEL, "deepspeed"),
}


def make_seeds(place: Path) -> dict[str, Path]:
    """Every seed, under `place`: real ones, and what is made of them."""
    found = {name: place / name for name in FORMATS}
    pool = _ranks.pool(2)
    pool.run(_made.save_deepspeed, "zero3-bf16", str(found["zero3"]), 1, {}, timeout=200)
    pool.run(_made.save_deepspeed, "zero2-fp16", str(found["zero2"]), 1, {}, timeout=200)
    pool.run(_made.save_deepspeed, "zero0-bf16", str(found["zero0"]), 1, {}, timeout=200)
    pool.run(_save_dcp, str(found["dcp"]), timeout=200)
    for name, mesh in (("fsdp-sharded", False), ("fsdp-dtensors", True)):
        how = ("SHARDED", True, mesh, str(found[name]), "accelerate" if mesh else "one")
        pool.run(_ranks_files.save, *how, timeout=200)
    aged(found["zero2"], found["zero2-0.4.5"], "0.4.5")
    source = open_checkpoint(found["zero3"])
    convert(source, target_of(found["zero0-fused"], "zero0:dp=2,fused=true"))
    convert(source, target_of(found["universal"], "universal"))
    small = target_of(found["safetensors"], "safetensors", {"max_shard_size": 1500})
    convert(source, small)
    _save_torch(found["torch"])
    root, _ = _megatron.few()
    for name, its in MEGATRON.items():
        shutil.copytree(root / its, found[name])
    for name, layout in ACCELERATE.items():
        convert(source, target_of(found[name], f"accelerate/{layout}:dp=2"))
    for name, layout in TRAINER.items():
        convert(source, target_of(found[name], f"trainer/{layout}:dp=2"))
    kinds = tuple(PARALLEL.values())
    _ranks.pool(4).run(_parallel.saved, kinds, str(place / "parallel"), {}, timeout=400)
    for name, kind in PARALLEL.items():
        (place / "parallel" / kind).rename(found[name])
    for name in found.keys() - {"safetensors"}:  # of the others, what their own formats can tell
        (found[name] / MANIFEST).unlink(missing_ok=True)
    return found


def _save_dcp(rank: int, world: int, where: str) -> None:
    from tests.offline import _dcp

    _dcp.save(rank, world, "fsdp2", "adamw", "nested", where, 1)


def _save_torch(where: Path) -> None:
    import torch

    from tests.live import jobs

    model = jobs.net()
    optimizer = jobs.adamw(model)
    model(jobs.tokens(0)).backward()
    optimizer.step()
    where.mkdir()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, where / "checkpoint.pt"
    )
