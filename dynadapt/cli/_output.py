"""What is printed: as JSON, and where it may be lost. Then the work goes on, and its exit code says so."""

from __future__ import annotations

import errno
import json
import math
import signal
from typing import Any, TextIO

import typer

__all__ = ["NO_READER", "Output", "print_json"]

NO_READER = 128 + signal.SIGPIPE
"""The exit code where who read the output has gone: a shell's for what such a signal ends."""


class Output:
    """A text stream in whose place this one is: it never fails, and keeps the first error in `lost`.

    What prints (rich, typer) ends a process with code 1 where a pipe breaks, which means something else here.

    >>> import io
    >>> Output(io.StringIO()).write("a")
    1
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        """Pass it on; once something was lost, nothing more is."""
        try:
            if self.lost is None:
                self._stream.write(text)
        except OSError as error:
            self.lost = error
        return len(text)

    def flush(self) -> None:
        """Likewise."""
        try:
            if self.lost is None:
                self._stream.flush()
        except OSError as error:
            self.lost = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def unread(self) -> bool:
        """Whether it was lost because its reader has gone, which is no error."""
        return self.lost is not None and self.lost.errno == errno.EPIPE


def print_json(facts: Any, indent: int | None = 2) -> None:
    """Print plain values as any JSON reader takes them: a number that is not finite as a text.

    >>> print_json({"lr": float("inf"), "betas": (0.9, 0.95)}, indent=None)
    {"lr": "inf", "betas": [0.9, 0.95]}
    """
    typer.echo(json.dumps(_finite(facts), indent=indent, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
