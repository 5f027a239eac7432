"""Work shared out among forked processes: threads would wait for the interpreter's lock at every call.

A fork has all tables as they are, shares their memory, and starts at once. It only reads maps, computes with
numpy and writes files. A process that has torch loaded is not forked: its threads and devices would not
be there.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import sys
import time
import warnings
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_all_start_methods, get_context
from typing import TYPE_CHECKING, Any, TypeVar

from dynadapt.transport.progress import TELL, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from multiprocessing.process import BaseProcess

    from dynadapt.transport.progress import Progress
    from dynadapt.transport.watch import Watch

__all__ = ["ForkLost", "Forks", "may_fork"]

T = TypeVar("T")
_PDEATHSIG = 1
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
_POLL = 0.01
"""Seconds between looks at what was told."""


class ForkLost(Exception):
    """A process that worked for this one was killed, or could not be made."""


def may_fork() -> bool:
    """Whether this process may be forked for some work: on Linux, without torch, and not at its limit."""
    known = sys.platform == "linux" and "fork" in get_all_start_methods()
    if not known or "torch" in sys.modules:
        return False
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        return False  # nobody can wait for the end of a fork then
    try:
        get_context("fork").Lock()  # there may be no /dev/shm
        with _quiet():
            pid = os.fork()
            if not pid:
                os._exit(0)
        os.waitpid(pid, 0)
    except OSError:  # or who waits for all children has waited for this one
        return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Forks can be made: no interrupt falls into one that would take itself for its parent.

    Nor is there the warning of newer Pythons that a fork has not the threads of its parent: it needs none.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Context(type(get_context("fork"))):  # type: ignore[misc]  # typeshed knows it by platform
    """Makes forks that are killed where a pool would end them: they ignore to be asked."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[BaseProcess] = []

    def Process(self, *args: Any, **named: Any) -> BaseProcess:  # what a pool calls
        made: BaseProcess = super().Process(*args, **named)
        made.terminate = made.kill  # type: ignore[method-assign]
        self.made.append(made)
        return made

    def kill(self) -> None:
        """End all that could be made."""
        for fork in self.made:
            if fork.pid is not None:
                fork.kill()


class Forks:
    """Processes that do some work and tell this one's `Watch` how far they are, by the same calls.

    For one `run`, or one `begun`.
    """

    def __init__(self) -> None:
        self._context = _Context()
        self._hears, self._tells = self._context.Pipe(duplex=False)
        self._turn, self._taking = self._context.Lock(), self._context.Lock()
        self._flag = mmap.mmap(-1, 1)  # shared by all forks
        self._next = memoryview(mmap.mmap(-1, 8)).cast("Q")  # likewise
        self._untold: list[tuple[Any, ...]] = []

    def _hear(self) -> Iterator[Any]:
        """What was told since; no more from forks that were killed in the middle of a word."""
        with suppress(EOFError, OSError):
            while self._hears.poll():
                yield self._hears.recv()

    def bytes(self, count: int) -> None:
        """See `Watch`; so the others. What a fork tells is sent together, of some MB at a time."""
        self._untold.append(("bytes", count))
        if count >= TELL:
            self._send()

    def mark(self, name: str, progress: Progress) -> None:
        """See `Watch`."""
        self._untold.append(("mark", name, progress))

    def early(self, path: str, start: int, nbytes: int) -> None:
        """See `Watch`."""
        self._untold.append(("early", path, start, nbytes))

    def kept(self, count: int) -> None:
        """See `Watch`."""
        self._untold.append(("kept", count))

    def _send(self) -> None:
        if self._untold:
            with self._turn:
                self._tells.send(self._untold)
            self._untold.clear()

    def is_set(self) -> bool:
        """Whether to stop."""
        return self._flag[0] != 0

    def run(
        self, task: Callable[[Any], T], items: Sequence[Any], workers: int, watch: Watch
    ) -> list[T]:
        """What `task` gives for each item, in order, by so many forks; `watch` hears what they tell.

        Raises what a task raises, the first of them, when all that were begun have ended; and `ForkLost`.
        """

        def listen() -> None:
            for every in self._hear():
                for what, *told in every:
                    getattr(watch, what)(*told)
            if watch.is_set():
                self._flag[0] = 1

        def told(item: Any) -> T:
            try:
                return task(item)
            finally:
                self._send()

        with self._made(told, items, workers) as asked:
            try:
                self._tells.close()  # the forks have theirs: when all of them have gone, that is told
                left = set(asked)
                while left:
                    done, left = wait(left, _POLL, FIRST_EXCEPTION)
                    listen()
                    for each in done:
                        each.result()
                return _in_order(asked, len(items))
            except BaseException:
                self._end(asked)
                raise

    def _end(self, asked: Sequence[Future[Any]]) -> None:
        """Tell all to stop, and hear them out: who tells what nobody hears waits in the pipe."""
        self._flag[0] = 1
        try:
            while not all(each.done() for each in asked):
                for _ in self._hear():
                    pass
                time.sleep(_POLL)
        except BaseException:  # interrupted once more
            self._context.kill()
            raise

    @contextmanager
    def begun(
        self, task: Callable[[Any], T], items: Sequence[Any], workers: int
    ) -> Iterator[Callable[[], list[T]]]:
        """The same under way, of tasks that tell nothing, and what to call for the answers.

        Those under way are awaited; may raise `ForkLost`.
        """
        with self._made(task, items, workers) as asked:
            yield lambda: _in_order(asked, len(items))

    @contextmanager
    def _made(
        self, task: Callable[[Any], T], items: Sequence[Any], workers: int
    ) -> Iterator[list[Future[list[tuple[int, T]]]]]:
        """Forks at work, each of which takes the next item when it has done one.

        All are made before it returns: what this process does then, they know nothing of.
        """

        def work() -> list[tuple[int, T]]:
            return [(at, task(items[at])) for at in self._taken(len(items))]

        count = max(min(workers, len(items)), 1)
        begin = (work, os.getpid())
        with ProcessPoolExecutor(count, self._context, _begin, begin) as pool:
            try:
                try:
                    with _quiet():
                        asked = [pool.submit(_do) for _ in range(count)]
                except OSError as error:  # not all of them could be made
                    self._context.kill()
                    raise ForkLost from error
                yield asked
            except BrokenProcessPool as error:
                raise ForkLost from error
            except BaseException:
                self._flag[0] = 1
                raise
            finally:
                pool.shutdown(cancel_futures=True)

    def _taken(self, count: int) -> Iterator[int]:
        """In a fork: numbers that no other one has, until there are no more, or all shall stop."""
        while not self.is_set():
            with self._taking:
                at = self._next[0]
                self._next[0] = at + 1
            if at >= count:
                return
            yield at


def _in_order(asked: Sequence[Future[list[tuple[int, T]]]], count: int) -> list[T]:
    """All answers, by the number of what was asked; raises what a task raised, and `Stopped`."""
    found = dict(answer for each in asked for answer in each.result())
    if len(found) < count:
        raise Stopped("not all was begun")
    return [found[at] for at in range(count)]


_work: Callable[[], list[tuple[int, Any]]]


def _begin(work: Callable[[], list[tuple[int, Any]]], parent: int) -> None:
    """In a fork: an interrupt is the parent's to answer, and without the parent there is no work."""
    global _work
    _work = work
    gc.freeze()  # a collection would walk all that is the parent's, and so copy its pages
    for each in _INTERRUPTS:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _do() -> list[tuple[int, Any]]:
    return _work()
