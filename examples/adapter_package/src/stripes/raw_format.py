"""A checkpoint format of one's own: a folder with a file of raw bytes for each tensor, and an index."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding, Refused
from dynadapt.files import FileBuffer
from dynadapt.protocols import Agree, AuxItem, Described, FileTarget, Outcome, alone
from dynadapt.vps import wire
from dynadapt.vps.box import Box, row_major_strides
from dynadapt.vps.keys import itemsize
from dynadapt.vps.layout import Row, file_endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynadapt.vps.keys import KeySpec

INDEX = "raw.index"


class RawFormat:
    """Reads a folder that has the index; writes the folder of a `FileTarget`."""

    name = "raw"

    @staticmethod
    def accepts(x: Any) -> bool:
        """Whether `x` is a target of this format, or the path of such a checkpoint."""
        if isinstance(x, FileTarget):
            return x.format == RawFormat.name
        return isinstance(x, str | os.PathLike) and (Path(x) / INDEX).is_file()

    def quiesce(self, x: Any, agree: Agree = alone) -> None:
        """Files are at rest."""
        agree()

    def describe(self, x: Any) -> Described:
        """What the index says; no tensor's bytes are read. Raises `WireError` for what is no index."""
        if isinstance(x, FileTarget):
            return Described((), (), {})  # nothing is there before `prepare`
        told = wire.decode((Path(x) / INDEX).read_bytes())
        aux = tuple(AuxItem(path, value) for path, value in told["aux"].items())
        specs = wire.decode_specs(told["specs"])
        return _described(Path(x), specs, scalars=told["scalars"], aux=aux)

    def prepare(self, x: FileTarget, keys: tuple[KeySpec, ...]) -> Described:
        """Make the files in their full size, unless the target is `dry`; say what goes where.

        Raises `Refused` (`unsupported-format`) for a layout or a dtype: it has whole tensors, as they come.
        """
        asked = f"{x.layout or ''} {x.options.get('dtype', '')}".strip()
        if asked:
            cause = f"has whole tensors in their own dtypes, and {asked} was asked for"
            raise Refused([Finding("unsupported-format", self.name, cause, "--to raw alone")])
        made = _described(Path(x.path), [key for key in keys if not key.derived])
        for name, buffer in () if x.dry else made.buffers.items():
            with (Path(x.path) / name).open(
                "ab"
            ) as file:  # what is in it stays: it may be continued
                file.truncate(buffer.numel * itemsize(buffer.dtype))
        return made

    def finish(
        self,
        x: FileTarget,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """The bytes have landed: write the index, and say what it has no place for."""
        kept = {path: item.value for path, item in aux.items() if wire.encodable(item.value)}
        index = {
            "specs": wire.encode_specs(key for key in keys if not key.derived),
            "scalars": {name: dict(own) for name, own in scalars.items()},
            "aux": kept,
        }
        (Path(x.path) / INDEX).write_bytes(wire.encode(index))
        lost = "not of plain values"
        return tuple(
            Outcome(path, "exact") if path in kept else Outcome(path, "dropped", lost)
            for path in aux
        )

    def abandon(self, x: Any) -> None:
        """Whoever made the folder removes it."""


def _described(
    folder: Path,
    specs: Sequence[KeySpec],
    *,
    scalars: Mapping[str, Mapping[str, int | float]] | None = None,
    aux: tuple[AuxItem, ...] = (),
) -> Described:
    """Every file is an endpoint and a buffer: here of one whole tensor, so one row."""
    files: dict[int, tuple[Row, ...]] = {}
    buffers: dict[str, FileBuffer] = {}
    for number, spec in enumerate(sorted(specs, key=lambda spec: spec.key)):
        if spec.presence != "present":
            continue
        name = f"{number}.raw"
        strides = row_major_strides(spec.shape)
        buffers[name] = FileBuffer(str(folder / name), spec.dtype, 0, spec.numel)
        files[file_endpoint(name)] = (Row(spec.key, Box.whole(spec.shape), name, 0, strides),)
    return Described(
        tuple(specs), (), buffers, scalars or {}, aux, files=files, written=RawFormat.name
    )
