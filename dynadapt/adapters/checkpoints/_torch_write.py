"""`torch.save` files laid out before their tensors' bytes are there: what lies where, and the frame.

`lay_out` says where each storage's bytes go, so that they can be put there in any order, by several
threads. The pickled tree and small storages follow them, and `Frame.seal` gives those, with the zip's
headers and check sums, when all else is known. Readers find entries by the directory at the end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from isal.isal_zlib import crc32

from dynadapt.adapters.checkpoints._repickle import write_pickle

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Frame", "lay_out"]

ALIGN = 64
"""Bytes that storages are aligned to, as torch does for its own maps."""

SHORT = 1 << 10
"""Bytes of what is kept for the next file of the same shape, at most."""

_BIG = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Entry:
    """One stored entry: where its local header starts, and where its bytes."""

    name: bytes
    header: int
    offset: int
    nbytes: int

    @classmethod
    def after(cls, at: int, name: str, nbytes: int) -> _Entry:
        full = name.encode()
        least = at + 30 + len(full) + (20 if nbytes >= _BIG else 0) + 4
        return cls(full, at, -(-least // ALIGN) * ALIGN, nbytes)

    def local(self, crc: int) -> bytes:
        """The local header, padded up to the bytes."""
        wide = self._wide(self.nbytes, self.nbytes)
        pad = self.offset - self.header - 30 - len(self.name) - len(wide)
        extra = wide + struct.pack("<2sH", b"FB", pad - 4) + b"Z" * (pad - 4)
        return b"PK\x03\x04" + self._common(crc, extra) + self.name + extra

    def central(self, crc: int) -> bytes:
        """The entry of the directory at the end."""
        header = min(self.header, _BIG)
        extra = self._wide(self.nbytes, self.nbytes, self.header)
        ends = struct.pack("<HHHII", 0, 0, 0, 0, header)
        return b"PK\x01\x02\x2d\0" + self._common(crc, extra) + ends + self.name + extra

    def _common(self, crc: int, extra: bytes) -> bytes:
        """What both say: version, flags, no compression, no time, check sum, sizes, lengths."""
        # Bit 11 says that the name is UTF-8, which readers of zips take for something older else.
        flags, size = 0 if self.name.isascii() else 0x800, min(self.nbytes, _BIG)
        lengths = len(self.name), len(extra)
        return struct.pack("<HHHHHIIIHH", 45, flags, 0, 0, 0, crc, size, size, *lengths)

    @staticmethod
    def _wide(*numbers: int) -> bytes:
        """The field of 64-bit numbers, with those that do not fit into 32."""
        big = [n for n in numbers if n >= _BIG]
        return struct.pack(f"<HH{len(big)}Q", 1, 8 * len(big), *big) if big else b""


@dataclass(frozen=True)
class Frame:
    """A file to be: `size` bytes up to the end of its storages, name -> (offset, bytes) of each."""

    size: int
    places: Mapping[str, tuple[int, int]]
    _entries: tuple[_Entry, ...]
    _name: str

    def seal(
        self, tree: Any, crcs: Mapping[str, int], values: Mapping[str, bytes] | None = None
    ) -> list[tuple[int, bytes]]:
        """All that is not a storage laid out before, as (offset, bytes).

        `tree` is the value that `torch.load` gives, `crcs` the check sums of the storages laid out,
        `values` the bytes of further storages, by name.
        """
        return self.seal_pickled(write_pickle(tree), crcs, values)

    def seal_pickled(
        self, pickled: bytes, crcs: Mapping[str, int], values: Mapping[str, bytes] | None = None
    ) -> list[tuple[int, bytes]]:
        """The same with the tree as a pickle already."""
        parts, directory = [], b""
        for entry in self._entries:
            crc = crcs[entry.name.decode().removeprefix(f"{self._name}/data/")]
            parts.append((entry.header, entry.local(crc)))
            directory += entry.central(crc)
        more = {f"data/{name}": value for name, value in (values or {}).items()}
        more |= {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}
        make = _small if sum(map(len, more.values())) <= SHORT else _small.__wrapped__
        small = make(self.size, self._name, tuple(more.items()))
        at, count = small.stop, len(self._entries) + len(more)
        parts += small.parts
        directory += small.directory
        end = at + len(directory)
        wide = (b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), at)
        shown = min(count, 0xFFFF)
        last = (b"PK\x05\x06", 0, 0, shown, shown, min(len(directory), _BIG), min(at, _BIG), 0)
        tail = struct.pack("<4sQHHIIQQQQ", *wide)
        tail += struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
        tail += struct.pack("<4sHHHHIIH", *last)
        return [*parts, (at, directory + tail)]


class _Small(NamedTuple):
    """Entries with their bytes, as (offset, bytes), theirs of the directory, and where they end."""

    parts: tuple[tuple[int, bytes], ...]
    directory: bytes
    stop: int


@lru_cache(maxsize=1 << 8)
def _small(at: int, root: str, contents: tuple[tuple[str, bytes], ...]) -> _Small:
    """Entries of some contents by name, from `at` on: the same in each of the files of one shape."""
    parts, directory = [], b""
    for name, content in contents:
        entry, crc = _Entry.after(at, f"{root}/{name}", len(content)), crc32(content)
        parts.append((entry.header, entry.local(crc) + content))
        directory += entry.central(crc)
        at = entry.offset + len(content)
    return _Small(tuple(parts), directory, at)


def lay_out(storages: Mapping[str, int], name: str = "archive") -> Frame:
    """Where storages of so many bytes go.

    All offsets are counted from the first byte of the zip, which may lie inside another file.

    >>> lay_out({"0": 12}).places["0"]
    (64, 12)
    """
    entries, places, at = [], {}, 0
    for storage, nbytes in storages.items():
        entry = _Entry.after(at, f"{name}/data/{storage}", nbytes)
        entries.append(entry)
        places[storage] = (entry.offset, nbytes)
        at = entry.offset + nbytes
    return Frame(at, places, tuple(entries), name)
