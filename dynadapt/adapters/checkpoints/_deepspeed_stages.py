"""The layers of a DeepSpeed pipeline: a file each, whose entries get the names of the whole model.

`PipelineModule` calls a layer by its number, and one that stages share by its key; a file of a layer has
the number in its own name. Which of them are shared layers is told by their entries.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from dynadapt.adapters.checkpoints._deepspeed_files import (
    Stage,
    groups_of,
    optimizer_states,
    options_of,
)
from dynadapt.adapters.checkpoints._deepspeed_stages0 import TIED, dealt, optimizers, told_by
from dynadapt.adapters.checkpoints._pickle import StoredTensor
from dynadapt.adapters.checkpoints._torch_file import read_torch
from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from dynadapt.adapters.checkpoints._deepspeed_files import Folder
    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.protocols import FileSource

__all__ = ["layer_files", "staged"]

_LAYER = re.compile(r"^layer_(\d+)(?:-model_(\d+))?-model_states\.pt$")


def layer_files(root: Path) -> list[dict[int, str]]:
    """The files of a pipeline's layers, by number, of each tensor-parallel rank; none: it is no pipeline's.

    Raises `Refused` (`missing-file`) if one has layers that another has not.
    """
    found: dict[int, dict[int, str]] = {}
    for name in sorted(p.name for p in root.iterdir()):
        if match := _LAYER.match(name):
            found.setdefault(int(match[2] or 0), {})[int(match[1])] = name
    ranks = [own for _, own in sorted(found.items())]
    numbers = {number for own in ranks for number in own}
    if max(found, default=0) >= len(ranks) > 0 or any(own.keys() != numbers for own in ranks):
        cause = "some layers have not a file of every tensor-parallel rank"
        fix = "copy the whole checkpoint"
        raise Refused([Finding("missing-file", str(root), cause, fix)])
    return ranks


def staged(
    root: Path, names: Mapping[int, str], folders: Sequence[Folder], said: FileSource
) -> tuple[Folder, ...]:
    """The parts of a pipeline, or of a tensor-parallel rank's part of it, with their layers.

    `names` are the files of layers. Raises `Refused` for what cannot be told.
    """
    files = {number: read_torch(str(root / name)) for number, name in sorted(names.items())}
    buffers = frozenset(str(n) for f in folders for n in f.common.get("buffer_names") or ())
    listed = [_sizes(folder) for folder in folders]
    stages = [] if all(listed) else optimizers(root, folders, said)
    sizes: dict[str, int | None] = {n: s for own in listed for each in own for n, s in each.items()}
    if stages:
        sizes = told_by(stages, said)
    module = _module(files, sizes, buffers)
    lost = [n for n in sizes if n not in module or sizes[n] not in {None, prod(module[n][1].shape)}]
    if lost:
        cause = "is trained, and no file of a layer has it in its size"
        fix = "copy the whole checkpoint"
        raise Refused([Finding("missing-file", name, cause, fix) for name in lost])
    if stages:
        listed = [[own] for own in dealt(root, stages, module, buffers, said)]
    taken: set[str] = set()
    parts = []
    for number, groups in enumerate(listed):
        own = frozenset(name for each in groups for name in each) - taken
        taken |= own
        if number == len(listed) - 1:  # what is not trained may be with any of them
            own |= frozenset(module) - taken
        shapes = tuple({name: module[name][1].shape for name in each} for each in groups)
        parts.append(Stage(module, own, buffers, shapes))
    return tuple(replace(f, stage=part) for f, part in zip(folders, parts, strict=True))


def _sizes(folder: Folder) -> list[dict[str, int]]:
    """The elements of each trained parameter of a stage, by group, in the order of the flats.

    `BF16_Optimizer` without ZeRO does not list shapes, but which pieces of what are in each rank's flats.
    """
    if listed := groups_of(folder.common):
        return [{name: prod(shape) for name, shape in own.items()} for own in listed]
    found: list[dict[str, int]] = []
    for file in folder.optim:
        told = optimizer_states(file).get("param_slice_mappings")
        for number, own in enumerate(told if isinstance(told, list) else ()):
            found += [{}] * (number == len(found))
            for name, piece in own.items():
                size = options_of({"state": getattr(piece, "state", None)}, "state").get("numel")
                found[number][str(name)] = found[number].get(str(name), 0) + int(size or 0)
    return found


def _module(
    files: Mapping[int, TorchFile], sizes: Mapping[str, int | None], buffers: Iterable[str]
) -> dict[str, tuple[TorchFile, StoredTensor]]:
    """All entries under their names, in the order of one module of all layers: shared ones first."""
    numbers = {name.partition(".")[0] for name in (*sizes, *buffers)}
    keys = dict.fromkeys(
        name.removeprefix(TIED).partition(".")[0]
        for name in (*sizes, *buffers)
        if name.startswith(TIED)
    )
    shared: dict[str, tuple[TorchFile, StoredTensor]] = {}
    single: dict[str, tuple[TorchFile, StoredTensor]] = {}
    for number, file in sorted(files.items()):
        tree = file.tree if isinstance(file.tree, dict) else {}
        entries = {str(n): v for n, v in tree.items() if isinstance(v, StoredTensor)}
        fits = [] if str(number) in numbers else [k for k in keys if _is_of(k, entries, sizes)]
        again = [k for k in fits if any(f"{TIED}{k}.{n}" in shared for n in entries)]
        if len(fits) > 1 or (again and not _same(again[0], file, entries, shared)):
            cause = f"may be any of several layers that stages share: {', '.join(fits)}"
            fix = "convert it with ds_to_universal first"
            raise Refused([Finding("unsupported-parallel", file.path, cause, fix)])
        into, prefix = (shared, f"{TIED}{fits[0]}.") if fits else (single, f"{number}.")
        for name, value in entries.items():
            into.setdefault(prefix + name, (file, value))
    return {**shared, **single}


def _is_of(key: str, entries: Mapping[str, StoredTensor], sizes: Mapping[str, int | None]) -> bool:
    """Whether a file's entries are those of a shared layer."""
    prefix = f"{TIED}{key}."
    own = {n.removeprefix(prefix): size for n, size in sizes.items() if n.startswith(prefix)}
    return bool(own) and all(
        n in entries and size in {None, prod(entries[n].shape)} for n, size in own.items()
    )


def _same(
    key: str,
    file: TorchFile,
    entries: Mapping[str, StoredTensor],
    shared: Mapping[str, tuple[TorchFile, StoredTensor]],
) -> bool:
    """Whether a file has the bits of another of the same shared layer."""
    for name, value in entries.items():
        other, known = shared.get(f"{TIED}{key}.{name}", (file, value))
        one, two = (
            each.buffer(t).array()[t.offset : t.offset + prod(t.shape)]
            for each, t in ((file, value), (other, known))
        )
        if (value.shape, value.strides) != (
            known.shape,
            known.strides,
        ) or one.tobytes() != two.tobytes():
            return False
    return True
