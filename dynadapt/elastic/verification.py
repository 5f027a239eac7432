"""Whether a checkpoint on disk is whole: complete, readable, its replicas equal, its sums as recorded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynadapt.elastic.place import read_manifest
from dynadapt.errors import Finding, Refused
from dynadapt.transport.certificate import fingerprint

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
    findings += drifted
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
