"""The index of a model in several files, as transformers writes it: which file holds which tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["broken_promises", "weight_map"]


def weight_map(path: Path) -> dict[str, str]:
    """Tensor -> file name; raises `Refused` (`bad-file`, `path-traversal`)."""
    try:
        found = dict(json.loads(path.read_bytes())["weight_map"])
        names = set(found.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        cause = f"is no index of a model's files: {error!r}"[:200]
        raise Refused([Finding("bad-file", str(path), cause)]) from error
    bad = [n for n in names if not isinstance(n, str) or Path(n).name != n or n in {"", "."}]
    if bad:
        cause = f"names a file outside its folder: {bad[0]!r}"[:200]
        raise Refused([Finding("path-traversal", str(path), cause)])
    return found


def broken_promises(promised: Mapping[str, str], found: Mapping[str, str]) -> list[Finding]:
    """What an index puts into a file that does not hold it; `found` is tensor -> file."""
    return [
        Finding("missing-key", tensor, f"the index puts it into {name}, which does not hold it")
        for tensor, name in sorted(promised.items())
        if found.get(tensor) != name
    ]
