"""The `.metadata` of a torch distributed checkpoint in the making, as torch 2.4 and later pickle it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._pickle import Global, Opaque, Size
from dynadapt.adapters.checkpoints._repickle import write_pickle

if TYPE_CHECKING:
    from dynadapt.adapters.checkpoints._dcp_metadata import Chunk, Names
    from dynadapt.vps.box import Box

__all__ = ["Metadata"]

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
VERSION = "1.0.0"


def _made(kind: str, state: Any = None) -> Opaque:
    return Opaque(Global(_MODULE, kind), new=True, state=state)


@dataclass
class Metadata:
    """Entries as they are added, in their order."""

    described: dict[str, Opaque] = field(default_factory=dict)
    paths: dict[str, Names] = field(default_factory=dict)
    stored: dict[Opaque, Opaque] = field(default_factory=dict)
    _properties: dict[str, Opaque] = field(default_factory=dict)
    _sizes: dict[tuple[int, ...], Size] = field(default_factory=dict)
    _boxes: dict[Box, Opaque] = field(default_factory=dict)

    def value(self, names: Names, chunk: Chunk) -> None:
        """Add an object that is no tensor."""
        name = self._name(names)
        self.described[name] = _made("BytesStorageMetadata")
        self._store(name, None, 0, chunk)

    def tensor(self, names: Names, shape: tuple[int, ...], dtype: str, chunks: list[Chunk]) -> None:
        """Add a tensor; its chunks may be those of another entry, to which it is tied."""
        name = self._name(names)
        self.described[name] = _made(
            "TensorStorageMetadata",
            {
                "properties": self._of(dtype),
                "size": self._size(shape),
                "chunks": [self._box(chunk.box) for chunk in chunks if chunk.box is not None],
            },
        )
        for number, chunk in enumerate(chunks):
            self._store(name, chunk.box.lo if chunk.box else (), number, chunk)

    def _name(self, names: Names) -> str:
        name = ".".join(map(str, names))
        if name in self.described:
            raise ValueError(f"two entries are called {name}")
        self.paths[name] = names
        return name

    def _store(self, name: str, offset: tuple[int, ...] | None, number: int, chunk: Chunk) -> None:
        index = {
            "fqn": name,
            "offset": None if offset is None else self._size(offset),
            "index": None if offset is None else number,
        }
        info = {"relative_path": chunk.file, "offset": chunk.offset, "length": chunk.length}
        self.stored[_made("MetadataIndex", index)] = Opaque(_STORAGE, new=True, state=info)

    def _size(self, shape: tuple[int, ...]) -> Size:
        """One object for equal sizes, which are pickled once."""
        if shape not in self._sizes:
            self._sizes[shape] = Size(shape)
        return self._sizes[shape]

    def _box(self, box: Box) -> Opaque:
        """The same of chunks: a parameter's states are cut as it is."""
        if box not in self._boxes:
            state = {"offsets": self._size(box.lo), "sizes": self._size(box.shape)}
            self._boxes[box] = _made("ChunkStorageMetadata", state)
        return self._boxes[box]

    def _of(self, dtype: str) -> Opaque:
        """`TensorProperties` of a dtype: dtype, layout, requires_grad, memory format, pin_memory."""
        if dtype not in self._properties:
            layout = Opaque(Global("torch.serialization", "_get_layout"), ("torch.strided",))
            form = Opaque(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
            state = (Global("torch", dtype), layout, False, form, False)
            self._properties[dtype] = _made("TensorProperties", state)
        return self._properties[dtype]

    def pickled(self) -> bytes:
        """The file's bytes."""
        state = {
            "state_dict_metadata": self.described,
            "planner_data": self.paths,
            "storage_data": self.stored,
            "storage_meta": None,
            "version": VERSION,
        }
        return write_pickle(_made("Metadata", state))
