"""DeepSpeed checkpoints in the making: which files, where every parameter lies in them, their trees.

The trees are those that `DeepSpeedZeroOptimizer_Stage3.load_state_dict`,
`DeepSpeedZeroOptimizer.load_state_dict` and `DeepSpeedEngine.load_checkpoint` of DeepSpeed 0.19 take.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._deepspeed_geometry import (
    Piece,
    flat_pieces,
    rows_of_span,
    shard_pieces,
)
from dynadapt.adapters.checkpoints._names import natural
from dynadapt.adapters.checkpoints._pickle import Global, Opaque, Size
from dynadapt.adapters.checkpoints._repickle import tensor
from dynadapt.errors import Finding, Refused
from dynadapt.vps.box import Box, row_major_strides
from dynadapt.vps.flat import zero3_groups, zero3_part, zero_group
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import Row, file_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynadapt.adapters.checkpoints._deepspeed_geometry import Shapes
    from dynadapt.adapters.checkpoints._making import Making
    from dynadapt.protocols import AuxItem, FileTarget

__all__ = ["VERSION", "Writing"]

VERSION = "0.19.8"
"""The DeepSpeed whose format is written."""

_TAG_DEFAULT = "dynadapt"


@dataclass
class _File:
    """One file: its storages, and its rows."""

    storages: dict[str, tuple[str, int]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


class Writing:
    """The plan of one checkpoint: made from keys alone, finished with scalars and aux."""

    def __init__(self, x: FileTarget, keys: Sequence[KeySpec]) -> None:
        layout = x.layout
        if layout is None:
            cause = "needs a layout, such as zero3:dp=4"
            raise Refused([Finding("bad-spec", x.format, cause)])
        self.stage = {"zero1": 1, "zero2": 2, "zero3": 3}.get(layout.kind, -1)
        other = [axis for axis in layout.axes if axis != "dp"]
        if self.stage < 0 or other:
            what = f"{other[0]}=" if other else layout.kind
            cause = f"{what} cannot be written as a DeepSpeed checkpoint; zero1, zero2, zero3 can"
            raise Refused([Finding("bad-spec", str(layout), cause, "use dp= alone")])
        self.x, self.layout, self.ranks = x, layout, layout.size("dp")
        self.keys = keys
        self.by_key = {spec.key: spec for spec in keys}
        self.dtype = layout.dtype("dtype", _compute_dtype(keys))
        params = [s for s in keys if s.key.slot == "param"]
        self.frozen = sorted((s for s in params if not s.trainable), key=_place)
        self.buffers = sorted((s for s in keys if s.kind == "buffer"), key=_place)
        self.groups = _grouped(x, [s for s in params if s.trainable])
        self.round_robin = self.stage < 3 and layout.flag("round_robin")
        if self.round_robin:
            self.groups = [_dealt(own, self.ranks) for own in self.groups]
        self.order = [s.key.name for s in sorted(params, key=_place)]
        self.files: dict[str, _File] = {}
        self.targets: dict[Key, KeySpec] = {}
        self.tag = str(x.options.get("tag") or _TAG_DEFAULT)
        findings = list(_unfit(keys, self.groups))
        if findings:
            raise Refused(findings)
        self._lay_out()

    # -- what lies where ---------------------------------------------------------------------------

    def _lay_out(self) -> None:
        sizes = [[prod(shape) for shape in own.values()] for own in self.groups]
        if self.stage == 3:
            limit = self.layout.number("sub_group_size", 10**9)
            cut = [zero3_groups(own, self.ranks, limit) for own in sizes]
            self.flats = [int(n) for one in cut for n in one.sizes]
            subs: list[Shapes] = []
            self.flats_of: list[list[int]] = []
            for shapes, one in zip(self.groups, cut, strict=True):
                first = len(subs)
                subs += [{} for _ in one.sizes]
                for (name, shape), at in zip(shapes.items(), one.index, strict=True):
                    if at >= 0:
                        subs[first + int(at)][name] = shape
                self.flats_of.append(list(range(first, len(subs))))
            self.listed = subs
            pieces, _, _ = shard_pieces(subs, self.ranks, self.flats)
        else:
            self.listed = self.groups
            self.flats_of = [[i] for i in range(len(self.groups))]
            self.flats = [zero_group(own, self.ranks).part for own in sizes]
            pieces = list(flat_pieces(self.groups, self.ranks))
        self.slots = self._slots()
        for rank in range(self.ranks):
            file = self.files.setdefault(self.optim_name(rank), _File())
            for flat, size in enumerate(self.flats):
                for slot, dtype in self.slots[flat].items():
                    file.storages[f"{slot}.{flat}"] = (dtype, size)
        for piece in pieces:
            self._piece(piece)
        self._model_files()

    def _slots(self) -> list[dict[str, str]]:
        """Per flat, the states that its parameters have, and their dtypes."""
        found = []
        for own in self.listed:
            slots = {"param": "float32"}
            for name in own:
                for spec in self.keys:
                    if spec.key.name == name and spec.kind == "state":
                        slots[spec.key.slot] = "float32"
            found.append(slots)
        return found

    def _piece(self, piece: Piece) -> None:
        path = self.optim_name(piece.rank)
        for slot in self.slots[piece.flat]:
            spec = self.by_key.get(Key(piece.name, slot))
            master = self.by_key[Key(piece.name, "param")]
            made = spec or replace(master, key=Key(piece.name, slot), kind="state")
            self.targets[made.key] = replace(made, dtype="float32", presence="present")
            buffer = f"{path}#{slot}.{piece.flat}"
            self.files[path].rows += rows_of_span(
                made.key, master.shape, piece.start, piece.stop, buffer, piece.at
            )

    def _model_files(self) -> None:
        ranks = range(self.ranks) if self.stage == 3 else range(1)
        for rank in ranks:
            path = self.model_name(rank)
            file = self.files.setdefault(path, _File())
            for spec in self.buffers:
                self._whole(path, file, spec, spec.key.name)
            for spec in self.frozen:
                if self.stage < 3:
                    self._whole(path, file, spec, spec.key.name)
                    continue
                part = zero3_part(spec.numel, self.ranks)
                start, stop = (min(spec.numel, n * part) for n in (rank, rank + 1))
                storage = f"frozen.{spec.key.name}"
                file.storages[storage] = (spec.dtype, part)
                self.targets[spec.key] = spec
                file.rows += rows_of_span(spec.key, spec.shape, start, stop, f"{path}#{storage}", 0)
            if self.stage < 3:
                for shapes in self.groups:
                    for name in shapes:
                        master = self.by_key[Key(name, "param")]
                        copy = replace(
                            master, key=Key(name, "compute"), dtype=self.dtype, derived=True
                        )
                        self._whole(path, file, copy, name)

    def _whole(self, path: str, file: _File, spec: KeySpec, storage: str) -> None:
        file.storages[storage] = (spec.dtype, spec.numel)
        self.targets[spec.key] = spec
        strides = row_major_strides(spec.shape)
        file.rows.append(Row(spec.key, Box.whole(spec.shape), f"{path}#{storage}", 0, strides))

    def optim_name(self, rank: int) -> str:
        """The file of a rank's optimizer states."""
        front = {"bfloat16": "bf16_", "float16": ""}.get(self.dtype, "")
        return f"{self.tag}/{front}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def model_name(self, rank: int) -> str:
        """The file of a rank's model states; below stage 3 there is one for all."""
        if self.stage == 3:
            return f"{self.tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        return f"{self.tag}/mp_rank_00_model_states.pt"

    def rows(self) -> dict[int, tuple[Row, ...]]:
        """Rows by endpoint."""
        return {file_endpoint(path): tuple(file.rows) for path, file in self.files.items()}

    def lay_into(self, made: Making) -> None:
        """Allocate all files."""
        for path, file in self.files.items():
            made.torch_file(path, file.storages)
        made.allocate()

    # -- the trees ---------------------------------------------------------------------------------

    def seal(
        self,
        made: Making,
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
    ) -> None:
        """Write everything that is not a tensor's bytes."""
        crcs = self.x.crcs
        config = self._config(aux)
        for rank in range(self.ranks):
            tree, values = self._optim_tree(rank, scalars, aux)
            whole = {"optimizer_state_dict": tree, "ds_config": config, "ds_version": VERSION}
            made.seal_torch(self.optim_name(rank), whole, crcs, values)
        for rank in range(self.ranks if self.stage == 3 else 1):
            none = {f"empty.{name}": b"" for name in self.order} if self.stage == 3 else {}
            made.seal_torch(self.model_name(rank), self._model_tree(aux, config), crcs, none)
        made.write("latest", self.tag.encode())

    def _config(self, aux: Mapping[str, AuxItem]) -> dict[str, Any]:
        behaviour = aux["behaviour"].value if "behaviour" in aux else {}
        config = dict(behaviour.get("config") or {})
        zero = dict(config.get("zero_optimization") or {})
        zero = {
            k: v for k, v in zero.items() if k not in {"sub_group_size", "round_robin_gradients"}
        }
        zero["stage"] = self.stage
        if self.round_robin:
            zero["round_robin_gradients"] = True
        if "sub_group_size" in self.layout.options:
            zero["sub_group_size"] = self.layout.number("sub_group_size")
        config["zero_optimization"] = zero
        for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
            own = dict(config.get(name) or {})
            config.pop(name, None)
            if dtype == self.dtype:
                config[name] = {**own, "enabled": True}
        return config

    def _base(
        self, scalars: Mapping[str, Mapping[str, int | float]], aux: Mapping[str, AuxItem]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The torch optimizer's state dict over the flats, and its small tensors' bytes."""
        values: dict[str, bytes] = {}
        state: dict[int, dict[str, Any]] = {}
        for flat, own in enumerate(self.listed):
            entry: dict[str, Any] = {}
            labels = {label for name in own for label in scalars.get(name, {})}
            for label in sorted(labels):
                number = max(scalars[n][label] for n in own if label in scalars.get(n, {}))
                storage = f"{label}.{flat}"
                values[storage] = struct.pack("<f", number)
                entry[label] = tensor(storage, "float32", ())
            for slot in self.slots[flat]:
                if slot != "param":
                    entry[slot] = tensor(f"{slot}.{flat}", "float32", (self.flats[flat],))
            if entry:
                state[flat] = entry
        hypers = _hypers(aux, self.groups)
        groups = [
            {**hyper, "params": flats} for hyper, flats in zip(hypers, self.flats_of, strict=True)
        ]
        return {"state": state, "param_groups": groups}, values

    def _optim_tree(
        self,
        rank: int,
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        base, values = self._base(scalars, aux)
        masters = [tensor(f"param.{i}", "float32", (n,)) for i, n in enumerate(self.flats)]
        enum = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
        scaler = _scaler(aux)
        tree: dict[str, Any] = {
            "loss_scaler": scaler,
            "dynamic_loss_scale": bool(scaler.get("dynamic", False)),
            "overflow": False,
            "zero_stage": Opaque(enum, (self.stage,)),
        }
        if self.stage == 3:
            tree["partition_count"] = self.ranks
            tree["optimizer_state_dict"] = base
            tree["fp32_flat_groups"] = masters
            return tree, values
        config = self._config(aux)
        sizes = [sum(prod(shape) for shape in own.values()) for own in self.groups]
        paddings = [
            part * self.ranks - size if rank == self.ranks - 1 else 0
            for part, size in zip(self.flats, sizes, strict=True)
        ]
        tree |= {
            "clip_grad": float(config.get("gradient_clipping") or 0.0),
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": paddings,
            "param_alignment_paddings": [[0] * len(own) for own in self.groups],
            "partition_count": [self.ranks] * len(self.groups),
            "ds_version": VERSION,
            "param_slice_mappings": self._mappings(rank),
        }
        return tree, values

    def _mappings(self, rank: int) -> list[dict[str, Any]]:
        made_by = Global("deepspeed.utils.tensor_fragment", "fragment_address")
        found: list[dict[str, Any]] = [{} for _ in self.groups]
        for piece in flat_pieces(self.groups, self.ranks):
            if piece.rank == rank:
                state = {"numel": piece.stop - piece.start, "start": piece.at}
                found[piece.flat][piece.name] = Opaque(made_by, new=True, state=state)
        return found

    def _model_tree(self, aux: Mapping[str, AuxItem], config: dict[str, Any]) -> dict[str, Any]:
        frozen = {spec.key.name: spec for spec in self.frozen}
        module: dict[str, Any] = {}
        for spec in self.buffers:
            module[spec.key.name] = tensor(spec.key.name, spec.dtype, spec.shape)
        aliases: dict[str, str] = {}
        for name in self.order:
            spec = frozen.get(name) or self.by_key[Key(name, "param")]
            dtype = spec.dtype if name in frozen else self.dtype
            if self.stage == 3:
                module[name] = tensor(f"empty.{name}", dtype, (0,))
            else:
                module[name] = tensor(name, dtype, spec.shape)
            for alias in spec.aliases:
                aliases[alias] = name
                module[alias] = module[name]
        fragments = {
            name: tensor(*(f"frozen.{name}", spec.dtype, (zero3_part(spec.numel, self.ranks),)))
            if self.stage == 3
            else module[name]
            for name, spec in frozen.items()
        }
        counters = dict(aux["counters"].value) if "counters" in aux else {}
        scheduler = aux["scheduler"].value["state"] if "scheduler" in aux else None
        users = {p.partition("/")[2]: i.value for p, i in aux.items() if p.startswith("user/")}
        return {
            "module": module,
            "buffer_names": [spec.key.name for spec in self.buffers],
            "optimizer": None,
            "param_shapes": [{n: Size(s) for n, s in own.items()} for own in self.listed],
            "frozen_param_shapes": {n: Size(s.shape) for n, s in frozen.items()},
            "shared_params": aliases,
            "frozen_param_fragments": fragments,
            "lr_scheduler": scheduler,
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": set(),
            "skipped_steps": counters.get("skipped_steps", 0),
            "global_steps": counters.get("global_steps", 0),
            "global_samples": counters.get("global_samples", 0),
            "dp_world_size": self.ranks,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": config,
            "ds_version": VERSION,
            **users,
        }


def _place(spec: KeySpec) -> Any:
    return (spec.order, natural(spec.key.name))


def _compute_dtype(keys: Iterable[KeySpec]) -> str:
    """What the model computes in: its copies' dtype, that of frozen weights, or the masters'."""
    for slot in ("compute", "param"):
        kinds = [
            s.dtype for s in keys if s.key.slot == slot and (slot == "compute" or not s.trainable)
        ]
        if kinds:
            return max(sorted(set(kinds)), key=kinds.count)
    return "float32"


def _grouped(x: FileTarget, trainable: Sequence[KeySpec]) -> list[Shapes]:
    """Shapes by group, in the optimizer's order: as the target says, else as the source had them."""
    specs = {spec.key.name: spec for spec in trainable}
    by_any = {alias: name for name, spec in specs.items() for alias in (name, *spec.aliases)}
    if x.groups:
        named = [[by_any[n] for n in own if n in by_any] for own in x.groups]
        left = set(specs) - {n for own in named for n in own}
        if left:
            cause = f"{len(left)} trainable parameters are in no group, such as {min(left)}"
            raise Refused([Finding("groups", min(left), cause, "list them in a group")])
    else:
        numbers = sorted({spec.group for spec in trainable})
        named = [
            [s.key.name for s in sorted(trainable, key=_place) if s.group == g] for g in numbers
        ]
    return [{n: specs[n].shape for n in own} for own in named if own]


def _dealt(shapes: Shapes, ranks: int) -> Shapes:
    """The order of a flat under round_robin_gradients: tensors are dealt to the ranks like cards."""
    dealt = [name for name, shape in shapes.items() if all(shape)]
    names = sorted(dealt, key=lambda name: dealt.index(name) % ranks)
    return {name: shapes[name] for name in (*names, *(n for n in shapes if n not in dealt))}


def _unfit(keys: Sequence[KeySpec], groups: Sequence[Shapes]) -> Iterable[Finding]:
    held = {name: shape for own in groups for name, shape in own.items()}
    if not held:
        cause = "holds no trainable parameter"
        yield Finding(
            "missing-key", "the source", cause, "a ZeRO checkpoint is of a training state"
        )
    for spec in keys:
        if spec.kind == "state" and spec.key.name in held and spec.shape != held[spec.key.name]:
            cause = f"its shape {list(spec.shape)} is not its parameter's: no flat can hold it"
            yield Finding("unsupported-state", str(spec.key), cause, "leave it out with --exclude")
    for name, shape in held.items():
        if not shape:
            yield Finding("unsupported-shape", name, "DeepSpeed cannot train a tensor without dims")


def _hypers(aux: Mapping[str, AuxItem], groups: Sequence[Shapes]) -> list[dict[str, Any]]:
    """The hyperparameters of each group; of members that differ the first's."""
    item = aux.get("param_groups")
    by_name = {n: g["hyper"] for g in (item.value if item else ()) for n in g["names"]}
    return [next((dict(by_name[n]) for n in own if n in by_name), {}) for own in groups]


def _scaler(aux: Mapping[str, AuxItem]) -> Opaque:
    item = aux.get("scaler")
    module = "deepspeed.runtime.fp16.loss_scaler"
    if item is None:
        state: dict[str, Any] = {"cur_scale": 1.0, "dynamic": False}
        return Opaque(Global(module, "LossScaler"), new=True, state=state)
    return Opaque(Global(module, item.value["class"]), new=True, state=dict(item.value["state"]))
