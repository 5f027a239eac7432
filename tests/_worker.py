"""A worker's life: run what the parent sends until the parent is gone."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests._reset import freeze_imports, reset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Store

__all__ = [
    "GROUP_TIMEOUT",
    "HOST",
    "ROOT",
    "allow_fp16",
    "at_reset",
    "store",
    "taken_for_fused",
    "work",
]

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
GROUP_TIMEOUT = timedelta(seconds=60)

_here: dict[str, Any] = {}
_undo: list[Callable[[], None]] = []


def store() -> Store:
    """A store in the parent, fresh for each run: it outlives every rank."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"run{_here['run']}/user", _here["store"])


def at_reset(undo: Callable[[], None]) -> None:
    """Call `undo` when the current run is over, however it ended."""
    _undo.append(undo)


def allow_fp16() -> None:
    """Lift DeepSpeed's gate for fp16 on CPU until the run is over; the arithmetic itself works."""
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    before = kind.is_fp16_supported
    kind.is_fp16_supported = lambda self: True
    at_reset(lambda: setattr(kind, "is_fp16_supported", before))


@contextlib.contextmanager
def taken_for_fused(optimizer: type | None) -> Iterator[None]:
    """Let DeepSpeed take a class of optimizer for its own fused Adam, which takes minutes to compile.

    The class decides on the wrapper of an engine without ZeRO. None changes nothing.
    """
    from deepspeed.runtime import engine

    before = engine.FusedAdam
    engine.FusedAdam = optimizer or before
    try:
        yield
    finally:
        engine.FusedAdam = before


def work(pipe: int, life_end: int, rank: int, world_size: int, port: int) -> None:
    """A worker's life: run what the parent sends until the parent is gone."""
    os.set_inheritable(pipe, False)
    os.set_inheritable(life_end, False)
    threading.Thread(target=_leave_with_parent, args=(life_end,), daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    import torch
    from torch.distributed import TCPStore

    torch.set_num_threads(1)
    _here["store"] = TCPStore(HOST, port, is_master=False, timeout=GROUP_TIMEOUT)
    environ = dict(os.environ)
    connection = Connection(pipe)
    freeze_imports()
    failed_reset: str | None = None
    while True:
        try:
            kind, *rest = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)
        if kind == "reset":
            try:
                while _undo:
                    _undo.pop()()
                reset(environ)
                os.chdir(ROOT)
            except Exception:  # the next run reports it
                failed_reset = traceback.format_exc()
            continue
        number, message = rest
        if failed_reset is None:
            answer = _call(rank, world_size, number, message)
        else:
            answer = pickle.dumps((None, "the reset after the last run failed", failed_reset))
        sys.stdout.flush()
        connection.send_bytes(answer)


def _leave_with_parent(life_end: int) -> None:
    """Block until the parent's end of the pipe closes, however the parent ended."""
    os.read(life_end, 1)
    os._exit(1)


def _call(rank: int, world_size: int, number: int, message: bytes) -> bytes:
    """The pickled answer of one run: (value, None, "") or (None, error, traceback)."""
    import numpy as np
    import torch
    import torch.distributed as dist

    _here["run"] = number
    try:
        group_store = dist.PrefixStore(f"run{number}/group", _here["store"])
        dist.init_process_group(
            "gloo", store=group_store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
        )
        dist.barrier()  # a rank that is done at once must not hang up on one that still connects
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        module, qualname, args = pickle.loads(message)
        fn: Any = importlib.import_module(module)
        for name in qualname.split("."):
            fn = getattr(fn, name)
        # By value: torch's own pickling for pipes would need this process to stay alive.
        return pickle.dumps((fn(rank, world_size, *args), None, ""))
    except BaseException as error:  # a rank's failure is an answer
        text = traceback.format_exception_only(type(error), error)[-1].strip()
        return pickle.dumps((None, text, traceback.format_exc()))
