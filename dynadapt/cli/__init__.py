"""The `dynadapt` command. Imports no framework itself: what a command needs, it loads when it runs."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from functools import wraps
from typing import TYPE_CHECKING, Any, TextIO, cast

import typer
from rich.console import Console

from dynadapt.cli._convert import convert
from dynadapt.cli._demo import demo
from dynadapt.cli._diff import diff
from dynadapt.cli._env import env
from dynadapt.cli._files import fingerprint, inspect, verify
from dynadapt.cli._output import NO_READER, Output
from dynadapt.cli._plan import plan
from dynadapt.cli._show import show
from dynadapt.errors import DynadaptError, Refused, lines_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["app", "main", "run"]

app = typer.Typer(
    name="dynadapt",
    help="Moves sharded training state between frameworks and layouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def _root() -> None:
    """Moves sharded training state between frameworks and layouts."""


def _plainly(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose faults typer does not see: it would take some for the terminal's, and end with 1."""

    @wraps(command)
    def run(**given: Any) -> None:
        try:
            command(**given)
        except (EOFError, OSError) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return run


for each in (convert, demo, diff, env, fingerprint, inspect, plan, show, verify):
    app.command()(_plainly(each))


def main() -> None:
    """Run the command line; an error of dynadapt's own is one message, not a traceback."""
    try:
        app()
    except DynadaptError as error:
        _tell(error)
        sys.exit(2)


def _tell(error: DynadaptError) -> None:
    # Not as markup: a reason stands in square brackets.
    console = Console(stderr=True)
    for line in lines_of(error):
        console.print("error", style="red", end=" ")
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def run() -> None:
    """What the installed script calls: `main`, and then the end of this process.

    To look for garbage as modules are loaded, and to take the interpreter apart, takes as long as a small
    command does. Whatever fails ends with 2: 1 is an answer of `diff`, `inspect` and `verify`.
    """
    gc.set_threshold(100_000)
    out, err = (None if each is None else Output(each) for each in (sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)  # None where it was closed
    try:
        main()
        code: object = 0
    except SystemExit as ended:
        code = ended.code or 0
    except Exception:  # a fault of this program
        traceback.print_exc()
        code = 2
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 2
    if out is not None:
        out.flush()
    if out is not None and out.lost is not None and code in {0, 1}:
        code = NO_READER if out.unread else 2
        if not out.unread:
            from dynadapt.files import unwritable

            _tell(Refused([unwritable("standard output", out.lost)]))
    if err is not None:
        err.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
