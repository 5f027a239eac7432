"""The parent's side of a pool of ranks: start workers, send them calls, collect what they answer."""

from __future__ import annotations

import contextlib
import glob
import os
import pickle
import signal
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, TYPE_CHECKING, Any

from dynadapt.demo.extensions import environment
from tests._forks import fork, warm_up
from tests._worker import GROUP_TIMEOUT, HOST, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch.distributed import Store

    from tests._forks import Fork

__all__ = ["Outcome", "Pool", "RanksFailedError"]

OUTPUT_LINES = 40

CROWD = 100
"""Threads of a rank: each group of gloo's has three, which wake a hundred times a second."""


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


@dataclass(slots=True)
class _Worker:
    """One rank's process, its pipe, and what it printed."""

    process: Fork
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
        if any(map(_is_crowded, self.pids)):
            self.close()
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
        for rank in range(self.world_size):  # all at once: each imports for seconds
            warm_up(rank, self._environment(rank), str(ROOT))
        self._workers = [self._start_worker(rank) for rank in range(self.world_size)]

    def _start_worker(self, rank: int) -> _Worker:
        ours, theirs = Pipe()
        life_end, lifeline = os.pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _Worker.end)
        process = fork(
            rank,
            ("tests._worker", "work", (rank, self.world_size, self._master.port)),
            env=self._environment(rank),
            folder=str(ROOT),
            fds=(output.fileno(), theirs.fileno(), life_end),
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
        return env

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


def _is_crowded(pid: int) -> bool:
    """Whether a rank has kept so many groups that a new process is cheaper."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > CROWD
    except OSError:  # it has ended
        return False


def _remove_shared_buffers(port: int) -> None:
    """DeepSpeed's shared-memory operator leaves 66 MiB a rank, named after the world's address."""
    for path in glob.glob(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{HOST}_{port}_*"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
