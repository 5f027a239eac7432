"""Ctrl-C and SIGTERM while something is written: it ends in order, and says what can be done next."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dynadapt.elastic.place import Place

__all__ = ["interruptible"]


@contextmanager
def interruptible(target: Path) -> Iterator[None]:
    """SIGTERM is an interrupt as Ctrl-C is; after either the exit code is 128 and the signal's number."""
    from dynadapt.elastic.place import Place

    place, number = Place(target), int(signal.SIGINT)
    had = _which(place.path)

    def interrupt(signum: int, _: Any) -> None:
        nonlocal number
        number = signum
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {_left(place, had)}", err=True)
        sys.exit(128 + number)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _which(path: Path) -> tuple[int, int] | None:
    """What a file or a folder keeps as it is renamed; None if there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _left(place: Place, had: tuple[int, int] | None) -> str:
    """What there is now, where `had` had the name before."""
    have, begun = _which(place.path), place.data.exists()
    if have not in {None, had} and not begun:
        rest = f"; {place.old}, which it replaced, is not removed" if _which(place.old) else ""
        return f"{place.path} is whole{rest}"
    was = "nothing was written" if have is None else f"{place.path} is as it was"
    if begun:
        return f"{was}; {place.aside} has what is done: the same command with --resume continues it"
    return was
