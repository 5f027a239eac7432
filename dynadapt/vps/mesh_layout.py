"""The declared layout: axes times placements, rows computed on demand, holders by division.

Endpoints fill the mesh row-major, the last axis fastest. Tensors that are placed alike share a
`Stack`, so the layout of a huge model on a huge mesh costs its families, not its tensors or ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dynadapt.errors import Finding, Refused
from dynadapt.vps.box import Box, row_major_strides
from dynadapt.vps.geometry import Flats, Geometry, mesh_strides
from dynadapt.vps.keys import itemsize
from dynadapt.vps.layout import Holder, Row, RowLayout
from dynadapt.vps.placement import Flat, Pin, Placement, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from dynadapt.vps.keys import Key, KeySpec

__all__ = ["Flat", "MeshLayout", "Pin", "Placement", "Replicate", "Shard", "Stack"]


@dataclass(frozen=True, eq=False)
class Stack:
    """Tensors of one shape that one `Geometry` places, each at its own pins and flat offset.

    `specs` has one sequence a slot, all of the same tensors in the same order, made on demand where
    the layout is of a `ModelShape`. `pins` (tensors,) is the place that the pinned axes add up to;
    `flats` is where each lies in a flat buffer that it shares with others, None without one.
    """

    specs: tuple[Sequence[KeySpec], ...]
    geometry: Geometry
    placements: tuple[Placement, ...]
    pins: NDArray[np.int64]
    flats: Flats | None = None

    def __len__(self) -> int:
        return len(self.pins)

    @cached_property
    def orders(self) -> NDArray[np.int64]:
        """(tensors,) int64: their places in the whole model's `named_parameters()`."""
        own = getattr(self.specs[0], "orders", None)
        return np.array([spec.order for spec in self.specs[0]]) if own is None else own

    def held_bytes(self, place: int) -> int:
        """Bytes of all tensors and states of the stack that one place holds."""
        mine, lo, hi, _ = _stack_rows(self, place)
        if not len(mine):
            return 0
        sizes = sum(itemsize(getattr(each, "dtype", None) or each[0].dtype) for each in self.specs)
        return int(np.prod(hi - lo, axis=1).sum()) * sizes

    def text(self) -> str:
        """All that decides where the elements lie, as text."""
        columns = (self.pins, *(self.flats or ()))
        raw = b"".join(np.ascontiguousarray(column, "<i8").tobytes() for column in columns)
        return f"{self.geometry.shape}|{self.placements}|{hashlib.sha256(raw).hexdigest()}"


class MeshLayout:
    """A layout as a pure function of mesh, placements and shapes. Implements `Layout`.

    Raises `Refused` with every key that is placed on an unknown axis, dim or index, or placed at all
    after a `Flat`. Absent keys have no rows.

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
        sizes = dict(axes)
        groups: dict[_Alike, list[tuple[KeySpec, int, Flat | None]]] = {}
        findings: list[Finding] = []
        strides = mesh_strides(sizes)
        for spec in specs:
            own = tuple(placements.get(spec.key, ()))
            wrong = list(_findings(spec, own, sizes))
            findings += wrong
            if wrong or spec.presence != "present":
                own = ()
            pinned = sum(p.index * strides[p.axis] for p in own if isinstance(p, Pin))
            flat = next((p for p in own if isinstance(p, Flat) and p.part is not None), None)
            alike = tuple(_general(placement) for placement in own)
            at = (spec.shape, alike, spec.presence == "present")
            groups.setdefault(at, []).append((spec, pinned, flat))
        findings += _mesh_findings(sizes, endpoints)
        if findings:
            raise Refused(findings)
        stacks = []
        for (shape, alike, _), members in groups.items():
            own_flats = [(flat.offset, flat.part) for _, _, flat in members if flat is not None]
            stacks.append(
                Stack(
                    (tuple(spec for spec, _, _ in members),),
                    Geometry(sizes, shape, alike),
                    alike,
                    np.array([pinned for _, pinned, _ in members]),
                    Flats(*np.array(own_flats, np.int64).T) if own_flats else None,
                )
            )
        self._set(sizes, stacks, endpoints)

    @classmethod
    def of_stacks(
        cls,
        axes: Mapping[str, int],
        stacks: Iterable[Stack],
        endpoints: Sequence[int] | None = None,
    ) -> MeshLayout:
        """A layout of ready stacks, as `dynadapt.vps.declare` makes them."""
        findings = list(_mesh_findings(axes, endpoints))
        if findings:
            raise Refused(findings)
        made = cls.__new__(cls)
        made._set(dict(axes), list(stacks), endpoints)
        return made

    def _set(
        self, axes: dict[str, int], stacks: list[Stack], endpoints: Sequence[int] | None
    ) -> None:
        self.axes = axes
        self.stacks = tuple(stacks)
        places = prod(axes.values())
        self.order: NDArray[np.int64] = (
            np.arange(places) if endpoints is None else np.array(endpoints, np.int64)
        )
        self.ascending = endpoints is None or bool(np.all(np.diff(self.order) > 0))

    @cached_property
    def keys(self) -> tuple[KeySpec, ...]:
        """All keys, sorted; a layout of a `ModelShape` makes them when first asked."""
        every = (spec for stack in self.stacks for specs in stack.specs for spec in specs)
        return tuple(sorted(every, key=lambda spec: spec.key))

    @cached_property
    def endpoints(self) -> tuple[int, ...]:
        """All endpoints, sorted."""
        return tuple(sorted(self.order.tolist()))

    @cached_property
    def where(self) -> dict[Key, tuple[Stack, int, KeySpec]]:
        """Key -> its stack, its number in it, its spec."""
        return {
            spec.key: (stack, member, spec)
            for stack in self.stacks
            for specs in stack.specs
            for member, spec in enumerate(specs)
        }

    @cached_property
    def _places(self) -> dict[int, int]:
        return {endpoint: place for place, endpoint in enumerate(self.order.tolist())}

    def place(self, endpoint: int) -> int | None:
        """The row-major number of an endpoint's mesh coordinate; None where it has none."""
        if self.ascending:
            at = int(np.searchsorted(self.order, endpoint))
            return at if at < len(self.order) and self.order[at] == endpoint else None
        return self._places.get(endpoint)

    def placements(self, key: Key) -> tuple[Placement, ...]:
        """A key's placements over all axes: what is not declared replicates."""
        stack, member, _ = self.where[key]
        strides = mesh_strides(self.axes)
        own: list[Placement] = []
        for placement in stack.placements:
            if isinstance(placement, Pin):
                size = self.axes[placement.axis]
                index = int(stack.pins[member]) // strides[placement.axis] % size
                own.append(placement if placement.also else Pin(placement.axis, index))
            elif isinstance(placement, Flat) and stack.flats is not None:
                offset, part = (int(column[member]) for column in stack.flats)
                own.append(replace(placement, offset=offset, part=part))
            else:
                own.append(placement)
        named = {axis for placement in own for axis in placement.over}
        return (*own, *(Replicate(axis) for axis in self.axes if axis not in named))

    def places(self, endpoints: NDArray[np.int64]) -> NDArray[np.int64]:
        """`place` of many endpoints, -1 where one has none; for a mesh in ascending order."""
        at = np.minimum(np.searchsorted(self.order, endpoints), len(self.order) - 1)
        return np.where(self.order[at] == endpoints, at, -1)

    def rows(self, endpoint: int) -> tuple[Row, ...]:
        """The rows of one endpoint, sorted by key and box; one contiguous buffer a key."""
        place = self.place(endpoint)
        if place is None:
            return ()
        found: list[Row] = []
        for stack in self.stacks:
            mine, lo, hi, whose = _stack_rows(stack, place)
            for specs in stack.specs:
                found += _rows(specs, mine[whose].tolist(), lo.tolist(), hi.tolist())
        return tuple(sorted(found, key=lambda row: (row.key, row.box)))

    def holders(self, key: Key, box: Box) -> tuple[Holder, ...]:
        """Who holds elements of `box`, sorted by endpoint and box; costs the answer."""
        where = self.where.get(key)
        if where is None or not box.volume:
            return ()
        stack, member, spec = where
        if spec.presence != "present":
            return ()
        lo, hi = (np.array([edge], np.int64).reshape(1, -1) for edge in (box.lo, box.hi))
        flats = None if stack.flats is None else stack.flats.take(np.array([member]))
        found = stack.geometry.meet(lo, hi, flats)
        places = (found.place + stack.pins[member])[:, None] + stack.geometry.replicas
        held = [
            Holder(endpoint, Box(tuple(low), tuple(high)))
            for low, high, own in zip(
                found.lo.tolist(), found.hi.tolist(), self.order[places].tolist(), strict=True
            )
            for endpoint in own
        ]
        return tuple(sorted(held))

    def digest(self) -> str:
        """A SHA-256 over mesh, endpoints, keys and placements."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        state = hashlib.sha256(repr(list(self.axes.items())).encode())
        state.update(np.ascontiguousarray(self.order, "<i8").tobytes())
        for stack in self.stacks:
            state.update(stack.text().encode())
            for specs in stack.specs:
                named = getattr(specs, "digest", None)
                state.update((named() if named else repr(tuple(specs))).encode())
        return state.hexdigest()

    def explicit(self) -> RowLayout:
        """The same rows as a `RowLayout`; costs all of them."""
        return RowLayout(self.keys, {e: self.rows(e) for e in self.order.tolist()})


_Alike = tuple[tuple[int, ...], tuple[Placement, ...], bool]


def _stack_rows(
    stack: Stack, place: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """What one place holds of a stack: its tensors, and boxes `lo`, `hi` with each box's tensor.

    The last is an index into the first.
    """
    geometry = stack.geometry
    mine = np.flatnonzero(stack.pins == geometry.pinned(place))
    empty = np.zeros(0, np.int64)
    absent = not len(stack.specs[0]) or stack.specs[0][0].presence != "present"
    if not len(mine) or absent:
        none = np.zeros((0, geometry.ndim), np.int64)
        return empty, none, none, empty
    flats = None if stack.flats is None else stack.flats.take(mine)
    held = geometry.held(place, flats, len(mine))
    return mine, held.lo, held.hi, held.query


def _rows(
    specs: Sequence[KeySpec],
    members: Sequence[int],
    lows: Sequence[Sequence[int]],
    highs: Sequence[Sequence[int]],
) -> Iterator[Row]:
    ends: dict[int, int] = {}
    for member, low, high in zip(members, lows, highs, strict=True):
        box = Box(tuple(low), tuple(high))
        key = specs[member].key
        at = ends.get(member, 0)
        yield Row(key, box, str(key), at, row_major_strides(box.shape))
        ends[member] = at + box.volume


def _general(placement: Placement) -> Placement:
    """A placement without what tells tensors of one stack apart."""
    if isinstance(placement, Pin):
        return placement if placement.also else Pin(placement.axis, 0)
    if isinstance(placement, Flat) and placement.part is not None:
        return replace(placement, offset=0, part=1)
    return placement


def _mesh_findings(axes: Mapping[str, int], endpoints: Sequence[int] | None) -> Iterator[Finding]:
    places = prod(axes.values())
    if any(type(size) is not int or size < 1 for size in axes.values()):
        yield Finding("bad-mesh", "mesh", f"axes {dict(axes)} are not whole sizes of at least 1")
    elif endpoints is not None and not len(set(endpoints)) == len(endpoints) == places:
        cause = f"{places} places and {len(set(endpoints))} different endpoints"
        yield Finding("bad-mesh", "mesh", cause, "give each place an endpoint")


def _findings(
    spec: KeySpec, placements: Sequence[Placement], axes: Mapping[str, int]
) -> Iterator[Finding]:
    seen: set[str] = set()
    flat = False
    for placement in placements:
        own = placement.over
        if len(set(own)) < len(own) or any(axis not in axes or axis in seen for axis in own):
            yield _bad(spec, f"axis {_named(own)} is unknown or used twice")
            continue
        seen.update(own)
        if flat and not isinstance(placement, Replicate):
            yield _bad(spec, "a flattened tensor cannot be sharded further")
        if isinstance(placement, Shard):
            yield from _shard_findings(spec, placement, placements, axes)
        elif isinstance(placement, Pin):
            every = (placement.index, *placement.also)
            size = axes[placement.axis]
            if sorted(set(every)) != list(every) or any(not 0 <= at < size for at in every):
                yield _bad(
                    spec, f"{list(every)} are not ascending places of axis {placement.axis!r}"
                )
            elif placement.also and any(isinstance(p, Flat) and p.part for p in placements):
                yield _bad(spec, "it is on several places whose flat buffers differ")
        elif isinstance(placement, Flat):
            flat = True
            if placement.part is not None and placement.offset < 0:
                yield _bad(spec, f"it lies at {placement.offset} of its flat buffer")
            elif placement.part is not None and placement.part < 1:
                yield _bad(spec, f"its flat buffer has parts of {placement.part} elements")
            elif placement.part is None and placement.offset:
                yield _bad(spec, f"it lies at {placement.offset} of a flat buffer without parts")
            if any(isinstance(p, Shard) and p.blocks > 1 for p in placements):
                yield _bad(spec, "a tensor of several blocks cannot be flattened after its shards")


def _shard_findings(
    spec: KeySpec, shard: Shard, all_: Sequence[Placement], axes: Mapping[str, int]
) -> Iterator[Finding]:
    ways = prod(axes[axis] for axis in shard.over)
    if not 0 <= shard.dim < len(spec.shape):
        yield _bad(spec, f"it has no dim {shard.dim}")
        return
    if (
        min(shard.multiple, shard.blocks, shard.copies) < 1
        or ways % shard.copies
        or (shard.copies > 1 and len(shard.over) > 1)
    ):
        yield _bad(spec, f"{shard} does not fit {ways} places")
    if spec.shape[shard.dim] % shard.blocks:
        yield _bad(spec, f"dim {shard.dim} is not {shard.blocks} equal blocks")
    same = [p for p in all_ if isinstance(p, Shard) and p.dim == shard.dim]
    if shard.blocks > 1 and len(same) > 1:
        yield _bad(spec, f"dim {shard.dim} has blocks and is cut twice")


def _named(own: Sequence[str]) -> str:
    return repr(own[0]) if len(own) == 1 else repr(tuple(own))


def _bad(spec: KeySpec, cause: str) -> Finding:
    return Finding("bad-placement", str(spec.key), cause, "mend its placements")
