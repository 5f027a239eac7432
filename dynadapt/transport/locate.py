"""Where tensors that should be equal first differ, and what stands there: by hashes of ever smaller boxes.

A round cuts every suspect box into parts, adds up each part's hashes over the seats, and goes on with the
first part, in row-major order, whose hashes differ. So a few small sums find one element among billions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.torch_dtypes import torch_dtype
from dynadapt.transport._torch import as_words, cast_into
from dynadapt.transport.hashing import Wanted, acts_for, hash_of
from dynadapt.transport.weights import MASK
from dynadapt.vps.box import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynadapt.transport.control import Control
    from dynadapt.transport.executor import Storage

__all__ = ["LIMIT", "Claim", "Contest", "FirstDifference", "first_differences"]

LIMIT = 32
"""Suspects that are looked into; the others are named without a coordinate."""

PARTS = 64


@dataclass(frozen=True)
class Claim:
    """One version of a box: what it is of, and the parts (endpoint, box) that make it up."""

    want: Wanted
    parts: tuple[tuple[int, Box], ...]


@dataclass(frozen=True)
class Contest:
    """Claims that differ somewhere in a box."""

    box: Box
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class FirstDifference:
    """The first coordinate at which claims differ, and the value of each claim there, as text."""

    at: tuple[int, ...]
    values: tuple[str, ...]

    @property
    def place(self) -> str:
        """The coordinate in brackets."""
        return f"[{','.join(map(str, self.at))}]"


def first_differences(
    name: str,
    control: Control,
    storage: Storage,
    contests: Sequence[Contest],
    workers: Sequence[int],
) -> list[FirstDifference | None]:
    """Per contest the first difference in row-major order; None where all claims are equal.

    All seats call it with equal contests; each hashes what it holds.
    """
    boxes: list[Box | None] = [contest.box for contest in contests]
    most = max((len(contest.claims) for contest in contests), default=0)
    step = 0
    while any(box is not None and box.volume > 1 for box in boxes):
        sums = np.zeros((len(contests), most, PARTS), np.uint64)
        cut = [[] if box is None else _parts(box) for box in boxes]
        for i, contest in enumerate(contests):
            for j, claim in enumerate(contest.claims):
                for k, part in enumerate(cut[i]):
                    sums[i, j, k] = _hash_here(control.seat, storage, claim, part, workers)
        both = control.combine(f"{name}/where/{step}", sums, np.add)
        step += 1
        for i, contest in enumerate(contests):
            own = both[i, : len(contest.claims)]
            odd = np.flatnonzero((own != own[0]).any(axis=0))
            boxes[i] = cut[i][odd[0]] if len(odd) else None
    return _values(name, control, storage, contests, boxes, workers)


def _parts(box: Box) -> list[Box]:
    """A box in at most `PARTS` parts, in row-major order."""
    for dim, size in enumerate(box.shape):
        if size > 1:
            step = -(-size // PARTS)
            return [
                Box(
                    (*box.lo[:dim], at, *box.lo[dim + 1 :]),
                    (*box.hi[:dim], min(at + step, box.hi[dim]), *box.hi[dim + 1 :]),
                )
                for at in range(box.lo[dim], box.hi[dim], step)
            ]
    return [box]


def _hash_here(seat: int, storage: Storage, claim: Claim, part: Box, workers: Sequence[int]) -> int:
    total = 0
    for endpoint, held in claim.parts:
        cell = held.intersect(part)
        if cell is not None and acts_for(seat, endpoint, workers):
            total += hash_of(storage, endpoint, claim.want, cell)
    return total & MASK


def _values(
    name: str,
    control: Control,
    storage: Storage,
    contests: Sequence[Contest],
    boxes: Sequence[Box | None],
    workers: Sequence[int],
) -> list[FirstDifference | None]:
    """What each claim holds at the places found, told by the seats that hold them."""
    mine: list[list[Any]] = []
    for i, (contest, box) in enumerate(zip(contests, boxes, strict=True)):
        for j, claim in enumerate(contest.claims if box is not None else ()):
            for endpoint, held in claim.parts:
                here = acts_for(control.seat, endpoint, workers)
                if box is not None and here and held.contains(box):
                    mine.append([i, j, *_texts(storage, endpoint, claim.want, box)])
    told: dict[tuple[int, int], tuple[str, str]] = {}
    for report in control.gather_values(f"{name}/what", mine).values():
        for i, j, plain, bits in report:
            told[i, j] = (plain, bits)
    found: list[FirstDifference | None] = []
    for i, box in enumerate(boxes):
        own = [told.get((i, j), ("?", "?")) for j in range(len(contests[i].claims))]
        alike = len({plain for plain, _ in own}) < len(own)
        texts = tuple(f"{plain} ({bits})" if alike else plain for plain, bits in own)
        found.append(None if box is None else FirstDifference(box.lo, texts))
    return found


def _texts(storage: Storage, endpoint: int, want: Wanted, box: Box) -> tuple[str, str]:
    """One element as a number, and as its bits."""
    import torch

    cast = torch.empty(box.shape, dtype=torch_dtype(want.dtype))
    cast_into(cast, storage.view(endpoint, want.spec.key, box).to("cpu"))
    value = cast.reshape(-1)
    word = as_words(value)[0]
    bits = hex(int(word)) if word.dtype.kind == "u" else str(word)
    return repr(value.item()), bits
