"""Folders with the checkpoint of a whole job, in the forms that Accelerate writes and transformers' Trainer.

The model and its optimizer lie in them as in the formats that the frameworks have; beside them are small
files, some of which only the library that wrote them can make. What a library calls its files are `Names`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dynadapt.adapters._loss_scales import as_grad_scaler
from dynadapt.adapters.checkpoints._dcp_read import Reading
from dynadapt.adapters.checkpoints._dcp_write import MODEL
from dynadapt.adapters.checkpoints._dcp_write import OPTIMIZER as OPTIMIZER_PART
from dynadapt.adapters.checkpoints._dcp_write import Writing as ShardedWriting
from dynadapt.adapters.checkpoints._deepspeed_files import outcomes_of
from dynadapt.adapters.checkpoints._deepspeed_open import writing_of
from dynadapt.adapters.checkpoints._format import homeless
from dynadapt.adapters.checkpoints._plain import Lifting, lowered, plain_part
from dynadapt.adapters.checkpoints._safetensors import NAMES, header_of, whole_row
from dynadapt.adapters.checkpoints._torch_file import read_torch
from dynadapt.adapters.checkpoints._torch_state import PLAIN, StateDicts
from dynadapt.adapters.checkpoints._torch_trees import StateTrees
from dynadapt.errors import Finding, Refused
from dynadapt.files import mapped
from dynadapt.protocols import AuxItem, Described, Outcome
from dynadapt.vps.layout import file_endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dynadapt.adapters.checkpoints._making import Making
    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.protocols import FileSource, FileTarget
    from dynadapt.vps.keys import KeySpec

__all__ = [
    "FULL",
    "OPTIMIZER",
    "SAFE",
    "SHARDED",
    "SHARDED_OPTIMIZER",
    "TORCH",
    "InDeepSpeed",
    "Names",
    "Sharded",
    "Whole",
    "read_sharded",
    "read_whole",
    "written_as",
]

SAFE = "model.safetensors"
TORCH = "pytorch_model.bin"
FULL = "pytorch_model_fsdp.bin"
SHARDED = "pytorch_model_fsdp_0"
OPTIMIZER = "optimizer.bin"
SHARDED_OPTIMIZER = "optimizer_0"

_FORMS = {
    "ddp": "plain",
    "zero0": "deepspeed",
    "zero1": "deepspeed",
    "zero2": "deepspeed",
    "zero3": "deepspeed",
    "fsdp1": "full",
    "fsdp2": "sharded",
}

MOST = 16 << 20
"""Bytes of a file that is carried."""


@dataclass(frozen=True)
class Names:
    """What a library calls its files. Those that match `small` are carried as they are.

    `random` has the states of a rank's generators, with the rank as its group; the aux items with the bytes
    of files are called `carried` and the file's name. `ticks` says that a schedule ticks once a process.
    """

    deepspeed: str
    optimizer: str
    scheduler: str
    scaler: str
    small: re.Pattern[str]
    random: re.Pattern[str]
    carried: str
    ticks: bool

    def read(self, root: Path) -> list[AuxItem]:
        """Schedule, loss scale, and every small file as it is."""
        names = sorted(p.name for p in root.iterdir())
        items = []
        for name in (self.scheduler, self.scaler):
            if name in names:
                file = read_torch(str(root / name))
                items += self._known(name, file.tree, file)
        for name in filter(self.small.match, names):
            data = mapped(str(root / name))
            if len(data) > MOST:
                items.append(AuxItem(f"opaque/{name}", f"{len(data):,} bytes"))
            else:
                items.append(AuxItem(f"{self.carried}{name}", bytes(data)))
        return items

    def _known(self, name: str, tree: Any, file: TorchFile) -> list[AuxItem]:
        if not isinstance(tree, dict):
            raise Refused([Finding("bad-file", file.path, "holds no state dict")])
        state, left = plain_part(lowered(tree, file))
        if name == self.scheduler:
            return [AuxItem("scheduler", {"class": "", "state": state, "left": left})]
        if type(state.get("scale")) not in (int, float):  # one that is switched off: an empty state
            return []
        value = {"class": "GradScaler", "scale": float(state["scale"]), "state": state}
        return [AuxItem("scaler", value)]

    def write(
        self, made: Making, aux: Mapping[str, AuxItem], ranks: int | None, *, scaler: bool
    ) -> dict[str, Outcome]:
        """Write the schedule, the loss scale if the form has one, and what was carried, for so many ranks.

        Returns what became of the items that have a place here, by path.
        """
        found: dict[str, Outcome] = {}
        inside = {path: path.removeprefix(self.carried) for path in aux}
        sources = {int(m[1]) for name in inside.values() if (m := self.random.match(name))}
        if "scheduler" in aux:
            lifting = Lifting()
            tree = lifting.lifted(aux["scheduler"].value["state"])
            made.seal_torch(self.scheduler, tree, {}, lifting.values)
            note = ""
            if self.ticks and ranks is not None and sources and len(sources) != ranks:
                was = len(sources)
                note = f"Accelerate ticks it once a process: {was} a step before, {ranks} now"
            found["scheduler"] = Outcome("scheduler", "exact", note)
        if "scaler" in aux and scaler:
            state, same = as_grad_scaler(aux["scaler"])
            made.seal_torch(self.scaler, state, {})
            note = "" if same else "its scale and count, as a GradScaler's"
            found["scaler"] = Outcome("scaler", "exact" if same else "derived", note)
        for path, item in aux.items():
            name = inside[path]
            if not path.startswith(self.carried) or not self.small.match(name):
                continue
            rank = self.random.match(name)
            if rank and ranks is not None and int(rank[1]) >= ranks:
                found[path] = Outcome(path, "dropped", f"there are {ranks} ranks")
                continue
            made.write(name, item.value)
            found[path] = Outcome(path, "exact", "the file as it was")
        if sources and ranks is not None and max(sources) + 1 < ranks:
            first = max(sources) + 1
            last = next(path for path, name in inside.items() if self.random.match(name))
            path = re.sub(r"\d+(?=\.\w+$)", str(first), last)
            note = f"ranks from {first} on keep the generators that they start with"
            found[path] = Outcome(path, "reseeded", note)
        return found


def written_as(
    x: FileTarget, keys: tuple[KeySpec, ...], made: Making, names: Names
) -> Whole | Sharded | InDeepSpeed:
    """The files of the form that a target's layout asks for, laid out.

    Raises `Refused` with everything that cannot be so written.
    """
    form = "plain" if x.layout is None else _FORMS.get(x.layout.kind)
    if form is None:
        cause = f"{x.layout.kind if x.layout else ''} has no form there"
        raise Refused([Finding("bad-spec", str(x.layout), cause, f"known: {', '.join(_FORMS)}")])
    keys = tuple(spec for spec in keys if not spec.key.slot.startswith("extra:"))
    if form == "deepspeed":
        return InDeepSpeed(x, keys, made, names)
    if form == "sharded":
        return Sharded(x, keys, made, names)
    return Whole(x, keys, made, names, full=form == "full")


def read_whole(
    path: Path, models: Sequence[str], optimizer: str, said: FileSource, written: str
) -> Described:
    """Model, in one file or several, and optimizer in one file each."""
    found = StateDicts(str(path), said)
    safe = [name for name in models if name.endswith(".safetensors")]
    for name in safe:
        found.safetensors(name)
    if not safe:
        found.model([_dict_of(path, name) for name in models])
    if (path / optimizer).is_file():
        found.optimizer(*_dict_of(path, optimizer))
    return found.described(written)


def _dict_of(path: Path, name: str) -> tuple[TorchFile, dict[str, Any]]:
    file = read_torch(str(path / name))
    if not isinstance(file.tree, dict):
        raise Refused([Finding("bad-file", file.path, "holds no state dict")])
    return file, file.tree


def read_sharded(path: Path, form: str) -> Described:
    """Model and optimizer in a torch distributed checkpoint each; `form` is the format that this is of."""
    names = [SHARDED, SHARDED_OPTIMIZER]
    found = Reading(path, [name for name in names if (path / name).is_dir()])
    own = found.described()
    return replace(own, written=own.written and f"{form}/{own.written.partition('/')[2]}")


class Sharded:
    """Torch distributed checkpoints of model and optimizer, as FSDP2 has them."""

    def __init__(
        self, x: FileTarget, keys: tuple[KeySpec, ...], made: Making, names: Names
    ) -> None:
        self.x, self.made, self.names = x, made, names
        self.ranks = x.layout.size("dp") if x.layout is not None else 1
        self.writings = [ShardedWriting(x, keys, SHARDED, frozenset({MODEL}))]
        if x.groups or any(spec.kind == "state" for spec in keys):
            own = ShardedWriting(x, keys, SHARDED_OPTIMIZER, frozenset({OPTIMIZER_PART}))
            self.writings.append(own)
        rows = {file: own for each in self.writings for file, own in each.into(made).items()}
        specs = tuple(spec for each in self.writings for spec in each.keys.values())
        self.described = Described(specs, (), made.buffers, files=rows)

    def seal(
        self, scalars: Mapping[str, Mapping[str, int | float]], aux: Mapping[str, AuxItem]
    ) -> tuple[Outcome, ...]:
        """Frames and metadata of both, and the small files beside them."""
        small = self.names.write(self.made, aux, self.ranks, scaler=True)
        rest = {path: item for path, item in aux.items() if path not in small}
        outcomes = [each.seal(self.made, self.x.crcs, scalars, rest) for each in self.writings]
        return (*small.values(), *outcomes[0])


class InDeepSpeed:
    """A DeepSpeed checkpoint under a tag."""

    def __init__(
        self, x: FileTarget, keys: tuple[KeySpec, ...], made: Making, names: Names
    ) -> None:
        self.names = names
        tagged = replace(x, options={**x.options, "tag": names.deepspeed})
        tagged.crcs = x.crcs  # filled between now and `seal`
        self.writing, self.made = writing_of(tagged, keys), made
        self.ranks = x.layout.size("dp") if x.layout is not None else 1
        rows = self.writing.laid.into(made)
        specs = tuple(self.writing.laid.keys.values())
        self.described = Described(specs, (), made.buffers, files=rows, flat_step=True)

    def seal(
        self, scalars: Mapping[str, Mapping[str, int | float]], aux: Mapping[str, AuxItem]
    ) -> tuple[Outcome, ...]:
        """DeepSpeed's trees, and the small files beside them."""
        small = self.names.write(self.made, aux, self.ranks, scaler=False)
        rest = {path: item for path, item in aux.items() if path not in small}
        held = {**rest, **({"scheduler": aux["scheduler"]} if "scheduler" in aux else {})}
        shared = self.writing.seal(self.made, scalars, held)
        return (*small.values(), *outcomes_of(rest, "a DeepSpeed checkpoint"), *shared)


@dataclass(init=False)
class Whole:
    """Model and optimizer in one file each: as plain and DDP jobs have them, or as FSDP gathers them."""

    described: Described

    def __init__(
        self, x: FileTarget, keys: tuple[KeySpec, ...], made: Making, names: Names, *, full: bool
    ) -> None:
        self.x, self.made, self.full = x, made, full
        self.names = names
        self.ranks = None if x.layout is None else x.layout.size("dp")
        optimizer = bool(x.groups) or any(spec.kind == "state" for spec in keys)
        self.file = OPTIMIZER if full else names.optimizer
        self.trees = StateTrees(x, keys, FULL if full else None, self.file if optimizer else None)
        self.optimizer = optimizer
        rows = {} if self.full else self._safetensors()
        rows |= self.trees.laid.into(made)
        if not self.full:
            made.write(SAFE, self.header)
        weights = () if self.full else (*self.trees.weights, *self.trees.buffers)
        specs = (*weights, *self.trees.laid.keys.values())
        self.described = Described(specs, (), made.buffers, files=rows)

    def _safetensors(self) -> dict[int, Any]:
        """The model as Accelerate saves it by default: under one of a tied tensor's names."""
        specs = [*self.trees.weights, *self.trees.buffers]
        findings = [
            Finding("dtype", str(spec.key), f"safetensors has no {spec.dtype}")
            for spec in specs
            if spec.dtype not in NAMES
        ]
        if findings:
            raise Refused(findings)
        self.header, start, places = header_of(specs)
        size = start + sum(spec.nbytes for spec in specs)
        parts = {spec.key.name: (spec.dtype, places[spec.key.name], spec.numel) for spec in specs}
        self.made.raw_file(SAFE, size, parts)
        own = tuple(whole_row(spec, f"{SAFE}#{spec.key.name}") for spec in specs)
        return {file_endpoint(SAFE): own}

    def seal(
        self, scalars: Mapping[str, Mapping[str, int | float]], aux: Mapping[str, AuxItem]
    ) -> tuple[Outcome, ...]:
        """The trees, and the small"""
        outcomes = self.names.write(self.made, aux, self.ranks, scaler=True)
        if self.full:
            lifting = Lifting()
            model = self.trees.model(aux, lifting)
            self.made.seal_torch(FULL, model, self.x.crcs, lifting.values)
        if self.optimizer:
            lifting = Lifting()
            tree = self.trees.optimizer(scalars, aux, lifting, by_name=self.full)
            self.made.seal_torch(self.file, tree, self.x.crcs, lifting.values)
        held = {"param_groups", "optimizer", PLAIN} if self.optimizer else set()
        for path, item in aux.items():
            lost = homeless(item, "this form of folder")
            outcomes.setdefault(path, Outcome(path, "exact") if path in held else lost)
        return tuple(outcomes.values())
