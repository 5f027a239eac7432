"""How a plan is cut into chunks that fit the staging budget, by a rule all seats compute alike.

The canonical order (key, row-major element, counted in wire bytes) is one line from 0 to
`match.total`. Every seat measures its own traffic on a grid over that line, the seats take the maximum
per grid cell, and chunks are cut greedily so that the busiest seat's share fits. A seat walks the
chunks in order and skips those it has no part in, so no cyclic wait can form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dynadapt.transport.plan import Match, Move, SeatPlan
from dynadapt.vps.box import boxes_in_span, count_below, linear_index
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["Chunk", "chunks", "cut", "grid", "traffic"]

MAX_CELLS = 1 << 16
CHUNKS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Chunk:
    """One interval of the canonical order: what this seat receives and sends in it."""

    number: int
    receives: tuple[Move, ...]
    sends: tuple[Move, ...]

    @property
    def nbytes(self) -> int:
        """Wire bytes of this seat in the chunk, both directions."""
        return sum(move.nbytes for move in (*self.receives, *self.sends))


def grid(total: int, budget: int) -> NDArray[np.int64]:
    """Edges of a grid over the canonical line, fine enough to cut chunks of `budget` bytes from.

    >>> grid(100, 1 << 20).tolist()
    [0, 100]
    """
    step = max(4096, budget // (16 * CHUNKS_IN_FLIGHT), -(-total // MAX_CELLS))
    return np.append(np.arange(0, total, step, dtype=np.int64), np.int64(total))


def traffic(plan: SeatPlan, matched: Match, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Wire bytes of this seat, in and out, per grid cell."""
    found = np.zeros(max(len(edges) - 1, 0), np.int64)
    for move in (*plan.receives, *plan.sends):
        spec = matched.by_target[move.key].target
        size = itemsize(move.wire)
        base = matched.offsets[move.key]
        first = base + linear_index(move.box.lo, spec.shape) * size
        last = base + linear_index([high - 1 for high in move.box.hi], spec.shape) * size
        low = int(np.searchsorted(edges, first, "right")) - 1
        high = int(np.searchsorted(edges, last, "right"))
        # Pieces start on multiples of 16 bytes; a border cuts a move into this many at most.
        found[low:high] += 16 if high - low == 1 else 16 * max(2 * len(spec.shape) - 1, 1)
        before = 0
        for cell in range(low, high):
            upto = -(-(int(edges[cell + 1]) - base) // size)
            below = count_below(move.box, spec.shape, upto)
            found[cell] += (below - before) * size
            before = below
    return found


def cut(busiest: NDArray[np.int64], edges: NDArray[np.int64], budget: int) -> tuple[int, ...]:
    """Chunk borders (canonical bytes) such that two chunks of the busiest seat fit the budget.

    `busiest` is the maximum over seats of `traffic`. A single cell that is larger is cut evenly.

    >>> cut(np.array([5, 5, 5]), np.array([0, 10, 20, 30]), 20)
    (0, 20, 30)
    """
    share = max(budget // CHUNKS_IN_FLIGHT, 1)
    borders, held = [0], 0
    for cell, amount in enumerate(busiest.tolist()):
        if held and held + amount > share:
            borders.append(int(edges[cell]))
            held = 0
        held += amount
        if held > share:  # one cell, which many seats want from one
            low, high = int(edges[cell]), int(edges[cell + 1])
            parts = min(-(-held // share), high - low)
            borders += (low + (high - low) * part // parts for part in range(1, parts))
            held = -(-held // parts)
    borders.append(int(edges[-1]))
    return tuple(borders)


def chunks(plan: SeatPlan, matched: Match, borders: Sequence[int]) -> Iterator[Chunk]:
    """This seat's chunks that are not empty, in order; moves are cut at the borders."""
    receives = list(_cut_moves(plan.receives, matched, borders))
    sends = list(_cut_moves(plan.sends, matched, borders))
    numbers = sorted({n for n, _ in receives} | {n for n, _ in sends})
    by_number: dict[int, tuple[list[Move], list[Move]]] = {n: ([], []) for n in numbers}
    for number, move in receives:
        by_number[number][0].append(move)
    for number, move in sends:
        by_number[number][1].append(move)
    for number in numbers:
        into, out = by_number[number]
        yield Chunk(number, tuple(into), tuple(out))


def _cut_moves(
    moves: Sequence[Move], matched: Match, borders: Sequence[int]
) -> Iterator[tuple[int, Move]]:
    line = np.asarray(borders)
    for move in moves:
        spec = matched.by_target[move.key].target
        size = itemsize(move.wire)
        base = matched.offsets[move.key]
        first = base + linear_index(move.box.lo, spec.shape) * size
        last = base + linear_index([high - 1 for high in move.box.hi], spec.shape) * size
        low = max(int(np.searchsorted(line, first, "right")) - 1, 0)
        high = min(int(np.searchsorted(line, last, "right")) - 1, len(borders) - 2)
        if low == high:
            yield low, move
            continue
        for number in range(low, high + 1):
            # an element belongs to the chunk in which its first byte lies
            start = 0 if number == low else -(-(borders[number] - base) // size)
            stop = spec.numel if number == high else -(-(borders[number + 1] - base) // size)
            for box in boxes_in_span(move.box, spec.shape, max(start, 0), max(stop, 0)):
                yield number, Move(move.key, box, move.source, move.target, move.wire)
