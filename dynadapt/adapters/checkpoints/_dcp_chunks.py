"""The chunks behind the entries of a torch distributed checkpoint: opened, and collected as rows by file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.adapters.checkpoints._dcp_metadata import Entry, read_metadata
from dynadapt.adapters.checkpoints._pickle import StoredTensor
from dynadapt.adapters.checkpoints._plain import lowered
from dynadapt.adapters.checkpoints._torch_file import TorchFile, read_torch
from dynadapt.errors import Finding, Refused
from dynadapt.files import mapped
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import Row

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dynadapt.adapters.checkpoints._dcp_metadata import Chunk
    from dynadapt.files import FileBuffer
    from dynadapt.protocols import AuxItem

__all__ = ["Chunks"]


class Chunks:
    """What is found of a checkpoint, in one folder or, as Accelerate has it, model and optimizer apart."""

    def __init__(self, root: Path, folders: Sequence[str] = ("",)) -> None:
        self.root = root
        self.entries: dict[str, Entry] = {}
        for folder in folders:
            for name, entry in read_metadata(root / folder).items():
                chunks = [
                    replace(c, file=f"{folder}/{c.file}" if folder else c.file)
                    for c in entry.chunks
                ]
                self.entries[name] = replace(entry, chunks=chunks)
        self.findings: list[Finding] = []
        self.specs: dict[Key, KeySpec] = {}
        self.rows: dict[str, list[Row]] = {}
        self.buffers: dict[str, FileBuffer] = {}
        self.scalars: dict[str, dict[str, int | float]] = {}
        self.aux: list[AuxItem] = []
        self._maps: dict[str, memoryview] = {}

    def _tensor(self, key: Key, entry: Entry, like: KeySpec | None = None, **more: Any) -> None:
        """A spec and its rows."""
        if like is None:
            spec = KeySpec(key, entry.shape, entry.dtype, **more)
        else:
            spec = replace(like, key=key, shape=entry.shape, dtype=entry.dtype, **more)
        self.specs[key] = spec
        for chunk in entry.chunks:
            rows = self.rows.setdefault(chunk.file, [])
            file, tensor = self._open(entry, chunk)
            if tensor is None or chunk.box is None:
                continue
            name = self._buffer(chunk, entry, file, tensor)
            rows.append(Row(key, chunk.box, name, tensor.offset, tensor.strides))

    def _buffer(self, chunk: Chunk, entry: Entry, file: TorchFile, tensor: StoredTensor) -> str:
        """The id of the storage behind a chunk."""
        name = f"{chunk.file}#{chunk.offset}:{entry.dtype}"
        self.buffers[name] = file.buffer(tensor)
        return name

    def _open(self, entry: Entry, chunk: Chunk) -> tuple[TorchFile, StoredTensor | None]:
        """The zip of a chunk and the tensor in it; None with a finding if it is not what it should be."""
        path = f"{self.root}/{chunk.file}"
        try:
            file = self._zip(chunk)
            tensor = file.tree
            if isinstance(tensor, StoredTensor):
                file.buffer(tensor)
                if tensor.dtype == entry.dtype and chunk.box and tensor.shape == chunk.box.shape:
                    return file, tensor
            cause = f"{entry.name} {chunk.box} in it is not a {entry.dtype} tensor of that shape"
            self.findings.append(Finding("bad-file", path, cause, "copy it again"))
        except Refused as error:
            self.findings += error.findings
            file = TorchFile(path, None, {})
        return file, None

    def _zip(self, chunk: Chunk) -> TorchFile:
        """The zip of a chunk; its file is mapped once."""
        path = f"{self.root}/{chunk.file}"
        if path not in self._maps:
            self._maps[path] = mapped(path)
        return read_torch(path, chunk.offset, chunk.length, self._maps[path])

    def _object(self, entry: Entry) -> Any:
        """An object that is no tensor."""
        (chunk,) = entry.chunks[:1]
        try:
            file = self._zip(chunk)
        except Refused as error:
            self.findings += error.findings
            return None
        return lowered(file.tree, file)

    def _small(self, entry: Entry) -> Any:
        """A small tensor's elements, as numpy has them; of one that has one element the number."""
        out = np.zeros(entry.shape, "u1")
        for i, chunk in enumerate(entry.chunks):
            file, tensor = self._open(entry, chunk)
            if tensor is None or chunk.box is None:
                return None
            flat = file.buffer(tensor).array()[tensor.offset :]
            steps = tuple(step * flat.itemsize for step in tensor.strides)
            own = np.lib.stride_tricks.as_strided(flat, tensor.shape, steps, writeable=False)
            out = out if i else np.zeros(entry.shape, own.dtype)
            out[tuple(slice(a, b) for a, b in zip(chunk.box.lo, chunk.box.hi, strict=True))] = own
        return out

    def _plain(self, value: Any) -> Any:
        """A value with tensors of one element as numbers."""
        if isinstance(value, Entry) and not sum(n - 1 for n in value.shape):
            found = self._small(value)
            return None if found is None or not found.size else found.reshape(-1)[0].item()
        return value
