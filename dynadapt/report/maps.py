"""What pictures show, as plain numbers: who holds what of a tensor, who sends how much to whom.

Nothing here draws. `terminal` and `figures` do, from a `Picture`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dynadapt.errors import Finding, Refused
from dynadapt.vps.box import Box
from dynadapt.vps.keys import Key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from dynadapt.report.traffic import Memory, Timeline, Traffic
    from dynadapt.vps.mesh_layout import MeshLayout

__all__ = ["Cells", "DrawnTensor", "Picture", "ranks_text", "tensor_maps"]

#: Regions of one tensor that a picture can show; with more only a part of the tensor is shown.
MAX_REGIONS = 4096


class Cells(NamedTuple):
    """A grid over a map: `row_edges` (rows + 1,) and `col_edges` (cols + 1,) in elements.

    `sets` (rows, cols) are numbers in `DrawnTensor.sets`, -1 where no rank holds anything. `exact` says
    that the edges are where holders change; otherwise each cell shows what lies in its middle.
    """

    row_edges: NDArray[np.int64]
    col_edges: NDArray[np.int64]
    sets: NDArray[np.int64]
    exact: bool


@dataclass(frozen=True, eq=False)
class DrawnTensor:
    """Who holds what of one tensor, as regions of a plane of `size` (rows, cols) elements.

    `lo`, `hi` are (regions, 2) int64, `holders` the ascending ranks that hold each region: several are
    replicas. `leaders` are the first ranks of all sets of this map and of those it is compared with.
    `labels` name the two sides; `note` says which part of the tensor is shown, if not all.
    """

    name: str
    shape: tuple[int, ...]
    size: tuple[int, int]
    labels: tuple[str, str]
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    holders: tuple[tuple[int, ...], ...]
    leaders: tuple[int, ...]
    note: str = ""

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """The different sets of ranks, by their first rank."""
        return tuple(sorted(set(self.holders)))

    @property
    def tones(self) -> tuple[int, ...]:
        """Per set a number for its colour: that of its first rank among `leaders`."""
        return tuple(self.leaders.index(ranks[0]) for ranks in self.sets)

    def cells(self, max_rows: int, max_cols: int) -> Cells:
        """The map as a grid of at most so many cells."""
        edges, exact = [], True
        for dim, most in enumerate((max_rows, max_cols)):
            found = np.unique(
                np.concatenate([[0, self.size[dim]], self.lo[:, dim], self.hi[:, dim]])
            )
            if len(found) - 1 > most:
                found, exact = np.linspace(0, self.size[dim], most + 1).astype(np.int64), False
            edges.append(found)
        middles = [(each[:-1] + each[1:] - 1) / 2 for each in edges]
        grid = np.full((len(middles[0]), len(middles[1])), -1, np.int64)
        number = {ranks: at for at, ranks in enumerate(self.sets)}
        low = [np.searchsorted(middles[dim], self.lo[:, dim]) for dim in range(2)]
        high = [np.searchsorted(middles[dim], self.hi[:, dim]) for dim in range(2)]
        for at, ranks in enumerate(self.holders):
            grid[low[0][at] : high[0][at], low[1][at] : high[1][at]] = number[ranks]
        return Cells(edges[0], edges[1], grid, exact)

    def to_json(self) -> dict[str, Any]:
        """The regions as plain JSON values."""
        return {
            "sides": [{"label": n, "size": s} for n, s in zip(self.labels, self.size, strict=True)],
            "note": self.note,
            "regions": [
                {"lo": low, "hi": high, "ranks": list(ranks)}
                for low, high, ranks in zip(
                    self.lo.tolist(), self.hi.tolist(), self.holders, strict=True
                )
            ],
        }


@dataclass(frozen=True, eq=False)
class Picture:
    """All that one picture shows: `titles` of the layouts, and per tensor a map for each of them.

    `heading` stands above it all, by default the titles.
    """

    titles: tuple[str, ...]
    maps: tuple[tuple[DrawnTensor, ...], ...] = ()
    memory: Memory | None = None
    traffic: Traffic | None = None
    timeline: Timeline | None = None
    notes: tuple[str, ...] = ()
    heading: str = ""

    def to_json(self) -> dict[str, Any]:
        """The picture as plain JSON values; bytes and seconds."""
        parts = {"memory": self.memory, "traffic": self.traffic, "timeline": self.timeline}
        return {
            "layouts": list(self.titles),
            "notes": list(self.notes),
            "tensors": [
                {
                    "name": own[0].name,
                    "shape": list(own[0].shape),
                    "maps": [each.to_json() for each in own],
                }
                for own in self.maps
            ],
            **{name: part.to_json() for name, part in parts.items() if part is not None},
        }


def tensor_maps(
    layouts: Sequence[MeshLayout], name: str, slot: str = "param"
) -> tuple[DrawnTensor, ...]:
    """One tensor's map in each of some layouts, all over the same plane.

    A tensor of more than two dims shows the two that are cut, or else folds all but the last into rows.

    Raises `Refused` (reason `no-tensor`) where a layout has no such tensor.

    >>> from dynadapt.vps.declare import declare
    >>> from dynadapt.vps.model_shape import ModelShape, Named
    >>> layout = declare("ddp:dp=2,tp=2", ModelShape.of([Named("w", (4, 6))]))
    >>> tensor_maps([layout], "w")[0].holders
    ((0, 1, 2, 3),)
    """
    key = Key(name, slot)
    missing = [layout for layout in layouts if key not in layout.where]
    if missing or not layouts:
        raise Refused([Finding("no-tensor", str(key), "the layout has no such tensor")])
    shape = layouts[0].where[key][2].shape
    whole = Box.whole(shape)
    held: list[dict[Box, list[int]]] = []
    for layout in layouts:
        by_box: dict[Box, list[int]] = {}
        for holder in layout.holders(key, whole):
            by_box.setdefault(holder.box, []).append(holder.endpoint)
        held.append(by_box)
    plane = _plane(shape, [box for by_box in held for box in by_box])
    leaders = tuple(sorted({min(ranks) for by_box in held for ranks in by_box.values()}))
    found = []
    for by_box in held:
        regions = [
            (low, high, tuple(sorted(ranks)))
            for box, ranks in by_box.items()
            for low, high in plane.project(box)
        ]
        regions.sort()
        lo, hi = (np.array([r[at] for r in regions], np.int64).reshape(-1, 2) for at in (0, 1))
        holders = tuple(ranks for _, _, ranks in regions)
        found.append(
            DrawnTensor(name, shape, plane.size, plane.labels, lo, hi, holders, leaders, plane.note)
        )
    return tuple(found)


def ranks_text(ranks: Sequence[int], most: int = 4) -> str:
    """A set of ranks in few letters.

    >>> ranks_text((0, 2)), ranks_text(range(8)), ranks_text(range(0, 64, 8))
    ('0, 2', '0-7', '0-56 by 8')
    """
    if len(ranks) <= most:
        return ", ".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    if all(b - a == step for a, b in pairwise(ranks)):
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)} ranks)"


@dataclass(frozen=True)
class _Plane:
    """Which dims make rows and columns; `part` clips leading dims of a tensor that has too many pieces."""

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    part: tuple[int, ...] = ()

    @property
    def size(self) -> tuple[int, int]:
        return prod(self.shape[d] for d in self.rows), prod(self.shape[d] for d in self.cols)

    @property
    def labels(self) -> tuple[str, str]:
        return _label(self.rows), _label(self.cols)

    @property
    def note(self) -> str:
        if self.part:
            return f"index {', '.join('0' for _ in self.part)} of {_label(self.part)}"
        left = [d for d in range(len(self.shape)) if d not in (*self.rows, *self.cols)]
        return f"{_label(left)} is whole everywhere" if left else ""

    def project(self, box: Box) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
        """The rectangles of the plane that a box covers."""
        if any(box.lo[dim] > 0 for dim in self.part):
            return
        for top, bottom in _runs(box, self.rows, self.shape):
            for left, right in _runs(box, self.cols, self.shape):
                yield (top, left), (bottom, right)

    def count(self, box: Box) -> int:
        """How many rectangles there are at most."""
        if any(box.lo[dim] > 0 for dim in self.part):
            return 0
        return prod(box.hi[dim] - box.lo[dim] for dim in self.rows[:-1])


def _plane(shape: tuple[int, ...], boxes: Sequence[Box]) -> _Plane:
    ndim = len(shape)
    if ndim <= 2:
        return _Plane(shape, tuple(range(ndim - 1)), tuple(range(max(ndim - 1, 0), ndim)))
    cut = [d for d in range(ndim) if any(b.lo[d] > 0 or b.hi[d] < shape[d] for b in boxes)]
    if len(cut) <= 2:
        more = [dim for dim in reversed(range(ndim)) if dim not in cut]
        first, second = sorted([*cut, *more][:2])
        return _Plane(shape, (first,), (second,))
    for skipped in range(ndim - 1):
        plane = _Plane(shape, tuple(range(skipped, ndim - 1)), (ndim - 1,), tuple(range(skipped)))
        if sum(plane.count(box) for box in boxes) <= MAX_REGIONS:
            break
    return plane


def _runs(box: Box, dims: Sequence[int], shape: Sequence[int]) -> list[tuple[int, int]]:
    """The intervals of folded dims that a box covers, joined where inner dims are whole."""
    runs = [(0, 1)]
    for dim in dims:
        low, high, size = box.lo[dim], box.hi[dim], shape[dim]
        if low == 0 and high == size:
            runs = [(start * size, stop * size) for start, stop in runs]
        else:
            runs = [
                (at * size + low, at * size + high)
                for start, stop in runs
                for at in range(start, stop)
            ]
    return runs


def _label(dims: Sequence[int]) -> str:
    if not dims:
        return ""
    return f"dim {dims[0]}" if len(dims) == 1 else f"dims {dims[0]}-{dims[-1]}"
