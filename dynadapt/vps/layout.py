"""Rows, and the `Layout` protocol with its explicit form, `RowLayout`.

A row says: this endpoint holds this box of this key in this buffer, element `x` at
`offset + sum((x_d - lo_d) * stride_d)`. An endpoint is an integer: a seat (a live process) is zero
or more, a file is negative (`file_endpoint`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from operator import le
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

from dynadapt.errors import Finding, Refused
from dynadapt.vps._form import MAX_ROWS_PER_KEY, bad_row, check_form
from dynadapt.vps.box import MAX_DIMS, Box
from dynadapt.vps.keys import Key, KeySpec, alias_groups, merge_specs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["MAX_ROWS_PER_KEY", "Holder", "Layout", "Row", "RowLayout", "file_endpoint"]


@dataclass(frozen=True, slots=True)
class Row:
    """One box of one key in one buffer; offset and strides are in elements of that buffer.

    >>> Row(Key("w", "param"), Box((0, 0), (2, 3)), "flat", 5, (3, 1)).last
    10
    """

    key: Key
    box: Box
    buffer: str
    offset: int
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.strides) != self.box.ndim:
            raise ValueError(f"{self.key} {self.box}: {len(self.strides)} strides")
        if self.offset < 0 or min(self.strides, default=0) < 0:
            raise ValueError(f"{self.key} {self.box}: negative offset or stride")

    @property
    def last(self) -> int:
        """Index in the buffer of the last element of a box that is not empty."""
        return self.offset + sum(
            (size - 1) * stride for size, stride in zip(self.box.shape, self.strides, strict=True)
        )

    def offset_of(self, coordinate: Sequence[int]) -> int:
        """Index in the buffer of the element at a logical coordinate."""
        return self.offset + sum(
            (x - low) * stride
            for x, low, stride in zip(coordinate, self.box.lo, self.strides, strict=True)
        )


class Holder(NamedTuple):
    """An endpoint, and a box of the asked key that it holds."""

    endpoint: int
    box: Box


@runtime_checkable
class Layout(Protocol):
    """Which endpoint holds which boxes of which key. Equal on every seat that has it."""

    @property
    def keys(self) -> tuple[KeySpec, ...]:
        """All keys, sorted, equal everywhere."""
        ...

    @property
    def endpoints(self) -> tuple[int, ...]:
        """All endpoints, sorted."""
        ...

    def rows(self, endpoint: int) -> Sequence[Row]:
        """The rows of one endpoint, sorted by key and box; costs that endpoint's own rows."""
        ...

    def holders(self, key: Key, box: Box) -> tuple[Holder, ...]:
        """Who holds elements of `box`, sorted by endpoint; costs the answer."""
        ...

    def digest(self) -> str:
        """Equal for two layouts iff they say the same."""
        ...


def file_endpoint(path: str) -> int:
    """The endpoint number of a file: negative, and the same in every process.

    >>> file_endpoint("a/b.pt") < 0
    True
    """
    number = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")
    return -1 - (number >> 2)


class RowLayout:
    """The explicit layout, columnar: one numpy column per field over all rows of all endpoints.

    `lo` and `hi` are (rows, 8) int64, padded with 0 and 1. Rows are sorted by key, endpoint, box.

    >>> spec = KeySpec(Key("w", "param"), (4,), "float32")
    >>> rows = {0: [Row(spec.key, Box((0,), (4,)), "b", 0, (1,))]}
    >>> RowLayout([spec], rows).holders(spec.key, Box((1,), (2,)))
    (Holder(endpoint=0, box=Box(lo=(0,), hi=(4,))),)
    """

    def __init__(self, keys: Iterable[KeySpec], rows: Mapping[int, Iterable[Row]]) -> None:
        self._keys = tuple(sorted(keys, key=lambda spec: spec.key))
        self._index = {spec.key: i for i, spec in enumerate(self._keys)}
        if len(self._index) != len(self._keys):
            raise ValueError("a key appears twice in a layout")
        ordered: list[tuple[int, int, Row]] = []
        findings: list[Finding] = []
        for endpoint, own in rows.items():
            for row in own:
                at = self._index.get(row.key)
                if at is None:
                    findings.append(bad_row(endpoint, row, "has no KeySpec"))
                elif not _fits(row.box, shape := self._keys[at].shape):
                    findings.append(bad_row(endpoint, row, f"leaves the tensor's shape {shape}"))
                elif row.box.volume:
                    ordered.append((at, endpoint, row))
        if findings:
            raise Refused(findings)
        ordered.sort(key=lambda item: (item[0], item[1], item[2].box))
        self._rows = tuple(row for _, _, row in ordered)
        count = len(ordered)
        self.key_index: NDArray[np.int64] = np.fromiter((k for k, _, _ in ordered), np.int64, count)
        self.endpoint: NDArray[np.int64] = np.fromiter((e for _, e, _ in ordered), np.int64, count)
        self.lo = np.zeros((count, MAX_DIMS), np.int64)
        self.hi = np.ones((count, MAX_DIMS), np.int64)
        for i, row in enumerate(self._rows):
            self.lo[i, : row.box.ndim] = row.box.lo
            self.hi[i, : row.box.ndim] = row.box.hi
        self._starts = np.searchsorted(self.key_index, np.arange(len(self._keys) + 1))
        self._endpoints = tuple(sorted(rows))
        check_form(self._endpoints, self._by_endpoint)

    @classmethod
    def of_seats(
        cls, described: Mapping[int, tuple[Iterable[KeySpec], Iterable[Row]]]
    ) -> RowLayout:
        """Unite what every seat described; raises `Refused` with all disagreements."""
        groups = alias_groups(spec for specs, _ in described.values() for spec in specs)
        keys, findings = merge_specs({seat: specs for seat, (specs, _) in described.items()})
        if findings:
            raise Refused(findings)

        def canonical(row: Row) -> Row:
            name = groups[row.key.name][0] if row.key.name in groups else row.key.name
            if name == row.key.name:
                return row
            return Row(Key(name, row.key.slot), row.box, row.buffer, row.offset, row.strides)

        own = {e: [*map(canonical, r)] if groups else r for e, (_, r) in described.items()}
        return cls(keys, own)

    @property
    def keys(self) -> tuple[KeySpec, ...]:
        """All keys, sorted."""
        return self._keys

    @property
    def endpoints(self) -> tuple[int, ...]:
        """All endpoints, sorted; one that holds nothing is among them."""
        return self._endpoints

    @cached_property
    def by_name(self) -> dict[Key, KeySpec]:
        """Key -> spec."""
        return {spec.key: spec for spec in self._keys}

    def rows(self, endpoint: int) -> tuple[Row, ...]:
        """The rows of one endpoint, sorted by key and box."""
        return self._by_endpoint.get(endpoint, ())

    def rows_of(self, key: Key, endpoint: int) -> tuple[Row, ...]:
        """The rows of one endpoint for one key, sorted by box."""
        return self._by_key_endpoint.get((key, endpoint), ())

    def held(self, key: Key) -> list[tuple[int, Row]]:
        """The rows of all endpoints for one key, each with its endpoint; sorted by endpoint and box."""
        at = self._index.get(key)
        if at is None:
            return []
        start, stop = int(self._starts[at]), int(self._starts[at + 1])
        return list(zip(self.endpoint[start:stop].tolist(), self._rows[start:stop], strict=True))

    @cached_property
    def _by_endpoint(self) -> dict[int, tuple[Row, ...]]:
        found: dict[int, list[Row]] = {}
        for endpoint, row in zip(self.endpoint.tolist(), self._rows, strict=True):
            found.setdefault(endpoint, []).append(row)
        return {endpoint: tuple(rows) for endpoint, rows in found.items()}

    @cached_property
    def _by_key_endpoint(self) -> dict[tuple[Key, int], tuple[Row, ...]]:
        found: dict[tuple[Key, int], list[Row]] = {}
        for endpoint, row in zip(self.endpoint.tolist(), self._rows, strict=True):
            found.setdefault((row.key, endpoint), []).append(row)
        return {at: tuple(rows) for at, rows in found.items()}

    def holders(self, key: Key, box: Box) -> tuple[Holder, ...]:
        """Who holds elements of `box`, sorted by endpoint and box; each with its whole row's box."""
        at = self._index.get(key)
        if at is None or not box.volume:
            return ()
        kind = self._kinds[at]
        found = self._asked.get((kind, box))
        if found is None:
            found = self._asked[kind, box] = self._search(at, box)
        return found

    def _search(self, at: int, box: Box) -> tuple[Holder, ...]:
        start, stop = int(self._starts[at]), int(self._starts[at + 1])
        if stop - start == 1:
            own = self._rows[start].box
            return (Holder(int(self.endpoint[start]), own),) if own.intersect(box) else ()
        overlap = np.ones(stop - start, bool)
        for dim in range(box.ndim):
            overlap &= self.lo[start:stop, dim] < box.hi[dim]
            overlap &= self.hi[start:stop, dim] > box.lo[dim]
        hits = np.flatnonzero(overlap) + start
        return tuple(Holder(int(self.endpoint[i]), self._rows[i].box) for i in hits.tolist())

    @cached_property
    def _asked(self) -> dict[tuple[int, Box], tuple[Holder, ...]]:
        """Answers given: a model has many tensors and few ways to split one."""
        return {}

    @cached_property
    def _kinds(self) -> list[int]:
        """Per key a number, equal for keys that the same endpoints hold in the same boxes."""
        known: dict[tuple[int, bytes], int] = {}
        rows = np.hstack([self.endpoint[:, None], self.lo, self.hi])
        found = []
        for at, spec in enumerate(self._keys):
            own = rows[int(self._starts[at]) : int(self._starts[at + 1])].tobytes()
            found.append(known.setdefault((len(spec.shape), own), len(known)))
        return found

    def digest(self) -> str:
        """A SHA-256 over keys and rows (boxes, buffers, offsets and strides included)."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        state = hashlib.sha256(repr(self._keys).encode())
        endpoints = np.array(self._endpoints, np.int64)
        for column in (endpoints, self.key_index, self.endpoint, self.lo, self.hi):
            state.update(np.ascontiguousarray(column, "<i8").tobytes())
        for row in self._rows:
            state.update(f"{row.buffer}:{row.offset}:{row.strides};".encode())
        return state.hexdigest()

    def __repr__(self) -> str:
        return (
            f"RowLayout({len(self._keys)} keys, {len(self._rows)} rows, "
            f"{len(self._endpoints)} endpoints)"
        )


def _fits(box: Box, shape: Sequence[int]) -> bool:
    return len(box.hi) == len(shape) and all(map(le, box.hi, shape))
