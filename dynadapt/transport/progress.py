"""How far a buffer of a file is filled."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dynadapt.transport.source_sums import Taken

__all__ = ["TELL", "Progress", "Stopped"]

TELL = 16 << 20
"""Bytes written after which it is told, for who watches."""


class Stopped(Exception):
    """Somebody wanted it to end before it was done."""


class Progress(NamedTuple):  # of which forks tell many
    """How far a buffer is filled: its first `done` bytes, which are its first rows, in order.

    `sums` are those rows' in the target's dtype, `crc` the check sum of the bytes, `read` the source's.
    `taken` is what of the source was read in one piece each, as far as this process knows.
    """

    sums: tuple[int, ...] = ()
    done: int = 0
    crc: int = 0
    read: int = 0
    taken: tuple[Taken, ...] = ()
