"""Rows over files, as both readers and writers collect them: what was found, and what is laid out."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding
from dynadapt.vps.box import Box, Span, row_major_strides
from dynadapt.vps.layout import Row, file_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynadapt.adapters.checkpoints._making import Making
    from dynadapt.adapters.checkpoints._pickle import StoredTensor
    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.vps.keys import Key, KeySpec

__all__ = ["Files", "Laid", "rows_of_span"]


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
        self.buffers[name] = file.buffer(tensor)  # which proves that this tensor lies in it
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


@dataclass
class Laid:
    """Files that are laid out: their storages (dtype, elements) and rows, and the keys they hold."""

    storages: dict[str, dict[str, tuple[str, int]]] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=dict)
    keys: dict[Key, KeySpec] = field(default_factory=dict)

    def storage(self, path: str, name: str, dtype: str, numel: int) -> str:
        """Give a file a storage; returns its buffer id."""
        self.rows.setdefault(path, [])
        self.storages.setdefault(path, {})[name] = (dtype, numel)
        return f"{path}#{name}"

    def whole(self, path: str, spec: KeySpec, name: str) -> None:
        """Put a whole tensor into a storage of its own."""
        buffer = self.storage(path, name, spec.dtype, spec.numel)
        self.keys[spec.key] = spec
        strides = row_major_strides(spec.shape)
        self.rows[path].append(Row(spec.key, Box.whole(spec.shape), buffer, 0, strides))

    def span(self, spec: KeySpec, start: int, stop: int, buffer: str, at: int) -> None:
        """Put elements `[start, stop)` of a tensor into a buffer, from index `at` on."""
        self.keys[spec.key] = spec
        rows = rows_of_span(spec.key, spec.shape, start, stop, buffer, at)
        self.rows[buffer.partition("#")[0]].extend(rows)

    def into(self, made: Making) -> dict[int, tuple[Row, ...]]:
        """Allocate all files; the rows by endpoint."""
        for path, storages in self.storages.items():
            made.torch_file(path, storages)
        made.allocate()
        return {file_endpoint(path): tuple(rows) for path, rows in self.rows.items()}
