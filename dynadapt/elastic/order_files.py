"""The order, groups and shapes of parameters that a user writes into a file."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING

from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    Groups = tuple[tuple[str, ...], ...]
    """The names in each group of an optimizer."""

    Order = Sequence[str] | Mapping[str, Sequence[int] | None]
    """Names in the model's order; some may have shapes."""

    Shapes = dict[str, tuple[int, ...]]

__all__ = ["in_two_groups", "named_twice", "order_in_file"]

_SHAPED = re.compile(r"^(\S+)\s+(scalar|\d+(?:x\d+)*)$")


def order_in_file(path: Path) -> tuple[Order, Groups]:
    """Names from a file: a line each, groups of the optimizer apart by empty lines; or JSON.

    A name may be followed by its shape, `4096x1024` or `scalar`; then the order is a dict. JSON is a list of
    names, or `{"order": [...], "groups": [[...], ...], "shapes": {name: [...]}}`. Raises `Refused`
    (`no-file`, `bad-json`, `no-order` if it has no name, `duplicate-name`, `groups`).

    >>> import pathlib, tempfile
    >>> at = pathlib.Path(tempfile.mkdtemp()) / "order.txt"
    >>> _ = at.write_text("a.weight\\na.bias\\n\\nhead.weight\\n")
    >>> order_in_file(at)
    (('a.weight', 'a.bias', 'head.weight'), (('a.weight', 'a.bias'), ('head.weight',)))
    >>> _ = at.write_text("a.weight 4x3\\na.bias 4\\n")
    >>> order_in_file(at)
    ({'a.weight': (4, 3), 'a.bias': (4,)}, ())
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused([Finding("no-file", str(path), f"cannot be read: {error}")]) from error
    if text.lstrip()[:1] in {"[", "{"}:
        order, groups, shapes = _of_json(path, text)
    else:
        shapes = {}
        blocks: list[list[str]] = [[]]
        for line in (line.strip() for line in text.splitlines()):
            if not line:
                blocks.append([])
            elif match := _SHAPED.match(line):
                blocks[-1].append(match[1])
                sizes = [] if match[2] == "scalar" else match[2].split("x")
                shapes[match[1]] = tuple(map(int, sizes))
            else:
                blocks[-1].append(line)
        groups = tuple(tuple(block) for block in blocks if block)
        order = tuple(name for own in groups for name in own)
        groups = groups if len(groups) > 1 else ()
    if not order:
        cause, fix = "has no name in it", "list every parameter, or leave --order (order=) out"
        raise Refused([Finding("no-order", str(path), cause, fix)])
    if twice := [*named_twice(order), *in_two_groups(groups)]:
        raise Refused(twice)
    return ({name: shapes.get(name) for name in order} if shapes else order), groups


def _of_json(path: Path, text: str) -> tuple[tuple[str, ...], Groups, Shapes]:
    try:
        found = json.loads(text)
        found = found if isinstance(found, dict) else {"order": found}
        groups = found.get("groups", ())
        named, shapes = [found["order"], *groups], found.get("shapes", {})
        if not all(isinstance(own, list) and all(isinstance(n, str) for n in own) for own in named):
            raise TypeError("names are a list of texts")
        if not all(isinstance(own, list) and all(map(_is_size, own)) for own in shapes.values()):
            raise TypeError("a shape is a list of sizes")
        if unknown := sorted(shapes.keys() - set(found["order"])):
            raise ValueError(f"{', '.join(unknown[:3])}: a shape of what is not in the order")
        sizes = {name: tuple(own) for name, own in shapes.items()}
        return tuple(found["order"]), tuple(map(tuple, groups)), sizes
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        cause = (
            'is neither a list of names nor {"order": [...], "groups": [[...]], "shapes": {...}}: '
            f"{error!r}"
        )
        raise Refused([Finding("bad-json", str(path), cause[:240])]) from error


def _is_size(n: object) -> bool:
    return type(n) is int and n >= 0


def named_twice(order: Iterable[str]) -> list[Finding]:
    """What is wrong with an order that has a name more than once."""
    cause = "stands in the order more than once: where it lies cannot be told"
    fix = "list every parameter once"
    counts = Counter(iter(order))  # a mapping itself would be taken for counts
    return [Finding("duplicate-name", name, cause, fix) for name, n in counts.items() if n > 1]


def in_two_groups(groups: Groups) -> list[Finding]:
    """What is wrong with groups that have a member more than once."""
    counts = Counter(name for own in groups for name in own)
    cause, fix = "stands in the groups more than once", "leave it in one"
    return [Finding("groups", name, cause, fix) for name, n in counts.items() if n > 1]
