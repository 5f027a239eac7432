"""The `.metadata` of a torch distributed checkpoint: which tensors there are, and where each chunk lies.

The file is a pickle of `torch.distributed.checkpoint.metadata.Metadata` (torch 2.1 to 2.13); it is read
as data. A save without collectives leaves one `__RANK.metadata` for each rank, which are united.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._pickle import Global, Opaque, read_pickle
from dynadapt.errors import Finding, Refused
from dynadapt.files import mapped
from dynadapt.vps.box import MAX_DIMS, Box
from dynadapt.vps.keys import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["METADATA", "Chunk", "Entry", "Names", "boxes", "metadata_files", "read_metadata"]

METADATA = ".metadata"
_OF_RANK = re.compile(r"^__(\d+)\.metadata$")

_FLATTENED = "nd_reformulated_orig_global_shape"
"""What Megatron-Core before 0.16 calls the shape of a tensor of flattened blocks."""

Names = tuple[str | int, ...]
"""The keys that lead to an entry in the nested dict that was saved."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, or a whole object (`box` is None), and where its `torch.save` zip lies."""

    box: Box | None
    file: str
    offset: int
    length: int


@dataclass
class Entry:
    """A tensor, or an object (`dtype` is empty), under its name in the checkpoint.

    `flattened` is the shape of a tensor that Megatron-Core keeps as a grid of flattened blocks.
    """

    name: str
    names: Names
    shape: tuple[int, ...] = ()
    dtype: str = ""
    boxes: list[Box] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    flattened: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


def metadata_files(root: Path) -> list[str]:
    """The names of the files of metadata in a folder: one, or one of each rank; none."""
    if (root / METADATA).is_file():
        return [METADATA]
    try:
        names = [p.name for p in root.iterdir()]
    except OSError:
        return []
    found = {int(m[1]): name for name in names if (m := _OF_RANK.match(name))}
    return [found[rank] for rank in sorted(found)]


def read_metadata(root: Path) -> dict[str, Entry]:
    """All entries by name, in the order in which they were saved; raises `Refused` with all findings."""
    entries: dict[str, Entry] = {}
    findings: list[Finding] = []
    sizes: dict[str, int] = {}
    files = metadata_files(root)
    if not files:
        cause = "has no .metadata: the save did not end, or it was not copied"
        findings.append(Finding("missing-file", str(root), cause, "copy the whole checkpoint"))
    for name in files:
        path = str(root / name)
        try:
            _take(read_pickle(bytes(mapped(path)), path), entries)
        except Refused as error:
            findings += error.findings
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            cause = f"is no metadata of a torch distributed checkpoint: {error}"[:300]
            findings.append(Finding("bad-file", path, cause, "it may be damaged: copy it again"))
    for entry in entries.values():
        entry.chunks.sort(key=lambda chunk: () if chunk.box is None else (chunk.box,))
        findings += _incomplete(root, entry, sizes)
    if findings:
        raise Refused(findings)
    return entries


def boxes(shape: tuple[int, ...], ranks: int) -> Iterator[tuple[int, Box]]:
    """What each rank holds of a tensor whose dim 0 is cut as `torch.chunk` cuts it; no empty ones."""
    whole = Box.whole(shape)
    if not whole.volume:
        return
    if ranks == 1 or not shape:
        yield 0, whole
        return
    step = -(-shape[0] // ranks)
    for rank, low in enumerate(range(0, shape[0], step)):
        yield rank, Box((low, *whole.lo[1:]), (min(low + step, shape[0]), *whole.hi[1:]))


def _take(tree: Any, entries: dict[str, Entry]) -> None:
    """Add what one file of metadata says."""
    described = _dict(_field(tree, ("Metadata", "MCoreMetadata"), "state_dict_metadata"))
    stored = _storage(_dict(tree.get("storage_data")))
    paths = tree.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    shapes = tree.get("mcore_data") or {}
    # A rank's own list is in the order of the dict that was saved, the united one of entries is not.
    place = {name: i for i, name in enumerate(paths)}
    for name in sorted(described, key=lambda n: place.get(n, len(place))):
        value = described[name]
        if not isinstance(name, str):
            raise TypeError(f"an entry is called {name!r}"[:80])
        entry = entries.setdefault(name, Entry(name, _names(paths.get(name), name)))
        if isinstance(value, Opaque) and value.is_a("BytesStorageMetadata"):
            at = stored.get((name, None)) or _lost(name)
            entry.chunks.append(Chunk(None, *at))
            continue
        shape = _numbers(_field(value, "TensorStorageMetadata", "size"))
        dtype = _dtype(value.get("properties"))
        if len(shape) > MAX_DIMS:
            raise ValueError(f"{name} has {len(shape)} dims")
        if entry.dtype and (entry.shape, entry.dtype) != (shape, dtype):
            raise ValueError(f"{name} has two shapes or dtypes")
        entry.shape, entry.dtype = shape, dtype
        if name in _dict(shapes):
            entry.flattened = _numbers(_dict(shapes[name]).get(_FLATTENED) or ())
        for chunk in _list(value.get("chunks")):
            low = _numbers(_field(chunk, "ChunkStorageMetadata", "offsets"))
            sizes = _numbers(chunk.get("sizes"))
            box = Box(low, tuple(a + n for a, n in zip(low, sizes, strict=True)))
            if box.ndim != len(shape) or not Box.whole(shape).contains(box):
                raise ValueError(f"{name} {box} leaves its shape {list(shape)}")
            entry.boxes.append(box)
            if not box.volume:
                continue
            # In a save without collectives a chunk may be another rank's.
            at = stored.get((name, low)) or stored.get((name, None)) or _lost(name)
            entry.chunks.append(Chunk(box, *at))


def _lost(name: str) -> tuple[str, int, int]:
    raise ValueError(f"it does not say where {name} lies")


def _storage(stored: dict[Any, Any]) -> dict[tuple[str, Any], tuple[str, int, int]]:
    """Where each chunk lies, by its entry's name and its offset in the tensor."""
    found: dict[tuple[str, Any], tuple[str, int, int]] = {}
    inside: set[Any] = set()
    for index, info in stored.items():
        name = _field(index, "MetadataIndex", "fqn")
        offset = index.get("offset")
        file = _field(info, "_StorageInfo", "relative_path")
        if info.get("transform_descriptors"):
            what = str(info.get("transform_descriptors"))[:60]
            cause = f"was written through an extension, {what}: its bytes are transformed"
            fix = "load it with torch and save it without _extensions"
            raise Refused([Finding("unsupported-format", str(name), cause, fix)])
        start, length = _numbers((info.get("offset"), info.get("length")))
        if file not in inside:
            _inside(file)
            inside.add(file)
        found[name, None if offset is None else _numbers(offset)] = (file, start, length)
    return found


def _inside(file: Any) -> None:
    """Raise unless a relative path stays inside its folder."""
    if not isinstance(file, str) or "\0" in file or not file:
        raise ValueError(f"a file is called {file!r}"[:80])
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        cause = f"names a file outside its folder: {file!r}"[:200]
        fix = "do not trust this checkpoint"
        raise Refused([Finding("path-traversal", METADATA, cause, fix)])


def _incomplete(root: Path, entry: Entry, sizes: dict[str, int]) -> list[Finding]:
    """Files that are not there or end too early; their sizes are looked up once."""
    found = []
    for chunk in entry.chunks:
        if chunk.file not in sizes:
            try:
                sizes[chunk.file] = (root / chunk.file).stat().st_size
            except OSError:
                sizes[chunk.file] = -1
        size, path = sizes[chunk.file], f"{root}/{chunk.file}"
        if size < 0:
            cause = f"is missing, and {entry.name} lies in it"
            found.append(Finding("missing-file", path, cause, "copy the whole checkpoint"))
        elif chunk.offset + chunk.length > size:
            cause = (
                f"ends at byte {size:,}, and bytes {chunk.offset:,} to "
                f"{chunk.offset + chunk.length:,} are declared, for {entry.name}"
            )
            found.append(Finding("truncated-file", path, cause, "copy it again"))
    return found[:1]


def _field(value: Any, kind: str | tuple[str, ...], name: str) -> Any:
    kinds = (kind,) if isinstance(kind, str) else kind
    if not isinstance(value, Opaque) or not value.is_a(*kinds):
        raise ValueError(f"a {kinds[0]} is {str(value)[:60]!r}")
    return value.get(name)


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"a dict is {str(value)[:60]!r}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a list is {str(value)[:60]!r}")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or any(type(n) is not int or n < 0 for n in value):
        raise ValueError(f"sizes are {str(value)[:60]!r}")
    return tuple(value)


def _names(value: Any, name: str) -> Names:
    """The path that `planner_data` gives an entry; of a flat dict its name."""
    if value is None:
        return (name,)
    if (
        not isinstance(value, tuple | list)
        or not 0 < len(value) <= 64
        or any(type(part) not in {str, int} for part in value)
    ):
        raise ValueError(f"the path of {name} is {str(value)[:60]!r}")
    return tuple(value)


def _dtype(properties: Any) -> str:
    """The dtype in a `TensorProperties`, whose state is a tuple."""
    state = properties.state if isinstance(properties, Opaque) else None
    first = state[0] if isinstance(state, tuple) and state else None
    if first is None and isinstance(properties, Opaque):
        first = properties.get("dtype")
    if not isinstance(first, Global) or first.module != "torch" or first.name not in ITEMSIZE:
        raise ValueError(f"a dtype is {str(first)[:60]!r}")
    return first.name
