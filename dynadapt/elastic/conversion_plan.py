"""What a conversion would do, and about how long it would take; nothing is written."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from isal.isal_zlib import crc32

from dynadapt.elastic.budget import FORK_BYTES, Budget, thread_bytes
from dynadapt.elastic.conversion_layout import chosen_of, laid_out, left_out
from dynadapt.transport.certificate import weighted_sum
from dynadapt.vps.box import Box
from dynadapt.vps.keys import Key, itemsize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.elastic.checkpoint import Checkpoint
    from dynadapt.elastic.selection import Selection
    from dynadapt.files import FileBuffer
    from dynadapt.protocols import FileTarget
    from dynadapt.transport.plan import Narrow

__all__ = ["ConversionPlan", "plan"]

PROBE = 64 << 20
"""Bytes of the source that are read to see how fast this machine reads and sums."""

DISK = 1e9
"""Bytes a second that a disk is taken to write: nothing is written to find out."""


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion would read, write and hold. Bytes are of tensors, `seconds` are a guess.

    `bytes_state` is what the target would hold of the source, `bytes_written` that with derived copies
    and padding; `peak_bytes` is anonymous memory beside the interpreter's own.
    """

    source: str
    format: str
    layout: str | None
    bytes_read: int
    bytes_state: int
    bytes_written: int
    files: int
    largest_file: int
    peak_bytes: int
    seconds: float
    dropped: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return {
            "source": self.source,
            "format": self.format,
            "layout": self.layout,
            "bytes_read": self.bytes_read,
            "bytes_state": self.bytes_state,
            "bytes_written": self.bytes_written,
            "files": self.files,
            "largest_file": self.largest_file,
            "peak_bytes": self.peak_bytes,
            "seconds": round(self.seconds, 3),
            "dropped": list(self.dropped),
        }


def plan(
    source: Checkpoint,
    target: FileTarget,
    *,
    selection: Selection | None = None,
    narrow: Narrow = "if-exact",
    verify: bool = True,
    threads: int = 2,
    budget: Budget | None = None,
) -> ConversionPlan:
    """Lay the target out without making it. Raises `Refused` as `convert` would before it writes.

    Whether values fit a smaller dtype is known only when they are read: `convert` may refuse that later.
    """
    own, target, layout = chosen_of(source, target, selection)
    _, made, there, matched = laid_out(own, layout, replace(target, dry=True), narrow)
    budget = budget or Budget()
    effort = budget.effort(threads, again=verify)
    sizes: dict[str, int] = {}
    for name, buffer in made.buffers.items():
        file = name.partition("#")[0]
        sizes[file] = sizes.get(file, 0) + buffer.nbytes  # type: ignore[attr-defined]
    pairs = [p for p in matched.pairs if not p.fill]
    state = sum(p.target.nbytes for p in pairs if not p.target.derived)
    from_source = {p.target.key: itemsize(p.source.dtype) for p in pairs}
    read = sum(
        row.box.volume * from_source.get(row.key, 0)
        for endpoint in there.endpoints
        for row in there.rows(endpoint)
    )
    written = sum(sizes.values())
    fill, again = _paces(own.buffers)  # type: ignore[arg-type]  # they are files
    forks = effort.threads if budget.forks(written) else 0
    return ConversionPlan(
        source=source.path,
        format=target.format,
        layout=str(target.layout) if target.layout else None,
        bytes_read=read,
        bytes_state=state,
        bytes_written=written,
        files=len(sizes),
        largest_file=max(sizes.values(), default=0),
        peak_bytes=effort.threads * thread_bytes(effort.piece) + forks * FORK_BYTES,
        # once through, as the disk writes; once to read back
        seconds=max(read / (fill * effort.threads), written / DISK)
        + verify * written / (again * effort.threads),
        dropped=tuple(each.path for each in left_out(source.own, layout, matched)),
    )


def _paces(buffers: Mapping[str, FileBuffer]) -> tuple[float, float]:
    """Bytes a second of one thread that reads, sums and copies some of the source; that checks sums."""
    left, filling, checking = PROBE, 1e-9, 1e-9
    for buffer in buffers.values():
        array = buffer.array()[: left // itemsize(buffer.dtype)]
        room = np.empty(1 << 17, array.dtype)
        for at in range(0, array.size, 1 << 17):
            piece = array[at : at + (1 << 17)]
            began = time.perf_counter()
            weighted_sum(piece, Box((at,), (at + piece.size,)), Key("probe", "param"))
            room[: piece.size] = piece
            middle = time.perf_counter()
            crc32(piece)
            filling += middle - began
            checking += time.perf_counter() - middle
        left -= array.nbytes
        if left <= 0:
            break
    return max((PROBE - left) / filling, 1.0), max((PROBE - left) / checking, 1.0)
