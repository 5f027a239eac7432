"""`torch.save` files, read without torch: the pickled tree, and where each storage's bytes lie.

The format is a zip whose entries are stored, not compressed: `NAME/data.pkl`, `NAME/data/0`, ... (see
`torch.serialization`). A distributed checkpoint puts many such zips into one file, one after another.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from threading import Lock
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

_CENTRAL = struct.Struct("<4s4xHH12xLHHH8xL")
"""An entry of the directory: mark, flags, method, bytes, lengths of what follows, local header."""

_END = struct.Struct("<4s6xHLLH")
"""The end of a zip: mark, entries, the directory's bytes and offset, the length of a comment."""

_BIG = 0xFFFFFFFF

SHORT = 512
"""Bytes of a pickle of one tensor, at most."""

KNOWN = 1 << 14
"""Pickles that are kept."""


@dataclass(frozen=True)
class TorchFile:
    """The tree of one file, with a `StoredTensor` for each tensor, and its storages' places.

    `root` is the folder inside the zip: the name, without its ending, under which torch wrote the file.
    """

    path: str
    tree: Any
    storages: Mapping[str, tuple[int, int]]
    root: str = ""

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


def read_torch(
    path: str, start: int = 0, length: int | None = None, data: memoryview | None = None
) -> TorchFile:
    """Read a file, or the zip that lies `start` bytes into it; no tensor's bytes are read.

    `data` is the whole file, if it is mapped already. Raises `Refused`: `unreadable-file`, `bad-file`,
    `bad-pickle`.
    """
    if data is None:
        data = mapped(path)
    data = data[start : None if length is None else start + length]
    mark = bytes(data[:2])
    if mark != b"PK":
        old = mark[:1] == b"\x80"
        cause = "was written by torch before 1.6" if old else "is no torch file"
        fix = "load it with torch and save it again" if old else "it may be damaged: copy it again"
        raise Refused([Finding("legacy-file" if old else "bad-file", path, cause, fix)])
    try:
        listed = _listed(data)
        records = {name.partition("/")[2]: _place(data, name, *at) for name, *at in listed}
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
    tree = _tree(bytes(data[at : at + size]), path)
    prefix = "data/"
    storages = {
        name[len(prefix) :]: (start + offset, nbytes)
        for name, (offset, nbytes) in records.items()
        if name.startswith(prefix)
    }
    return TorchFile(path, tree, storages, listed[0][0].partition("/")[0])


_trees: dict[bytes, StoredTensor] = {}
_lock = Lock()


def _tree(data: bytes, path: str) -> Any:
    """What a pickle says. The pickles of a checkpoint's chunks are few, each of them thousands of times."""
    known = _trees.get(data) if len(data) <= SHORT else None
    if known is not None:
        return known
    tree = read_pickle(data, path)
    if len(data) <= SHORT and isinstance(tree, StoredTensor):
        with _lock:
            if len(_trees) >= KNOWN:
                _trees.clear()
            _trees[data] = tree
    return tree


def _listed(data: memoryview) -> list[tuple[str, int, int, int, int]]:
    """The entries of a zip: name, flags, method, bytes, and where its local header is.

    By its directory, where that is at its end and plain; by `zipfile`, which takes ten times as long, for
    all that is large, odd or broken.
    """
    found = []
    try:
        mark, count, size, at, comment = _END.unpack_from(data, len(data) - _END.size)
        stop = at + size
        plain = mark == b"PK\x05\x06" and not comment and count < 0xFFFF
        while plain and at < stop:
            mark, flags, method, nbytes, name, extra, note, header = _CENTRAL.unpack_from(data, at)
            text = bytes(data[at + _CENTRAL.size : at + _CENTRAL.size + name]).decode("ascii")
            plain = mark == b"PK\x01\x02" and nbytes < _BIG and header < _BIG
            found.append((text, flags, method, nbytes, header))
            at += _CENTRAL.size + name + extra + note
        if plain and at == stop and len(found) == count:
            return found
    except (struct.error, UnicodeDecodeError):
        pass
    with zipfile.ZipFile(_Window(data)) as archive:
        return [
            (e.filename, e.flag_bits, e.compress_type, e.file_size, e.header_offset)
            for e in archive.infolist()
        ]


def _place(
    data: memoryview, name: str, flags: int, method: int, nbytes: int, header: int
) -> tuple[int, int]:
    """Where an entry's bytes lie; it must be stored as it is, inside the file."""
    if method != zipfile.ZIP_STORED or flags & 1:
        raise ValueError(f"{name} is compressed or encrypted")
    mark, length, extra = _LOCAL.unpack_from(data, header)
    at = header + 30 + length + extra
    if mark != b"PK\x03\x04" or nbytes < 0 or at + nbytes > len(data):
        raise ValueError(f"{name} leaves the file")
    return at, nbytes


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
