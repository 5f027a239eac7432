"""Folders of `Accelerator.save_state`: plain and DDP, DeepSpeed, FSDP sharded or in one file.

Accelerate has a form for each way to train. The model and its optimizer lie in them as in the formats that
the frameworks have; beside them are schedule, loss scale, random generators, samplers and the objects that
a script registered (see `_accelerate_files`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints import _accelerate_files as files
from dynadapt.adapters.checkpoints._dcp_read import Reading
from dynadapt.adapters.checkpoints._dcp_write import MODEL, OPTIMIZER
from dynadapt.adapters.checkpoints._dcp_write import Writing as ShardedWriting
from dynadapt.adapters.checkpoints._deepspeed_files import outcomes_of
from dynadapt.adapters.checkpoints._deepspeed_open import described, writing_of
from dynadapt.adapters.checkpoints._format import Format
from dynadapt.adapters.checkpoints._fsdp_read import read_ranks
from dynadapt.adapters.checkpoints._making import Making
from dynadapt.adapters.checkpoints._plain import Lifting
from dynadapt.adapters.checkpoints._safetensors import NAMES, header_of, whole_row
from dynadapt.adapters.checkpoints._torch_file import read_torch
from dynadapt.adapters.checkpoints._torch_state import PLAIN, StateDicts
from dynadapt.adapters.checkpoints._torch_trees import StateTrees
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import Described, FileSource, FileTarget, Outcome, alone
from dynadapt.vps.layout import file_endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.protocols import Agree, AuxItem
    from dynadapt.vps.keys import KeySpec

__all__ = ["AccelerateDir"]

_FORMS = {
    "ddp": "plain",
    "zero0": "deepspeed",
    "zero1": "deepspeed",
    "zero2": "deepspeed",
    "zero3": "deepspeed",
    "fsdp1": "full",
    "fsdp2": "sharded",
}


class AccelerateDir(Format):
    """Reads what `save_state` writes, writes what `load_state` reads."""

    name = "accelerate"

    @staticmethod
    def holds(path: Path) -> bool:
        """A folder with files of Accelerate's names."""
        return files.form_of(path) is not None

    def read(self, path: Path, said: FileSource) -> Described:
        """See `Format.describe`."""
        form = files.form_of(path)
        small = files.read_small(path)
        if form == "deepspeed":
            own = described(path / files.DEEPSPEED, said)
            layout = own.written.partition("/")[2]
            own = replace(own, written=f"accelerate/{layout}" if layout else "")
        elif form == "sharded":
            own = _read_sharded(path)
        elif form in {"plain", "full"}:
            own = _read_whole(path, files.FULL if form == "full" else None, said)
        elif not (path / files.SHARDED_OPTIMIZER).is_dir():
            own = read_ranks(path, said)
        else:
            cause = "has a model in a file of each rank and its optimizer in another form"
            fix = "save it with SHARDED_STATE_DICT or FULL_STATE_DICT"
            raise Refused([Finding("unsupported-format", str(path), cause, fix)])
        paths = {item.path for item in small}
        aux = (*(item for item in own.aux if item.path not in paths), *small)
        return replace(own, aux=aux)

    def prepare(self, x: FileTarget, keys: tuple[KeySpec, ...]) -> Described:
        """Lay out the files; raises `Refused` with everything that cannot be so written."""
        form = "plain" if x.layout is None else _FORMS.get(x.layout.kind)
        if form is None:
            cause = f"{x.layout.kind if x.layout else ''} has no form there"
            raise Refused(
                [Finding("bad-spec", str(x.layout), cause, f"known: {', '.join(_FORMS)}")]
            )
        keys = tuple(spec for spec in keys if not spec.key.slot.startswith("extra:"))
        made = Making(Path(x.path), x.dry)
        if form == "deepspeed":
            x.made = _DeepSpeed(x, keys, made)
        elif form == "sharded":
            x.made = _Sharded(x, keys, made)
        else:
            x.made = _Whole(x, keys, made, form)
        own: Described = x.made.described
        return own

    def finish(
        self,
        x: FileTarget,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Write everything that is not a tensor's bytes; says what became of the rest."""
        agree()
        made: _DeepSpeed | _Sharded | _Whole = x.made
        return made.seal(scalars, aux)


def _read_whole(path: Path, model: str | None, said: FileSource) -> Described:
    """Model and optimizer in one file each."""
    found = StateDicts(str(path), said)
    if model is None and (path / files.SAFE).is_file():
        found.safetensors(files.SAFE)
    else:
        file, tree = _dict_of(path, model or files.TORCH)
        found.model([(file, tree)])
    if (path / files.OPTIMIZER).is_file():
        file, tree = _dict_of(path, files.OPTIMIZER)
        found.optimizer(file, tree)
    return found.described("accelerate/fsdp1:dp=1" if model else "accelerate")


def _dict_of(path: Path, name: str) -> tuple[TorchFile, dict[str, Any]]:
    file = read_torch(str(path / name))
    if not isinstance(file.tree, dict):
        raise Refused([Finding("bad-file", file.path, "holds no state dict")])
    return file, file.tree


def _read_sharded(path: Path) -> Described:
    """Model and optimizer in a torch distributed checkpoint each."""
    names = [files.SHARDED, files.SHARDED_OPTIMIZER]
    found = Reading(path, [name for name in names if (path / name).is_dir()])
    own = found.described()
    return replace(own, written=own.written and f"accelerate/{own.written.partition('/')[2]}")


class _Sharded:
    """Torch distributed checkpoints of model and optimizer, as FSDP2 has them."""

    def __init__(self, x: FileTarget, keys: tuple[KeySpec, ...], made: Making) -> None:
        self.x, self.made = x, made
        self.ranks = x.layout.size("dp") if x.layout is not None else 1
        self.writings = [ShardedWriting(x, keys, files.SHARDED, frozenset({MODEL}))]
        if x.groups or any(spec.kind == "state" for spec in keys):
            own = ShardedWriting(x, keys, files.SHARDED_OPTIMIZER, frozenset({OPTIMIZER}))
            self.writings.append(own)
        rows = {file: own for each in self.writings for file, own in each.into(made).items()}
        specs = tuple(spec for each in self.writings for spec in each.keys.values())
        self.described = Described(specs, (), made.buffers, files=rows)

    def seal(
        self, scalars: Mapping[str, Mapping[str, int | float]], aux: Mapping[str, AuxItem]
    ) -> tuple[Outcome, ...]:
        """Frames and metadata of both, and Accelerate's files beside them."""
        small = files.write_small(self.made, aux, self.ranks, scaler=True)
        rest = {path: item for path, item in aux.items() if path not in small}
        outcomes = [each.seal(self.made, self.x.crcs, scalars, rest) for each in self.writings]
        return (*small.values(), *outcomes[0])


class _DeepSpeed:
    """A DeepSpeed checkpoint under Accelerate's tag."""

    def __init__(self, x: FileTarget, keys: tuple[KeySpec, ...], made: Making) -> None:
        tagged = replace(x, options={**x.options, "tag": files.DEEPSPEED})
        tagged.crcs = x.crcs  # filled between now and `seal`
        self.writing, self.made = writing_of(tagged, keys), made
        self.ranks = x.layout.size("dp") if x.layout is not None else 1
        rows = self.writing.laid.into(made)
        specs = tuple(self.writing.laid.keys.values())
        self.described = Described(specs, (), made.buffers, files=rows, flat_step=True)

    def seal(
        self, scalars: Mapping[str, Mapping[str, int | float]], aux: Mapping[str, AuxItem]
    ) -> tuple[Outcome, ...]:
        """DeepSpeed's trees, and Accelerate's files beside them."""
        small = files.write_small(self.made, aux, self.ranks, scaler=False)
        rest = {path: item for path, item in aux.items() if path not in small}
        held = {**rest, **({"scheduler": aux["scheduler"]} if "scheduler" in aux else {})}
        shared = self.writing.seal(self.made, scalars, held)
        return (*small.values(), *outcomes_of(rest, "a DeepSpeed checkpoint"), *shared)


@dataclass(init=False)
class _Whole:
    """Model and optimizer in one file each: as plain and DDP jobs have them, or as FSDP gathers them."""

    described: Described

    def __init__(self, x: FileTarget, keys: tuple[KeySpec, ...], made: Making, form: str) -> None:
        self.x, self.made, self.full = x, made, form == "full"
        self.ranks = None if x.layout is None else x.layout.size("dp")
        optimizer = bool(x.groups) or any(spec.kind == "state" for spec in keys)
        model = files.FULL if self.full else None
        self.trees = StateTrees(x, keys, model, files.OPTIMIZER if optimizer else None)
        self.optimizer = optimizer
        rows = {} if self.full else self._safetensors()
        rows |= self.trees.laid.into(made)
        if not self.full:
            made.write(files.SAFE, self.header)
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
        self.made.raw_file(files.SAFE, size, parts)
        own = tuple(whole_row(spec, f"{files.SAFE}#{spec.key.name}") for spec in specs)
        return {file_endpoint(files.SAFE): own}

    def seal(
        self, scalars: Mapping[str, Mapping[str, int | float]], aux: Mapping[str, AuxItem]
    ) -> tuple[Outcome, ...]:
        """The trees, and the small files."""
        outcomes = files.write_small(self.made, aux, self.ranks, scaler=True)
        if self.full:
            lifting = Lifting()
            model = self.trees.model(aux, lifting)
            self.made.seal_torch(files.FULL, model, self.x.crcs, lifting.values)
        if self.optimizer:
            lifting = Lifting()
            tree = self.trees.optimizer(scalars, aux, lifting, by_name=self.full)
            self.made.seal_torch(files.OPTIMIZER, tree, self.x.crcs, lifting.values)
        held = {"param_groups", "optimizer", PLAIN} if self.optimizer else set()
        note = "this form of Accelerate's folder has no place for it"
        for path in aux:
            kind = Outcome(path, "exact") if path in held else Outcome(path, "dropped", note)
            outcomes.setdefault(path, kind)
        return tuple(outcomes.values())
