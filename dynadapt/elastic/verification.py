"""Whether a checkpoint on disk is whole: complete, readable, its replicas equal, its sums as recorded."""

from __future__ import annotations

import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isal.isal_zlib import crc32

from dynadapt.elastic.place import read_manifest
from dynadapt.errors import Finding, Refused
from dynadapt.files import mapped
from dynadapt.transport.certificate import fingerprint
from dynadapt.transport.stream import PIECE

if TYPE_CHECKING:
    from dynadapt.elastic.checkpoint import Checkpoint

__all__ = ["verified"]


def verified(
    checkpoint: Checkpoint, *, threads: int = 2
) -> tuple[tuple[Finding, ...], dict[str, Any]]:
    """Everything that is wrong with a checkpoint, and what was looked at. Reads all of it."""
    findings = list(checkpoint.problems())
    told: dict[str, Any] = {"keys": len(checkpoint.layout.keys)}
    if findings:
        return tuple(findings), told
    try:
        sums, drifted = checkpoint.sums(threads=threads)
    except Refused as error:
        return error.findings, told
    findings += [*drifted, *_damaged(checkpoint, threads)]
    told["fingerprint"] = fingerprint(checkpoint.layout.keys, sums)
    recorded = read_manifest(Path(checkpoint.path))
    told["manifest"] = "compared" if recorded is not None else "none"
    for key, value in sorted((recorded or {}).items()):
        have = next((f"{v:016x}" for k, v in sums.items() if str(k) == key), None)
        if have != value:
            cause = f"its sum is {have or 'missing'}, and was {value} when it was written"
            findings.append(
                Finding("certificate", key, cause, "it has changed since: copy it again")
            )
    return tuple(findings), told


def _damaged(checkpoint: Checkpoint, threads: int) -> list[Finding]:
    """Parts of `torch.save` files that are not what their own check sums, those of a zip, say."""
    paths = sorted({buffer.path for buffer in checkpoint.buffers.values()})
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(_damaged_parts, paths))
    return [finding for own in found for finding in own]


def _damaged_parts(path: str) -> list[Finding]:
    data = mapped(path)
    if bytes(data[:4]) != b"PK\x03\x04" or not zipfile.is_zipfile(path):
        return []  # a distributed checkpoint's file is many zips, one after another
    findings = []
    with zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            if part.compress_type != zipfile.ZIP_STORED or not part.CRC:
                continue  # torch may be told to take none
            header = data[part.header_offset : part.header_offset + 30]
            names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:], "little")
            start, crc = part.header_offset + 30 + names, 0
            for at in range(start, start + part.file_size, PIECE):
                crc = crc32(data[at : min(at + PIECE, start + part.file_size)], crc)
            if crc != part.CRC:
                cause = f"its check sum is {crc:08x}, and {part.CRC:08x} is written beside it"
                fix = "the file has changed since it was written: copy it again"
                findings.append(Finding("certificate", f"{path}: {part.filename}", cause, fix))
    return findings
