"""`torch.save` files laid out before their tensors' bytes are there: what lies where, and the frame.

`lay_out` says where each storage's bytes go, so that they can be put there in any order, by several
threads; `Frame.seal` then gives the zip's headers, with the check sums of what was written.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._pickle import StoredTensor
from dynadapt.adapters.checkpoints._repickle import write_pickle
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Frame", "lay_out", "tensors_of"]

ALIGN = 64
"""Bytes that storages are aligned to, as torch does for its own maps."""

_BIG = 0xFFFFFFFF


@dataclass(frozen=True)
class _Entry:
    name: bytes
    header: int  # where the local header starts
    offset: int  # where the bytes start
    nbytes: int
    content: bytes | None  # None: a storage, written by others

    def local(self, crc: int) -> bytes:
        """The local header and its padding."""
        room = self.offset - self.header - 30 - len(self.name)
        size = self.nbytes
        extra = b""
        if size >= _BIG:
            extra, size = struct.pack("<HHQQ", 1, 16, size, size), _BIG
        pad = room - len(extra)
        extra += struct.pack("<2sH", b"FB", pad - 4) + b"Z" * (pad - 4)
        head = struct.pack(
            "<4sHHHHHIIIHH",
            *(b"PK\x03\x04", 45, 0, 0, 0, 0, crc, size, size, len(self.name), len(extra)),
        )
        return head + self.name + extra

    def central(self, crc: int) -> bytes:
        """The entry of the directory at the end."""
        wide, size, header = b"", self.nbytes, self.header
        if size >= _BIG:
            wide += struct.pack("<QQ", size, size)
            size = _BIG
        if header >= _BIG:
            wide += struct.pack("<Q", header)
            header = _BIG
        extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
        fields = (45, 45, 0, 0, 0, 0, crc, size, size, len(self.name), len(extra), 0, 0, 0, 0)
        return (
            struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", *fields, header) + self.name + extra
        )


@dataclass(frozen=True)
class Frame:
    """A file to be: its size, and where each storage's bytes go (name -> offset, bytes)."""

    size: int
    places: Mapping[str, tuple[int, int]]
    _entries: tuple[_Entry, ...]
    _directory: int

    def seal(self, crcs: Mapping[str, int]) -> list[tuple[int, bytes]]:
        """All that is not a storage's, as (offset, bytes); `crcs` are of the storages, by name."""
        parts, directory = [], b""
        for entry in self._entries:
            if entry.content is None:
                crc = crcs[entry.name.decode().partition("/data/")[2]]
                parts.append((entry.header, entry.local(crc)))
            else:
                crc = zlib.crc32(entry.content)
                parts.append((entry.header, entry.local(crc) + entry.content))
            directory += entry.central(crc)
        end = self._directory + len(directory)
        count = len(self._entries)
        tail = struct.pack(
            "<4sQHHIIQQQQ",
            *(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), self._directory),
        )
        tail += struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
        shown = min(count, 0xFFFF)
        tail += struct.pack(
            "<4sHHHHIIH",
            *(b"PK\x05\x06", 0, 0, shown, shown),
            *(min(len(directory), _BIG), min(self._directory, _BIG), 0),
        )
        return [*parts, (self._directory, directory + tail)]


def tensors_of(tree: Any) -> list[StoredTensor]:
    """Every tensor of a tree, once each, in order."""
    found: list[StoredTensor] = []
    seen: set[int] = set()
    todo = [tree]
    while todo:
        at = todo.pop()
        if id(at) in seen:
            continue
        if isinstance(at, StoredTensor):
            seen.add(id(at))
            found.append(at)
        elif isinstance(at, dict):
            seen.add(id(at))
            todo += reversed([*at.keys(), *at.values()])
        elif isinstance(at, list | tuple | set | frozenset):
            seen.add(id(at))
            todo += list(at)[::-1]
        elif hasattr(at, "made_by"):
            seen.add(id(at))
            todo += [at.elements, at.items, at.state, at.kwargs, at.args]
    return found


def lay_out(tree: Any, name: str = "archive") -> Frame:
    """Where everything of a file with this tree lies.

    >>> from dynadapt.adapters.checkpoints._repickle import tensor
    >>> lay_out({"w": tensor("0", "float32", (3,))}).places["0"][1]
    12
    """
    storages = {t.storage.name: t.storage for t in tensors_of(tree)}
    contents: list[tuple[str, bytes | None, int]] = [
        ("data.pkl", write_pickle(tree), 0),
        ("byteorder", b"little", 0),
        *((f"data/{s.name}", None, s.numel * itemsize(s.dtype)) for s in storages.values()),
        ("version", b"3\n", 0),
    ]
    entries, places, at = [], {}, 0
    for path, content, nbytes in contents:
        full = f"{name}/{path}".encode()
        size = nbytes if content is None else len(content)
        least = at + 30 + len(full) + (20 if size >= _BIG else 0) + 4
        offset = -(-least // ALIGN) * ALIGN
        entries.append(_Entry(full, at, offset, size, content))
        if content is None:
            places[path.partition("/")[2]] = (offset, size)
        at = offset + size
    frame = Frame(0, places, tuple(entries), at)
    crcs = dict.fromkeys(places, 0)
    last, data = frame.seal(crcs)[-1]
    return Frame(last + len(data), places, tuple(entries), at)
