"""Pools of real gloo ranks for tests.

Starting ranks costs seconds (each is a fresh interpreter that imports torch), using them
milliseconds. So all tests of one world size share a warm pool, and between two runs every worker is
put back to how it started. Tests that kill ranks take a pool of their own from `spawn_fresh`.

The rules that make this safe:

- The store lives in the parent, so any rank may die.
- Every run gets a new default group, so nothing that an earlier run left in a group survives.
- A pool in which a run failed is ended, and its next run starts new workers.
- Workers leave by `os._exit`: gloo sometimes aborts in an interpreter's normal shutdown.
- Everything private to torch or DeepSpeed that tests have to reset is in this file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import glob
import importlib
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dynadapt.demo.extensions import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from torch.distributed import Store

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
GROUP_TIMEOUT = timedelta(seconds=60)
OUTPUT_LINES = 40


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank answered: a value, or an error with its traceback."""

    rank: int
    value: Any = None
    error: str | None = None
    detail: str = ""
    died: bool = False


class RanksFailedError(Exception):
    """At least one rank raised, died or did not answer; `outcomes` has every rank's answer."""

    def __init__(self, what: str, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        lines = [f"{what} failed on {len(failed)} of {len(outcomes)} ranks"]
        lines += [f"rank {outcome.rank}: {outcome.error}" for outcome in failed]
        lines += [
            f"--- rank {outcome.rank} ---\n{outcome.detail}" for outcome in failed if outcome.detail
        ]
        super().__init__("\n".join(lines))


# --- the parent's side ------------------------------------------------------------------------


@dataclass(slots=True)
class _Worker:
    """One rank's process, its pipe, and what it printed."""

    process: subprocess.Popen[bytes]
    connection: Connection
    lifeline: int
    output: IO[bytes]

    def printed(self) -> str:
        """The last lines that the worker printed."""
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-OUTPUT_LINES:])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        os.close(self.lifeline)
        self.output.close()


@dataclass(slots=True)
class Pool:
    """`world_size` processes, each one rank of a gloo world on the loopback interface.

    Workers start with the first run, and again with the run after a failed one.
    """

    world_size: int
    env: Mapping[str, str] = field(default_factory=dict)
    _workers: list[_Worker] = field(default_factory=list, init=False)
    _master: Any = field(default=None, init=False)
    _runs: int = field(default=0, init=False)
    _what: str = field(default="", init=False)
    _waiting: set[int] = field(default_factory=set, init=False)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process of each rank; empty while no worker runs."""
        return [worker.process.pid for worker in self._workers]

    @property
    def store(self) -> Store:
        """What `store()` returns in the ranks of the current run: to wait for what they set."""
        from torch.distributed import PrefixStore

        return PrefixStore(f"run{self._runs}/user", self._master)

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 120, grace: float = 10
    ) -> list[Any]:
        """Call `fn(rank, world_size, *args)` on every rank; the results, by rank.

        `fn` is a module-level function; arguments and results are pickled. If a rank fails, its
        peers may be stuck in a collective, so they get `grace` seconds more, not all of `timeout`.
        """
        self.start(fn, *args)
        try:
            outcomes = self.outcomes(timeout, grace=grace)
        except BaseException:
            self.close()
            raise
        if any(outcome.error is not None for outcome in outcomes):
            self.close()
            raise RanksFailedError(self._what, outcomes)
        return [outcome.value for outcome in outcomes]

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        """Call `fn` on every rank and do not wait: for tests that interfere meanwhile."""
        if self._waiting:
            raise RuntimeError(f"{self._what} still runs: ask for its outcomes first")
        if "<" in fn.__qualname__ or fn.__module__ == "__main__":
            raise ValueError(f"{fn.__qualname__} is not at the top level of an importable module")
        message = pickle.dumps((fn.__module__, fn.__qualname__, args))
        if not self._workers:
            self._start_workers()
        self._runs += 1
        self._what = f"{fn.__module__}.{fn.__qualname__}"
        for rank, worker in enumerate(self._workers):
            # A dead worker is told from its silence, when outcomes are collected.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.connection.send_bytes(pickle.dumps(("run", self._runs, message)))
            self._waiting.add(rank)

    def outcomes(self, timeout: float = 120, *, grace: float | None = None) -> list[Outcome]:
        """Every rank's answer to the last `start`, by rank; raises nothing.

        A rank that does not answer in time is ended, and its outcome shows the stacks of its
        threads. `grace` shortens the wait once some rank has failed.
        """
        deadline = time.monotonic() + timeout
        found: dict[int, Outcome] = {}
        while len(found) < self.world_size and time.monotonic() < deadline:
            for rank in self._ready(0.2):
                found[rank] = self._receive(rank)
                self._waiting.discard(rank)
                if found[rank].error is not None and grace is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        for rank in sorted(self._waiting):
            found[rank] = self._give_up(rank)
        self._waiting.clear()
        for rank, worker in enumerate(self._workers):
            # All ranks have left the function, so nobody still needs the groups it made.
            if not found[rank].died:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    worker.connection.send_bytes(pickle.dumps(("reset",)))
        return [found[rank] for rank in range(self.world_size)]

    def kill(self, rank: int, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one rank, by default the one that cannot be caught."""
        self._workers[rank].process.send_signal(sig)

    def close(self) -> None:
        """End all workers and remove what they left in shared memory."""
        for worker in self._workers:
            worker.end()
        if self._master is not None:
            _remove_shared_buffers(self._master.port)
        self._workers = []
        self._waiting.clear()
        self._master = None

    def _start_workers(self) -> None:
        from torch.distributed import TCPStore

        self._master = TCPStore(
            HOST, 0, is_master=True, wait_for_workers=False, timeout=GROUP_TIMEOUT
        )
        _remove_shared_buffers(self._master.port)
        self._workers = [self._start_worker(rank) for rank in range(self.world_size)]

    def _start_worker(self, rank: int) -> _Worker:
        ours, theirs = Pipe()
        life_end, lifeline = os.pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _Worker.end)
        numbers = f"{theirs.fileno()}, {life_end}, {rank}, {self.world_size}, {self._master.port}"
        process = subprocess.Popen(
            [sys.executable, "-c", f"from tests._ranks import work; work({numbers})"],
            cwd=ROOT,
            env=self._environment(rank),
            pass_fds=(theirs.fileno(), life_end),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt from the keyboard is the parent's to handle
        )
        theirs.close()
        os.close(life_end)
        return _Worker(process, ours, lifeline, output)

    def _environment(self, rank: int) -> dict[str, str]:
        """torchrun's variables, and one CPU thread a rank."""
        env = {
            name: value
            for name, value in os.environ.items()
            # DeepSpeed's own launcher sets LOCAL_SIZE, which turns on its shared-memory operator.
            if not name.startswith(("PYTEST_", "PYTHONWARNINGS", "TORCHELASTIC_", "LOCAL_SIZE"))
        }
        env |= environment()  # DeepSpeed on the CPU, and where it compiles
        env |= {
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self._master.port),
            "PYTHONPATH": str(ROOT),
            "RANK": str(rank),
            "TOKENIZERS_PARALLELISM": "false",
            # The parent serves the store: rank 0 must not try to serve it as well.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(self.world_size),
        }
        return env | dict(self.env)

    def _ready(self, timeout: float) -> list[int]:
        """The ranks that answered or died."""
        waiting = {self._workers[rank].connection: rank for rank in self._waiting}
        # Looked up first: a worker may answer and then end, and the answer counts.
        ended = [rank for rank in self._waiting if self._workers[rank].process.poll() is not None]
        answered = [waiting[ready] for ready in wait(list(waiting), 0 if ended else timeout)]
        return sorted({*ended, *answered})

    def _receive(self, rank: int) -> Outcome:
        worker = self._workers[rank]
        try:
            if not worker.connection.poll():
                raise EOFError  # ended, while a child of it still holds its pipe open
            value, error, detail = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            code = worker.process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Outcome(rank, error=f"died ({how})", detail=worker.printed(), died=True)
        return Outcome(rank, value, error, detail)

    def _give_up(self, rank: int) -> Outcome:
        """End a rank that does not answer, after it has printed where its threads are."""
        worker = self._workers[rank]
        worker.process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        worker.process.kill()
        worker.process.wait()
        return Outcome(rank, error="did not answer in time", detail=worker.printed(), died=True)


_pools: dict[int, Pool] = {}


def pool(world_size: int) -> Pool:
    """The warm pool of that many ranks, shared by the whole test session."""
    return _pools.setdefault(world_size, Pool(world_size))


def spawn_fresh(world_size: int, env: Mapping[str, str] | None = None) -> Pool:
    """A pool of its own for a test that breaks ranks; use it in a `with` statement.

    `start`, then `kill(rank)` (or let a rank `os._exit`), then `outcomes` for what the survivors
    answered. `env` is added to the workers' environment.
    """
    return Pool(world_size, env or {})


def close_pools() -> None:
    """End the warm pools."""
    for each in _pools.values():
        each.close()
    _pools.clear()


def _remove_shared_buffers(port: int) -> None:
    """DeepSpeed's shared-memory operator leaves 66 MiB a rank, named after the world's address."""
    for path in glob.glob(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{HOST}_{port}_*"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


# --- the workers' side ------------------------------------------------------------------------

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
    _freeze_imports()
    failed_reset: str | None = None
    while True:
        try:
            kind, *rest = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)
        if kind == "reset":
            try:
                _reset(environ)
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


def _reset(environ: dict[str, str]) -> None:
    """Put the process back to how it was before the run.

    Cheap when DeepSpeed, DTensor and Accelerate were never imported: only what is loaded is reset.
    """
    import torch
    import torch.distributed as dist

    while _undo:
        _undo.pop()()
    _reset_deepspeed()
    _reset_accelerate()
    gc.collect()  # engines are full of cycles and must not outlive the groups they use
    if dist.is_initialized():
        dist.destroy_process_group()
    _freeze_imports()
    _reset_torch_caches()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(ROOT)


def _freeze_imports() -> None:
    """Spare later collections the objects of what was imported meanwhile.

    Walking a framework's modules takes a tenth of a second, and a reset collects each time.
    """
    if len(sys.modules) > _here.get("modules", 0) + 100:
        _here["modules"] = len(sys.modules)
        gc.freeze()


def _reset_torch_caches() -> None:
    """Caches that compare device meshes without their groups: a stale entry fails or hangs."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _random, _redistribute, debug

        debug._clear_sharding_prop_cache()
        _redistribute.clear_redistribute_planner_cache()
        _random._rng_tracker = None
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and dynamo.counters["frames"]:
        sys.modules["torch._dynamo"].reset()


def _reset_deepspeed() -> None:
    """Globals of DeepSpeed that one engine leaves for the next."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.module_inject import layers
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.activation_checkpointing import checkpointing
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.runtime.zero import (
        parameter_offload,
        partition_parameters,
        partitioned_param_coordinator,
    )
    from deepspeed.utils import groups

    init = partition_parameters.Init
    init.param_id = init.num_persisted_parameters = init.num_persisted_elements = 0
    # Module numbers are kept in a mutable default argument.
    offload = parameter_offload.DeepSpeedZeRoOffload
    offload._register_deepspeed_module.__defaults__[0][0] = 0
    parameter_offload.FWD_MODULE_STACK.clear()  # it keeps the whole last engine alive
    # So does the cache of a method, whose keys are all coordinators that there were.
    coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
    wrapped = vars(coordinator)["_PartitionedParameterCoordinator__params_to_release"]
    for cell in wrapped.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()
    layers.DEEPSPEED_AUTOTP_MODE = layers.AUTOTP_MODE.INFERENCE
    init_utils._TP_MODEL_INIT_ARGS = None
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    p2p._groups = p2p._grid = None
    checkpointing.reset()
    checkpointing.mpu = checkpointing.mp_group = checkpointing.num_layers = None
    checkpointing.mp_rank, checkpointing.mp_size = 0, 1
    checkpointing.deepspeed_checkpointing_enabled = False
    groups._release_process_group_references()
    comm.cdb = None


def _reset_accelerate() -> None:
    """Accelerate's process-wide singletons, and the DeepSpeed config that transformers keeps."""
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        GradientState._reset_state()
        AcceleratorState._reset_state(True)
    if "transformers.integrations.deepspeed" in sys.modules:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
