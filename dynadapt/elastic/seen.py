"""Whether all seats see the same files: a checkpoint is read and written by many hosts at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dynadapt.elastic.place import read_manifest
from dynadapt.errors import Finding
from dynadapt.files import FileBuffer
from dynadapt.transport.read_back import crc_of
from dynadapt.transport.source_sums import unlike, where

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dynadapt.protocols import Described
    from dynadapt.transport.plan import Pair

__all__ = ["changed_since", "damaged_files", "file_sizes", "files_differ"]

SHOWN = 8
"""Files that are named."""

_FIX = "put the checkpoint on a file system that all hosts share, and load it when it is whole"


def file_sizes(own: Described) -> dict[str, int]:
    """The size of each file behind a description, by its path inside the checkpoint; -1: not there."""
    found: dict[str, str] = {}
    for name, buffer in own.buffers.items():
        if isinstance(buffer, FileBuffer):
            found.setdefault(name.partition("#")[0], buffer.path)
    return {name: _size(path) for name, path in sorted(found.items())}


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _told(size: int) -> str:
    return "is not there" if size < 0 else f"has {size:,} bytes"


def files_differ(told: Mapping[int, Mapping[str, int]]) -> list[Finding]:
    """What seats see of one checkpoint that others do not, by file.

    >>> files_differ({0: {"a.pt": 12}, 1: {"a.pt": 8}})[0].cause
    'has 12 bytes on seat 0, has 8 bytes on seat 1'
    """
    names = sorted({name for sizes in told.values() for name in sizes})
    findings = []
    for name in names:
        sizes = {seat: own.get(name, -1) for seat, own in told.items()}
        first, known = next(iter(sizes.items()))
        other = next((seat for seat, size in sizes.items() if size != known), None)
        if other is None:
            continue
        cause = f"{_told(known)} on seat {first}, {_told(sizes[other])} on seat {other}"
        findings.append(Finding("files-differ", name, cause, _FIX))
    if not findings:
        cause = "is not read alike on all seats: it has changed, or they see other files"
        findings.append(Finding("files-differ", "the checkpoint", cause, _FIX))
    return findings[:SHOWN]


def changed_since(path: str, sums: Iterable[tuple[Pair, int]]) -> list[Finding]:
    """What is not as the manifest beside a checkpoint has it; raises `Refused` (`bad-file`).

    Sums are of the target's dtype, so where that is another one there is nothing to compare.
    """
    manifest = read_manifest(Path(path))
    recorded = {} if manifest is None else manifest.sums
    findings = []
    for pair, value in sums:
        known = recorded.get(str(pair.source.key))
        comparable = pair.source.key == pair.target.key and pair.source.dtype == pair.target.dtype
        if comparable and known not in {None, f"{value:016x}"}:
            cause = f"its sum is {value:016x}, and was {known} when it was written"
            fix = "it has changed since: copy it again"
            findings.append(Finding("certificate", str(pair.source.key), cause, fix))
    return findings


def damaged_files(buffers: Iterable[FileBuffer]) -> list[Finding]:
    """Those that have not the check sums in their files, where there are such; raises `Refused`."""
    fix = "it is damaged: copy it again"
    summed = sorted({b for b in buffers if b.crc}, key=lambda b: (b.path, b.offset))
    return [unlike(where(b), crc, b.crc, fix) for b in summed if (crc := crc_of(b)) != b.crc]
