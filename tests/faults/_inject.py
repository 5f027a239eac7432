"""How a fault is done, for real, to the process it runs in.

Nothing of the migration is replaced. What it uses (its adapters, its store, its channel) is wrapped, so
that calls can be counted, and at the chosen one the process raises, sleeps, is stopped or dies.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dynadapt.elastic import before, parked, release
from dynadapt.elastic.worlds import current_session
from dynadapt.protocols import Vote
from dynadapt.registry import adapter_for
from dynadapt.transport import certify, control, executor
from tests import _ranks
from tests.faults._fault import LATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dynadapt.elastic.worlds import Session
    from tests.faults._fault import Fault

__all__ = ["BoomError", "Injector"]

SLACK, BLOCK = 1 << 20, 256 << 10
"""When memory is to run out: bytes that a process may still take, and the largest block it finds."""


class BoomError(Exception):
    """What a rank raises on purpose."""


class Injector:
    """Does one fault once, if `rank` is the one it is meant for. All ranks make one."""

    def __init__(self, fault: Fault, rank: int, source: Any, target: Any) -> None:
        self.fault, self._source, self._target = fault, source, target
        self._armed = rank == fault.rank or fault.call == "decide"
        self._phase = ""
        self._calls = 0
        self.undo: list[Callable[[], None]] = []

    def on_phase(self, name: str) -> None:
        """For `migrate(on_phase=)`."""
        self._phase = name
        if not self._armed or name != self.fault.phase:
            return
        if not self.fault.call or self.fault.kind == "flip":
            self._strike()

    def called(self, call: str) -> None:
        """A call of what the migration uses begins or, with ", done" behind its name, has ended."""
        fault = self.fault
        if not self._armed or (self._phase, call) != (fault.phase, fault.call):
            return
        if call.startswith("store.") and threading.current_thread() is not threading.main_thread():
            return  # the heartbeat
        self._calls += 1
        if self._calls == fault.nth and self._chosen():
            self._strike()

    def _chosen(self) -> bool:
        """Where the rank is not known before (the one that decides a vote), the first is it."""
        if self.fault.call != "decide":
            return True
        mine = str(os.getpid())
        return _ranks.store().compare_set("victim", "", mine) == mine.encode()

    def _strike(self) -> None:
        self._armed = False
        getattr(self, f"_{self.fault.kind}")()

    def _raise(self) -> None:
        raise BoomError(f"on purpose: {self.fault}")

    def _delay(self) -> None:
        time.sleep(LATE)

    def _stop(self) -> None:
        """All threads of the process stand still for a while."""
        subprocess.Popen(["/bin/sh", "-c", f"sleep {LATE}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _memory(self) -> None:
        """Allow no more address space than there is, and take what `malloc` has left in large blocks."""
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + SLACK, before[1]))
        blocks: list[torch.Tensor] = []
        with contextlib.suppress(RuntimeError):
            while True:
                blocks.append(torch.empty(BLOCK, dtype=torch.uint8))
        blocks.pop()  # for what is small

        def undo() -> None:
            resource.setrlimit(resource.RLIMIT_AS, before)
            blocks.clear()

        self.undo.append(undo)

    def _flip(self) -> None:
        """Change one bit of the largest master that this rank holds of the target, or of the source."""
        of_source = self.fault.call == "source"
        state = self._source if of_source else self._target
        own = adapter_for(state).describe(state)
        held = {row.buffer for row in own.rows if row.key.slot == "param"}
        largest = max((own.buffers[name] for name in held), key=lambda buffer: buffer.numel)
        flat = largest.tensor().detach().view(torch.uint8)

        def flip() -> None:
            flat[flat.numel() // 3] ^= 4

        flip()
        if of_source:
            self.undo.append(flip)

    def session(self) -> Session:
        """The session of this process, its channel watched."""
        session = current_session()

        def channel(number: int, device: str, timeout: float) -> Any:
            self.called("channel.open")
            opened = session.channel(number, device, timeout)
            self.called("channel.open, done")
            return _Channel(opened, self)

        return replace(session, channel=channel)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what a migration uses until the end of the block; then undo what is left of the fault."""
        changed = (
            (before, "adapter_for", lambda true: lambda x: _Adapter(true(x), self)),
            (control.Control, "__init__", self._watch_store),
            (control.Control, "vote", self._watch_vote),
            (control.Control, "again", self._with_bare_store),
            (executor._Run, "_copy", lambda true: self._before("copy", true)),
            (certify, "hash_of", lambda true: self._before("hash", true)),
            (parked._HostCopy, "__init__", lambda true: self._before("park", true)),
            (release.Release, "free", lambda true: self._around("free", true)),
        )
        saved = [(holder, name, getattr(holder, name)) for holder, name, _ in changed]
        for (holder, name, wrap), (_, _, true) in zip(changed, saved, strict=True):
            setattr(holder, name, wrap(true))
        try:
            yield
        finally:
            for holder, name, true in saved:
                setattr(holder, name, true)
            while self.undo:
                self.undo.pop()()

    def _before(self, call: str, true: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.called(call)
            return true(*args, **kwargs)

        return watched

    def _around(self, call: str, true: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.called(call)
            found = true(*args, **kwargs)
            self.called(f"{call}, done")
            return found

        return watched

    def _watch_store(self, true: Callable[..., None]) -> Callable[..., None]:
        def init(own: Any, store: Any, *args: Any, **kwargs: Any) -> None:
            true(own, _Store(store, self), *args, **kwargs)

        return init

    def _with_bare_store(self, true: Callable[..., Any]) -> Callable[..., Any]:
        """torch takes no store of another class; the control that is made watches its own again."""

        def again(own: Any, name: str) -> Any:
            watched = own._store
            own._store = watched._true
            try:
                return true(own, name)
            finally:
                own._store = watched

        return again

    def _watch_vote(self, true: Callable[..., None]) -> Callable[..., None]:
        def vote(own: Any, *args: Any, **kwargs: Any) -> None:
            true(own, *args, **kwargs)
            self.called("voted")

        return vote


class _Wrapped:
    def __init__(self, true: Any, injector: Injector) -> None:
        self._true, self._injector = true, injector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._true, name)


class _Store(_Wrapped):
    """A store that tells of its calls."""

    def __getattr__(self, name: str) -> Any:
        self._injector.called(f"store.{name}")
        if name == "compare_set":
            self._injector.called("decide")
        return getattr(self._true, name)


class _Channel(_Wrapped):
    def post(self, receives: Any, sends: Any) -> _Posted:
        self._injector.called("channel.post")
        posted = self._true.post(receives, sends)
        self._injector.called("channel.post, done")
        return _Posted(posted, self._injector)


class _Posted(_Wrapped):
    def wait(self, timeout: float) -> None:
        self._injector.called("posted.wait")
        self._true.wait(timeout)
        self._injector.called("posted.wait, done")


class _Adapter(_Wrapped):
    """An adapter that tells of its calls, and of the vote inside two of them."""

    def quiesce(self, x: Any, agree: Callable[[], None]) -> None:
        self._watched("quiesce", x, agree)

    def describe(self, x: Any) -> Any:
        return self._watched("describe", x)

    def prepare(self, x: Any, keys: Any) -> Any:
        return self._watched("prepare", x, keys)

    def finish(self, x: Any, keys: Any, scalars: Any, aux: Any, agree: Callable[[], None]) -> Any:
        return self._watched("finish", x, keys, scalars, aux, agree)

    def _watched(self, name: str, *args: Any) -> Any:
        def agreed(agree: Callable[[], None]) -> Callable[[], None]:
            def both() -> None:
                agree()
                self._injector.called(f"adapter.{name}, agreed")

            return Vote(both, agree.watching) if isinstance(agree, Vote) else both

        *first, last = args
        self._injector.called(f"adapter.{name}")
        found = getattr(self._true, name)(*first, agreed(last) if callable(last) else last)
        self._injector.called(f"adapter.{name}, done")
        return found
