"""What is in the files of a DeepSpeed checkpoint, key by key: stages 1, 2 and 3.

Which files there are is in `_deepspeed_files`, where parameters lie in `_deepspeed_geometry`, and stage 0
in `_deepspeed_read0`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints import _deepspeed_geometry as geometry
from dynadapt.adapters.checkpoints._deepspeed_files import (
    aliases_of,
    aux_items,
    buffers_of,
    groups_of,
    hyper_item,
    made_by,
    number,
    optimizer_states,
    options_of,
    scaler_item,
    ties_of,
)
from dynadapt.adapters.checkpoints._deepspeed_mixed import mixed
from dynadapt.adapters.checkpoints._optimizer_kinds import family_told
from dynadapt.adapters.checkpoints._pickle import StoredTensor
from dynadapt.adapters.checkpoints._rows import Files
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Described
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import file_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dynadapt.adapters.checkpoints._deepspeed_files import Folder
    from dynadapt.adapters.checkpoints._deepspeed_geometry import Shapes
    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.protocols import FileSource

__all__ = ["Flats", "Reading"]


class Reading(ABC):
    """One pass over the trees of a checkpoint."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.files = Files(str(folder.root))
        self.specs: dict[Key, KeySpec] = {}
        self.scalars: dict[str, dict[str, int | float]] = {}
        stage = folder.stage
        self.module: Mapping[str, Any] = (
            options_of(folder.common, "module")
            if stage is None
            else {name: tensor for name, (_, tensor) in stage.module.items()}
        )
        self.buffer_names = buffers_of(folder)
        self.aliases = aliases_of(folder.common)
        if stage is None and not self.aliases:
            self.aliases = ties_of(self.module)
        self.tied = {alias for own in self.aliases.values() for alias in own}
        params = [n for n in self.module if n not in self.buffer_names and n not in self.tied]
        self.order = {name: i for i, name in enumerate(params)}

    @abstractmethod
    def optimizer(self) -> list[AuxItem]:
        """Put masters and states into `specs`, `files` and `scalars`; the items of the optimizer."""

    @property
    def sharded(self) -> bool:
        """Whether the model states are cut over the ranks too."""
        return False

    @property
    @abstractmethod
    def layout(self) -> str:
        """The kind of layout, its ranks, and what is not the default of how they are filled."""

    @property
    @abstractmethod
    def scaler(self) -> AuxItem | None:
        """What the loss is multiplied by."""

    @property
    @abstractmethod
    def clipped(self) -> Any:
        """What the optimizer says to have clipped gradients by; None: it does not."""

    def described(self) -> Described:
        """All of it; raises `Refused` with every finding."""
        if findings := mixed(self.folder):
            raise Refused(findings)
        own = self.optimizer()
        self._frozen()
        self._module()
        findings = [*self.files.findings, *self._untied()]
        if findings:
            raise Refused(findings)
        scaler = self.scaler
        items = aux_items(self.folder.common, self.folder.model[0], self.clipped)
        aux = (*own, *items, *([scaler] if scaler else []))
        files = {file_endpoint(name): tuple(rows) for name, rows in self.files.rows.items()}
        specs = tuple(self.specs.values())
        copies = [spec.dtype for spec in specs if spec.key.slot == "compute"]
        dtype = f",dtype={max(sorted(set(copies)), key=copies.count)}" if copies else ""
        return Described(
            specs,
            (),
            self.files.buffers,
            self.scalars,
            aux,
            files=files,
            written=f"deepspeed/{self.layout}{dtype}",
            made_by=made_by(self.folder.common),
        )

    def _spec(self, key: Key, shape: tuple[int, ...], dtype: str, group: int, **more: Any) -> None:
        if key in self.specs:
            return
        aliases = self.aliases.get(key.name, ())
        order = self.order.get(key.name, len(self.order))
        kind = "parameter" if key.slot in {"param", "compute"} else "state"
        own: dict[str, Any] = {
            "kind": kind,
            "order": order,
            "group": group,
            "aliases": aliases,
            **more,
        }
        self.specs[key] = KeySpec(key, shape, dtype, **own)

    def _groups_item(
        self, groups: Sequence[Shapes], number_of: Mapping[str, int], param_groups: Sequence[Any]
    ) -> list[AuxItem]:
        """The hyperparameters by name; and every spec gets its group."""
        for key, spec in self.specs.items():
            if spec.group != (number := number_of.get(key.name, 0)):
                self.specs[key] = replace(spec, group=number)
        states = {key.slot for key, spec in self.specs.items() if spec.kind == "state"}
        family = family_told(param_groups, states)
        items = [hyper_item(groups, param_groups)] if param_groups else []
        return [*items, *([AuxItem("optimizer", family)] if family else [])]

    def _frozen(self) -> None:
        shapes = geometry.shapes_of(self.folder.common.get("frozen_param_shapes"))
        if self.sharded:
            known = {key.name for key in self.specs} | set(shapes) | self.buffer_names | self.tied
            fix = "gather it in a job of the DeepSpeed that wrote this"
            cause = "is frozen, and a DeepSpeed before 0.9 keeps nothing of it at stage 3"
            lost = [name for name in self.module if name not in known]
            self.files.findings += [Finding("missing-key", name, cause, fix) for name in lost]
        for rank, file in enumerate(self.folder.model):
            fragments = options_of(file.tree, "frozen_param_fragments")
            for name, tensor in fragments.items():
                if not isinstance(tensor, StoredTensor) or name not in shapes:
                    continue
                key, shape = Key(name, "param"), shapes[name]
                self._spec(key, shape, tensor.dtype, -1, trainable=False)
                if not self.sharded:
                    self.files.whole(key, file, tensor)
                    continue
                start, stop = geometry.shard(prod(shape), len(self.folder.model), rank)
                if start < stop:
                    self.files.span(key, shape, (start, stop, 0), file, tensor)

    def _module(self) -> None:
        """Buffers, and below stage 3 the copies that training computes with."""
        for rank, name, file, tensor in self._held():
            if not isinstance(tensor, StoredTensor) or name in self.tied:
                continue
            if name in self.buffer_names:
                key = Key(name, "buffer")
                spec = KeySpec(key, tensor.shape, tensor.dtype, kind="buffer", trainable=False)
                self.specs.setdefault(key, spec)
                self.files.whole(key, file, tensor)
            elif not self.sharded and not rank:
                self._weight(str(name), file, tensor)

    def _held(self) -> Iterator[tuple[int, str, TorchFile, Any]]:
        """Rank, name, file and entry of what the model states have."""
        stage = self.folder.stage
        if stage is None:
            for rank, file in enumerate(self.folder.model):
                for name, entry in options_of(file.tree, "module").items():
                    yield rank, name, file, entry
        else:
            for name, (file, entry) in stage.module.items():
                if name in stage.own:
                    yield 0, name, file, entry

    def home(self, name: str) -> TorchFile:
        """The file of a parameter's weight; below stage 3 there is one."""
        stage = self.folder.stage
        return self.folder.model[0] if stage is None else stage.module[name][0]

    def _untied(self) -> Iterator[Finding]:
        """Names that are recorded to be another tensor's, of which there is none.

        Where no frozen weight was saved (`exclude_frozen_parameters`, as for PEFT) they are of such a one.
        """
        if self.folder.common.get("frozen_param_shapes", {}) is None:
            return
        for name, aliases in self.aliases.items() if self.folder.stage is None else ():
            if not any(Key(name, slot) in self.specs for slot in ("param", "buffer")):
                cause = f"is not there, and {', '.join(aliases)} is recorded to be the same tensor"
                yield Finding("missing-key", name, cause, "copy the whole checkpoint")

    def _weight(self, name: str, file: TorchFile, tensor: StoredTensor) -> None:
        master = self.specs.get(Key(name, "param"))
        if master is None:  # frozen, and written by a version that does not list what is frozen
            self._spec(Key(name, "param"), tensor.shape, tensor.dtype, -1, trainable=False)
            self.files.whole(Key(name, "param"), file, tensor)
        elif master.trainable:
            key = Key(name, "compute")
            self._spec(key, tensor.shape, tensor.dtype, master.group, derived=True)
            self.files.whole(key, file, tensor)


class Flats(Reading):
    """Stages 1 to 3: what is trained lies in flats, cut over the ranks."""

    def __init__(self, folder: Folder, said: FileSource) -> None:
        super().__init__(folder)
        self.said = said
        self.ranks = len(folder.optim_names)
        told = folder.common.get("dp_world_size")
        if type(told) is int and self.ranks < told <= 1 << 16:
            cause = f"the optimizer states of ranks {list(range(self.ranks, told))} are missing"
            fix = "copy the whole checkpoint"
            raise Refused([Finding("missing-file", str(folder.root), cause, fix)])
        self.states = [optimizer_states(file) for file in folder.optim]
        self.stage = 3 if any("fp32_flat_groups" in s for s in self.states) else 2

    @property
    def sharded(self) -> bool:
        """Stage 3."""
        return self.stage == 3

    @property
    def layout(self) -> str:
        """See `Reading.layout`."""
        stage = 1 if not self.sharded and self.folder.option("stage") == 1 else self.stage
        text = f"zero{stage}:dp={self.ranks}"
        if self.sharded and isinstance(size := self.folder.option("sub_group_size"), int | float):
            return f"{text},sub_group_size={int(size)}"
        dealt = not self.sharded and self.folder.option("round_robin_gradients") is True
        return f"{text},round_robin=true" if dealt else text

    @property
    def scaler(self) -> AuxItem | None:
        """An object of its own."""
        return scaler_item(self.states[0].get("loss_scaler"))

    @property
    def clipped(self) -> Any:
        """See `Reading.clipped`. Stage 3 does not say it."""
        return self.states[0].get("clip_grad")

    def optimizer(self) -> list[AuxItem]:
        """See `Reading.optimizer`."""
        if any("local_sub_partitions_of_fp32_groups" in states for states in self.states):
            cause = "is of stage 1 of a DeepSpeed before 0.5, which cuts a flat into sub-partitions"
            fix = "load it with that DeepSpeed and save it with ZeRO stage 2"
            raise Refused([Finding("unsupported-stage", str(self.folder.root), cause, fix)])
        stage = self.folder.stage
        groups = groups_of(self.folder.common) or groups_of(self.folder.optim[0].tree)
        if stage is not None:
            groups = list(stage.groups)
        groups = groups or self._said()
        if not groups:
            cause = "does not say its parameters' shapes"
            fix = (
                "it was written by a DeepSpeed before 0.3.13: give the names and shapes of each group, "
                "--order FILE (order=), or of all, --model CONFIG (model=); or load it with that and "
                "save it with a newer one"
            )
            raise Refused([Finding("bad-file", self.folder.model[0].path, cause, fix)])
        return self._zero3(groups) if self.stage == 3 else self._zero12(groups)

    def _said(self) -> list[Shapes]:
        """What the user says of the groups, or of all trained parameters where there is one group."""
        shapes = dict(self.said.shapes)
        idle = self.tied | set(options_of(self.folder.common, "frozen_param_shapes"))
        order = tuple(name for name in self.said.order if name not in idle)
        groups = self.said.groups or ((order,) if order else ())
        if not all(name in shapes for own in groups for name in own):
            return []
        return [{name: shapes[name] for name in own} for own in groups]

    def _flats(self) -> list[list[Any]]:
        """The fp32 flats of each rank."""
        name = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return [list(states.get(name) or ()) for states in self.states]

    def _base(self, states: Mapping[str, Any]) -> tuple[Mapping[Any, Any], list[Any]]:
        """The torch optimizer's own state and groups.

        With `elastic_checkpoint`, the default before 0.5, there are states by group and no more.
        """
        name = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        base = states.get(name)
        if isinstance(base, list):
            return dict(enumerate(base)), []
        if not isinstance(base, dict):
            return {}, []
        found = base.get("param_groups") or []
        if not isinstance(found, list) or not all(isinstance(group, dict) for group in found):
            cause = "its param_groups are no list of dicts"
            raise Refused([Finding("bad-file", self.folder.optim[0].path, cause)])
        return options_of(base, "state"), found

    def _zero12(self, groups: Sequence[Shapes]) -> list[AuxItem]:
        # The list is in the order of the flats, which round_robin_gradients has changed already.
        sizes = [
            [prod(f.shape) for f in own if isinstance(f, StoredTensor)] for own in self._flats()
        ]
        held = [sum(own) for own in zip(*sizes, strict=False)]
        if len(groups) == 1 and len(held) > 1:
            groups = geometry.regrouped(groups[0], held, self.ranks) or groups
        between = self._between()
        parts = sizes[0] if self.ranks > 1 else held  # the last rank's may be without its padding
        fits = [
            geometry.fitting(own, part, self.ranks, between)
            for own, part in zip(groups, parts, strict=False)
        ]
        if len(groups) != len(parts) or not all(fits):
            cause = (
                f"lists {[sum(map(prod, own.values())) for own in groups]} elements of parameters, and has "
                f"{held} in its flats"
            )
            fix = "a DeepSpeed before 0.4 lists frozen parameters too, and those of all groups together"
            raise Refused([Finding("geometry", str(self.folder.root), cause, fix)])
        pieces = list(geometry.flat_pieces(groups, self.ranks, between, parts))
        number_of = {name: i for i, own in enumerate(groups) for name in own}
        self._place(groups, pieces)
        _, param_groups = self._base(self.states[0])
        if self.folder.option("round_robin_gradients"):
            groups = [geometry.undealt(own, self.ranks) for own in groups]
        return self._groups_item(groups, number_of, param_groups)

    def _between(self) -> int:
        """What each parameter's start is a multiple of: 1 unless the config says."""
        return int(self.folder.option("parameter_alignment", 1) or 1)

    def _zero3(self, groups: Sequence[Shapes]) -> list[AuxItem]:
        flats = self._flats()
        sizes = [flat.storage.numel for flat in flats[0] if isinstance(flat, StoredTensor)]
        pieces, where, lost = geometry.shard_pieces(groups, self.ranks, sizes)
        for name in lost:
            cause = f"no flat of sizes {sizes} has room for it"
            self.files.findings.append(Finding("geometry", name, cause))
        self._place(groups, pieces)
        _, param_groups = self._base(self.states[0])
        number_of: dict[str, int] = {}
        for i, group in enumerate(param_groups):
            for flat in group.get("params", ()):
                number_of |= {name: i for name, at in where.items() if at == flat}
        found: list[Shapes] = [{} for _ in param_groups] or [{}]
        for own in groups:
            for name, shape in own.items():
                found[number_of.get(name, 0)][name] = shape
        return self._groups_item(found, number_of, param_groups)

    def _place(self, groups: Sequence[Shapes], pieces: Iterable[geometry.Piece]) -> None:
        """Rows of masters and of every state that has the flat's size; steps of the others."""
        shapes = {name: shape for own in groups for name, shape in own.items()}
        flats = self._flats()
        bases = [self._base(states)[0] for states in self.states]
        dtype = next((f.dtype for own in flats for f in own), "float32")
        for flat, names in enumerate(groups):
            for name in (n for n, shape in names.items() if not all(shape)):
                self._nothing(name, shapes[name], dtype, bases[0].get(flat))
        known: dict[tuple[int, int], tuple[dict[str, StoredTensor], dict[str, int | float]]] = {}
        for piece in pieces:
            file = self.folder.optim[piece.rank]
            own = flats[piece.rank]
            if piece.flat >= len(own) or not isinstance(own[piece.flat], StoredTensor):
                where = f"{piece.name} in {file.path}"
                self.files.findings.append(Finding("geometry", where, "its flat is missing"))
                continue
            at = piece.rank, piece.flat
            if at not in known:
                known[at] = _of_flat(bases[piece.rank].get(piece.flat), file)
            states, numbers = known[at]
            if numbers:
                self.scalars.setdefault(piece.name, {}).update(numbers)
            for slot, tensor in {"param": own[piece.flat], **states}.items():
                key = Key(piece.name, slot)
                self._spec(key, shapes[piece.name], tensor.dtype, 0)
                place = (piece.start, piece.stop, piece.at)
                self.files.span(key, shapes[piece.name], place, file, tensor)

    def _nothing(self, name: str, shape: tuple[int, ...], dtype: str, state: Any) -> None:
        """A parameter of no elements: it has the states of its flat, and no place in it."""
        self._spec(Key(name, "param"), shape, dtype, 0)
        states, numbers = _of_flat(state, self.folder.optim[0])
        for slot, tensor in states.items():
            self._spec(Key(name, slot), shape, tensor.dtype, 0)
        if numbers:
            self.scalars.setdefault(name, {}).update(numbers)


def _of_flat(state: Any, file: TorchFile) -> tuple[dict[str, StoredTensor], dict[str, int | float]]:
    """The states of one flat by slot, and the numbers that hold for all of it."""
    states, numbers = {}, {}
    for slot, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, StoredTensor) and len(value.shape) == 1:  # padding may be off
            states[str(slot)] = value
        elif (found := number(value, file)) is not None:
            numbers[str(slot)] = found
    return states, numbers
