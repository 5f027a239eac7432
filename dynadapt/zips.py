"""Zips whose entries are stored as they are, as torch makes them: their records, and many in one file."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BROKEN", "Record", "extent_of", "records_of", "zips_in"]

BROKEN = (zipfile.BadZipFile, ValueError, struct.error, OSError, NotImplementedError)
"""What reading a zip that is none, or damaged, ends in."""

_LOCAL = struct.Struct("<4s22xHH")
"""A local header: its mark, and the lengths of the name and of the extra field that follow it."""

_CENTRAL = struct.Struct("<4s4xHH4xL4xLHHH8xL")
"""An entry of the directory: mark, flags, method, CRC, bytes, lengths of what follows, local header."""

_END = struct.Struct("<4s6xHLLH")
"""The end of a zip: mark, entries, the directory's bytes and offset, the length of a comment."""

_BIG = 0xFFFFFFFF


class Record(NamedTuple):
    """An entry of a zip: where its local header is, and what the directory says of it."""

    name: str
    flags: int
    method: int
    crc: int
    nbytes: int
    header: int


def records_of(data: memoryview) -> list[Record]:
    """The entries of a zip.

    By its directory, where that is at its end and plain; by `zipfile`, which takes ten times as long, for
    all that is large, odd or broken.
    """
    found = []
    try:
        mark, count, size, at, comment = _END.unpack_from(data, len(data) - _END.size)
        stop = at + size
        plain = mark == b"PK\x05\x06" and not comment and count < 0xFFFF
        while plain and at < stop:
            mark, flags, method, crc, nbytes, name, extra, note, header = _CENTRAL.unpack_from(
                data, at
            )
            text = bytes(data[at + _CENTRAL.size : at + _CENTRAL.size + name]).decode("ascii")
            plain = mark == b"PK\x01\x02" and nbytes < _BIG and header < _BIG
            found.append(Record(text, flags, method, crc, nbytes, header))
            at += _CENTRAL.size + name + extra + note
        if plain and at == stop and len(found) == count:
            return found
    except (struct.error, UnicodeDecodeError):
        pass
    with zipfile.ZipFile(_Window(data)) as archive:
        return [
            Record(e.filename, e.flag_bits, e.compress_type, e.CRC, e.file_size, e.header_offset)
            for e in archive.infolist()
        ]


def extent_of(data: memoryview, own: Record) -> tuple[int, int]:
    """Where an entry's bytes lie; it must be stored as it is, inside the file."""
    if own.method != zipfile.ZIP_STORED or own.flags & 1:
        raise ValueError(f"{own.name} is compressed or encrypted")
    mark, length, extra = _LOCAL.unpack_from(data, own.header)
    begin = own.header + _LOCAL.size
    at = begin + length + extra
    if mark != b"PK\x03\x04" or own.nbytes < 0 or at + own.nbytes > len(data):
        raise ValueError(f"{own.name} leaves the file")
    if own.name.isascii() and data[begin : begin + length] != own.name.encode():
        raise ValueError(f"{own.name} leads to another entry")
    return at, own.nbytes


_WIDE = struct.Struct("<4s36xQQ")
"""The end of a large zip: mark, the directory's bytes and offset."""

GAP = 64
"""Zero bytes between two zips, at most."""


def zips_in(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The zips that lie in a file one after another, and where, as far as they reach from its end.

    >>> import io, zipfile
    >>> out = io.BytesIO()
    >>> for name in "ab":
    ...     one = io.BytesIO()
    ...     zipfile.ZipFile(one, "w").writestr(name, "x")
    ...     _ = out.write(one.getvalue())
    >>> [(at, records_of(each)[0].name) for at, each in zips_in(memoryview(out.getvalue()))]
    [(101, 'b'), (0, 'a')]
    """
    stop = len(data)
    while stop:
        low = max(stop - _END.size - GAP, 0)
        end = low + bytes(data[low:stop]).rfind(b"PK\x05\x06")
        if end < low or end + _END.size > stop:
            return
        _, _, size, at, _ = _END.unpack_from(data, end)
        wide = end - 20 - 56
        if wide >= 0 and bytes(data[end - 20 : end - 16]) == b"PK\x06\x07":
            _, size, at = _WIDE.unpack_from(data, wide)
            start = wide - size - at
        else:
            start = end - size - at
        if start < 0 or bytes(data[start : start + 4]) != b"PK\x03\x04":
            return
        yield start, data[start : end + _END.size]
        stop = start


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
