"""Hugging Face safetensors: one file, or numbered files and an index. Weights only.

Also read: a folder that torch's `HuggingFaceStorageWriter` wrote with `save_distributed`, a file a rank.

The format: 8 bytes with the header's length, a JSON header of dtypes, shapes and byte ranges, the data
(github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from dynadapt.adapters.checkpoints._format import Format, homeless
from dynadapt.adapters.checkpoints._hf_index import broken_promises, weight_map
from dynadapt.adapters.checkpoints._making import Making
from dynadapt.adapters.checkpoints._names import as_asked, natural, placeholders, tensor_spec
from dynadapt.adapters.checkpoints._safetensors import NAMES, header_of, read_header, whole_row
from dynadapt.errors import Finding, Refused
from dynadapt.files import FileBuffer
from dynadapt.protocols import Described, FileSource, FileTarget, Outcome, alone
from dynadapt.vps.box import Box, row_major_strides
from dynadapt.vps.layout import Row, file_endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynadapt.protocols import Agree, AuxItem
    from dynadapt.vps.keys import KeySpec

__all__ = ["SafetensorsDir"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = 5 << 30
"""Bytes of a file, unless the user says otherwise, as transformers writes them."""


class SafetensorsDir(Format):
    """Reads a folder or a file; writes a folder that `from_pretrained` takes."""

    name = "safetensors"

    @staticmethod
    def holds(path: Path) -> bool:
        """A folder with safetensors files, or one such file."""
        return path.suffix == ".safetensors" or bool(_files(path))

    def read(self, path: Path, said: FileSource) -> Described:
        """See `Format.describe`."""
        root = path.parent if path.is_file() else path
        names = [path.name] if path.is_file() else _files(path)
        specs: dict[str, KeySpec] = {}
        buffers: dict[str, FileBuffer] = {}
        files: dict[int, tuple[Row, ...]] = {}
        findings: list[Finding] = []
        every: list[tuple[str, str]] = []
        for name in names:
            try:
                header = read_header(str(root / name))
            except Refused as error:
                findings += error.findings
                continue
            rows = []
            for tensor, (dtype, shape, at) in header.entries.items():
                every.append((tensor, name))
                low = header.offsets.get(tensor, (0,) * len(shape))
                box = Box(low, tuple(map(sum, zip(low, shape, strict=True))))
                aliases = header.aliases.get(tensor, ())
                told = header.buffers if header.buffers is not None else said.buffers or None
                spec = tensor_spec(tensor, box.hi, dtype, 0, buffers=told, aliases=aliases)
                if (known := specs.get(tensor)) is not None:
                    if (known.dtype, len(known.shape)) != (dtype, len(shape)):
                        cause = f"{tensor} is {dtype} here, and {known.dtype} in another file"
                        findings.append(Finding("bad-file", str(root / name), cause))
                        continue
                    spec = replace(spec, shape=tuple(map(max, known.shape, box.hi)))
                specs[tensor] = spec
                buffer = f"{name}#{tensor}"
                buffers[buffer] = FileBuffer(str(root / name), dtype, at, prod(shape))
                rows.append(Row(spec.key, box, buffer, 0, row_major_strides(shape)))
            files[file_endpoint(name)] = tuple(rows)
        order = {tensor: i for i, tensor in enumerate(sorted({e[0] for e in every}, key=natural))}
        placed = [replace(spec, order=order[name]) for name, spec in specs.items()]
        findings += _missing(root, names, {e[0]: e[1] for e in every})
        findings += placeholders(placed, str(path))
        if findings:
            raise Refused(findings)
        return Described(
            tuple(placed), (), buffers, files=files, written="safetensors", ordered=False
        )

    def prepare(self, x: FileTarget, keys: tuple[KeySpec, ...]) -> Described:
        """Lay out the files, of at most `options["max_shard_size"]` bytes each."""
        held = [k for k in keys if k.moves or not k.numel]
        kept = [k for k in held if k.kind in {"parameter", "buffer"} and k.key.slot != "compute"]
        kept = [as_asked(k, x.options) for k in kept]
        findings = [
            Finding("dtype", str(k.key), f"safetensors has no {k.dtype}")
            for k in kept
            if k.dtype not in NAMES
        ]
        if findings:
            raise Refused(findings)
        made = x.made = Making(Path(x.path), x.dry)
        kept.sort(key=lambda k: (k.order, natural(k.key.name)))
        shards = _shards(kept, int(x.options.get("max_shard_size", SHARD)))
        files, placed = {}, {}
        for number, shard in enumerate(shards, 1):
            one = len(shards) == 1
            name = SINGLE if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            header, start, places = header_of(shard)
            size = start + sum(k.nbytes for k in shard)
            parts = {k.key.name: (k.dtype, places[k.key.name], k.numel) for k in shard}
            made.raw_file(name, size, parts)
            files[file_endpoint(name)] = tuple(whole_row(k, f"{name}#{k.key.name}") for k in shard)
            placed[name] = (header, [k.key.name for k in shard])
        made.allocate()
        for name, (header, _) in placed.items():
            made.write(name, header)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(k.nbytes for k in kept)},
                "weight_map": {t: name for name, (_, own) in placed.items() for t in own},
            }
            made.write(INDEX, json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")
        return Described(tuple(kept), (), made.buffers, files=files)

    def finish(
        self,
        x: FileTarget,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Nothing is left to do; says what the format cannot hold."""
        agree()
        return tuple(homeless(item, "a file of weights") for item in aux.values())


def _files(path: Path) -> list[str]:
    if (path / INDEX).is_file():
        return sorted(set(weight_map(path / INDEX).values()))
    return sorted(p.name for p in path.glob("*.safetensors")) if path.is_dir() else []


def _missing(root: Path, names: Sequence[str], found: Mapping[str, str]) -> list[Finding]:
    """What the index promises and no file holds."""
    if not (root / INDEX).is_file() or len(names) == 1:
        return []
    return broken_promises(weight_map(root / INDEX), found)


def _shards(specs: Sequence[KeySpec], most: int) -> list[list[KeySpec]]:
    shards: list[list[KeySpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards
