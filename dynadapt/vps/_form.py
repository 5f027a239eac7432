"""The form of rows: no coordinate twice on one endpoint, no memory shared, not too many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import Row

__all__ = ["MAX_ROWS_PER_KEY", "bad_row", "check_form"]

MAX_ROWS_PER_KEY = 4096
"""More rows than this for one key on one endpoint is refused: the layout is not a regular one."""

_SMALL = 1 << 16
"""Elements up to which two rows are compared place by place."""


def bad_row(endpoint: int, row: Row, cause: str) -> Finding:
    """What is wrong with one row, and where."""
    fix = "this is a fault of the adapter that described it"
    return _at_row("bad-row", endpoint, row, cause, fix)


def _shared(endpoint: int, row: Row, cause: str) -> Finding:
    fix = "give the tensor memory of its own: clone the expanded or overlapping view"
    return _at_row("shared-memory", endpoint, row, cause, fix)


def _at_row(reason: str, endpoint: int, row: Row, cause: str, fix: str) -> Finding:
    where = f"endpoint {endpoint}: {row.key} {row.box}"
    return Finding(reason, where, f"the row {cause}", fix)


def check_form(endpoints: Iterable[int], rows_of: Mapping[int, Sequence[Row]]) -> None:
    """No endpoint holds a coordinate of a key twice, nor too many rows; no two rows share memory."""
    findings: list[Finding] = []
    groups: dict[tuple[int, Key], list[Row]] = {}
    for endpoint in endpoints:
        for row in rows_of.get(endpoint, ()):
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
    for endpoint in endpoints:
        findings.extend(_shared_memory(endpoint, rows_of.get(endpoint, ())))
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
                yield _shared(endpoint, row, "holds one element for several coordinates")
                break
            reach += stride * (size - 1)
        buffers.setdefault(row.buffer, []).append(row)
    for own in buffers.values():
        open_rows: list[Row] = []
        for row in sorted(own, key=lambda r: r.offset):
            open_rows = [other for other in open_rows if other.last >= row.offset]
            for other in open_rows:
                if _same_places(other, row):
                    yield _shared(endpoint, row, f"shares memory with {other.key} {other.box}")
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
            yield bad_row(endpoint, rows[i], f"overlaps another row of the same key, {other.box}")
