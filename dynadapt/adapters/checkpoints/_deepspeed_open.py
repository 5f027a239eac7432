"""A DeepSpeed checkpoint of any stage: the reader, and the writer, for its folder of a tag."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynadapt.adapters.checkpoints._deepspeed_files import Folder
from dynadapt.adapters.checkpoints._deepspeed_join import joined, whole_of
from dynadapt.adapters.checkpoints._deepspeed_read import Flats
from dynadapt.adapters.checkpoints._deepspeed_read0 import Whole
from dynadapt.adapters.checkpoints._deepspeed_stages import has_layers, staged
from dynadapt.adapters.checkpoints._deepspeed_write import Writing
from dynadapt.adapters.checkpoints._deepspeed_write0 import Writing0
from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dynadapt.protocols import Described, FileSource, FileTarget
    from dynadapt.vps.keys import KeySpec

__all__ = ["described", "writing_of"]


def described(root: Path, said: FileSource) -> Described:
    """What the folder of a tag holds; raises `Refused` with all that is wrong."""
    folders = Folder.parts(root)
    if layers := has_layers(root):
        folders = staged(root, folders, said)
    parts: list[Described] = []
    findings: list[Finding] = []
    for folder in folders:
        try:
            parts.append(_part(folder, said))
        except Refused as error:
            findings += error.findings
    if findings:
        raise Refused(tuple(dict.fromkeys(findings)))
    if len(parts) == 1:
        return parts[0]
    if not layers:
        shapes = dict(said.shapes)
        parts = whole_of(parts, [folder.common for folder in folders], shapes)
    return joined(parts)


def _part(folder: Folder, said: FileSource) -> Described:
    if folder.optim_names:
        return Flats(folder).described()
    if isinstance(folder.common.get("optimizer"), dict):
        return Whole(folder, said).described()
    cause = "has no optimizer states, neither in files of their own nor in the model states"
    fix = "copy the whole checkpoint; of weights alone, read the model states as a torch file"
    raise Refused([Finding("missing-file", str(folder.root), cause, fix)])


def writing_of(x: FileTarget, keys: Sequence[KeySpec]) -> Writing | Writing0:
    """The plan of a checkpoint of the stage that the target's layout names; raises `Refused`."""
    kind = x.layout.kind if x.layout is not None else ""
    return Writing0(x, keys) if kind == "zero0" else Writing(x, keys)
