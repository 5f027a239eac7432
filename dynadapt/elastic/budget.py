"""What a conversion may take of this process's memory: how many threads that is, and how large pieces."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from dynadapt.elastic.sizes import size_of
from dynadapt.errors import Finding, Refused
from dynadapt.transport.forks import may_fork
from dynadapt.transport.sources import PIECE

__all__ = ["FORK_BYTES", "Budget", "Effort", "anonymous_bytes", "thread_bytes"]

FORK = 128 << 20
"""Bytes from which on forked processes are worth it."""

FORK_BYTES = 10 << 20
"""What a forked process changes of the tables that it has from its parent, beside what a thread takes."""

SMALLEST = 64 << 10
"""Bytes of a piece below which more pieces would only be slower."""

_WORTH = 256 << 10
"""Bytes of a piece above which a further thread is worth more than larger pieces."""

_FIXED = 3 << 20
_SHARE = 4


def anonymous_bytes() -> int | None:
    """Resident bytes of this process that are no file's; None where the kernel does not say."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        return None
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


def thread_bytes(piece: int) -> int:
    """The most that a thread takes for pieces of so many bytes.

    A block of widened words, its products and weights, whatever the piece; and the piece put together, and
    the casts of a quarter of one.
    """
    return _FIXED + _SHARE * piece


@dataclass(frozen=True, slots=True)
class Effort:
    """How many threads read and write, and how many bytes each takes at a time."""

    threads: int
    piece: int = PIECE


@dataclass(frozen=True, slots=True)
class Budget:
    """At most `most` bytes of anonymous memory over the `held` ones that the process had at the start."""

    most: int | None = None
    held: int = 0

    @classmethod
    def of(cls, said: int | str | None) -> Budget:
        """What there is to spend from now on; None is no limit. Raises `Refused` (`bad-argument`)."""
        most = None if said is None else size_of(said)
        return cls(most, (anonymous_bytes() or 0) if most is not None else 0)

    def forks(self, nbytes: int) -> bool:
        """Whether forked processes shall work on so many bytes."""
        return self.most is None and nbytes >= FORK and may_fork()

    def effort(self, threads: int, *, again: bool = True) -> Effort:
        """As many of the threads as fit beside the tables that are there by now, with the largest pieces.

        `again`: the tables will be needed once more, to read back what was written. Raises `Refused`
        (`max-memory`) if not even one thread fits.
        """
        if self.most is None:
            return Effort(threads)
        tables = max((anonymous_bytes() or 0) - self.held, 0) * (2 if again else 1)
        room = self.most - tables
        least = thread_bytes(SMALLEST)
        if room < least:
            cause = f"the tables take {tables:,} bytes, and a thread at least {least:,}"
            fix = f"allow at least {(tables + least) * 5 // 4:,} bytes"
            raise Refused([Finding("max-memory", f"{self.most:,} bytes", cause, fix)])
        threads = max(min(threads, room // thread_bytes(_WORTH)), 1)
        piece = min((room // threads - _FIXED) // _SHARE, PIECE)
        return Effort(threads, piece // SMALLEST * SMALLEST)
