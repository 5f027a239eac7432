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

__all__ = ["interruptible"]


@contextmanager
def interruptible(target: Path) -> Iterator[None]:
    """SIGTERM is an interrupt as Ctrl-C is; after either the exit code is 128 and the signal's number."""
    number = int(signal.SIGINT)

    def interrupt(signum: int, _: Any) -> None:
        nonlocal number
        number = signum
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        from dynadapt.elastic.place import Place

        place = Place(target)
        if place.data.exists():
            text = f"{place.aside} has what is done: the same command with --resume continues it"
        else:
            text = "nothing was left to do" if target.exists() else "nothing was written"
        typer.echo(f"interrupted; {text}", err=True)
        sys.exit(128 + number)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
