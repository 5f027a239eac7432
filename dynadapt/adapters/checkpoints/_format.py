"""What the adapters of all formats share: files are at rest, and what is being made is nobody's yet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynadapt.protocols import Described, FileTarget, alone

if TYPE_CHECKING:
    from dynadapt.protocols import Agree

__all__ = ["Format", "named_folder"]


class Format:
    """An adapter whose endpoints are files, without its own `accepts`, `prepare` and `finish`."""

    def quiesce(self, x: Any, agree: Agree = alone) -> None:
        """Files are at rest."""
        agree()

    def describe(self, x: Any) -> Described:
        """Who holds what: every file is an endpoint. Raises `Refused` with all that is wrong."""
        return Described((), (), {}) if isinstance(x, FileTarget) else self.read(Path(x))

    def read(self, path: Path) -> Described:
        """The same of a checkpoint that is there: each format's own."""
        raise NotImplementedError

    def abandon(self, x: Any) -> None:
        """Whoever made the folder removes it."""


def named_folder(path: Path, pointer: str) -> Path | None:
    """The folder inside `path` that a file such as `latest` names; None if it names none in there."""
    try:
        tag = (path / pointer).read_text(errors="replace").strip()
    except OSError:
        return None
    if not tag or Path(tag).name != tag or tag in {".", ".."} or "\0" in tag:
        return None
    return path / tag if (path / tag).is_dir() else None
