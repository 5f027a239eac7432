"""Where parameters lie inside the flat parameters of FSDP1, of which a file of a rank has a part."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

__all__ = ["FLAT", "members", "placed"]

FLAT = "_flat_param"

ALIGNMENT = 16
"""Bytes to a multiple of which FSDP pads between parameters if it keeps the original ones."""

_FIX = (
    "give the model, by which names, order and shapes are known: --model with a config "
    "or a listing (model=); or gather the state in its job (FULL_STATE_DICT)"
)


def members(prefix: str, prefixes: Collection[str], order: Sequence[str]) -> list[str]:
    """The names, in order, that lie in the flat of a module: what no flat further inside has.

    >>> members("", ["", "up."], ["embed.weight", "up.weight"])
    ['embed.weight']
    """
    inner = [p for p in prefixes if p != prefix and p.startswith(prefix)]
    return [
        name
        for name in order
        if name.startswith(prefix) and not any(name.startswith(each) for each in inner)
    ]


def placed(
    where: str,
    numel: int,
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    itemsize: int,
    ranks: int,
) -> dict[str, int]:
    """The first element of each of a flat's parameters.

    Raises `Refused` (`no-order`) where a shape is not known, or they do not make the flat's size.
    """
    lost = [name for name in names if name not in shapes]
    if not names or lost:
        what = f"the shape of {lost[0]}" if lost else "the names of its parameters"
        cause = f"is a flat parameter of {numel:,} elements, and nothing says {what}"
        raise Refused([Finding("no-order", where, cause, _FIX)])
    totals = set()
    for aligned in (ALIGNMENT // itemsize, 0):
        found, total = {}, 0
        for name in names:
            total += -total % aligned if aligned else 0
            found[name] = total
            total += prod(shapes[name])
        total += -total % ranks if aligned else 0
        if total == numel:
            return found
        totals.add(total)
    cause = f"has {numel:,} elements, and {', '.join(names[:4])}... make {max(totals):,}"
    raise Refused([Finding("no-order", where, cause, _FIX)])
