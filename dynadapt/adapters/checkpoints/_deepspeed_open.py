"""A DeepSpeed checkpoint of any stage: the reader, and the writer, for its folder of a tag."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dynadapt.adapters.checkpoints._deepspeed_files import Folder
from dynadapt.adapters.checkpoints._deepspeed_join import joined, whole_of
from dynadapt.adapters.checkpoints._deepspeed_read import Flats
from dynadapt.adapters.checkpoints._deepspeed_read0 import Whole
from dynadapt.adapters.checkpoints._deepspeed_stages import layer_files, staged
from dynadapt.adapters.checkpoints._deepspeed_write import Writing
from dynadapt.adapters.checkpoints._deepspeed_write0 import Writing0
from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dynadapt.protocols import Described, FileSource, FileTarget
    from dynadapt.vps.keys import KeySpec

__all__ = ["described", "writing_of"]


def described(root: Path, said: FileSource) -> Described:
    """What the folder of a tag holds; raises `Refused` with all that is wrong."""
    stages: list[tuple[Folder, ...]] = [Folder.parts(root)]
    if layers := layer_files(root):
        stages = _stages(root, layers, stages[0], said)
    parts: list[list[Described]] = []
    findings: list[Finding] = []
    for folders in stages:
        parts.append([])
        for folder in folders:
            try:
                parts[-1].append(_part(folder, said))
            except Refused as error:
                findings += error.findings
    if findings:
        raise Refused(tuple(dict.fromkeys(findings)))
    shapes = dict(said.shapes)
    every = [
        part
        for folders, own in zip(stages, parts, strict=True)
        for part in (
            whole_of(own, [folder.common for folder in folders], shapes) if len(own) > 1 else own
        )
    ]
    return every[0] if len(every) == 1 else joined(every)


def _stages(
    root: Path, layers: Sequence[Mapping[int, str]], folders: Sequence[Folder], said: FileSource
) -> list[tuple[Folder, ...]]:
    """The parts of each stage of a pipeline, one of every tensor-parallel rank: those count fastest."""
    ranks = len(layers)
    if len(folders) % ranks:
        cause = f"has {len(folders)} parts of the model (mp_rank), of {ranks} tensor-parallel ranks"
        raise Refused([Finding("missing-file", str(root), cause, "copy the whole checkpoint")])
    if ranks > 1:  # whole shapes are not those of a rank's part
        said = replace(said, shapes=())
    columns = [staged(root, names, folders[rank::ranks], said) for rank, names in enumerate(layers)]
    return list(zip(*columns, strict=True))


def _part(folder: Folder, said: FileSource) -> Described:
    if folder.optim_names:
        return Flats(folder, said).described()
    if isinstance(folder.common.get("optimizer"), dict):
        return Whole(folder, said).described()
    cause = "has no optimizer states, neither in files of their own nor in the model states"
    fix = "copy the whole checkpoint; of weights alone, read the model states as a torch file"
    raise Refused([Finding("missing-file", str(folder.root), cause, fix)])


def writing_of(x: FileTarget, keys: Sequence[KeySpec]) -> Writing | Writing0:
    """The plan of a checkpoint of the stage that the target's layout names; raises `Refused`."""
    kind = x.layout.kind if x.layout is not None else ""
    return Writing0(x, keys) if kind == "zero0" else Writing(x, keys)
