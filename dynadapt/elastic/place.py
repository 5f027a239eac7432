"""Where a checkpoint is to be: a hidden folder beside its place, which gets the name when all is right.

And the manifest in it, which says what it was when it was written.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dynadapt.protocols import FileTarget
    from dynadapt.vps.keys import Key

__all__ = ["MANIFEST", "Place", "read_manifest", "write_manifest"]

MANIFEST = "dynadapt.json"
"""Beside the data of every checkpoint that was written: what it is, and the sum of every tensor."""


@dataclass
class Place:
    """A path that is to become a checkpoint; one process works on it.

    `begin`, then `settle` and `close`, or at any point `undo`. Until `close` an old checkpoint of that
    name is kept, and comes back with `undo`.
    """

    path: Path
    force: bool = False
    settled: bool = False

    @property
    def aside(self) -> Path:
        """The folder in which it is made."""
        return self.path.with_name(f".{self.path.name}.partial-{os.getpid()}")

    @property
    def old(self) -> Path:
        """Where what is replaced waits."""
        return self.path.with_name(f".{self.path.name}.old-{os.getpid()}")

    def begin(self) -> Path:
        """Make the folder; raises `Refused` (`target-exists` unless `force`, `unwritable-file`)."""
        if self.path.exists() and not self.force:
            cause, fix = "is there already", "choose another place, or replace it with --force"
            raise Refused([Finding("target-exists", str(self.path), cause, fix)])
        shutil.rmtree(self.aside, ignore_errors=True)
        try:
            self.aside.mkdir(parents=True)
        except OSError as error:
            cause = f"cannot be made: {error.strerror}"
            raise Refused([Finding("unwritable-file", str(self.aside), cause)]) from error
        return self.aside

    def settle(self) -> None:
        """Give it its name. What was there waits to be removed."""
        if self.path.exists() and self.force:
            self.path.rename(self.old)
        try:
            self.aside.rename(self.path)
        except OSError:
            if self.old.exists():
                self.old.rename(self.path)
            raise
        self.settled = True

    def close(self) -> None:
        """There is no way back: remove what was replaced."""
        if self.old.is_dir():
            shutil.rmtree(self.old, ignore_errors=True)
        elif self.old.exists():
            self.old.unlink()

    def undo(self) -> None:
        """Leave nothing behind, and what was there as it was."""
        shutil.rmtree(self.aside, ignore_errors=True)
        if self.settled:
            shutil.rmtree(self.path, ignore_errors=True)
            self.settled = False
            if self.old.exists():
                self.old.rename(self.path)


def write_manifest(folder: Path, x: FileTarget, prints: str, sums: Mapping[Key, int]) -> None:
    """Write down what a checkpoint is: its format, its layout, its fingerprint, the sum of each tensor."""
    manifest = {
        "version": 1,
        "format": x.format,
        "layout": str(x.layout) if x.layout else None,
        "fingerprint": prints,
        "sums": {str(key): f"{value:016x}" for key, value in sorted(sums.items())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def read_manifest(path: Path) -> dict[str, str] | None:
    """The sums by key of when a checkpoint was written; None if it was not written by dynadapt.

    Raises `Refused` (`bad-file`).
    """
    folder = path if path.is_dir() else path.parent
    try:
        told: Any = json.loads((folder / MANIFEST).read_bytes())
        return {str(key): str(value) for key, value in told["sums"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        cause = f"is no manifest: {error!r}"[:200]
        raise Refused([Finding("bad-file", str(folder / MANIFEST), cause)]) from error
