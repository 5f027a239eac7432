"""Something to convert, and processes that die or are interrupted at any point of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from dynadapt.transport import filling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def source_in(folder: Path, rows: int = 40, layers: int = 7) -> Path:
    rng = np.random.default_rng(0)
    names = [f"layers.{i}.weight" for i in range(layers)]
    tensors = {name: rng.standard_normal((rows, 33)).astype("f4") for name in names}
    tensors["empty"] = np.zeros((0, 4), "f4")
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def in_fork(what: Callable[[], Any]) -> int:
    """Run it in a fork of this process; how that ended, as `os.waitstatus_to_exitcode` has it."""
    pid = os.fork()
    if not pid:
        code = 70
        try:
            what()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def act_at(point: int, act: Callable[[], None]) -> None:
    """Act at the so-many-th of all that this process does to the target from now on."""
    steps = count(1)

    def step() -> None:
        if next(steps) == point:
            act()

    def hear(event: str, words: tuple[Any, ...]) -> None:
        writes = event in {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}
        if writes and any(".b." in str(word) or str(word).endswith("/b") for word in words):
            step()

    write = filling._write

    def half(fd: int, data: memoryview, at: int) -> None:
        write(fd, data[: len(data) // 2], at)
        step()
        write(fd, data[len(data) // 2 :], at + len(data) // 2)

    filling._write = half
    sys.addaudithook(hear)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[bool]:
    """A file system in memory for a while, in a new folder; False where none may be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = not subprocess.run(command, capture_output=True, check=False).returncode
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "-l", str(folder)], check=True)  # files may be mapped
