"""Reading another process's memory on the same host: one copy, where a connection makes several.

Linux's `process_vm_readv` (man 2 process_vm_readv) needs no memory set aside; whether it is allowed is
found out by reading a nonce, which also proves that the process is the one that is meant.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import socket
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["CARD", "OFF", "Nonce", "can_read", "read_memory"]

OFF = "DYNADAPT_SAME_HOST"
"""Set to 0 in a process's environment, no seat reads its memory, nor does it read another's."""

CARD = 48
"""Bytes of a card: its host, its process, where its nonce lies, and the nonce."""

_VECTORS = 1024
"""Most stretches of one call (`UIO_MAXIOV`)."""


class Nonce:
    """16 bytes in this process's memory for others to read, which stay there as long as this object."""

    def __init__(self) -> None:
        self._bytes = np.frombuffer(secrets.token_bytes(16), np.uint8).copy()

    def card(self) -> bytes:
        """What a peer has to know to find them; all zeros where this process is not to be read.

        >>> len(Nonce().card()) == CARD
        True
        """
        if os.environ.get(OFF) == "0" or _call() is None:
            return bytes(CARD)
        place = np.array([os.getpid(), self._bytes.ctypes.data], np.int64)
        card: bytes = _host() + place.tobytes() + self._bytes.tobytes()
        return card


def can_read(card: bytes) -> int:
    """The number of the process that wrote a card, if its memory can be read from here; else 0."""
    if os.environ.get(OFF) == "0" or _call() is None or card[:16] != _host():
        return 0
    process, address = (int(n) for n in np.frombuffer(card[16:32], np.int64))
    found = np.zeros(16, np.uint8)
    try:
        read_memory(
            process,
            np.array([[address, 16]], np.int64),
            np.array([[found.ctypes.data, 16]], np.int64),
        )
    except OSError:
        return 0
    return process if found.tobytes() == card[32:48] else 0


def read_memory(process: int, there: NDArray[np.int64], here: NDArray[np.int64]) -> None:
    """Copy stretches of another process's memory into this one's; both are (n, 2): address, bytes.

    The i-th stretch goes to the i-th; empty ones are allowed. Raises `OSError`: the process is gone, or
    its memory is.
    """
    call = _call()
    if call is None:
        raise OSError("this system has no process_vm_readv")
    there, here = there[there[:, 1] > 0].copy(), here[here[:, 1] > 0].copy()
    at = 0
    while at < len(there):
        count = min(len(there) - at, _VECTORS)
        done = call(process, here[at:].ctypes.data, count, there[at:].ctypes.data, count, 0)
        if done <= 0:
            number = ctypes.get_errno() if done < 0 else 0
            raise OSError(number, os.strerror(number) if number else "nothing could be read")
        while at < len(there) and done >= there[at, 1]:
            done -= int(there[at, 1])
            at += 1
        if done:  # it stopped within a stretch
            for rest in (there, here):
                rest[at] += (done, -done)


@lru_cache(maxsize=1)
def _call() -> Any:
    """The C library's function, or None."""
    try:
        found = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError, TypeError):  # no Linux, or a C library without it
        return None
    word = ctypes.c_ulong
    found.argtypes = (ctypes.c_int, ctypes.c_void_p, word, ctypes.c_void_p, word, word)
    found.restype = ctypes.c_ssize_t
    return found if ctypes.sizeof(ctypes.c_void_p) == 8 else None


@lru_cache(maxsize=1)
def _host() -> bytes:
    """16 bytes that the processes of one host have in common which know each other by number."""
    told: Sequence[str] = ()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        told = (socket.gethostname(), boot, str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        told = (secrets.token_hex(),)  # like no other's
    return hashlib.sha256("\0".join(told).encode()).digest()[:16]
