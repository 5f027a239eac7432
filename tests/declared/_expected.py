"""Rows as the formulas of `dynadapt.vps.flat` say them, to compare with what was observed."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from dynadapt.vps.box import Box, Span
from dynadapt.vps.keys import Key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dynadapt.vps.flat import FlatGroup
    from dynadapt.vps.layout import Row


class Place(NamedTuple):
    """A row without strides: in flat buffers they follow from the box."""

    key: Key
    box: Box
    buffer: str
    offset: int


def places(rows: Iterable[Row]) -> list[Place]:
    """What was observed."""
    return sorted(Place(row.key, row.box, row.buffer, row.offset) for row in rows)


def of_group(
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    group: FlatGroup,
    rank: int,
    slot: str,
    buffer: str,
) -> Iterator[Place]:
    """What rank `rank` of the group holds of its tensors."""
    numels = [prod(shapes[name]) for name in names]
    spans = zip(names, *(column.tolist() for column in group.spans(numels, rank)), strict=True)
    for name, start, stop, at in spans:
        offset = at
        for box in Span(start, stop).boxes(shapes[name]):
            yield Place(Key(name, slot), box, buffer, offset)
            offset += box.volume
