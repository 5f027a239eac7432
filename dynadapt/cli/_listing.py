"""How facts, listings and findings are printed, in a terminal of any width.

Names of tensors and paths are for copying: a line that has one is neither cut nor wrapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console

    from dynadapt.errors import Finding

__all__ = ["columns", "names_of", "print_facts", "print_findings", "print_lines"]


def print_facts(console: Console, title: str, facts: Mapping[str, str]) -> None:
    """A table of names and texts below its title; a text that is empty is left out."""
    from rich.table import Table

    table = Table("", "", show_header=False)
    for name, text in facts.items():
        if text:
            table.add_row(name, escape(text))
    print_lines(console, [title])
    console.print(table)


def print_findings(console: Console, label: str, style: str, findings: Iterable[Finding]) -> None:
    """A line each."""
    for finding in findings:
        console.print(label, style=style, end=" ")
        print_lines(console, [str(finding)])


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Lines as they are: neither markup nor wrapped."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def names_of(key: str, aliases: Sequence[str]) -> tuple[str, str]:
    """All names of a tensor that has several, and its slot.

    >>> names_of("embed.weight/param", ["head.weight"])
    ('embed.weight = head.weight', 'param')
    """
    name, _, slot = key.rpartition("/")
    return " = ".join((name, *aliases)), slot


def columns(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """Rows as lines whose columns begin at one place each; of `numbers` all but the last end at one.

    >>> columns([("a", "1", "x"), ("bc", "10", "y")])
    ['a   1   x', 'bc  10  y']
    >>> columns([("a", "1", "x"), ("bc", "10", "y")], numbers=True)
    [' a   1  x', 'bc  10  y']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    side = str.rjust if numbers else str.ljust
    return ["  ".join((*map(side, row[:-1], widths), row[-1])) for row in rows]
