"""Sums of a whole side of a migration: every element counted once, replicas compared cell by cell."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from dynadapt.errors import Finding
from dynadapt.transport._torch import as_words, cast_into, dtype_name, torch_dtype
from dynadapt.transport.certificate import key_seed, weighted_sum
from dynadapt.vps.box import Box, atoms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynadapt.transport.control import Control
    from dynadapt.transport.executor import Storage
    from dynadapt.vps.keys import Key, KeySpec
    from dynadapt.vps.layout import Holder, Layout

__all__ = ["Sums", "Wanted", "count"]

_PIECE = 1 << 20
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """One sum to take: the elements of a key, cast to `dtype`, weighted as `as_key`.

    `any_nan` counts all NaNs as equal: for copies that a framework cast, whose NaN bits are its own.
    """

    spec: KeySpec
    dtype: str
    as_key: Key
    any_nan: bool = False


@dataclass(frozen=True)
class Sums:
    """The sums in the order they were wanted, and the keys whose replicas differ, as findings."""

    values: tuple[int, ...]
    drifted: dict[Key, tuple[Finding, ...]]


def count(
    name: str,
    control: Control,
    layout: Layout,
    storage: Storage,
    wanted: Sequence[Wanted],
    workers: Sequence[int],
) -> Sums:
    """Hash this seat's part of one side, add over the seats, compare replicas. All seats call it.

    Elements that several endpoints hold are counted once, for the lowest endpoint; the others' hashes
    of the same cell must be equal, else the key is in `drifted` with the seats and boxes named.
    """
    counted, drift = [0] * len(wanted), [0] * len(wanted)
    own: dict[int, list[tuple[int, int, int]]] = {}
    known: dict[tuple[Holder, ...], tuple[tuple[Box, list[int]], ...]] = {}
    for number, want in enumerate(wanted):
        whole = Box.whole(want.spec.shape)
        holders = layout.holders(want.spec.key, whole)
        mine = {h.endpoint for h in holders if _acts_for(control.seat, h.endpoint, workers)}
        if not mine:
            continue
        cells = known.get(holders)
        if cells is None:  # the states of a parameter are mostly split as it is
            cells = known[holders] = tuple(
                (cell, sorted({holders[i].endpoint for i in at}))
                for cell, at in atoms(h.box for h in holders)
            )
        for cell_number, (cell, endpoints) in enumerate(cells):
            for endpoint in mine.intersection(endpoints):
                value = _hash(storage, endpoint, want, cell)
                own.setdefault(number, []).append((cell_number, endpoint, value))
                first = endpoint == endpoints[0]
                if first or want.spec.local:
                    counted[number] += value
                if len(endpoints) > 1 and not want.spec.local:
                    drift[number] += value * _drift_weight(cell_number, endpoint, endpoints)
    words = np.array([total & _MASK for total in (*counted, *drift)], np.uint64)
    both = control.combine(f"{name}/sums", words, np.add)
    values = tuple(int(total) for total in both[: len(wanted)])
    suspects = [i for i in range(len(wanted)) if int(both[len(wanted) + i])]
    drifted = _name_drift(name, control, layout, wanted, suspects, own) if suspects else {}
    return Sums(values, drifted)


def _name_drift(
    name: str,
    control: Control,
    layout: Layout,
    wanted: Sequence[Wanted],
    suspects: list[int],
    own: dict[int, list[tuple[int, int, int]]],
) -> dict[Key, tuple[Finding, ...]]:
    """Second round, only where the sums say that replicas differ: which cell, which endpoints."""
    reports = control.gather_values(
        f"{name}/drift", [[i, [list(t) for t in own.get(i, [])]] for i in suspects]
    )
    found: dict[Key, tuple[Finding, ...]] = {}
    for i in suspects:
        want = wanted[i]
        cells = atoms(h.box for h in layout.holders(want.spec.key, Box.whole(want.spec.shape)))
        by_cell: dict[int, dict[int, list[int]]] = {}
        for report in reports.values():
            for at, entries in report:
                for cell, endpoint, value in entries if at == i else ():
                    by_cell.setdefault(cell, {}).setdefault(value, []).append(endpoint)
        findings = []
        for cell, values in sorted(by_cell.items()):
            if len(values) > 1:
                sides = " / ".join(str(sorted(seats)) for _, seats in sorted(values.items()))
                findings.append(
                    Finding(
                        "replicas-differ",
                        f"{want.spec.key} {cells[cell][0]}",
                        f"its replicas differ between endpoints {sides}",
                        'find out why they drifted, or on_drift="first" to take the first holder\'s',
                    )
                )
        found[want.spec.key] = tuple(findings)
    return found


def _drift_weight(cell: int, endpoint: int, endpoints: Sequence[int]) -> int:
    """Weights that add up to 0 over the holders of a cell, so equal hashes add up to 0.

    Each holder after the first has a number of its own: two that drift by opposite amounts are seen.
    """
    weights = [key_seed(str(cell), str(other)) | 1 for other in range(1, len(endpoints))]
    place = endpoints.index(endpoint)
    return weights[place - 1] if place else -sum(weights)


def _acts_for(seat: int, endpoint: int, workers: Sequence[int]) -> bool:
    if endpoint >= 0:
        return endpoint == seat
    return bool(workers) and workers[zlib.crc32(str(endpoint).encode()) % len(workers)] == seat


def _hash(storage: Storage, endpoint: int, want: Wanted, cell: Box) -> int:
    view = storage.view(endpoint, want.spec.key, cell)
    plain = view.device.type == "cpu" and dtype_name(view.dtype) == want.dtype
    if plain and not want.any_nan:
        return weighted_sum(as_words(view), cell, want.as_key)
    total = 0
    for part in _pieces(cell, _PIECE):  # a cast or a device copy is made piece by piece
        window = tuple(
            slice(a - base, b - base) for a, b, base in zip(part.lo, part.hi, cell.lo, strict=True)
        )
        cast = torch.empty(part.shape, dtype=torch_dtype(want.dtype))
        cast_into(cast, view[window].to("cpu"))
        if want.any_nan and cast.is_floating_point():
            cast[torch.isnan(cast)] = float("nan")  # one pattern for all
        total += weighted_sum(as_words(cast), part, want.as_key)
    return total & _MASK


def _pieces(box: Box, limit: int) -> Iterator[Box]:
    """A box in parts of at most `limit` elements, cut along its first dims."""
    if box.volume <= limit or not box.ndim:
        yield box
        return
    for dim, size in enumerate(box.shape):
        inner = prod(box.shape[dim + 1 :])
        if size > 1:
            rows = max(limit // inner, 1)
            for at in range(box.lo[dim], box.hi[dim], rows):
                lo = (*box.lo[:dim], at, *box.lo[dim + 1 :])
                hi = (*box.hi[:dim], min(at + rows, box.hi[dim]), *box.hi[dim + 1 :])
                yield from _pieces(Box(lo, hi), limit)
            return
