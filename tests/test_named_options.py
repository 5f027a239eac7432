"""An error is raised for both who types a command and who calls a function: it names what both of them have.

The form is one, `--order FILE (order=)`: an option, what it takes, and the keyword that is the same.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

import dynadapt
from dynadapt import cli
from dynadapt.adapters.model_shapes import read_model

if TYPE_CHECKING:
    from collections.abc import Iterator

CODE = Path(dynadapt.__file__).parent

COMMANDS = ("cli", "demo", "report", "testing", "__main__.py")
"""Parts whose texts no user of a function sees."""

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
PAIR = re.compile(r"(--[a-z][a-z-]*)(?: \w+)* \(([a-z_]+)=(?:True|False|\d+)?(?: of [\w.]+)?\)")

OTHER_WORDS = {"workers": "threads", "no-verify": "verify", "order": "groups"}
"""Options that say how many of what, what is left out, or two things at once."""

MEGATRONS = {"--ckpt-format", "--dist-ckpt-optim-fully-reshardable"}


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a module but those that are for who reads it; what is put into one is `{}`."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inner.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
            parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and id(node) not in inner:
            yield str(node.value)


def wrong(text: str) -> list[str]:
    """What of a text one of the two cannot follow."""
    pairs = dict(PAIR.findall(text))
    found = [option for option in OPTION.findall(text) if option not in {*pairs, *MEGATRONS}]
    for option, keyword in pairs.items():
        word = option.removeprefix("--")
        if option not in _options() or keyword not in _keywords():
            found.append(f"{option} ({keyword}=)")
        elif keyword not in {word.replace("-", "_"), OTHER_WORDS.get(word)}:
            found.append(f"{option} is not {keyword}=")
    return found


@cache
def _options() -> frozenset[str]:
    group: Any = typer.main.get_command(cli.app)
    params = [param for command in group.commands.values() for param in command.params]
    return frozenset(option for p in params for option in (*p.opts, *p.secondary_opts))


@cache
def _keywords() -> frozenset[str]:
    named = [read_model, *(getattr(dynadapt, name) for name in dynadapt.__all__)]
    functions = [each for each in named if inspect.isfunction(each)]
    return frozenset(name for each in functions for name in inspect.signature(each).parameters)


def test_both_have_what_an_error_names() -> None:
    told = {}
    for path in sorted(CODE.rglob("*.py")):
        if path.relative_to(CODE).parts[0] not in COMMANDS:
            told |= {text: wrong(text) for text in texts(ast.parse(path.read_text()))}
    assert not {text: found for text, found in told.items() if found}
    named = {option for text in told for option, _ in PAIR.findall(text)}
    assert len(named) > 12
    assert {"--order", "--workers", "--no-verify", "--weights-only"} <= named


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("say --to", ["--to"]),
        ("say --to (to=)", []),
        ("--nothing (to=)", ["--nothing (to=)"]),
        ("--order FILE (model=)", ["--order is not model="]),
        ("--workers 1 (threads=1), --order FILE with groups (groups=)", []),
        ("--order FILE (order=) or --model", ["--model"]),
    ],
)
def test_what_it_would_find(text: str, found: list[str]) -> None:
    """A walk that sees nothing would find nothing."""
    assert wrong(text) == found
    assert list(texts(ast.parse(f'"""{text}"""\nfix = f"{text} {{x}}"'))) == [f"{text} {{}}"]
