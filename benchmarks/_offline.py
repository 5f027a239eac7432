"""Checkpoints on disk: conversions beside a copy of the same bytes and beside the frameworks' own tools.

The checkpoint is written by real DeepSpeed: ZeRO-3 on four ranks, bf16 with AdamW in fp32. What is read
has been read before (it is in the page cache); what is written is on the disk at the end (`sync`), for both.
All of it is in a folder for temporary files (`TMPDIR`), which should be on a disk and have 12 GB.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._results import Result, middle

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynadapt.elastic.checkpoint import Checkpoint

__all__ = ["SIZES", "cases"]

WORLD = 4
SIZES = {"small": (256, 3), "middle": (768, 5), "full": (1024, 16)}
"""Width and depth of the model: 2.5, 37 and 203 million parameters."""

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(tempfile.gettempdir()) / f"dynadapt-bench-{os.getpid()}"
ASIDE = FOLDER / "aside"
BIN = Path(sys.executable).parent

#: Target -> the most it may take of a copy, in process and as a command.
TARGETS = {
    "universal": (1.3, 1.5),
    "universal/zero3": (1.3, 1.5),  # what `ds_to_universal` writes: without a copy of the weights
    "zero3:dp=2": (1.2, 1.4),
    "dcp": (1.2, 1.4),
}
PEER_SPEEDUP = 8
MEMORY_GB: dict[str, tuple[float, ...]] = {
    "small": (0.02, 0.1),
    "middle": (0.2,),
    "full": (0.2, 2, 8),
}
MEMORY_BAR = 100

#: A process that has converted before: prints the seconds of a conversion, in all and by phase.
CONVERT = """
import json, os, sys, time
from dynadapt import offline
warm, source, target, to = sys.argv[1:]
offline.convert(warm, target + "-warm", to)
os.sync()
began = time.perf_counter()
report = offline.convert(source, target, to)
print(json.dumps([time.perf_counter() - began, report.seconds]))
"""

#: Prints the most anonymous memory of a conversion and the processes that work for it, shared pages counted
#: once, over that of an interpreter that has imported nothing.
MEMORY = """
import json, sys, threading
from pathlib import Path

def anonymous():
    found = 0
    for own in ("self", *CHILDREN.read_text().split()):
        try:
            lines = Path(f"/proc/{own}/smaps_rollup").read_text().splitlines()
        except (OSError, ProcessLookupError):
            continue
        found += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))
    return found

CHILDREN = Path(f"/proc/self/task/{threading.get_native_id()}/children")
before = most = anonymous()
done = threading.Event()

def sample():
    global most
    while not done.wait(0.005):
        most = max(most, anonymous())

watch = threading.Thread(target=sample)
watch.start()
from dynadapt import offline
offline.convert(*sys.argv[1:])
done.set()
watch.join()
print(json.dumps(most - before))
"""

#: The same for a comparison.
DIFF = """
import json, sys, time
from dynadapt import offline
warm, a, b = sys.argv[1:]
offline.diff(warm, warm)
began = time.perf_counter()
assert offline.diff(a, b).same
print(json.dumps([time.perf_counter() - began]))
"""


def cases(rounds: int, quick: bool, size: str | None = None) -> list[Result]:
    """All of them, at one of `SIZES`."""
    name = size or ("small" if quick else "full")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    try:
        return _cases(rounds, name)
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


def _cases(rounds: int, size: str) -> list[Result]:
    from tests._ranks import close_pools, spawn_fresh

    source, warm = FOLDER / "zero3", FOLDER / "warm"
    with spawn_fresh(WORLD) as pool:
        params = pool.run(save, str(source), *SIZES[size], timeout=900)[0]
        pool.run(save, str(warm), 64, 1, timeout=300)
    close_pools()
    nbytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    what = f"ZeRO-3 x 4, {params / 1e6:.0f}M parameters, {nbytes / 1e9:.2g} GB"
    return [
        *_fingerprints(rounds, size),  # before the page cache is in pieces
        *_conversions(source, warm, what, rounds),
        *_weights(source, what, max(rounds // 2, 1)),
        *_differences(source, warm, what, rounds),
        *_memory(source, what, size),
        _help(rounds),
    ]


def save(rank: int, world: int, folder: str, width: int, depth: int) -> int:
    """One rank's part of the checkpoint: an engine, a step with a loss of little work, a save."""
    import deepspeed
    import torch
    from torch import nn

    from benchmarks._live import Stack

    class Running(Stack):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                y = block.norm_1(x)
                x = x + block.out(block.query(y) + block.key(y) + block.value(y))
                x = x + block.down(nn.functional.gelu(block.up(block.norm_2(x))))
            return self.head(x).float().square().mean()

    torch.manual_seed(0)
    model = Running(width, depth)
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )[0]
    engine.backward(engine(torch.arange(4)[None] + rank))
    engine.step()
    engine.save_checkpoint(folder, tag="step1")
    return count


def _fresh(path: Path) -> Path:
    """A path where nothing is. What was there is emptied and set aside.

    Not removed: ext4 gives no inode anew for some time, and searches long where hundreds have just gone.
    """
    for each in path.parent.glob(f"{path.name}*"):
        for file in (own for own in each.rglob("*") if own.is_file()):
            os.truncate(file, 0)
        ASIDE.mkdir(exist_ok=True)
        each.rename(ASIDE / str(len(list(ASIDE.iterdir()))))
    return path


def _timed(*words: str | Path) -> tuple[float, str]:
    """Seconds of a command that must end well, from a disk that is at rest, and what it printed."""
    own = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | own
    os.sync()
    began = time.perf_counter()
    done = subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        env=env,  # compiled once, as what is installed is
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-2000:]}")
    return seconds, done.stdout


def _in_turn(rounds: int, tasks: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Seconds of each task, run by turns after a warm-up."""
    found: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(rounds + 1):
        for name, task in tasks.items():
            seconds = task()
            if number:
                found[name].append(seconds)
    return found


def _conversions(source: Path, warm: Path, what: str, rounds: int) -> list[Result]:
    phases: dict[str, list[dict[str, float]]] = {to: [] for to in TARGETS}

    def inside(to: str) -> float:
        target = _fresh(FOLDER / "to")
        _, told = _timed(sys.executable, "-c", CONVERT, warm, source, target, to)
        seconds, own = json.loads(told)
        phases[to].append(own)
        return float(seconds)

    def command(to: str) -> float:
        return _timed(BIN / "dynadapt", "convert", source, _fresh(FOLDER / "to"), "--to", to)[0]

    def copy() -> float:
        return _timed("sh", "-c", f"cp -r {source} {_fresh(FOLDER / 'copy')} && sync")[0]

    tasks: dict[str, Callable[[], float]] = {"copy": copy}
    for to in TARGETS:
        tasks[f"{to} inside"] = lambda to=to: inside(to)  # type: ignore[misc]
        tasks[f"{to} command"] = lambda to=to: command(to)  # type: ignore[misc]
    times = _in_turn(rounds, tasks)
    for left in ("to", "copy"):
        _fresh(FOLDER / left)
    theirs = [_universal(source) for _ in range(rounds // 3)]
    _fresh(FOLDER / "theirs")
    results = []
    for to, (in_process, as_command) in TARGETS.items():
        middle_run = phases[to][len(phases[to]) // 2]
        note = "a run by phase: " + ", ".join(f"{n} {v:.2f}" for n, v in middle_run.items())
        ours, whole = times[f"{to} inside"], times[f"{to} command"]
        change, bar = f"{what} -> {to}, s", 1 / PEER_SPEEDUP
        results += [
            middle(
                f"{change} (beside cp -r + sync)", ours, times["copy"], bar=in_process, note=note
            ),
            middle(
                f"as a command, {change} (beside cp -r + sync)",
                whole,
                times["copy"],
                bar=as_command,
            ),
            *(
                Result(f"{how}{change} (beside ds_to_universal)", median(own), median(theirs), bar)
                for how, own in (("", ours), ("as a command, ", whole))
            ),
        ]
    return results


def _universal(source: Path) -> float:
    words = ["--input_folder", source / "step1", "--output_folder", _fresh(FOLDER / "theirs")]
    module = "deepspeed.checkpoint.ds_to_universal"
    return _timed(sys.executable, "-m", module, *words, "--inject_missing_state")[0]


def _weights(source: Path, what: str, rounds: int) -> list[Result]:
    def ours() -> float:
        words = ["convert", source, _fresh(FOLDER / "to"), "--to", "safetensors"]
        return _timed(BIN / "dynadapt", *words)[0]

    def theirs() -> float:
        words = ["-m", "deepspeed.utils.zero_to_fp32", source, _fresh(FOLDER / "theirs")]
        return _timed(sys.executable, *words)[0]

    times = _in_turn(rounds, {"ours": ours, "theirs": theirs})
    for left in ("to", "theirs"):
        _fresh(FOLDER / left)
    name = f"as a command, weights of {what} -> safetensors, s (beside zero_to_fp32)"
    return [middle(name, times["ours"], times["theirs"], bar=1 / 3)]


def _differences(source: Path, warm: Path, what: str, rounds: int) -> list[Result]:
    other = _fresh(FOLDER / "copy")
    shutil.copytree(source, other)
    each = f'cd {source} && find . -type f | while read f; do cmp "$f" {other}/"$f" || exit 1; done'

    def inside() -> float:
        found: list[float] = json.loads(_timed(sys.executable, "-c", DIFF, warm, source, other)[1])
        return found[0]

    times = _in_turn(
        rounds,
        {
            "inside": inside,
            "command": lambda: _timed(BIN / "dynadapt", "diff", source, other)[0],
            "cmp": lambda: _timed("sh", "-c", each)[0],
        },
    )
    _fresh(other)
    name = f"diff of two equal ones, {what}, s (beside cmp)"
    return [
        middle(name, times["inside"], times["cmp"], bar=0.6),
        middle(f"as a command, {name}", times["command"], times["cmp"], bar=1.0),
    ]


def _sparse(path: Path, nbytes: int, dtype: str = "F32") -> Path:
    """A safetensors file of tensors of 64 MiB, all holes: the disk's part is no matter here."""
    width = 1024 * (4 if dtype == "F32" else 2)
    rows = min(nbytes, 1 << 26) // width
    each, count = rows * width, max(nbytes >> 26, 1)
    entries = {
        f"layers.{i}.weight": {
            "dtype": dtype,
            "shape": [rows, 1024],
            "data_offsets": [i * each, (i + 1) * each],
        }
        for i in range(count)
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # as the library has it
    path.mkdir()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + count * each)
    return path


def _filled(path: Path) -> Path:
    """The same with values in it, and so in the page cache as files are."""
    file = path / "model.safetensors"
    data = np.memmap(file, np.uint8, "r")
    start = 8 + int(data[:8].view("<u8")[0])
    values = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()
    with file.open("r+b") as out:
        out.seek(start)
        for at in range(start, data.size, len(values)):
            out.write(values[: data.size - at])
    return path


def _fingerprints(rounds: int, size: str) -> list[Result]:
    """Seconds for a GB, on one core, of what is in the page cache."""
    from dynadapt.elastic.checkpoint import open_checkpoint
    from dynadapt.transport.certificate import weighted_sum
    from dynadapt.vps.box import Box
    from dynadapt.vps.keys import Key

    nbytes = 1 << (26 if size == "small" else 29)
    results = []
    for name, dtype, bar in (("fp32", "F32", 7), ("bf16", "BF16", 4)):
        found = open_checkpoint(_filled(_sparse(_fresh(FOLDER / "sparse"), nbytes, dtype)))

        def task(found: Checkpoint = found) -> float:
            return _clock(lambda: found.fingerprint(threads=1))

        times = _in_turn(rounds, {"": task})
        gb = sum(spec.nbytes for spec in found.keys) / 1e9
        results.append(_pace(f"fingerprint of a checkpoint in {name}", median(times[""]) / gb, bar))
    wide = np.random.default_rng(0).standard_normal((2048, nbytes // 8192)).astype("f4")
    column = wide[:, : wide.shape[1] // 2]
    box, key = Box((0, 0), column.shape), Key("w", "param")
    times = _in_turn(rounds, {"": lambda: _clock(lambda: weighted_sum(column, box, key))})
    seconds = median(times[""]) / (column.nbytes / 1e9)
    return [*results, _pace("fingerprint of a column box in fp32", seconds, 4)]


def _pace(name: str, seconds: float, bar: float) -> Result:
    """Of what should reach `bar` GB/s on one core; and what a core does at best in that moment."""
    words, limbs = np.arange(1 << 16, dtype=np.int32), np.ones((128, 4))
    floats, sums = np.empty((512, 128)), np.empty((512, 4))

    def bare() -> None:
        np.copyto(floats.reshape(-1), words)
        np.matmul(floats, limbs, out=sums)

    limit = words.nbytes / min(_clock(bare) for _ in range(200)) / 1e9
    note = (
        f"{1 / seconds:.1f} GB/s; the bar is {bar} GB/s; words of 32 bits made floats and multiplied in the "
        f"cache, and nothing else: {limit:.1f} GB/s"
    )
    return Result(f"{name}, s for a GB on one core", seconds, bar=1 / bar, note=note)


def _clock(task: Callable[[], Any]) -> float:
    began = time.perf_counter()
    task()
    return time.perf_counter() - began


def _memory(source: Path, what: str, size: str) -> list[Result]:
    """Of the checkpoint, and of synthesised ones whose source takes no room on the disk."""

    def grown(path: Path) -> float:
        target = _fresh(FOLDER / "to")
        _, told = _timed(sys.executable, "-c", MEMORY, path, target, "universal")
        _fresh(target)
        return float(json.loads(told)) / 2**20

    about = "anonymous memory of a conversion to universal, MiB over the interpreter's"
    results = [Result(f"{about}: {what}", grown(source), bar=MEMORY_BAR)]
    for gigabytes in MEMORY_GB[size]:
        if shutil.disk_usage(FOLDER).free < 2e9 * gigabytes:
            continue
        sparse = _sparse(_fresh(FOLDER / "sparse"), int(gigabytes * 1e9))
        label = f"{about}: safetensors, {gigabytes:g} GB"
        results.append(Result(label, grown(sparse), bar=MEMORY_BAR))
        _fresh(sparse)
    return results


def _help(rounds: int) -> Result:
    times = _in_turn(rounds, {"": lambda: _timed(BIN / "dynadapt", "--help")[0]})
    return Result("dynadapt --help, s", median(times[""]), bar=0.3)
