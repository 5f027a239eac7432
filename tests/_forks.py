"""Processes forked from interpreters that have imported the frameworks already.

Importing torch and DeepSpeed takes a rank seconds, and tests that kill ranks need new ones each time.
So there is one warmed-up interpreter a rank, which has made no group and no thread, and every process of
that rank is a fork of it. One for each rank, not one for all: ranks must not share the seed of Python's
hashes, or code that walks a set in another order on every rank would never be noticed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Fork", "end_parents", "fork", "warm_up"]

#: What nearly all ranks import. Nothing here may start a thread.
WARM = (
    "deepspeed",
    "dynadapt.elastic.migration",
    "tests._worker",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)


class Fork:
    """One forked process, with what of `subprocess.Popen` a pool asks for.

    Its parent is the warmed-up interpreter, which writes how it ended into a pipe.
    """

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self._ended = ended
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code as `Popen` counts it, None while the process runs."""
        if self._code is None and select.select([self._ended], [], [], 0)[0]:
            return self.wait()
        return self._code

    def wait(self) -> int:
        """Block until the process has ended; its exit code."""
        if self._code is None:
            told = os.read(self._ended, 8)
            os.close(self._ended)
            # nothing told: the interpreter it was forked from is gone, and it with it
            self._code = int.from_bytes(told, "little", signed=True) if told else -signal.SIGKILL
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class _Parent:
    """This process's end of the warmed-up interpreter of one rank."""

    def __init__(self, env: Mapping[str, str], folder: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from tests._forks import serve; serve({theirs.fileno()})"],
            cwd=folder,
            env=dict(env),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt from the keyboard is the parent's to handle
        )
        theirs.close()

    def fork(
        self, call: tuple[str, str, tuple[Any, ...]], env: Mapping[str, str], fds: Sequence[int]
    ) -> Fork:
        ended, tell = os.pipe()
        message = pickle.dumps((call, dict(env)))
        socket.send_fds(self._socket, [message], [tell, *fds])
        os.close(tell)
        answer = self._socket.recv(64)
        if not answer:
            self._process.wait()
            self._output.seek(0)
            raise RuntimeError(f"cannot fork: {self._output.read().decode(errors='replace')}")
        return Fork(int(answer), ended)

    def end(self) -> None:
        self._socket.close()
        self._process.wait()
        self._output.close()


_parents: dict[int, _Parent] = {}
_lock = threading.Lock()


def warm_up(rank: int, env: Mapping[str, str], folder: str) -> None:
    """Start the interpreter of a rank, if there is none, and do not wait for it."""
    with _lock:
        if rank not in _parents:
            _parents[rank] = _Parent(env, folder)


def fork(
    rank: int,
    call: tuple[str, str, tuple[Any, ...]],
    *,
    env: Mapping[str, str],
    folder: str,
    fds: Sequence[int],
) -> Fork:
    """A new process of a rank that calls `module.function(*fds, *args)` with `call` of these three.

    `fds` are file descriptors of this process: the first becomes its output, the others, by their
    numbers in the new process, its function's first arguments. `env` is its whole environment; what
    modules read when imported has to be equal for all processes of a rank.
    """
    warm_up(rank, env, folder)
    with _lock:
        return _parents[rank].fork(call, env, fds)


def end_parents() -> None:
    """End the warmed-up interpreters; processes forked from them live on."""
    with _lock:
        for parent in _parents.values():
            parent.end()
        _parents.clear()


# --- in the warmed-up interpreter -----------------------------------------------------------------


def serve(number: int) -> NoReturn:
    """Fork when asked, say how forks ended, leave when the other end is closed."""
    import importlib

    for name in WARM:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads would be lost in a fork"
    gc.collect()
    gc.freeze()
    asked = socket.socket(fileno=number)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    while True:
        ready = select.select([asked, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _tell_ended(running)
        if asked in ready:
            message, fds, _, _ = socket.recv_fds(asked, 1 << 20, 16)
            if not message:
                os._exit(0)
            tell, *given = fds
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (woken, wake, number, tell, *running.values()):
                    os.close(fd)
                asked.detach()
                _become(message, given)
            running[pid] = tell
            for fd in given:
                os.close(fd)
            asked.send(str(pid).encode())


def _tell_ended(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        tell = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(BrokenPipeError):
            os.write(tell, code.to_bytes(8, "little", signed=True))
        os.close(tell)


def _become(message: bytes, fds: list[int]) -> NoReturn:
    """The life of a fork."""
    import importlib

    output, *more = fds
    os.setsid()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    (module, name, args), env = pickle.loads(message)
    os.environ.clear()
    os.environ.update(env)
    try:
        getattr(importlib.import_module(module), name)(*more, *args)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
