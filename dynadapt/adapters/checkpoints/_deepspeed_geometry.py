"""Where each parameter lies in the flats of a DeepSpeed checkpoint: spans of files, as rows.

The order of parameters is that of `param_shapes`, as DeepSpeed flattens them; the offsets are those of
`vps.flat`. The file's own `param_slice_mappings` are not used: they are wrong under round robin.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._rows import Files
from dynadapt.errors import Finding, Refused
from dynadapt.vps.flat import FlatGroup, zero3_part, zero_group

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Files",
    "Piece",
    "Shapes",
    "dealt",
    "fitting",
    "flat_pieces",
    "regrouped",
    "shapes_of",
    "shard",
    "shard_pieces",
    "undealt",
]

Shapes = dict[str, tuple[int, ...]]

MAX_DIMS, MAX_NUMEL = 8, 1 << 56
"""Of a tensor: what is longer is no tensor's shape."""

ALIGNMENT = 2
"""Padding of a flat of stages 1 and 2 is shorter than so many elements a rank, in every version."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `[start, stop)` of a parameter, from index `at` on in flat number `flat` of a rank."""

    name: str
    rank: int
    flat: int
    start: int
    stop: int
    at: int


def flat_pieces(
    groups: Sequence[Shapes],
    ranks: int,
    between: int = 1,
    parts: Sequence[int] | None = None,
) -> Iterator[Piece]:
    """Stages 1 and 2: one flat a group, cut evenly; the tensors in the flat's order.

    `parts` are the elements of a rank of each flat, by default those of DeepSpeed 0.19: older versions
    pad to other multiples.
    """
    for number, shapes in enumerate(groups):
        sizes = [prod(shape) for shape in shapes.values()]
        group = zero_group(sizes, ranks, between=between)
        if parts is not None:
            group = FlatGroup(group.offsets, parts[number])
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


def fitting(group: Shapes, part: int, ranks: int, between: int = 1) -> bool:
    """Whether a group's tensors fill a flat of so many parts, but for the padding of any version.

    >>> fitting({"a": (5,)}, 4, 2), fitting({"a": (5,), "b": (4,)}, 4, 2), fitting({"a": (3,)}, 4, 2)
    (True, False, False)
    """
    sizes = [prod(shape) for shape in group.values()]
    offsets = zero_group(sizes, ranks, between=between).offsets
    total = max((int(at) + size for at, size in zip(offsets, sizes, strict=True)), default=0)
    return 0 <= part * ranks - total < ALIGNMENT * ranks or part * ranks == total


def regrouped(shapes: Shapes, held: Sequence[int], ranks: int) -> list[Shapes] | None:
    """One list of all groups' tensors, cut into groups; None if there is more than one way.

    DeepSpeed before 0.5 did not list by group. `held` are the elements of each flat on all ranks, which
    those versions kept without padding, unless it was longer than the last rank's part.

    >>> regrouped({"a": (5,), "b": (9,), "c": (1,)}, [5, 10], 2)
    [{'a': (5,)}, {'b': (9,), 'c': (1,)}]
    >>> regrouped({"a": (5,), "b": (1,), "c": (9,)}, [6, 9], 2)
    [{'a': (5,), 'b': (1,)}, {'c': (9,)}]
    """
    names = [name for name, shape in shapes.items() if all(shape)]
    ends = [0, *accumulate(prod(shapes[name]) for name in names)]
    ways: list[tuple[int, ...]] = [()]
    for total in held:  # each way is where the groups so far end
        longer = [
            (*way, stop)
            for way in ways
            for stop in range(way[-1] if way else 0, len(ends))
            if 0 <= total - (ends[stop] - ends[way[-1] if way else 0]) < ALIGNMENT * ranks
        ]
        ways = longer[:1000]
    whole = [way for way in ways if way and way[-1] == len(names)]
    exact = [w for w in whole if [ends[b] - ends[a] for a, b in pairwise((0, *w))] == list(held)]
    chosen = exact if exact else whole
    if len(chosen) != 1:
        return None
    groups = [names[start:stop] for start, stop in pairwise((0, *chosen[0]))]
    groups[0] += [name for name, shape in shapes.items() if not all(shape)]  # they lie nowhere
    return [{name: shapes[name] for name in own} for own in groups]


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
            full = True
            while number < len(flats) and at + part > flats[number]:
                full &= at == flats[number]
                number, at = number + 1, 0
            if number == len(flats) or not full:
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
    """A dict name -> `torch.Size`, as plain tuples; raises `Refused` (`bad-file`) for what is no shape."""
    if not isinstance(value, dict):
        return {}
    bad = [
        Finding("bad-file", str(name), f"is listed with {str(shape)[:80]}, which is no shape")
        for name, shape in value.items()
        if not isinstance(shape, tuple | list)
        or len(shape) > MAX_DIMS
        or any(type(n) is not int or n < 0 for n in shape)
        or prod(shape) > MAX_NUMEL
    ]
    if bad:
        raise Refused(bad)
    return {str(name): tuple(shape) for name, shape in value.items()}
