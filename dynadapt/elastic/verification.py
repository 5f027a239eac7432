"""Whether a checkpoint on disk is whole: complete, readable, its replicas equal, its sums as recorded.

And what of it nothing can tell: bytes without a check sum, files that do not say whose they are.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dynadapt.elastic.outcome import human
from dynadapt.elastic.place import read_manifest
from dynadapt.errors import Finding, Refused
from dynadapt.files import check_sum, mapped
from dynadapt.transport.casts import CASTABLE, cast
from dynadapt.transport.certificate import fingerprint
from dynadapt.transport.source_sums import unlike, where
from dynadapt.transport.sources import PIECE, Sources, boxes_of
from dynadapt.vps.box import Box
from dynadapt.zips import BROKEN, extent_of, records_of, zips_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dynadapt.elastic.checkpoint import Checkpoint
    from dynadapt.elastic.place import Recorded
    from dynadapt.files import FileBuffer
    from dynadapt.vps.keys import Key, KeySpec

__all__ = ["Verified", "verified"]

_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".distcp")
_COPY = "it has changed since it was written: copy it again"
_SUMS = "convert it (dynadapt.json then has sums of all tensors), or keep sums of your own"


class Verified(NamedTuple):
    """Everything that is wrong, what could not be looked at, and what was."""

    problems: tuple[Finding, ...]
    warnings: tuple[Finding, ...]
    told: dict[str, Any]


def verified(checkpoint: Checkpoint, *, threads: int = 2) -> Verified:
    """Read all of a checkpoint and compare it with everything that it says of itself."""
    findings = list(checkpoint.problems())
    told: dict[str, Any] = {"keys": len(checkpoint.layout.keys)}
    if findings:
        return Verified(tuple(findings), (), told)
    try:
        sums, drifted = checkpoint.sums(threads=threads)
    except Refused as error:
        return Verified(error.findings, (), told)
    findings += [*drifted, *_damaged(checkpoint, threads), *_stale(checkpoint, threads)]
    told["fingerprint"] = fingerprint(checkpoint.layout.keys, sums)
    recorded = read_manifest(Path(checkpoint.path))
    told["manifest"] = "compared" if recorded is not None else "none"
    if recorded is not None:
        findings += _changed(checkpoint, sums, told["fingerprint"], recorded)
    warnings = () if recorded is not None else (*_unsummed(checkpoint), *_alike(checkpoint))
    return Verified(tuple(findings), tuple(warnings), told)


def _changed(
    checkpoint: Checkpoint, sums: Mapping[Key, int], prints: str, recorded: Recorded
) -> list[Finding]:
    """What is not as the manifest has it. A file alone has a part of what its folder's says."""
    have, alone = {str(k): f"{v:016x}" for k, v in sums.items()}, Path(checkpoint.path).is_file()
    findings = [
        Finding(
            "certificate",
            key,
            f"its sum is {have.get(key, 'missing')}, and was {value} when it was written",
            _COPY,
        )
        for key, value in sorted(recorded.sums.items())
        if have.get(key) != value and not (alone and key not in have)
    ]
    if not findings and not alone and prints != recorded.fingerprint:
        cause = f"its fingerprint is {prints}, and was {recorded.fingerprint} when it was written"
        fix = "all sums are equal: tensors were added, or one has another dtype, shape or name now"
        findings.append(Finding("certificate", checkpoint.path, cause, fix))
    return findings


def _damaged(checkpoint: Checkpoint, threads: int) -> list[Finding]:
    """Parts of `torch.save` files that are not what their own check sums, those of a zip, say."""
    by_path: dict[str, set[FileBuffer]] = {}
    for buffer in checkpoint.buffers.values():
        by_path.setdefault(buffer.path, set()).add(buffer)
    root = Path(checkpoint.path)
    folders = {Path(path).parent for path in by_path} if root.is_dir() else set()
    folders |= {up for each in folders for up in each.parents if root in (up, *up.parents)}
    every = (p for each in folders for p in each.iterdir() if p.suffix in _TORCH)
    beside = {str(path) for path in every if path.is_file()}
    with ThreadPoolExecutor(threads) as pool:
        paths = sorted(by_path.keys() | beside)
        found = list(pool.map(lambda path: _damaged_parts(path, by_path.get(path, ())), paths))
    return [finding for own in found for finding in own]


def _damaged_parts(path: str, buffers: Iterable[FileBuffer]) -> list[Finding]:
    """Of a file of zips all of their records; of another what of it tensors lie in."""
    try:
        data = mapped(path)
        places = {(b.offset, b.nbytes): (where(b), b.crc) for b in buffers}
        for start, each in zips_in(data):
            for record in records_of(each):
                at, nbytes = extent_of(each, record)
                places[start + at, nbytes] = f"{path}: {record.name}", record.crc
    except Refused as error:
        return [*error.findings]
    except BROKEN as error:
        return [Finding("bad-file", path, f"is no whole torch file: {error}", "copy it again")]
    findings = []
    for (start, nbytes), (name, written) in sorted(places.items()):
        if not written:
            continue  # torch may be told to take none
        crc = check_sum(data[start : start + nbytes])
        if crc != written:
            findings.append(unlike(name, crc, written, _COPY))
    return findings


def _stale(checkpoint: Checkpoint, threads: int) -> list[Finding]:
    """Low-precision copies that are not their masters, rounded: one of them was changed, or moved."""
    layout = checkpoint.layout
    masters = {s.key.name: s for s in layout.keys if s.key.slot == "param" and _held(s)}
    pairs = [
        (masters[spec.key.name], spec)
        for spec in layout.keys
        if spec.derived and _held(spec) and spec.key.name in masters
    ]
    sources = Sources(layout, checkpoint.buffers)

    def differs(pair: tuple[KeySpec, KeySpec]) -> Finding | None:
        master, copy = pair
        if not {master.dtype, copy.dtype} <= CASTABLE or master.shape != copy.shape:
            return None
        for box in boxes_of(Box.whole(copy.shape), PIECE // 8):
            have = sources.read(copy.key, box)
            made = cast(sources.read(master.key, box), master.dtype, copy.dtype)
            if np.array_equal(have, made, equal_nan=have.dtype.kind == "f"):
                continue
            cause = f"the {copy.dtype} weights in {box} are not the {master.dtype} masters, rounded"
            fix = "files of two tensors or saves are mixed, or one was edited without the other"
            return Finding("stale-copy", str(copy.key), cause, fix)
        return None

    with ThreadPoolExecutor(threads) as pool:
        return [finding for finding in pool.map(differs, pairs) if finding is not None]


def _held(spec: KeySpec) -> bool:
    return bool(spec.numel) and spec.presence == "present"


def _unsummed(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Bytes of tensors beside which no check sum lies."""
    every = {(b.path, b.offset, b.nbytes): b.crc for b in checkpoint.buffers.values() if b.numel}
    bare = [at for at, crc in every.items() if not crc]
    if bare:
        files = sorted({path for path, _, _ in bare})
        size, total = sum(n for _, _, n in bare), sum(n for _, _, n in every)
        cause = (
            f"{human(size)} of {human(total)} have no check sum beside them, in "
            f"{_few(files, checkpoint.path)}: that a bit in them has changed cannot be told"
        )
        yield Finding("no-checksum", checkpoint.path, cause, _SUMS)


def _alike(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Files that hold the same number of the same things, and do not say which of them they are."""
    if not checkpoint.own.nameless:
        return
    inside: dict[str, list[tuple[int, str, int]]] = {}
    for buffer in checkpoint.buffers.values():
        own = inside.setdefault(buffer.path, [])
        own.append((buffer.offset, buffer.dtype, buffer.numel))
    groups: dict[Any, list[str]] = {}
    for path, held in inside.items():
        kind = Path(path).name if checkpoint.own.nameless == "folders" else ""
        groups.setdefault((kind, Path(path).stat().st_size, *sorted(held)), []).append(path)
    alike = [path for own in groups.values() if len(own) > 1 for path in own]
    if alike:
        cause = (
            f"{_few(sorted(alike), checkpoint.path)} do not say which tensors or rank they are of: "
            "that two of one size have changed places cannot be told"
        )
        yield Finding("nameless-files", checkpoint.path, cause, _SUMS)


def _few(paths: list[str], root: str) -> str:
    """How many files, and what the first are called."""
    names = [path.removeprefix(root).lstrip("/") or Path(path).name for path in paths]
    more = ", ..." if len(names) > 2 else ""
    return f"{len(names)} file{'s' * (len(names) > 1)} ({', '.join(names[:2])}{more})"
