"""Who hears how far those are that fill buffers, and says when to stop."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock
from typing import TYPE_CHECKING, Protocol

from dynadapt.files import start_writing

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynadapt.transport.progress import Progress

__all__ = ["Heard", "Watch"]


class Heard(Protocol):
    """What a writer tells, in this process or from another."""

    def bytes(self, count: int) -> None:
        """So many were written."""

    def mark(self, name: str, progress: Progress) -> None:
        """A buffer is so far."""

    def early(self, path: str, start: int, nbytes: int) -> None:
        """The disk may begin with some bytes of a file."""

    def kept(self, count: int) -> None:
        """So many had been written before."""

    def is_set(self) -> bool:
        """Whether to stop."""


class Watch:
    """Hears several threads, and passes on what they tell; a thread of its own lets the disk begin.

    `on_bytes` and `on_mark` are called from several threads.
    """

    def __init__(
        self,
        on_bytes: Callable[[int], None] | None = None,
        on_mark: Callable[[str, Progress], None] | None = None,
        stop: Event | None = None,
    ) -> None:
        self._on_bytes, self._on_mark = on_bytes, on_mark
        self._stop, self._lock = stop or Event(), Lock()
        self._disk = ThreadPoolExecutor(1)
        self.before = 0

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._disk.shutdown(wait=False)

    def bytes(self, count: int) -> None:
        """So many were written."""
        if self._on_bytes is not None:
            self._on_bytes(count)

    def mark(self, name: str, progress: Progress) -> None:
        """A buffer is so far."""
        if self._on_mark is not None:
            self._on_mark(name, progress)

    def early(self, path: str, start: int, nbytes: int) -> None:
        """The disk may begin with some bytes of a file; whoever says so does not wait for it."""
        self._disk.submit(start_writing, path, start, nbytes)

    def kept(self, count: int) -> None:
        """So many had been written before."""
        with self._lock:
            self.before += count
        self.bytes(count)

    def stop(self) -> None:
        """All shall end."""
        self._stop.set()

    def is_set(self) -> bool:
        """Whether to stop."""
        return self._stop.is_set()
