"""A seat's share of a checkpoint, written from the framework's own storage to its places in files.

The files are there in their full size, and other seats write other parts of them at the same time: only
`pwrite`, never a map, whose pages two hosts would overwrite for each other.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynadapt.errors import Refused
from dynadapt.files import FileBuffer, unwritable, write_at
from dynadapt.torch_dtypes import dtype_name, torch_dtype
from dynadapt.transport._torch import as_words
from dynadapt.transport.executor import Moved, copy_checked
from dynadapt.transport.filling import WRITE
from dynadapt.transport.hashing import acts_for
from dynadapt.transport.read_back import crc_of
from dynadapt.transport.sources import boxes_of, inside
from dynadapt.vps.keys import itemsize
from dynadapt.vps.layout import file_endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dynadapt.transport.executor import Storage
    from dynadapt.transport.plan import Match, Move, SeatPlan
    from dynadapt.vps.box import Box
    from dynadapt.vps.layout import Row

__all__ = ["crcs_of", "write_moves"]

FROM_DEVICE = 16 << 20
"""Bytes that are copied from a device at a time."""


def write_moves(
    plan: SeatPlan, matched: Match, source: Storage, target: Storage, *, narrow: str = "if-exact"
) -> Moved:
    """Write what this seat was chosen for, each element once. What is zero in the target is left as it is.

    Raises `Refused` (`narrowing`, `disk-full`, `unwritable-file`).
    """
    moved = Moved()
    for move in dict.fromkeys(m for m in plan.local if m.target < 0 <= m.source):
        pair = matched.by_target[move.key]
        view = source.view(move.source, pair.source.key, move.box)
        how = "allow" if pair.target.derived else narrow  # a copy is rounded by its nature
        for row, buffer in target.places(move.target, move.key, move.box):
            assert isinstance(buffer, FileBuffer)
            _write(view, move, row, buffer, how)
            moved.written += move.box.volume * itemsize(buffer.dtype)
    return moved


def _write(view: torch.Tensor, move: Move, row: Row, buffer: FileBuffer, narrow: str) -> None:
    """One box into one row of a file."""
    size = itemsize(buffer.dtype)
    bytes_each = WRITE if view.device.type == "cpu" else FROM_DEVICE
    try:
        fd = os.open(buffer.path, os.O_WRONLY)
        try:
            for part in boxes_of(move.box, max(bytes_each // size, 1)):
                found = _on_host(view[inside(part, move.box)], move, buffer.dtype, narrow)
                _put(fd, found, part, row, buffer)
        finally:
            os.close(fd)
    except OSError as error:
        raise Refused([unwritable(buffer.path, error)]) from error


def _on_host(view: torch.Tensor, move: Move, dtype: str, narrow: str) -> NDArray[Any]:
    """A box as plain words, in order, in the file's dtype."""
    own = view.to("cpu")
    if dtype_name(own.dtype) != dtype:
        cast = torch.empty(own.shape, dtype=torch_dtype(dtype))
        if finding := copy_checked(own, cast, move, narrow):
            raise Refused([finding])
        own = cast
    return np.ascontiguousarray(as_words(own))


def _put(fd: int, array: NDArray[Any], box: Box, row: Row, buffer: FileBuffer) -> None:
    """Write a box to its place; its innermost dims that follow one another in the file go together."""
    size, run, dim = itemsize(buffer.dtype), 1, box.ndim
    while dim and (box.shape[dim - 1] == 1 or row.strides[dim - 1] == run):
        dim -= 1
        run *= box.shape[dim]
    outer = box.shape[:dim]
    data = array.reshape(-1).view(np.uint8).data
    for number, at in enumerate(np.ndindex(outer) if outer else [()]):
        low = tuple(a + b for a, b in zip(box.lo, (*at, *(0,) * (box.ndim - dim)), strict=True))
        place = buffer.offset + row.offset_of(low) * size
        own = data[number * run * size : (number + 1) * run * size]
        for begin in range(0, len(own), WRITE):
            write_at(fd, own[begin : begin + WRITE], place + begin)


def crcs_of(buffers: Mapping[str, FileBuffer], seat: int, workers: Sequence[int]) -> dict[str, int]:
    """The CRC-32 of every buffer of the files that are this seat's, read back when all have written."""
    found = {}
    for name, buffer in buffers.items():
        if acts_for(seat, file_endpoint(name.partition("#")[0]), workers):
            found[name] = crc_of(buffer)
    return found
