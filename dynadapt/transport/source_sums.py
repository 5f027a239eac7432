"""Whether what was read of files had the check sums that they have of it themselves, at no cost.

Each piece is summed once, for what is written; CRC-32s of neighbours are put together without their bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from isal.isal_zlib import crc32, crc32_combine

from dynadapt.errors import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynadapt.files import FileBuffer

__all__ = ["Taken", "damaged", "unlike", "where"]


class Taken(NamedTuple):  # of which forks tell many
    """Bytes of a buffer that were read in one piece, and their check sum."""

    buffer: str
    start: int
    nbytes: int
    crc: int


def damaged(taken: Iterable[Taken], buffers: Mapping[str, FileBuffer]) -> tuple[Finding, ...]:
    """A finding for each buffer whose bytes have not the check sum that its file has beside them.

    Of those that have one, and were read for the most part: what nobody asked for is read now.
    """
    by_place: dict[tuple[str, int, int], list[Taken]] = {}
    names: dict[tuple[str, int, int], str] = {}
    for each in taken:
        own = buffers[each.buffer]
        place = own.path, own.offset, own.nbytes
        by_place.setdefault(place, []).append(each)
        names[place] = each.buffer
    findings = []
    for place, parts in sorted(by_place.items()):
        own = buffers[names[place]]
        crc = _crc_of(own, parts)
        if crc is not None and crc != own.crc:
            fix = "copy the file again; --no-verify (verify=False) takes it as it is"
            findings.append(unlike(where(own), crc, own.crc, fix))
    return tuple(findings)


def unlike(place: str, crc: int, written: int, fix: str) -> Finding:
    """What to say of bytes that have another check sum than their file says."""
    cause = f"the check sum is {crc:08x}, and {written:08x} is written beside it"
    return Finding("certificate", place, cause, fix)


def where(buffer: FileBuffer) -> str:
    """Its place, for people."""
    return f"{buffer.path}: {buffer.nbytes:,} bytes from {buffer.offset:,} on"


def _crc_of(buffer: FileBuffer, parts: Sequence[Taken]) -> int | None:
    """The check sum of a whole buffer; None if more than half of it was not read."""
    crc = at = 0
    gaps = buffer.nbytes
    chain = []
    for part in sorted(parts, key=lambda p: p.start):
        if part.start >= at:  # else it was read twice
            chain.append(part)
            at = part.start + part.nbytes
            gaps -= part.nbytes
    if gaps > buffer.nbytes // 2:
        return None
    data, at = buffer.bytes(), 0
    for part in chain:
        crc = crc32_combine(crc32(data[at : part.start], crc), part.crc, part.nbytes)
        at = part.start + part.nbytes
    return crc32(data[at:], crc)
