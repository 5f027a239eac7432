"""`torch.save` files, read without torch: the pickled tree, and where each storage's bytes lie.

The format is a zip whose entries are stored, not compressed: `NAME/data.pkl`, `NAME/data/0`, ... (see
`torch.serialization`). A distributed checkpoint puts many such zips into one file, one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from isal.isal_zlib import crc32

from dynadapt.adapters.checkpoints._pickle import StoredTensor, is_flat, read_pickle
from dynadapt.errors import Finding, Refused
from dynadapt.files import FileBuffer, mapped
from dynadapt.vps.keys import ITEMSIZE
from dynadapt.zips import BROKEN, extent_of, records_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TorchFile", "read_torch"]

SHORT = 512
"""Bytes of a pickle of one tensor and little else, at most."""

KNOWN = 1 << 14
"""Pickles that are kept."""


@dataclass(frozen=True)
class TorchFile:
    """The tree of one file, with a `StoredTensor` for each tensor, and its storages' places.

    `root` is the folder inside the zip: the name, without its ending, under which torch wrote the file.
    `crcs` are the check sums of storages, as far as torch was not told to take none.
    """

    path: str
    tree: Any
    storages: Mapping[str, tuple[int, int]]
    root: str = ""
    crcs: Mapping[str, int] = field(default_factory=dict)

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
        numel = declared // size
        crc = self.crcs.get(tensor.storage.name, 0) if numel * size == nbytes else 0
        return FileBuffer(self.path, tensor.dtype, offset, numel, crc)


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
        listed = records_of(data)
        records = {own.name.partition("/")[2]: extent_of(data, own) for own in listed}
        crcs = {own.name.partition("/")[2]: own.crc for own in listed if own.crc}
        if "data.pkl" not in records:
            raise ValueError("it has no data.pkl")
        if "byteorder" in records:
            at, size = records["byteorder"]
            if bytes(data[at : at + size]) != b"little":
                raise ValueError("it was written on a big-endian machine")
        at, size = records["data.pkl"]
        pickled = bytes(data[at : at + size])
        if crcs.get("data.pkl", have := crc32(pickled)) != have:
            raise ValueError("data.pkl has not the check sum that was written beside it")
    except BROKEN as error:
        cause = f"is no whole torch file: {error}"
        fix = "it may be cut short or damaged: copy it again"
        raise Refused([Finding("bad-file", path, cause, fix)]) from error
    storages = {
        name.removeprefix(_DATA): (start + offset, nbytes)
        for name, (offset, nbytes) in records.items()
        if name.startswith(_DATA)
    }
    sums = {n.removeprefix(_DATA): crc for n, crc in crcs.items() if n.startswith(_DATA)}
    return TorchFile(path, _tree(pickled, path), storages, listed[0].name.partition("/")[0], sums)


_DATA = "data/"


_trees: dict[bytes, Any] = {}
_lock = Lock()


def _tree(data: bytes, path: str) -> Any:
    """What a pickle says. The small pickles of a checkpoint are few, each of them thousands of times."""
    known = _trees.get(data) if len(data) <= SHORT else None
    if known is not None:
        return dict(known) if isinstance(known, dict) else known
    tree = read_pickle(data, path)
    if len(data) <= SHORT and is_flat(tree):
        with _lock:
            if len(_trees) >= KNOWN:
                _trees.clear()
            _trees[data] = dict(tree) if isinstance(tree, dict) else tree
    return tree
