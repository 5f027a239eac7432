"""docs/refusals.md has every reason in the code, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]

#: How functions that make a finding of a reason are called.
MAKERS = ("finding", "_refused", "_at_row")

REASON = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def constants(node: ast.expr) -> Iterator[str]:
    """The texts that an expression may be: a constant, or either side of a choice."""
    if isinstance(node, ast.IfExp):
        yield from constants(node.body)
        yield from constants(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def reasons(text: str) -> Iterator[str]:
    """What the code of a module passes as the reason of a finding or an error."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
            if name.lower().endswith(MAKERS) and node.args:
                yield from constants(node.args[0])
            for keyword in node.keywords:
                if keyword.arg == "reason":
                    yield from constants(keyword.value)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "reason":
                    yield from constants(value)
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "reason" for target in node.targets
        ):
            yield from constants(node.value)


def told() -> dict[str, list[str]]:
    """Reason -> the cells of its row in the page."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "refusals.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            for reason in re.findall(r"`([^`]+)`", cells[0]):
                assert reason not in found, f"{reason} is there twice"
                found[reason] = cells
    return found


def test_every_reason_is_in_the_page() -> None:
    """With what it means and the way out."""
    code = {
        reason
        for path in sorted((ROOT / "dynadapt").rglob("*.py"))
        for reason in reasons(path.read_text())
        if REASON.fullmatch(reason)
    }
    page = told()
    assert code - page.keys() == set(), "missing in docs/refusals.md"
    assert page.keys() - code == set(), "in docs/refusals.md, and nowhere in the code"
    assert all(len(cells) == 3 and all(cells) for cells in page.values())


def test_the_walk_sees_every_form() -> None:
    """A page that is complete by an empty list would prove nothing."""
    text = 'Finding("a-b", x)\nself._finding("c", y)\nreason = "d" if z else "e"\nError(reason="f")'
    assert set(reasons(text)) == {"a-b", "c", "d", "e", "f"}
