"""`torch.save` files, read without torch: the pickled tree, and where each storage's bytes lie.

The format is a zip whose entries are stored, not compressed: `NAME/data.pkl`, `NAME/data/0`, ... (see
`torch.serialization`). A distributed checkpoint puts many such zips into one file, one after another.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._pickle import StoredTensor, read_pickle
from dynadapt.errors import Finding, Refused
from dynadapt.files import FileBuffer, mapped
from dynadapt.vps.keys import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TorchFile", "read_torch"]

_LOCAL = struct.Struct("<4s22xHH")
"""A local header: its mark, and the lengths of the name and of the extra field that follow it."""


@dataclass(frozen=True)
class TorchFile:
    """The tree of one file, with a `StoredTensor` for each tensor, and its storages' places."""

    path: str
    tree: Any
    storages: Mapping[str, tuple[int, int]]

    def buffer(self, tensor: StoredTensor) -> FileBuffer:
        """The storage behind a tensor, seen in the tensor's dtype; raises `Refused`."""
        found = self.storages.get(tensor.storage.name)
        size = ITEMSIZE.get(tensor.dtype)
        if found is None or size is None:
            what = f"storage {tensor.storage.name!r}" if found is None else tensor.dtype
            raise Refused([Finding("bad-file", self.path, f"{what} is not in it")])
        offset, nbytes = found
        declared = tensor.storage.numel * ITEMSIZE[tensor.storage.dtype]
        extent = (
            tensor.offset
            + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
            + 1
        ) * size
        if declared > nbytes or (all(tensor.shape) and extent > declared):
            cause = f"storage {tensor.storage.name!r} has {nbytes:,} bytes, too few for its tensor"
            raise Refused([Finding("bad-file", self.path, cause, "it may be damaged")])
        return FileBuffer(self.path, tensor.dtype, offset, declared // size)


def read_torch(path: str, start: int = 0, length: int | None = None) -> TorchFile:
    """Read a file, or the zip that lies `start` bytes into it; no tensor's bytes are read.

    Raises `Refused`: `unreadable-file`, `bad-file`, `bad-pickle`.
    """
    data = mapped(path)
    data = data[start : None if length is None else start + length]
    mark = bytes(data[:2])
    if mark != b"PK":
        old = mark[:1] == b"\x80"
        cause = "was written by torch before 1.6" if old else "is no torch file"
        fix = "load it with torch and save it again" if old else "it may be damaged: copy it again"
        raise Refused([Finding("legacy-file" if old else "bad-file", path, cause, fix)])
    try:
        with zipfile.ZipFile(_Window(data)) as archive:
            entries = archive.infolist()
        records = {entry.filename.partition("/")[2]: _place(data, entry) for entry in entries}
        if "data.pkl" not in records:
            raise ValueError("it has no data.pkl")
        if "byteorder" in records:
            at, size = records["byteorder"]
            if bytes(data[at : at + size]) != b"little":
                raise ValueError("it was written on a big-endian machine")
        at, size = records["data.pkl"]
    except (zipfile.BadZipFile, ValueError, struct.error, OSError, NotImplementedError) as error:
        cause = f"is no whole torch file: {error}"
        fix = "it may be cut short or damaged: copy it again"
        raise Refused([Finding("bad-file", path, cause, fix)]) from error
    tree = read_pickle(bytes(data[at : at + size]), path)
    prefix = "data/"
    storages = {
        name[len(prefix) :]: (start + offset, nbytes)
        for name, (offset, nbytes) in records.items()
        if name.startswith(prefix)
    }
    return TorchFile(path, tree, storages)


def _place(data: memoryview, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Where an entry's bytes lie; it must be stored as it is, inside the file."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        raise ValueError(f"{entry.filename} is compressed or encrypted")
    mark, name, extra = _LOCAL.unpack_from(data, entry.header_offset)
    at = entry.header_offset + 30 + name + extra
    if mark != b"PK\x03\x04" or entry.file_size < 0 or at + entry.file_size > len(data):
        raise ValueError(f"{entry.filename} leaves the file")
    return at, entry.file_size


class _Window(io.RawIOBase):
    """Part of a map as a file, so that `zipfile` copies no more than it asks for."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._at, len(self._data))[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        stop = len(self._data) if size is None or size < 0 else self._at + size
        found = bytes(self._data[self._at : stop])
        self._at += len(found)
        return found
