"""A throw-away file format, written only against the ports: a folder of raw parts and an index."""

from __future__ import annotations

import os
import threading
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynadapt import registry
from dynadapt.protocols import AuxItem, Described, Outcome, TrainState, alone
from dynadapt.vps import wire
from dynadapt.vps.box import Span, row_major_strides
from dynadapt.vps.keys import ITEMSIZE, KeySpec
from dynadapt.vps.layout import Row, file_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Split = tuple[str, int]
"""`("flat", n)`: every tensor in n spans, one a file; `("copies", n)`: n files with everything."""


class FileBuffer:
    """A stretch of one file, mapped when it is asked for."""

    device = "cpu"

    def __init__(self, path: Path, dtype: str, offset: int, numel: int) -> None:
        self.dtype, self.numel = dtype, numel
        self._path, self._offset = path, offset

    def tensor(self) -> torch.Tensor:
        nbytes = self.numel * ITEMSIZE[self.dtype]
        raw = np.memmap(self._path, np.uint8, "r+", self._offset, (nbytes,))
        return torch.from_numpy(raw).view(getattr(torch, self.dtype))

    def free(self) -> None:
        """Nothing is held."""

    def refill(self) -> None:
        """Nothing was freed."""


class RawFolder:
    """Reads a path, writes to `(path, split)`. Tensors start on multiples of 64 bytes."""

    name = "raw-folder"

    def __init__(self) -> None:
        self._prepared: dict[Path, Described] = {}
        self._lock = threading.Lock()

    @staticmethod
    def accepts(x: Any) -> bool:
        folder = _where(x)[0]
        return folder is not None and (_where(x)[1] is not None or (folder / "index").exists())

    def quiesce(self, x: Any, agree: Callable[[], None] = alone) -> None:
        agree()

    def describe(self, x: Any) -> Described:
        folder, split = _where(x)
        assert folder is not None
        if (folder / "index").exists():
            index = wire.decode((folder / "index").read_bytes())
            specs = wire.decode_specs(index["specs"])
            aux = tuple(AuxItem(path, value) for path, value in index["aux"])
            return _described(folder, specs, tuple(index["split"]), index["scalars"], aux)
        prepared = self._prepared.get(folder)
        if prepared is not None:
            return prepared
        return Described(
            (), (), {}, files={file_endpoint(str(p)): () for p in _paths(folder, split)}
        )

    def prepare(self, x: Any, keys: tuple[KeySpec, ...]) -> Described:
        folder, split = _where(x)
        assert folder is not None
        assert split is not None
        folder.mkdir(exist_ok=True)
        described = _described(folder, keys, split, {}, ())
        ends = dict.fromkeys(_paths(folder, split), 0)
        for buffer in described.buffers.values():
            end = buffer._offset + buffer.numel * ITEMSIZE[buffer.dtype]
            ends[buffer._path] = max(ends[buffer._path], end)
        with self._lock:
            for path, end in ends.items():
                path.touch()
                os.truncate(path, end)  # idempotent: every seat does it
            self._prepared[folder] = described
        return described

    def finish(
        self,
        x: Any,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Callable[[], None],
    ) -> tuple[Outcome, ...]:
        folder, split = _where(x)
        assert folder is not None
        agree()
        index = {
            "specs": wire.encode_specs(keys),
            "split": list(split or ()),
            "scalars": {name: dict(own) for name, own in scalars.items()},
            "aux": [[item.path, item.value] for item in aux.values()],
        }
        aside = folder / f"index.{threading.get_ident()}"
        aside.write_bytes(wire.encode(index))
        aside.rename(folder / "index")
        return tuple(Outcome(path, "exact") for path in aux)

    def abandon(self, x: Any) -> None:
        folder, split = _where(x)
        assert folder is not None
        for path in _paths(folder, split):
            path.unlink(missing_ok=True)


def install() -> None:
    """Make the format known to this process."""
    registry.register(RawFolder())


def _where(x: Any) -> tuple[Path | None, Split | None]:
    x = x.model if isinstance(x, TrainState) else x
    path, split = x if isinstance(x, tuple) else (x, None)
    return (Path(path), split) if isinstance(path, str | Path) else (None, None)


def _paths(folder: Path, split: Any) -> list[Path]:
    return [folder / f"{i}.raw" for i in range(split[1])] if split else []


def _described(
    folder: Path, specs: tuple[KeySpec, ...], split: Any, scalars: Any, aux: Any
) -> Described:
    kind, num = split
    files: dict[int, list[Row]] = {}
    buffers: dict[str, FileBuffer] = {}
    for number, path in enumerate(_paths(folder, split)):
        rows = files.setdefault(file_endpoint(str(path)), [])
        at = 0
        for spec in specs:
            if not spec.moves:
                continue
            total = prod(spec.shape)
            low, high = (total * i // num for i in (number, number + 1))
            span = Span(0, total) if kind == "copies" else Span(low, high)
            if not len(span):
                continue
            name = f"{path.name}/{spec.key}"
            buffers[name] = FileBuffer(path, spec.dtype, at, len(span))
            inside = 0
            for box in span.boxes(spec.shape):
                rows.append(Row(spec.key, box, name, inside, row_major_strides(box.shape)))
                inside += box.volume
            at += -(-len(span) * ITEMSIZE[spec.dtype] // 64) * 64
    return Described(
        specs=specs,
        rows=(),
        buffers=buffers,
        scalars=scalars,
        aux=aux,
        files={endpoint: tuple(rows) for endpoint, rows in files.items()},
    )
