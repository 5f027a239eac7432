"""Which layers of a pipeline without ZeRO each stage has trained: its optimizer does not list them.

A stage has a run of layers, and those that it shares with others. Its optimizer has as many entries as they
have parameters, of the same shapes (flats: as many elements). Where just one cut of the layers into runs is
such, it is taken. The key of a layer that stages share is in no file: names that the user knows say it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain, combinations
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dynadapt.adapters.checkpoints._deepspeed_read0 import Whole
from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dynadapt.adapters.checkpoints._deepspeed_files import Folder
    from dynadapt.adapters.checkpoints._pickle import StoredTensor
    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.protocols import FileSource

__all__ = ["TIED", "dealt", "optimizers", "told_by"]

TIED = "tied_modules."

Module = dict[str, tuple["TorchFile", "StoredTensor"]]

_FIX = (
    "give the model's names, --order FILE (order=) or --like (like=), as tied_modules.KEY... where stages "
    "share a layer, in the optimizer's groups if not all is trained; or copy the whole checkpoint"
)
_TRIES = 20_000
_MOST = 256
"""Stages."""

_WINDOW = 64


def optimizers(root: Path, folders: Sequence[Folder], said: FileSource) -> list[Whole]:
    """The optimizer of each stage; raises `Refused` if one has none."""
    if any(f.optim_names or not isinstance(f.common.get("optimizer"), dict) for f in folders):
        cause = "has stages without optimizer states that say which parameters are whose"
        raise Refused([Finding("missing-file", str(root), cause, "copy the whole checkpoint")])
    return [Whole(folder, said) for folder in folders]


def told_by(stages: Sequence[Whole], said: FileSource) -> dict[str, int | None]:
    """The names that the optimizers have, or else the user, with their elements where those are known."""
    names = [n for whole in stages for own in whole.names for n in own]
    if not all(whole.names for whole in stages):
        names = list(said.order) or [n for own in said.groups for n in own]
    shapes = dict(said.shapes)
    return {name: prod(shapes[name]) if name in shapes else None for name in names}


@dataclass(frozen=True)
class _Need:
    """What the optimizer of a stage has: its entries' shapes, None for unknown ones; or flats."""

    entries: tuple[tuple[int, ...] | None, ...]
    flat: bool

    def size(self, shapes: Iterable[tuple[int, ...]]) -> int:
        """Elements of flats, else the number of entries."""
        return sum(prod(shape) if self.flat else 1 for shape in shapes)

    @property
    def whole(self) -> int:
        """What all of it comes to."""
        return self.size(shape or () for shape in self.entries)

    def is_of(self, shapes: Iterable[tuple[int, ...]]) -> bool:
        """Whether it may be of parameters of these shapes, which have the right size."""
        known = Counter(shape for shape in self.entries if shape is not None)
        return self.flat or known <= Counter(shapes)


def dealt(
    root: Path,
    stages: Sequence[Whole],
    module: Module,
    buffers: frozenset[str],
    said: FileSource,
) -> list[dict[str, int]]:
    """The elements of every parameter that each stage trains, by name; raises `Refused` (`no-order`)."""
    if all(whole.names for whole in stages):
        every = [[n for own in whole.names for n in own] for whole in stages]
        return [{n: prod(module[n][1].shape) for n in own if n in module} for own in every]
    trained = {n for own in said.groups for n in own} or set(module) - buffers
    shapes = {n: tensor.shape for n, (_, tensor) in module.items() if n in trained}
    layers: dict[str, list[str]] = {}
    for name in shapes:
        number = name.removeprefix(TIED).partition(".")[0]
        layers.setdefault(f"{TIED}{number}" if name.startswith(TIED) else number, []).append(name)
    single = [own for key, own in layers.items() if not key.startswith(TIED)]
    shared = [own for key, own in layers.items() if key.startswith(TIED)]
    needs = [
        _Need(tuple(s for own in whole.entries() for s in own), whole.fused) for whole in stages
    ]
    found = [] if not shared and _twins(single, module) else _cuts(needs, single, shared, shapes)
    if len(found) == 1:
        order = {name: i for i, name in enumerate(shapes)}
        return [
            {n: prod(shapes[n]) for n in sorted(own, key=order.__getitem__)} for own in found[0]
        ]
    cause = (
        "is of a pipeline without ZeRO, whose optimizers do not name their parameters, and "
        f"{'several' if found else 'no'} cuts of its layers into {len(stages)} stages have their shapes"
    )
    raise Refused([Finding("no-order", str(root), cause, _FIX)])


def _cuts(
    needs: Sequence[_Need],
    single: Sequence[Sequence[str]],
    shared: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[tuple[frozenset[str], ...]]:
    """The ways, two at most, in which the stages have runs of layers, and any of the shared ones."""
    some = list(
        chain.from_iterable(combinations(shared, count) for count in range(len(shared[:6]) + 1))
    )
    tries = 0

    def runs(stage: int, at: int) -> Iterator[tuple[frozenset[str], ...]]:
        nonlocal tries
        if stage == len(needs):
            if at == len(single):
                yield ()
            return
        need = needs[stage]
        for beside in some:
            own = [name for layer in beside for name in layer]
            size, stop = need.size(shapes[n] for n in own), at
            while size < need.whole and stop < len(single):
                size += need.size(shapes[n] for n in single[stop])
                own += single[stop]
                stop += 1
            tries += 1
            if tries > _TRIES:
                return
            if size == need.whole and need.is_of(shapes[n] for n in own):
                yield from ((frozenset(own), *rest) for rest in runs(stage + 1, stop))

    found: dict[tuple[frozenset[str], ...], None] = {}
    for cut in runs(0, 0) if len(needs) <= _MOST else ():
        if frozenset(chain.from_iterable(shared)) <= frozenset(chain.from_iterable(cut)):
            found[cut] = None
        if len(found) > 1:
            break
    return list(found) if tries <= _TRIES else []


def _twins(single: Sequence[Sequence[str]], module: Module) -> bool:
    """Whether two layers look like one that stages share."""
    seen: set[bytes] = set()
    for layer in single:
        look = b""
        for name in layer:
            file, tensor = module[name]
            array = file.buffer(tensor).array()
            ends = (tensor.offset, max(tensor.offset + prod(tensor.shape) - _WINDOW, tensor.offset))
            parts = [array[at : at + min(_WINDOW, prod(tensor.shape))] for at in ends]
            look += repr((name.partition(".")[2], tensor.shape)).encode()
            look += b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
        if look in seen:
            return True
        seen.add(look)
    return False
