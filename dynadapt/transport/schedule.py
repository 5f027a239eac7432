"""How a plan is cut into chunks that fit the staging budget, by a rule that both ends compute alike.

What one seat sends another is a stream: its moves in canonical order. The stream is cut into equal
slices, one a chunk, so that every chunk holds the same part of every stream and no seat or link waits for
another within it. A short stream is cut into fewer slices, which a hash of the pair spreads over the
chunks. A seat walks the chunks in order and skips those it has no part in, so no cyclic wait can form.

The seats agree on two numbers, the largest load and the largest staging, not on who sends what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dynadapt.transport.plan import Move
from dynadapt.vps.box import Box, Span
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from dynadapt.transport.plan import SeatPlan

__all__ = ["Chunk", "Slicing", "chunks", "finer", "load", "slicing", "spread_of"]

CHUNKS_IN_FLIGHT = 2
ALIGN = 16
"""Pieces of a packed message start on multiples of so many bytes."""

SPREAD_BITS = 20
LONG = 1 << 20
"""Bytes from which a slice is long enough for its message to cost little."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What this seat receives and sends at one place of the common order."""

    number: int
    receives: tuple[Move, ...]
    sends: tuple[Move, ...]

    @property
    def nbytes(self) -> int:
        """Wire bytes of this seat in the chunk, both directions."""
        return sum(move.nbytes for move in (*self.receives, *self.sends))


class Slicing(NamedTuple):
    """How fine all seats cut: the number of chunks, and the shortest slice of a stream in bytes."""

    chunks: int
    shortest: int

    def slices(self, nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Into how many slices each stream of so many bytes is cut."""
        return np.clip(nbytes // self.shortest, 1, self.chunks)

    def chunk_of(
        self, number: NDArray[np.int64], slices: NDArray[np.int64], spread: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """In which chunk each slice travels; `spread` is `spread_of` its pair."""
        along = number * self.chunks + (spread * self.chunks >> SPREAD_BITS)
        found: NDArray[np.int64] = along // slices
        return found


def spread_of(source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where between two slices those of each pair lie: a hash in `[0, 2**20)`.

    >>> bool((spread_of(np.arange(9), np.arange(9)) < 1 << 20).all())
    True
    """
    mixed: NDArray[np.uint64] = source.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += target.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    found: NDArray[np.int64] = (mixed >> np.uint64(64 - SPREAD_BITS)).astype(np.int64)
    return found


def load(plan: SeatPlan) -> int:
    """What a seat tells the others before they cut: its wire bytes, both ways, alignment included."""
    return sum(_aligned(move.nbytes) for move in (*plan.receives, *plan.sends))


def slicing(loads: Iterable[int], budget: int) -> Slicing:
    """The coarsest cut that may fit the budget of every seat, to be tried.

    >>> slicing([1000, 400], 256)
    Slicing(chunks=8, shortest=8)
    """
    share = max(budget // CHUNKS_IN_FLIGHT, 1)
    nbytes = max(loads, default=0)
    return Slicing(max(-(-nbytes // share), 1), max(min(share // 16, LONG), 1))


def finer(tried: Slicing, staging: int, budget: int) -> Slicing:
    """The next cut to try where the busiest seat's staging does not fit the budget."""
    chunks = tried.chunks * max(staging * 16, budget * 17) // (budget * 15) + 1
    return Slicing(chunks, max(tried.shortest // 2, 1))


def chunks(plan: SeatPlan, cut: Slicing) -> tuple[Chunk, ...]:
    """This seat's chunks that are not empty, in order; moves are cut where slices end."""
    found: dict[int, tuple[list[Move], list[Move]]] = {}
    for way, moves in enumerate((plan.receives, plan.sends)):
        streams: dict[tuple[int, int], list[Move]] = {}
        for move in moves:
            streams.setdefault((move.source, move.target), []).append(move)
        for (source, target), own in sorted(streams.items()):
            slices = int(cut.slices(np.array(sum(_aligned(move.nbytes) for move in own))))
            spread = spread_of(np.array([source]), np.array([target]))
            places = cut.chunk_of(np.arange(slices), np.array([slices]), spread).tolist()
            for number, move in _sliced(own, slices):
                found.setdefault(places[number], ([], []))[way].append(move)
    return tuple(
        Chunk(number, tuple(into), tuple(out)) for number, (into, out) in sorted(found.items())
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _sliced(moves: Sequence[Move], slices: int) -> Iterator[tuple[int, Move]]:
    """The parts of a stream, each with its slice's number; a slice ends at an element."""
    total = sum(_aligned(move.nbytes) for move in moves)
    begin = 0
    for move in moves:
        size, volume = itemsize(move.wire), move.box.volume
        end = begin + _aligned(move.nbytes)
        number = begin * slices // total if total else 0
        at = 0
        while at < volume:
            border = -(-(number + 1) * total // slices)  # the slice's end in the stream
            upto = volume if border >= end else min(max(-(-(border - begin) // size), 0), volume)
            if upto > at:
                for box in _part(move.box, at, upto):
                    yield number, Move(move.key, box, move.source, move.target, move.wire)
                at = upto
            number += 1
        begin = end


def _part(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Elements `[start, stop)` of a box in its own row-major order, as boxes."""
    if stop - start == box.volume:
        yield box
        return
    for piece in Span(start, stop).boxes(box.shape):
        yield Box(
            tuple(a + low for a, low in zip(piece.lo, box.lo, strict=True)),
            tuple(a + low for a, low in zip(piece.hi, box.lo, strict=True)),
        )
