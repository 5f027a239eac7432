"""What is filled already of a checkpoint in the making, written down as it goes: for who continues.

A file beside the data. Its first line says what is made of what; each further one how far a buffer is, with
the check sum of the bytes and the sums of the rows. A last line that is cut off counts as not written.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding, Refused
from dynadapt.transport.certificate import VERSION
from dynadapt.transport.progress import Progress
from dynadapt.vps import wire

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

    from dynadapt.elastic.selection import Selection
    from dynadapt.files import FileBuffer
    from dynadapt.protocols import Described, FileTarget

__all__ = ["Journal", "identity", "stamps_of"]

_FORM = 3


def identity(
    source: Path,
    own: Described,
    stamps: Mapping[str, list[int]],
    x: FileTarget,
    selection: Selection | None,
    narrow: str,
) -> dict[str, Any]:
    """What must be the same for a conversion to be continued: the source's tensors, the target, the options.

    `stamps` are those of the files that the tensors lie in. Whatever else a source has is written at the
    end, as it then is.
    """
    chosen = [None if selection is None else asdict(selection), narrow]
    said = (x.order, x.groups, x.frozen)
    told = [x.format, str(x.layout), *said, sorted(x.options.items()), chosen]
    details = hashlib.sha256(json.dumps(told, default=str).encode())
    details.update(_where(source, own).encode())
    return {
        "version": [_FORM, VERSION],
        "source": str(source.resolve()),
        "files": {os.path.relpath(path, source): stamp for path, stamp in stamps.items()},
        "target": f"{x.format} {x.layout or ''}".strip(),
        "details": details.hexdigest(),
    }


def _where(source: Path, own: Described) -> str:
    """Which tensors there are, and where in which files."""
    files: Mapping[str, FileBuffer] = own.buffers  # type: ignore[assignment]
    paths = {path: os.path.relpath(path, source) for path in {b.path for b in files.values()}}
    buffers = [(name, paths[b.path], b.dtype, b.offset, b.numel) for name, b in files.items()]
    rows = [
        (row.key, row.box.lo, row.box.hi, row.buffer, row.offset, row.strides)
        for each in own.files.values()
        for row in each
    ]
    return json.dumps([wire.encode_specs(own.specs), rows, buffers])


def stamps_of(own: Described) -> dict[str, list[int]]:
    """Of the files that tensors lie in, as far as they are there: size and time.

    They differ when a file has been written to, or another has taken its place.
    """
    files: Mapping[str, FileBuffer] = own.buffers  # type: ignore[assignment]
    found: dict[str, list[int]] = {}
    for path in sorted({buffer.path for buffer in files.values()}):
        with suppress(OSError):  # whoever reads it says so
            told = Path(path).stat()
            found[path] = [told.st_size, told.st_mtime_ns]
    return found


@dataclass
class Journal:
    """`marks`: how far each buffer was when the file was read. Several threads may `mark`."""

    path: Path
    marks: dict[str, Progress] = field(default_factory=dict)
    _told: dict[str, int] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _file: TextIO | None = None

    @classmethod
    def begin(cls, path: Path, what: Mapping[str, Any]) -> Journal:
        """A new one."""
        path.write_text(json.dumps(what) + "\n")
        return cls(path)

    @classmethod
    def goes_on(cls, path: Path, what: Mapping[str, Any], *, resume: bool) -> Journal:
        """The one that is there with `resume`, without a last line that was cut off; else a new one."""
        found = cls.again(path, what) if resume else None
        if found is None:
            return cls.begin(path, what)
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        return found

    @classmethod
    def again(cls, path: Path, what: Mapping[str, Any]) -> Journal | None:
        """The one that is there, if any; raises `Refused` (`resume-differs`) if it is of something else."""
        if not path.exists():
            return None
        lines = path.read_bytes().split(b"\n")
        if len(lines) < 2:
            return None
        try:
            begun = json.loads(lines[0])
        except ValueError:
            return None
        _compare(path, begun if isinstance(begun, dict) else {}, json.loads(json.dumps(what)))
        found = cls(path)
        for line in lines[1:-1]:
            with suppress(
                ValueError, TypeError
            ):  # garbled, as by a loss of power: nothing is known of it
                found._read(json.loads(line))
        return found

    @classmethod
    def every(cls, folder: Path, what: Mapping[str, Any]) -> dict[str, Progress]:
        """How far each buffer is by all journals of a folder."""
        found: dict[str, Progress] = {}
        for path in sorted(folder.glob("journal-*")):
            own = cls.again(path, what)
            for name, mark in ({} if own is None else own.marks).items():
                if mark.done >= found.get(name, Progress()).done:
                    found[name] = mark
        return found

    def _read(self, told: Any) -> None:
        name, start, sums, done, crc, read = told
        before = self.marks.get(name, Progress()).sums[:start]
        self.marks[name] = Progress((*before, *sums), done, crc, read)
        self._told[name] = start + len(sums)

    def mark(self, name: str, progress: Progress) -> None:
        """Write down how far a buffer is."""
        with self._lock:
            start = self._told.get(name, 0)
            start = start if start <= len(progress.sums) else 0
            self._told[name] = len(progress.sums)
            sums = progress.sums[start:]
            told = [name, start, sums, progress.done, progress.crc, progress.read]
            if self._file is None:
                self._file = self.path.open("a")
            self._file.write(json.dumps(told) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Nothing more is written down."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _compare(path: Path, had: Mapping[str, Any], have: Mapping[str, Any]) -> None:
    """Raises `Refused` with what is not as it was."""
    causes = {
        key: f"was {had.get(key)!r}, is {have[key]!r}"
        for key in ("source", "target")
        if had.get(key) != have[key]
    }
    before, now = had.get("files", {}), have["files"]
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    causes |= dict.fromkeys(changed[:20], "has changed since, has come or is gone")
    if not causes and dict(had) != dict(have):
        cause = "was begun with other options, of other tensors, or by another version"
        causes = {str(path.parent): cause}
    if causes:
        fix = "without --resume (resume=True) it begins anew"
        raise Refused([Finding("resume-differs", k, cause, fix) for k, cause in causes.items()])
