"""The flat parameters in files of FSDP1's ranks: what lies where in them, and whose a numbered state is.

With `use_orig_params` the optimizer has a rank's views of the parameters, else the flats themselves; its own
`state_dict()` numbers either. A state has the elements that its rank has of the parameter, or flat.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._fsdp_flats import FLAT, members, placed
from dynadapt.adapters.checkpoints._optimizer_names import dealt
from dynadapt.adapters.checkpoints._pickle import StoredTensor
from dynadapt.errors import Finding, Refused
from dynadapt.vps.keys import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from dynadapt.adapters.checkpoints._shards import Part
    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.protocols import FileSource

    Parts = list[tuple[TorchFile, Part]]
    Optimizers = Sequence[tuple[TorchFile, dict[Any, Any]]]

__all__ = ["FlatParameters"]

Stretch = tuple[str, int, int, "TorchFile", "StoredTensor", int]
"""A parameter's name, the first and the end of its elements, and where they begin in a tensor of a file."""


class FlatParameters:
    """Every flat, with what each rank has of it. Views of them are taken out of `parts`."""

    def __init__(
        self, root: Path, flats: dict[str, Parts], parts: dict[str, Parts], said: FileSource
    ) -> None:
        self.root, self.flats = root, flats
        self.ranks = max(map(len, flats.values()))
        storages = {
            (file.path, tensor.storage.name): flat
            for flat, own in flats.items()
            for file, part in own
            for _, tensor in part.held
        }
        self.flat_of: dict[str, str] = {}
        local: dict[str, Parts] = {}
        for name, own in list(parts.items()):
            held = [storages.get((f.path, t.storage.name)) for f, p in own for _, t in p.held]
            if any(held) or (len(own) > 1 and len({part.shape for _, part in own}) > 1):
                local[name] = parts.pop(name)
                self.flat_of[name] = next(filter(None, held), "")
        self.local = {name: _sizes(own) for name, own in local.items()}
        self.again = _again(local)
        self.order = list(self.local) or list(said.order)
        place = {name: i for i, name in enumerate(self.order)}
        self.tied = {
            name
            for own in said.tied
            for name in sorted(own, key=place.__getitem__ if set(own) <= set(place) else None)[1:]
        }
        self.at: dict[str, dict[str, int]] = {}
        self.numel: dict[str, int] = {}
        self.states: dict[tuple[str, str], dict[int, tuple[TorchFile, StoredTensor]]] = {}

    def members(self, flat: str) -> list[str]:
        """The names of what lies in a flat, in order."""
        prefixes = [name.removesuffix(FLAT) for name in self.flats]
        return [
            n for n in members(flat.removesuffix(FLAT), prefixes, self.order) if n not in self.tied
        ]

    def place(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
        """Find where everything lies; what cannot be told is yielded."""
        self.numel = {name: prod(shape) for name, shape in shapes.items()}
        for flat, own in self.flats.items():
            _, first = own[0]
            where, names = f"{self.root}: {flat}", self.members(flat)
            size = ITEMSIZE[first.dtype]
            try:
                self.at[flat] = placed(where, first.shape[0], names, shapes, size, self.ranks)
            except Refused as error:
                yield from error.findings

    def numbered(self, optimizers: Optimizers) -> list[list[str]]:
        """The views, or the flats, that the numbers of each group are; raises `Refused`."""
        file, tree = optimizers[0]
        ids = [list(group["params"]) for group in tree["param_groups"]]
        if self.local:
            entries = [[_over_ranks(optimizers, id_) for id_ in own] for own in ids]
            every = {n: sizes for n, sizes in self.local.items() if n not in self.again}
        else:  # only the last rank's has padding
            entries = [[_over_ranks(optimizers[:1], id_) for id_ in own] for own in ids]
            every = {flat: _sizes(own[:1]) for flat, own in self.flats.items()}
        trained = {
            name: sizes
            for name, sizes in every.items()
            if all(p.trainable for _, p in self.flats.get(self.flat_of.get(name, name), ()))
        }
        exact = len(trained) == sum(map(len, ids))
        return dealt(entries, list((trained if exact else every).items()), file.path)

    def stretches(self, flat: str) -> Iterator[Stretch]:
        """What each rank has of each parameter in a flat."""
        for rank, (file, part) in enumerate(self.flats[flat]):
            for _, tensor in part.held:
                for name, low, high, begin in self._held(flat, rank):
                    yield name, low, high, file, tensor, begin

    def states_of(self, key: tuple[str, str]) -> Iterator[Stretch]:
        """What each rank has of a numbered state, of a view or a flat; raises `Refused` (`geometry`)."""
        name, label = key
        view = name not in self.flats
        flat = next((f for f, own in self.at.items() if name in own), "") if view else name
        for rank, (file, tensor) in self.states[key].items():
            held = self._held(flat, rank)
            if view:
                held = [(each, low, high, 0) for each, low, high, _ in held if each == name]
            size, used = prod(tensor.shape), max((at + b - a for _, a, b, at in held), default=0)
            if size < used or (view and size > used):
                cause = f"rank {rank} has {size} elements of it, and {used} of its parameter"
                raise Refused(
                    [Finding("geometry", f"{name}/{label}", cause, "copy all files again")]
                )
            for each, low, high, begin in held:
                yield each, low, high, file, tensor, begin

    def _held(self, flat: str, rank: int) -> list[tuple[str, int, int, int]]:
        """What a rank has of a flat: names, first and last elements of theirs, and where in its part."""
        found = []
        parts = self.flats.get(flat, ())
        for box, _ in parts[rank][1].held if rank < len(parts) else ():
            for name, at in self.at.get(flat, {}).items():
                low, high = max(at, box.lo[0]), min(at + self.numel[name], box.hi[0])
                if low < high:
                    found.append((name, low - at, high - at, low - box.lo[0]))
        return found


def _sizes(own: Parts) -> tuple[int, ...]:
    """The elements that each rank has."""
    return tuple(sum(box.volume for box, _ in part.held) for _, part in own)


def _again(local: Mapping[str, Parts]) -> set[str]:
    """Second names of a view."""
    seen: dict[Any, str] = {}
    for name, own in local.items():
        key = tuple(
            (file.path, t.storage.name, t.offset, t.shape) for file, p in own for _, t in p.held
        )
        if key:
            seen.setdefault(key, name)
    return set(local) - set(seen.values())


def _over_ranks(optimizers: Optimizers, id_: Any) -> tuple[int, ...] | None:
    """The elements that each rank has of an entry's states; None: no rank has one."""
    found = [_elements(tree["state"].get(id_)) for _, tree in optimizers]
    return None if all(n is None for n in found) else tuple(n or 0 for n in found)


def _elements(state: Any) -> int | None:
    values = state.values() if isinstance(state, dict) else ()
    return next((prod(v.shape) for v in values if isinstance(v, StoredTensor) and v.shape), None)
