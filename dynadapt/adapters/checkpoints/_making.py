"""Files in the making: laid out and allocated first, filled by others, sealed at the end.

What an adapter's `prepare` and `finish` share. A buffer's id is `FILE#STORAGE`, with the file's path
inside the checkpoint, in every format.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._names import leaves
from dynadapt.adapters.checkpoints._torch_write import Frame, lay_out
from dynadapt.errors import Finding, Refused
from dynadapt.files import FileBuffer, check_sum, unwritable, write_at
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

__all__ = ["Making", "allocate"]


@dataclass
class Making:
    """The files of one checkpoint under `root`; `buffers` are to be filled before `seal`.

    `dry` lays them out and makes none.
    """

    root: Path
    dry: bool = False
    buffers: dict[str, FileBuffer] = field(default_factory=dict)
    frames: dict[str, Frame] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def torch_file(self, path: str, storages: Mapping[str, tuple[str, int]]) -> None:
        """Lay out a `torch.save` file; `storages` are (dtype, elements) by name.

        It has its own name in it, as torch writes it: a file that was renamed since can be told.
        """
        self._inside(path)
        sizes = {name: n * itemsize(kind) for name, (kind, n) in storages.items()}
        frame = lay_out(sizes, PurePath(path).stem)
        self.frames[path], self.sizes[path] = frame, frame.size
        for name, (dtype, numel) in storages.items():
            at, _ = frame.places[name]
            self.buffers[f"{path}#{name}"] = FileBuffer(str(self.root / path), dtype, at, numel)

    def raw_file(self, path: str, size: int, parts: Mapping[str, tuple[str, int, int]]) -> None:
        """Lay out a file of `size` bytes; `parts` are (dtype, byte offset, elements) by name."""
        self._inside(path)
        self.sizes[path] = size
        for name, (dtype, at, numel) in parts.items():
            self.buffers[f"{path}#{name}"] = FileBuffer(str(self.root / path), dtype, at, numel)

    def _inside(self, path: str) -> None:
        """Raises `Refused` (`path-traversal`): names of tensors and of carried files are the source's."""
        if leaves(path):
            cause = "a name of the source would put a file outside the checkpoint"
            fix = "leave it out by --exclude (exclude=), and do not trust that source"
            raise Refused([Finding("path-traversal", path, cause, fix)])

    def allocate(self) -> None:
        """Make all files in full size, unless dry; raises `Refused` (`disk-full`, `unwritable-file`)."""
        for path, size in () if self.dry else self.sizes.items():
            allocate(self.root / path, size)

    def crc(self, buffer: str, known: Mapping[str, int]) -> int:
        """The CRC-32 of a filled buffer, read back if nobody has taken it."""
        if buffer in known:
            return known[buffer]
        place = self.buffers[buffer]
        return check_sum(place.bytes())

    def seal_torch(
        self,
        path: str,
        tree: Any,
        crcs: Mapping[str, int],
        values: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write all that `torch_file` left open: see `Frame.seal`."""
        if path not in self.frames:
            self.torch_file(path, {})
            allocate(self.root / path, 0)
        frame = self.frames[path]
        own = {name: self.crc(f"{path}#{name}", crcs) for name in frame.places}
        self.write_parts(path, frame.seal(tree, own, values))

    def also(self, path: str, other: str) -> None:
        """A file under another path, too: one file where the file system can do that, else a copy."""
        if self.dry:
            return
        self._inside(other)
        old, new = self.root / path, self.root / other
        try:
            new.parent.mkdir(parents=True, exist_ok=True)
            new.unlink(missing_ok=True)  # of a conversion that is continued
            try:
                os.link(old, new)
            except OSError:
                shutil.copyfile(old, new)
        except OSError as error:
            raise Refused([unwritable(new, error)]) from error

    def write(self, path: str, data: bytes, at: int = 0) -> None:
        """Put bytes into a file that was laid out, or make a small one; nothing if dry."""
        self.write_parts(path, [(at, data)])

    def write_parts(self, path: str, parts: Iterable[tuple[int, bytes]]) -> None:
        """The same of many parts, each with its offset."""
        self._inside(path)
        if self.dry:
            return
        fd = _opened(self.root / path)
        try:
            for at, data in _joined(parts):
                write_at(fd, data, at)
        finally:
            os.close(fd)


def _joined(parts: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Parts that follow one another as one: there are many small ones, and each costs a call."""
    start = stop = 0
    own: list[bytes] = []
    for at, data in parts:
        if own and at != stop:
            yield start, b"".join(own)
            own = []
        if not own:
            start = at
        own.append(data)
        stop = at + len(data)
    if own:
        yield start, b"".join(own)


def _opened(path: Path) -> int:
    """A file to be written, which may be there; its folders are made. There are hundreds of some."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o666)


def allocate(path: Path, size: int) -> None:
    """Make a file of `size` zero bytes whose blocks are taken already, so that the disk cannot fill up.

    One that is there, from a conversion that goes on now, keeps its bytes up to `size`.

    Raises `Refused` (`disk-full`, `unwritable-file`).
    """
    try:
        fd = _opened(path)
        try:
            if os.fstat(fd).st_size > size:
                os.ftruncate(fd, size)
            if size:
                try:
                    os.posix_fallocate(fd, 0, size)
                except OSError as error:
                    if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
                        raise
                    os.ftruncate(fd, size)  # some file systems cannot
        finally:
            os.close(fd)
    except OSError as error:
        raise Refused([unwritable(path, error)]) from error
