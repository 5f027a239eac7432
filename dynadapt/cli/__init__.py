"""The `dynadapt` command. Imports no framework itself: what a command needs, it loads when it runs."""

from __future__ import annotations

import gc
import os
import sys

import typer
from rich.console import Console

from dynadapt.cli._convert import convert
from dynadapt.cli._demo import demo
from dynadapt.cli._diff import diff
from dynadapt.cli._env import env
from dynadapt.cli._files import fingerprint, inspect, verify
from dynadapt.cli._plan import plan
from dynadapt.cli._show import show
from dynadapt.errors import DynadaptError, lines_of

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


for command in (convert, demo, diff, env, fingerprint, inspect, plan, show, verify):
    app.command()(command)


def main() -> None:
    """Run the command line; an error of dynadapt's own is one message, not a traceback."""
    try:
        app()
    except DynadaptError as error:
        # Not as markup: a reason stands in square brackets.
        console = Console(stderr=True)
        for line in lines_of(error):
            console.print("error", style="red", end=" ")
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


def run() -> None:
    """What the installed script calls: `main`, and then the end of this process.

    To look for garbage as modules are loaded, and to take the interpreter apart, takes as long as a small
    command does.
    """
    gc.set_threshold(100_000)
    code: object = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # it may be closed
                stream.flush()
        except OSError:  # who read it has gone
            code = code or 1
    os._exit(code)


if __name__ == "__main__":
    run()
