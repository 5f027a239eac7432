"""Where each parameter lies in the flats of a DeepSpeed checkpoint: spans of files, as rows.

The order of parameters is that of `param_shapes`, as DeepSpeed flattens them; the offsets are those of
`vps.flat`. The file's own `param_slice_mappings` are not used: they are wrong under round robin.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._rows import Files
from dynadapt.vps.flat import zero3_part, zero_group

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Files",
    "Piece",
    "Shapes",
    "dealt",
    "flat_pieces",
    "shapes_of",
    "shard",
    "shard_pieces",
    "undealt",
]

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `[start, stop)` of a parameter, from index `at` on in flat number `flat` of a rank."""

    name: str
    rank: int
    flat: int
    start: int
    stop: int
    at: int


def flat_pieces(groups: Sequence[Shapes], ranks: int, between: int = 1) -> Iterator[Piece]:
    """Stages 1 and 2: one flat a group, cut evenly; the tensors in the flat's order."""
    for number, shapes in enumerate(groups):
        sizes = [prod(shape) for shape in shapes.values()]
        group = zero_group(sizes, ranks, between=between)
        for rank in range(ranks):
            start, stop, at = group.spans(sizes, rank)
            for i, name in enumerate(shapes):
                if start[i] < stop[i]:
                    yield Piece(name, rank, number, int(start[i]), int(stop[i]), int(at[i]))


def dealt(shapes: Shapes, ranks: int) -> Shapes:
    """The order of a flat under `round_robin_gradients`: a group's tensors are dealt to the ranks like cards.

    >>> list(dealt({"a": (1,), "b": (1,), "c": (1,)}, 2))
    ['a', 'c', 'b']
    """
    names = list(shapes)
    return {names[at]: shapes[names[at]] for at in _turns(len(names), ranks)}


def undealt(shapes: Shapes, ranks: int) -> Shapes:
    """A group's own order out of that of its flat: the inverse of `dealt`.

    >>> list(undealt({"a": (1,), "c": (1,), "b": (1,)}, 2))
    ['a', 'b', 'c']
    """
    cards = dict(zip(_turns(len(shapes), ranks), shapes.items(), strict=True))
    return dict(cards[at] for at in range(len(cards)))


def _turns(count: int, ranks: int) -> list[int]:
    """The cards in the order in which they lie in the hands, one rank after another."""
    return sorted(range(count), key=lambda at: at % ranks)


def shard(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """Stage 3: the elements `[start, stop)` of a parameter that a rank holds, without padding.

    >>> shard(10, 4, 3)
    (9, 10)
    """
    part = zero3_part(numel, ranks)
    return min(rank * part, numel), min((rank + 1) * part, numel)


def shard_pieces(
    groups: Sequence[Shapes], ranks: int, flats: Sequence[int]
) -> tuple[list[Piece], dict[str, int], list[str]]:
    """Stage 3: every parameter padded and cut alone; the pieces of a sub-group one after another.

    `flats` are the elements of a rank's flats. Older versions list the parameters by group and not by
    sub-group, so a parameter goes to the next flat when the current one is full. Returns the pieces,
    the flat of each parameter, and the names that found no room.
    """
    pieces: list[Piece] = []
    where: dict[str, int] = {}
    lost: list[str] = []
    number, at = 0, 0
    for shapes in groups:
        for name, shape in shapes.items():
            size = prod(shape)
            part = zero3_part(size, ranks)
            while number < len(flats) and at + part > flats[number]:
                number, at = number + 1, 0
            if number == len(flats):
                lost.append(name)
                continue
            where[name] = number
            for rank in range(ranks):
                start, stop = shard(size, ranks, rank)
                if start < stop:
                    pieces.append(Piece(name, rank, number, start, stop, at))
            at += part
    return pieces, where, lost


def shapes_of(value: Any) -> Shapes:
    """A dict name -> `torch.Size`, as plain tuples."""
    if not isinstance(value, dict):
        return {}
    return {str(name): tuple(int(n) for n in shape) for name, shape in value.items()}
