"""Where each parameter lies in the flats of a DeepSpeed checkpoint: spans of files, as rows.

The order of parameters is that of `param_shapes`, as DeepSpeed flattens them; the offsets are those of
`vps.flat`. The file's own `param_slice_mappings` are not used: they are wrong under round robin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding
from dynadapt.vps.box import Box, Span, row_major_strides
from dynadapt.vps.flat import zero3_part, zero_group
from dynadapt.vps.layout import Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynadapt.adapters.checkpoints._pickle import StoredTensor
    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.vps.keys import Key

__all__ = [
    "Files",
    "Piece",
    "Shapes",
    "flat_pieces",
    "rows_of_span",
    "shapes_of",
    "shard",
    "shard_pieces",
]

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `[start, stop)` of a parameter, from index `at` on in flat number `flat` of a rank."""

    name: str
    rank: int
    flat: int
    start: int
    stop: int
    at: int


def flat_pieces(groups: Sequence[Shapes], ranks: int, between: int = 1) -> Iterator[Piece]:
    """Stages 1 and 2: one flat a group, cut evenly; the tensors in the flat's order."""
    for number, shapes in enumerate(groups):
        sizes = [prod(shape) for shape in shapes.values()]
        group = zero_group(sizes, ranks, between=between)
        for rank in range(ranks):
            start, stop, at = group.spans(sizes, rank)
            for i, name in enumerate(shapes):
                if start[i] < stop[i]:
                    yield Piece(name, rank, number, int(start[i]), int(stop[i]), int(at[i]))


def shard(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """Stage 3: the elements `[start, stop)` of a parameter that a rank holds, without padding.

    >>> shard(10, 4, 3)
    (9, 10)
    """
    part = zero3_part(numel, ranks)
    return min(rank * part, numel), min((rank + 1) * part, numel)


def shard_pieces(
    groups: Sequence[Shapes], ranks: int, flats: Sequence[int]
) -> tuple[list[Piece], dict[str, int], list[str]]:
    """Stage 3: every parameter padded and cut alone; the pieces of a sub-group one after another.

    `flats` are the elements of a rank's flats. Older versions list the parameters by group and not by
    sub-group, so a parameter goes to the next flat when the current one is full. Returns the pieces,
    the flat of each parameter, and the names that found no room.
    """
    pieces: list[Piece] = []
    where: dict[str, int] = {}
    lost: list[str] = []
    number, at = 0, 0
    for shapes in groups:
        for name, shape in shapes.items():
            size = prod(shape)
            part = zero3_part(size, ranks)
            while number < len(flats) and at + part > flats[number]:
                number, at = number + 1, 0
            if number == len(flats):
                lost.append(name)
                continue
            where[name] = number
            for rank in range(ranks):
                start, stop = shard(size, ranks, rank)
                if start < stop:
                    pieces.append(Piece(name, rank, number, start, stop, at))
            at += part
    return pieces, where, lost


def rows_of_span(
    key: Key, shape: tuple[int, ...], start: int, stop: int, buffer: str, at: int
) -> Iterator[Row]:
    """A span of a tensor that lies contiguous in a buffer from index `at` on, as rows."""
    for box in Span(start, stop).boxes(shape):
        yield Row(key, box, buffer, at, row_major_strides(box.shape))
        at += box.volume


@dataclass
class Files:
    """Rows and buffers as they are found, by file."""

    root: str
    rows: dict[str, list[Row]] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def buffer(self, file: TorchFile, tensor: StoredTensor) -> str:
        """The id of the storage behind a tensor, seen in its dtype."""
        name = f"{self.inside(file)}#{tensor.storage.name}:{tensor.dtype}"
        if name not in self.buffers:
            self.buffers[name] = file.buffer(tensor)
        self.rows.setdefault(self.inside(file), [])
        return name

    def inside(self, file: TorchFile) -> str:
        """A file's path inside the checkpoint."""
        return file.path.removeprefix(self.root).lstrip("/")

    def whole(self, key: Key, file: TorchFile, tensor: StoredTensor) -> None:
        """A tensor that lies in a file as a whole, strided as it may be."""
        buffer = self.buffer(file, tensor)
        box = Box.whole(tensor.shape)
        self.rows[self.inside(file)].append(Row(key, box, buffer, tensor.offset, tensor.strides))

    def span(
        self,
        key: Key,
        shape: tuple[int, ...],
        piece: tuple[int, int, int],
        file: TorchFile,
        tensor: StoredTensor,
    ) -> None:
        """`(start, stop, at)`: a span of a parameter inside a flat tensor of a file."""
        start, stop, at = piece
        if at + stop - start > prod(tensor.shape):
            cause = f"the flat of {prod(tensor.shape):,} elements ends before it"
            self.findings.append(Finding("geometry", f"{key} in {self.inside(file)}", cause))
            return
        buffer = self.buffer(file, tensor)
        rows = rows_of_span(key, shape, start, stop, buffer, tensor.offset + at)
        self.rows[self.inside(file)].extend(rows)


def shapes_of(value: Any) -> Shapes:
    """A dict name -> `torch.Size`, as plain tuples."""
    if not isinstance(value, dict):
        return {}
    return {str(name): tuple(int(n) for n in shape) for name, shape in value.items()}
