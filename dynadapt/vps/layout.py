"""Rows, and the `Layout` protocol with its explicit form, `RowLayout`.

A row says: this endpoint holds this box of this key in this buffer, element `x` at
`offset + sum((x_d - lo_d) * stride_d)`. An endpoint is an integer: a seat (a live process) is zero
or more, a file is negative (`file_endpoint`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

from dynadapt.errors import Finding, Refused
from dynadapt.vps.box import MAX_DIMS, Box
from dynadapt.vps.keys import Key, KeySpec, alias_groups, merge_specs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["MAX_ROWS_PER_KEY", "Holder", "Layout", "Row", "RowLayout", "file_endpoint"]

MAX_ROWS_PER_KEY = 4096
"""More rows than this for one key on one endpoint is refused: the layout is not a regular one."""

_SMALL = 1 << 16
"""Elements up to which two rows are compared place by place."""


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
        if self.offset < 0 or any(stride < 0 for stride in self.strides):
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
                    findings.append(_bad(endpoint, row, "has no KeySpec"))
                elif not _fits(row.box, shape := self._keys[at].shape):
                    findings.append(_bad(endpoint, row, f"leaves the tensor's shape {shape}"))
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
        _check_form(self)

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
            name = groups.get(row.key.name, (row.key.name,))[0]
            if name == row.key.name:
                return row
            return Row(Key(name, row.key.slot), row.box, row.buffer, row.offset, row.strides)

        return cls(
            keys, {e: [canonical(row) for row in rows] for e, (_, rows) in described.items()}
        )

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
        start, stop = int(self._starts[at]), int(self._starts[at + 1])
        ndim = box.ndim
        overlap = np.ones(stop - start, bool)
        for dim in range(ndim):
            overlap &= self.lo[start:stop, dim] < box.hi[dim]
            overlap &= self.hi[start:stop, dim] > box.lo[dim]
        hits = np.flatnonzero(overlap) + start
        return tuple(Holder(int(self.endpoint[i]), self._rows[i].box) for i in hits.tolist())

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
    return box.ndim == len(shape) and Box.whole(shape).contains(box)


def _bad(endpoint: int, row: Row, cause: str) -> Finding:
    return Finding(
        "bad-row",
        f"endpoint {endpoint}: {row.key} {row.box}",
        f"the row {cause}",
        "this is a fault of the adapter that described it",
    )


def _check_form(layout: RowLayout) -> None:
    """No endpoint holds a coordinate of a key twice, nor too many rows; no two rows share memory."""
    findings: list[Finding] = []
    groups: dict[tuple[int, Key], list[Row]] = {}
    for endpoint in layout.endpoints:
        for row in layout.rows(endpoint):
            groups.setdefault((endpoint, row.key), []).append(row)
    for (endpoint, key), rows in groups.items():
        if len(rows) > MAX_ROWS_PER_KEY:
            findings.append(
                Finding(
                    "too-many-rows",
                    f"endpoint {endpoint}: {key}",
                    f"{len(rows)} rows, more than {MAX_ROWS_PER_KEY}",
                    "describe it with strides, or with another sharding",
                )
            )
            continue
        if len(rows) > 1:
            findings.extend(_overlaps(endpoint, rows))
    for endpoint in layout.endpoints:
        findings.extend(_shared_memory(endpoint, layout.rows(endpoint)))
    if findings:
        raise Refused(findings)


def _shared_memory(endpoint: int, rows: Sequence[Row]) -> Iterable[Finding]:
    """Rows with one place for two coordinates, and pairs of rows with places in common."""
    buffers: dict[str, list[Row]] = {}
    for row in rows:
        reach = 0
        sizes = zip(row.strides, row.box.shape, strict=True)
        for stride, size in sorted((stride, size) for stride, size in sizes if size > 1):
            if stride <= reach:
                yield _bad(endpoint, row, "holds one element for several coordinates")
                break
            reach += stride * (size - 1)
        buffers.setdefault(row.buffer, []).append(row)
    for own in buffers.values():
        open_rows: list[Row] = []
        for row in sorted(own, key=lambda r: r.offset):
            open_rows = [other for other in open_rows if other.last >= row.offset]
            for other in open_rows:
                if _same_places(other, row):
                    yield _bad(endpoint, row, f"shares memory with {other.key} {other.box}")
            open_rows.append(row)


def _same_places(a: Row, b: Row) -> bool:
    """Whether two rows whose stretches of one buffer meet have an element in common.

    Exact for rows of equal strides (slices of one matrix) and for small ones; else False.
    """
    if all(row.box.volume == row.last - row.offset + 1 for row in (a, b)):
        return True
    steps = sorted({s for s, n in zip(a.strides, a.box.shape, strict=True) if n > 1}, reverse=True)
    if steps == sorted(
        {s for s, n in zip(b.strides, b.box.shape, strict=True) if n > 1}, reverse=True
    ):
        first, second = _digits(a, steps), _digits(b, steps)
        if first is not None and second is not None:
            grid = zip(*first, *second, strict=True)
            return all(max(lo, low) < min(hi, high) for lo, hi, low, high in grid)
    if a.box.volume + b.box.volume > _SMALL:
        return False
    return bool(np.intersect1d(_places(a), _places(b)).size)


def _digits(row: Row, steps: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The row as a box in the grid that its strides span; None where it runs over a grid line."""
    sizes = {s: n for s, n in zip(row.strides, row.box.shape, strict=True) if n > 1}
    lo, hi, rest = [], [], row.offset
    for step, outer in zip(steps, (0, *steps), strict=False):
        at, rest = divmod(rest, step)
        lo.append(at)
        hi.append(at + sizes[step])
        if outer and hi[-1] * step > outer:
            return None
    return ((*lo, rest), (*hi, rest + 1))


def _places(row: Row) -> NDArray[np.int64]:
    """The index in the buffer of every element."""
    found = np.array([row.offset])
    for size, stride in zip(row.box.shape, row.strides, strict=True):
        found = np.add.outer(found, np.arange(size) * stride).reshape(-1)
    return found


def _overlaps(endpoint: int, rows: Sequence[Row]) -> Iterable[Finding]:
    lo = np.array([row.box.lo for row in rows])
    hi = np.array([row.box.hi for row in rows])
    for i in range(len(rows) - 1):
        clash = np.all((lo[i + 1 :] < hi[i]) & (hi[i + 1 :] > lo[i]), axis=1)
        if clash.any():
            other = rows[i + 1 + int(np.argmax(clash))]
            yield _bad(endpoint, rows[i], f"overlaps another row of the same key, {other.box}")
