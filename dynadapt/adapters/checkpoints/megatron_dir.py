"""Distributed checkpoints of Megatron-Core (`dist_checkpointing`, backend `torch_dist`): read, not written.

A folder `iter_0000100` has `metadata.json`, `common.pt` and a torch distributed checkpoint; the folder above
it has `latest_checkpointed_iteration.txt`, which names the newest. See `_megatron_read`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dynadapt.adapters.checkpoints._format import ReadOnly
from dynadapt.adapters.checkpoints._megatron_read import COMMON, Reading
from dynadapt.errors import Finding, Refused
from dynadapt.files import mapped

if TYPE_CHECKING:
    from pathlib import Path

    from dynadapt.protocols import Described, FileSource

__all__ = ["MegatronDir"]

_CONFIG = "metadata.json"
_LATEST = "latest_checkpointed_iteration.txt"
_LEGACY = "model_optim_rng.pt"


class MegatronDir(ReadOnly):
    """Reads a folder that Megatron-Core's `dist_checkpointing.save` wrote, or the one above it."""

    name = "megatron"
    instead = (
        "checkpoints of Megatron-Core",
        "write dcp, which Megatron's converters and torch read",
    )

    @staticmethod
    def holds(path: Path) -> bool:
        """A folder with `metadata.json` and `common.pt`, or of ranks' own files, or one that leads there."""
        return _folder(path) is not None

    def read(self, path: Path, said: FileSource) -> Described:
        """See `Format.describe`."""
        root = _folder(path)
        if root is None:
            raise Refused([Finding("bad-file", str(path), "is no checkpoint of Megatron-Core")])
        backend = _backend(root)
        if backend != "torch_dist":
            what = (
                f"was written by its backend {backend!r}" if backend else "has a file of each rank"
            )
            cause = f"is a checkpoint of Megatron that {what}: only torch_dist is read"
            fix = "load it in Megatron and save it with --ckpt-format torch_dist"
            raise Refused([Finding("unsupported-format", str(root), cause, fix)])
        return Reading(root, said).described()


def _folder(path: Path) -> Path | None:
    """The folder of one iteration."""
    if (path / _CONFIG).is_file() and (path / COMMON).is_file():
        return path
    if any(path.glob(f"mp_rank_*/{_LEGACY}")):
        return path
    try:
        tag = (path / _LATEST).read_text(errors="replace").strip()
    except OSError:
        return None
    if tag.isdecimal() and len(tag) < 10:
        tag = f"iter_{int(tag):07d}"
    elif tag != "release":
        return None
    return _folder(path / tag) if (path / tag).is_dir() else None


def _backend(root: Path) -> str:
    """What wrote it, as its configuration says; nothing of a legacy checkpoint."""
    path = root / _CONFIG
    if not path.is_file():
        return ""
    try:
        told = json.loads(bytes(mapped(str(path))))
    except (ValueError, RecursionError) as error:
        cause = f"is no JSON: {error}"
        raise Refused([Finding("bad-json", str(path), cause[:200])]) from error
    return str(told.get("sharded_backend")) if isinstance(told, dict) else "?"
