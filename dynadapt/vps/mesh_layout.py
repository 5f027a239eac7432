"""The declared layout: axes times placements, rows computed on demand, holders by division.

Endpoints fill the mesh row-major, the last axis fastest. A key's placements are applied in the order
they are listed, each to what the ones before left; an axis that is not listed replicates. Closed kinds:

- `Shard(axis, dim)`: parts of `ceil(size / ways)`, as `torch.chunk`: the last ones shorter or empty.
- `Flat(axis, multiple)`: equal spans of the flattened rest, padded up to `ways * multiple`.
- `Replicate(axis)`: the same on every place of the axis.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from dynadapt.errors import Finding, Refused
from dynadapt.vps.box import Box, Span, linear_index, row_major_strides
from dynadapt.vps.layout import Holder, Row, RowLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dynadapt.vps.keys import Key, KeySpec

__all__ = ["Flat", "MeshLayout", "Placement", "Replicate", "Shard"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every place of an axis holds the same."""

    axis: str


@dataclass(frozen=True, slots=True)
class Shard:
    """Parts of a dim, one a place of an axis."""

    axis: str
    dim: int


@dataclass(frozen=True, slots=True)
class Flat:
    """Equal spans of the flattened tensor, one a place of an axis, each a multiple of `multiple` long."""

    axis: str
    multiple: int = 1

    def part(self, numel: int, ways: int) -> int:
        """Elements of one span, padding included.

        >>> Flat("dp", 4).part(10, 2)
        8
        """
        return -(-numel // (ways * self.multiple)) * self.multiple


Placement = Replicate | Shard | Flat


class MeshLayout:
    """A layout as a pure function of mesh, placements and shapes. Implements `Layout`.

    Raises `Refused` with every key that is placed on an unknown axis or dim, or placed at all after a
    `Flat`. Absent keys have no rows.

    >>> from dynadapt.vps.keys import Key, KeySpec
    >>> spec = KeySpec(Key("w", "param"), (4, 3), "float32")
    >>> mesh = MeshLayout({"dp": 2, "tp": 2}, [spec], {spec.key: (Shard("tp", 0), Flat("dp"))})
    >>> [str(row.box) for row in mesh.rows(1)]
    ['[2:3,0:3]']
    >>> [str(holder.box) for holder in mesh.holders(spec.key, Box((3, 0), (4, 1)))]
    ['[3:4,0:3]']
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        specs: Iterable[KeySpec],
        placements: Mapping[Key, Sequence[Placement]],
        endpoints: Sequence[int] | None = None,
    ) -> None:
        self.axes = dict(axes)
        self._keys = tuple(sorted(specs, key=lambda spec: spec.key))
        self._by_name = {spec.key: spec for spec in self._keys}
        self._order = tuple(range(prod(axes.values())) if endpoints is None else endpoints)
        self._placements = {key: tuple(own) for key, own in placements.items()}
        findings = [f for spec in self._keys for f in self._findings(spec)]
        places = prod(self.axes.values())
        if len(self._order) != places or len(set(self._order)) != places:
            cause = f"{places} places and {len(set(self._order))} different endpoints"
            findings.append(Finding("bad-mesh", "mesh", cause, "give each place an endpoint"))
        if findings:
            raise Refused(findings)

    def _findings(self, spec: KeySpec) -> Iterator[Finding]:
        seen: list[str] = []
        flat = False
        for placement in self._placements.get(spec.key, ()):
            if placement.axis not in self.axes or placement.axis in seen:
                yield _bad(spec, f"axis {placement.axis!r} is unknown or used twice")
            if isinstance(placement, Shard) and not 0 <= placement.dim < len(spec.shape):
                yield _bad(spec, f"it has no dim {placement.dim}")
            if flat and not isinstance(placement, Replicate):
                yield _bad(spec, "a flattened tensor cannot be sharded further")
            seen.append(placement.axis)
            flat = flat or isinstance(placement, Flat)

    @property
    def keys(self) -> tuple[KeySpec, ...]:
        """All keys, sorted."""
        return self._keys

    @property
    def endpoints(self) -> tuple[int, ...]:
        """All endpoints, sorted."""
        return tuple(sorted(self._order))

    def placements(self, key: Key) -> tuple[Placement, ...]:
        """A key's placements over all axes: what is not declared replicates."""
        own = self._placements.get(key, ())
        named = {placement.axis for placement in own}
        return (*own, *(Replicate(axis) for axis in self.axes if axis not in named))

    @cached_property
    def _places(self) -> dict[int, dict[str, int]]:
        every = itertools.product(*(range(size) for size in self.axes.values()))
        return {
            endpoint: dict(zip(self.axes, place, strict=True))
            for endpoint, place in zip(self._order, every, strict=True)
        }

    def rows(self, endpoint: int) -> tuple[Row, ...]:
        """The rows of one endpoint, sorted by key and box; one contiguous buffer a key."""
        place = self._places.get(endpoint)
        return () if place is None else tuple(self._rows(place))

    def _rows(self, place: Mapping[str, int]) -> Iterator[Row]:
        for spec in self._keys:
            if spec.presence != "present":
                continue
            at = 0
            for box in self._held(spec, place):
                yield Row(spec.key, box, str(spec.key), at, row_major_strides(box.shape))
                at += box.volume

    def _held(self, spec: KeySpec, place: Mapping[str, int]) -> tuple[Box, ...]:
        local = Box.whole(spec.shape)
        for placement in self._placements.get(spec.key, ()):
            ways, index = self.axes[placement.axis], place[placement.axis]
            if isinstance(placement, Shard):
                local = _chunk(local, placement.dim, ways, index)
            elif isinstance(placement, Flat):
                return _span_boxes(local, placement.part(local.volume, ways), index)
        return (local,) if local.volume else ()

    def holders(self, key: Key, box: Box) -> tuple[Holder, ...]:
        """Who holds elements of `box`, sorted by endpoint and box; costs the answer."""
        spec = self._by_name.get(key)
        if spec is None or spec.presence != "present" or not box.volume:
            return ()
        found = self._search(Box.whole(spec.shape), box, self.placements(key), {})
        return tuple(sorted(Holder(self._endpoint(place), own) for place, own in found))

    def _search(
        self, local: Box, box: Box, left: Sequence[Placement], place: dict[str, int]
    ) -> Iterator[tuple[dict[str, int], Box]]:
        """All places below a partial one whose boxes meet `box`: only overlapping parts are visited."""
        if not left:
            yield place, local
            return
        placement, rest = left[0], left[1:]
        ways = self.axes[placement.axis]
        common = local.intersect(box)
        if common is None:
            return
        if isinstance(placement, Flat):
            yield from self._search_flat(placement, local, common, rest, place)
            return
        indices: Iterable[int] = range(ways)
        if isinstance(placement, Shard):
            dim, part = placement.dim, max(-(-local.shape[placement.dim] // ways), 1)
            low, high = common.lo[dim] - local.lo[dim], common.hi[dim] - local.lo[dim]
            indices = range(low // part, (high - 1) // part + 1)
        for index in indices:
            inner = (
                _chunk(local, placement.dim, ways, index) if isinstance(placement, Shard) else local
            )
            yield from self._search(inner, box, rest, {**place, placement.axis: index})

    def _search_flat(
        self,
        placement: Flat,
        local: Box,
        common: Box,
        rest: Sequence[Placement],
        place: dict[str, int],
    ) -> Iterator[tuple[dict[str, int], Box]]:
        part = placement.part(local.volume, self.axes[placement.axis])
        lo = [a - base for a, base in zip(common.lo, local.lo, strict=True)]
        hi = [a - base - 1 for a, base in zip(common.hi, local.lo, strict=True)]
        first = linear_index(lo, local.shape) // part
        last = linear_index(hi, local.shape) // part
        for index in range(first, last + 1):
            for own in _span_boxes(local, part, index):
                if own.intersect(common) is not None:
                    below = {**place, placement.axis: index}
                    yield from self._search(own, common, rest, below)

    def _endpoint(self, place: Mapping[str, int]) -> int:
        return self._order[linear_index([place[a] for a in self.axes], [*self.axes.values()])]

    def digest(self) -> str:
        """A SHA-256 over mesh, endpoints, keys and placements."""
        placed = [(spec, self.placements(spec.key)) for spec in self._keys]
        text = repr((list(self.axes.items()), self._order, placed))
        return hashlib.sha256(text.encode()).hexdigest()

    def explicit(self) -> RowLayout:
        """The same rows as a `RowLayout`; costs all of them."""
        return RowLayout(self._keys, {endpoint: self.rows(endpoint) for endpoint in self._order})


def _bad(spec: KeySpec, cause: str) -> Finding:
    return Finding("bad-placement", str(spec.key), cause, "mend its placements")


def _chunk(local: Box, dim: int, ways: int, index: int) -> Box:
    """Part `index` of a dim cut as `torch.chunk` cuts it."""
    low, high = local.lo[dim], local.hi[dim]
    part = -(-(high - low) // ways)
    start, stop = min(low + index * part, high), min(low + (index + 1) * part, high)
    return Box(
        (*local.lo[:dim], start, *local.lo[dim + 1 :]),
        (*local.hi[:dim], stop, *local.hi[dim + 1 :]),
    )


def _span_boxes(local: Box, part: int, index: int) -> tuple[Box, ...]:
    """Boxes of span `index` of a flattened box, in its tensor's coordinates."""
    total = local.volume
    span = Span(min(index * part, total), min((index + 1) * part, total))
    return tuple(
        Box(
            tuple(a + base for a, base in zip(box.lo, local.lo, strict=True)),
            tuple(a + base for a, base in zip(box.hi, local.lo, strict=True)),
        )
        for box in span.boxes(local.shape)
    )
