"""Stretches of files as buffers: what rows of a file endpoint point into, read without any framework."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from isal.isal_zlib import crc32

from dynadapt.errors import Finding, Refused
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

__all__ = [
    "FileBuffer",
    "check_sum",
    "forget",
    "mapped",
    "raw_dtype",
    "start_writing",
    "to_disk",
    "unwritable",
    "write_at",
]

_PIECE = 1 << 20

MAPS = 128
"""Files kept mapped: each costs a descriptor, of which a process often has 1,024, and no memory."""

#: Floats that numpy lacks, as the unsigned integer of their size.
_RAW = {
    "bfloat16": "u2",
    "float8_e4m3fn": "u1",
    "float8_e4m3fnuz": "u1",
    "float8_e5m2": "u1",
    "float8_e5m2fnuz": "u1",
    "float8_e8m0fnu": "u1",
}


def raw_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype, little-endian, that holds a dtype's bits.

    >>> raw_dtype("bfloat16") == np.uint16, raw_dtype("float32") == np.float32
    (True, True)
    """
    found: np.dtype[Any] = np.dtype(_RAW.get(dtype, dtype)).newbyteorder("<")
    return found


_maps: OrderedDict[tuple[str, int, int, int], mmap.mmap] = OrderedDict()
_lock = Lock()
# A fork has this lock as it is: it must not be another thread's that the fork has not.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


def mapped(path: str) -> memoryview:
    """A whole file, mapped read-only; raises `Refused` (`unreadable-file`).

    A file that was replaced or has grown is mapped anew.
    """
    try:
        with open(path, "rb") as file:
            told = os.fstat(file.fileno())
            if not told.st_size:
                return memoryview(b"")
            at = (path, told.st_ino, told.st_size, told.st_mtime_ns)
            with _lock:
                found = _maps.get(at)
                if found is None:
                    found = _maps[at] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    while len(_maps) > MAPS:
                        _maps.popitem(last=False)  # closed when its last view is gone
                _maps.move_to_end(at)
                return memoryview(found)
    except (OSError, ValueError) as error:  # a name may have a zero byte
        cause = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise Refused([Finding("unreadable-file", path, cause)]) from error


_libc = ctypes.CDLL(None, use_errno=True)
_sync_file_range = getattr(_libc, "sync_file_range", None)  # Linux has it
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_START_WRITING, _WAIT_FOR_ALL = 2, 7


def start_writing(path: str, start: int, nbytes: int) -> None:
    """Let the disk begin with some bytes of a file: left to itself it begins when all else is done.

    Only a hint, which promises nothing. It waits while the disk has enough to do.
    """
    if _sync_file_range is None:
        return
    with suppress(OSError), open(path, "rb+", buffering=0) as file:  # it may be gone by now
        _sync_file_range(file.fileno(), start, nbytes, _START_WRITING)


def write_at(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write all of some bytes at a place of a file; raises `OSError`."""
    data = memoryview(data)
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done


def check_sum(data: memoryview, look: Callable[[], None] | None = None) -> int:
    """The CRC-32 of bytes of a map, read piece by piece; `look` is called before each, and may raise."""
    array, crc = np.frombuffer(data, np.uint8), 0
    for at in range(0, array.size, _PIECE):
        if look is not None:
            look()
        part = array[at : at + _PIECE]
        crc = crc32(part, crc)
    return crc


def to_disk(folder: str | os.PathLike[str]) -> None:
    """Wait until all that was written in a folder is on the disk; raises `OSError` if some of it cannot be.

    One `sync` for all files is much faster than one for each, and tells no errors: those are asked for then.
    """
    os.sync()
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            fd = os.open(path, os.O_RDONLY)
            try:
                failed = _failed(fd)
            finally:
                os.close(fd)
            if failed:
                raise OSError(failed, os.strerror(failed), path)


def _failed(fd: int) -> int:
    """The number of an error that came up as the disk wrote a file, or 0.

    An `fsync` would tell it too, and empty the disk's own cache for each file once more.
    """
    if _sync_file_range is None:
        os.fsync(fd)
        return 0
    done = _sync_file_range(fd, 0, 0, _WAIT_FOR_ALL)
    error = ctypes.get_errno() if done else 0
    return 0 if error in {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ESPIPE} else error


def forget(folder: str | os.PathLike[str]) -> None:
    """Keep no file of a folder mapped: a map keeps the room of a removed file taken."""
    inside = os.path.join(os.fspath(folder), "")
    with _lock:
        for at in [at for at in _maps if at[0].startswith(inside)]:
            del _maps[at]


def unwritable(path: str | os.PathLike[str], error: OSError) -> Finding:
    """What an error says that came up as a file was made or written."""
    full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    reason = "disk-full" if full else "unwritable-file"
    cause = f"cannot be written: {error.strerror or error}"
    fix = "free some space, or write elsewhere" if full else ""
    return Finding(reason, os.fspath(path), cause, fix)


@dataclass(frozen=True, slots=True)
class FileBuffer:
    """`numel` elements of `dtype` that start `offset` bytes into a file.

    `crc` is the CRC-32 of their bytes that the file itself has beside them; 0 if it has none.

    >>> import tempfile, pathlib
    >>> at = pathlib.Path(tempfile.mkdtemp()) / "x"
    >>> _ = at.write_bytes(bytes(4) + np.arange(3, dtype="<f4").tobytes())
    >>> FileBuffer(str(at), "float32", 4, 3).array()
    array([0., 1., 2.], dtype=float32)
    """

    path: str
    dtype: str
    offset: int
    numel: int
    crc: int = 0

    @property
    def device(self) -> str:
        """Files are read by the host."""
        return "cpu"

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self.numel * itemsize(self.dtype)

    def array(self) -> NDArray[Any]:
        """The elements, 1-D, read-only, in `raw_dtype`; raises `Refused` (`truncated-file`)."""
        return np.frombuffer(self.bytes(), raw_dtype(self.dtype))

    def bytes(self) -> memoryview:
        """Its bytes in the file's map, read-only; raises `Refused` (`truncated-file`)."""
        data = mapped(self.path)
        if self.offset < 0 or self.offset + self.nbytes > len(data):
            cause = (
                f"ends at byte {len(data):,}, and bytes {self.offset:,} to "
                f"{self.offset + self.nbytes:,} are declared"
            )
            fix = "copy it again, or leave this checkpoint out"
            raise Refused([Finding("truncated-file", self.path, cause, fix)])
        return data[self.offset : self.offset + self.nbytes]

    def tensor(self) -> torch.Tensor:
        """The same as a 1-D torch tensor, to be read only: it lies over the file's map."""
        import warnings

        import torch

        kind = getattr(torch, self.dtype)
        if not self.numel:
            return torch.empty(0, dtype=kind)
        raw = self.array().view(f"u{min(itemsize(self.dtype), 8)}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # not writable: it is a map
            return torch.from_numpy(raw).view(kind)

    def free(self) -> None:
        """Nothing is held."""

    def refill(self) -> None:
        """Nothing was freed."""
