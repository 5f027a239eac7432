"""Where a checkpoint is to be: a hidden folder beside its place, which gets the name when all is right.

And the manifest in it, which says what it was when it was written.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dynadapt.errors import DynadaptError, Finding, Refused
from dynadapt.files import forget, unwritable
from dynadapt.registry import adapter_for
from dynadapt.transport.certificate import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dynadapt.protocols import FileTarget
    from dynadapt.vps.keys import Key

__all__ = ["MANIFEST", "Place", "Recorded", "read_manifest", "write_manifest"]

MANIFEST = "dynadapt.json"
"""Beside the data of every checkpoint that was written: what it is, and the sum of every tensor."""

MARK = b"dynadapt\n"
"""In the lock of a hidden folder: it was made here, and what is in it may be removed."""


_locks: set[int] = set()


def _let_go() -> None:
    """In a fork: the locks are its parent's, and shall end with it."""
    for lock in _locks:
        os.close(lock)
    _locks.clear()


os.register_at_fork(after_in_child=_let_go)


@dataclass
class Place:
    """A path that is to become a checkpoint; one process works on it at a time.

    `begin`, then `settle` and `close`, or at any point `undo`, or `leave` for who might continue. Until
    `close` an old checkpoint of that name is kept, and comes back with `undo`. What a process that was
    killed has left is found by the next that begins.
    """

    path: Path
    force: bool = False
    settled: bool = False
    found: bool = False
    _lock: int = -1
    _replaced: bool = False
    _parents: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.path.name in {"", ".."}:  # `.`, too: what lies beside it needs its name
            self.path = self.path.resolve()

    @property
    def aside(self) -> Path:
        """The folder beside it with all that is there before it is done."""
        return self.path.with_name(f".{self.path.name}.partial")

    @property
    def data(self) -> Path:
        """The folder in which it is made."""
        return self.aside / "data"

    @property
    def old(self) -> Path:
        """Where what is replaced waits."""
        return self.path.with_name(f".{self.path.name}.old")

    @property
    def _note(self) -> Path:
        """Which file or folder is replaced: nothing else of the name `old` is touched."""
        return self.aside / "replaced"

    def begin(self, *, resume: bool = False) -> Path:
        """Make the folder, and say where; what was left over is removed, or with `resume` kept.

        Then `found` says whether anything was. Raises `Refused` (`target-exists` unless `force`, and if
        somebody else made what has a name that is needed; `target-busy`, `unwritable-file`).
        """
        self._free()
        self._parents = tuple(p for p in self.path.parents if not os.path.lexists(p))
        both = os.path.lexists(self.old) and os.path.lexists(self.path)
        if both and not self._is_replaced():
            raise Refused([_another(self.old)])
        try:
            self._take()
            if self._is_replaced():  # somebody was killed as he replaced it
                if self.path.exists():
                    _remove(self.old)
                else:
                    self.old.rename(self.path)
                    self._free()
            self.found = self.data.exists()
            for each in self.aside.iterdir():
                goes_on = each.name == "data" or each.name.startswith("journal-")
                if each.name != "lock" and not (resume and goes_on):
                    _remove(each)
            self.data.mkdir(exist_ok=True)
        except OSError as error:
            self.leave()
            raise Refused([unwritable(self.aside, error)]) from error
        except Refused:
            self.undo()
            raise
        except BaseException:
            self.leave()
            raise
        return self.data

    def _free(self) -> None:
        if os.path.lexists(self.path) and not self.force:  # a link that leads nowhere, too
            cause = "is there already"
            fix = "choose another place, or replace it with --force (force=True)"
            raise Refused([Finding("target-exists", str(self.path), cause, fix)])
        if self.force and (what := _foreign(self.path)):
            cause = f"{what}, which --force (force=True) would remove"
            fix = "choose another place, or remove it yourself"
            raise Refused([Finding("target-exists", str(self.path), cause, fix)])

    def _is_replaced(self) -> bool:
        """Whether what is called `old` is what a process here has so called."""
        try:
            return self._note.read_text() == _identity(self.old)
        except OSError:
            return False

    def _take(self) -> None:
        """Be the only one: a lock that ends with the process."""
        name = self.aside / "lock"
        while True:
            self.aside.mkdir(parents=True, exist_ok=True)
            if not _ours(self.aside):
                raise Refused([_another(self.aside)])
            try:
                lock = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:  # its owner has just removed it
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                cause, fix = "another process is writing it", "let it end, or choose another place"
                raise Refused([Finding("target-busy", str(self.path), cause, fix)]) from None
            except OSError as error:
                if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}:
                    os.close(lock)
                    raise  # some file systems have no locks
            self._lock = lock
            _locks.add(lock)
            if _same(name, lock):
                self._mark()
                return
            self.leave()  # its owner has just removed it

    def _mark(self) -> None:
        """Say in the lock of a new folder that it is of ours."""
        try:
            if not os.fstat(self._lock).st_size:
                os.pwrite(self._lock, MARK, 0)
        except OSError:
            self._drop()
            raise

    def settle(self) -> None:
        """Give it its name. What was there waits to be removed."""
        try:
            if os.path.lexists(self.path) and self.force:
                if os.path.lexists(self.old):
                    raise Refused([_another(self.old)])
                self._note.write_text(_identity(self.path))
                self.path.rename(self.old)
                self._replaced = True
            self.data.rename(self.path)
            self.settled = True
        finally:
            if self._replaced and not self.settled and not self.path.exists():
                self.old.rename(self.path)

    def close(self) -> None:
        """There is no way back: remove what was replaced."""
        if self._replaced:
            _remove(self.old)
        self._drop()

    def undo(self) -> None:
        """Leave nothing behind, and what was there as it was."""
        if self.settled:
            _remove(self.path)
            self.settled = False
            if self._replaced and os.path.lexists(self.old):
                self.old.rename(self.path)
        self._drop()
        with suppress(OSError):  # not empty: somebody else has put something there meanwhile
            for folder in self._parents:
                folder.rmdir()

    def sweep(self) -> None:
        """Remove what another process has left that is gone; one that lives has the lock."""
        if not self.aside.exists():
            return
        try:
            self._take()
        except (OSError, Refused):
            return
        self._drop()

    def leave(self) -> None:
        """Keep what there is of it, for `begin(resume=True)`."""
        if self._lock >= 0:
            _locks.discard(self._lock)
            os.close(self._lock)
            self._lock = -1

    def _drop(self) -> None:
        forget(self.aside)
        if self._lock >= 0:
            with suppress(OSError):  # it may be gone; and what has failed before is what is told
                for each in self.aside.iterdir():  # the mark goes last
                    if each.name != "lock":
                        _remove(each)
                _remove(self.aside)
        self.leave()


def _same(name: Path, opened: int) -> bool:
    try:
        return os.path.samestat(name.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False


def _ours(aside: Path) -> bool:
    """Whether a hidden folder was made here: it has the mark, or nothing yet."""
    if aside.is_symlink():
        return False
    lock = aside / "lock"
    try:
        marked = not lock.is_symlink() and lock.read_bytes() == MARK
    except FileNotFoundError:
        marked = False
    try:
        return marked or all(e.name == "lock" and not e.lstat().st_size for e in aside.iterdir())
    except FileNotFoundError:  # its owner has just removed it
        return True


def _identity(path: Path) -> str:
    """What a file or a folder keeps as it is renamed."""
    told = path.lstat()
    return f"{told.st_dev} {told.st_ino}"


def _another(path: Path) -> Finding:
    cause = "is not dynadapt's, and has a name that is needed: it would be replaced or removed"
    return Finding("target-exists", str(path), cause, "move it away, or choose another place")


def _foreign(path: Path) -> str:
    """What somebody would miss: not one checkpoint, whole or not, an empty folder or a link; or nothing."""
    if path.is_symlink() or not path.exists():
        return ""
    kind = _kind(path)
    if not path.is_dir():
        return "" if kind else "is a file, and no checkpoint"
    several = [each.name for each in path.iterdir() if each.is_dir() and kind == _kind(each)]
    if kind and len(several) > 1:
        return f"has several checkpoints in it ({', '.join(sorted(several)[:4])})"
    if kind or (path / MANIFEST).exists() or not any(path.iterdir()):
        return ""
    return "is a folder with something else than a checkpoint in it"


def _kind(path: Path) -> str:
    """The format of a checkpoint; nothing, if it is none."""
    try:
        return adapter_for(str(path)).name
    except DynadaptError:
        return ""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_manifest(folder: Path, x: FileTarget, prints: str, sums: Mapping[Key, int]) -> None:
    """Write down what a checkpoint is: its format, its layout, its fingerprint, the sum of each tensor."""
    manifest = {
        "version": VERSION,
        "format": x.format,
        "layout": str(x.layout) if x.layout else None,
        "fingerprint": prints,
        "sums": {str(key): f"{value:016x}" for key, value in sorted(sums.items())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


class Recorded(NamedTuple):
    """What a manifest says: the fingerprint, and the sum of each key."""

    fingerprint: str
    sums: dict[str, str]


def read_manifest(path: Path) -> Recorded | None:
    """What a checkpoint was when it was written; None if it was not by dynadapt, or has other sums.

    Raises `Refused` (`bad-file`).
    """
    folder = path if path.is_dir() else path.parent
    try:
        told: Any = json.loads((folder / MANIFEST).read_bytes())
        if told["version"] != VERSION:
            return None
        sums = {str(key): str(value) for key, value in told["sums"].items()}
        return Recorded(str(told["fingerprint"]), sums)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        cause = f"is no manifest: {error!r}"[:200]
        raise Refused([Finding("bad-file", str(folder / MANIFEST), cause)]) from error
