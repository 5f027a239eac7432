"""A DeepSpeed checkpoint of ZeRO stages 1 to 3 in the making: which files, and what lies where."""

from __future__ import annotations

import struct
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints import _deepspeed_trees as trees
from dynadapt.adapters.checkpoints._deepspeed_geometry import (
    Piece,
    dealt,
    flat_pieces,
    shard,
    shard_pieces,
)
from dynadapt.adapters.checkpoints._pickle import Global, Opaque
from dynadapt.adapters.checkpoints._plain import Lifting
from dynadapt.adapters.checkpoints._repickle import tensor
from dynadapt.adapters.checkpoints._rows import Laid
from dynadapt.errors import Finding, Refused
from dynadapt.vps.flat import zero3_groups, zero3_part, zero_group
from dynadapt.vps.keys import Key, KeySpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynadapt.adapters.checkpoints._deepspeed_geometry import Shapes
    from dynadapt.adapters.checkpoints._making import Making
    from dynadapt.protocols import AuxItem, FileTarget, Outcome

__all__ = ["TAG", "Writing"]

TAG = "dynadapt"
"""The tag of what is written, unless `options["tag"]` says another."""


class Writing:
    """The plan of one checkpoint: laid out from keys alone, sealed with scalars and aux."""

    def __init__(self, x: FileTarget, keys: Sequence[KeySpec]) -> None:
        layout = x.layout
        if layout is None:
            cause = "needs a layout, such as zero3:dp=4"
            raise Refused([Finding("bad-spec", x.format, cause)])
        self.stage = {"zero1": 1, "zero2": 2, "zero3": 3}.get(layout.kind, -1)
        other = [axis for axis in layout.axes if axis != "dp"]
        if self.stage < 0 or other:
            what = f"{other[0]}=" if other else layout.kind
            cause = f"{what} cannot be written as a DeepSpeed checkpoint; zero0 to zero3 can"
            raise Refused([Finding("bad-spec", str(layout), cause, "use dp= alone")])
        self.x, self.layout, self.ranks = x, layout, layout.size("dp")
        self.model = trees.Model.of(x, keys)
        self.round_robin = self.stage < 3 and layout.flag("round_robin")
        self.groups = list(self.model.groups)
        if self.round_robin:
            self.groups = [dealt(own, self.ranks) for own in self.groups]
        self.tag = str(x.options.get("tag") or TAG)
        self.laid = Laid()
        self._optimizer_files()
        self._model_files()

    def _optimizer_files(self) -> None:
        sizes = [[prod(shape) for shape in own.values()] for own in self.groups]
        if self.stage == 3:
            limit = self.layout.number("sub_group_size", 10**9)
            cut = [zero3_groups(own, self.ranks, limit) for own in sizes]
            self.flats = [int(n) for one in cut for n in one.sizes]
            self.listed: list[Shapes] = []
            self.flats_of: list[list[int]] = []
            for shapes, one in zip(self.groups, cut, strict=True):
                subs: list[Shapes] = [{} for _ in one.sizes]
                for (name, shape), at in zip(shapes.items(), one.index, strict=True):
                    if at >= 0:
                        subs[int(at)][name] = shape
                self.flats_of.append(list(range(len(self.listed), len(self.listed) + len(subs))))
                self.listed += subs
            pieces, _, _ = shard_pieces(self.listed, self.ranks, self.flats)
        else:
            self.listed = self.groups
            self.flats_of = [[i] for i in range(len(self.groups))]
            self.flats = [zero_group(own, self.ranks).part for own in sizes]
            pieces = list(flat_pieces(self.groups, self.ranks))
            pieces += [  # of what has no elements: it has no place in its flat, but states
                Piece(name=name, rank=0, flat=flat, start=0, stop=0, at=0)
                for flat, own in enumerate(self.groups)
                for name, shape in own.items()
                if not all(shape)
            ]
        self.slots = [
            sorted({slot for name in own for slot in self.model.slots(name)}) for own in self.listed
        ]
        for rank in range(self.ranks):
            for flat, size in enumerate(self.flats):
                for slot in ("param", *self.slots[flat]):
                    self.laid.storage(self.optim_name(rank), f"{slot}.{flat}", "float32", size)
        for piece in pieces:
            self._piece(piece)

    def _piece(self, piece: Piece) -> None:
        for slot in ("param", *self.slots[piece.flat]):
            key = Key(piece.name, slot)
            known = self.model.by_key.get(key, self.model.by_key[Key(piece.name, "param")])
            kind = known.kind if slot == "param" else "state"
            spec = replace(known, key=key, kind=kind, dtype="float32", presence="present")
            buffer = f"{self.optim_name(piece.rank)}#{slot}.{piece.flat}"
            self.laid.span(spec, piece.start, piece.stop, buffer, piece.at)

    def _model_files(self) -> None:
        for rank in range(self.ranks if self.stage == 3 else 1):
            path = self.model_name(rank)
            for spec in self.model.buffers:
                self.laid.whole(path, spec, trees.weight(spec.key.name))
            for spec in self.model.frozen:
                if self.stage < 3:
                    self.laid.whole(path, spec, trees.weight(spec.key.name))
                    continue
                part = zero3_part(spec.numel, self.ranks)
                start, stop = shard(spec.numel, self.ranks, rank)
                name = f"frozen.{spec.key.name}"
                buffer = self.laid.storage(path, name, spec.dtype, part)
                self.laid.span(spec, start, stop, buffer, 0)
            if self.stage < 3:
                for name in (n for own in self.groups for n in own):
                    master = self.model.by_key[Key(name, "param")]
                    key, dtype = Key(name, "compute"), self.model.dtype
                    copy = replace(master, key=key, dtype=dtype, derived=True)
                    self.laid.whole(path, copy, trees.weight(name))

    def optim_name(self, rank: int) -> str:
        """The file of a rank's optimizer states."""
        front = "bf16_" if self.model.dtype == "bfloat16" else ""
        return f"{self.tag}/{front}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def model_name(self, rank: int) -> str:
        """The file of a rank's model states; below stage 3 there is one for all."""
        if self.stage == 3:
            return f"{self.tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        return f"{self.tag}/mp_rank_00_model_states.pt"

    def seal(
        self,
        made: Making,
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
    ) -> tuple[Outcome, ...]:
        """Write everything that is not a tensor's bytes; numbers that members of a flat now share."""
        aux, told = trees.settled(aux, scalars)
        zero: dict[str, Any] = {"stage": self.stage}
        if "sub_group_size" in self.layout.options:
            zero["sub_group_size"] = self.layout.number("sub_group_size")
        if self.round_robin:
            zero["round_robin_gradients"] = True
        config = trees.config_of(aux, self.model, zero)
        base, values = self._base(scalars, aux)
        for rank in range(self.ranks):
            tree = self._optim_tree(rank, base, aux, config)
            whole = {
                "optimizer_state_dict": tree,
                "ds_config": config,
                "ds_version": trees.VERSION,
            }
            made.seal_torch(self.optim_name(rank), whole, self.x.crcs, values)
        sharded = self.stage == 3
        lifting = Lifting("user.")
        model = trees.model_tree(
            self.model, aux, config, self.listed, self.ranks, lifting, sharded=sharded
        )
        none = {f"empty.{name}": b"" for name in self.model.order} if sharded else {}
        for rank in range(self.ranks if sharded else 1):
            made.seal_torch(self.model_name(rank), model, self.x.crcs, none | lifting.values)
        made.write("latest", self.tag.encode())
        return (*trees.joined(self.listed, scalars), *told)

    def _base(
        self, scalars: Mapping[str, Mapping[str, int | float]], aux: Mapping[str, AuxItem]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The torch optimizer's state dict over the flats, and its small tensors' bytes."""
        values: dict[str, bytes] = {}
        state: dict[int, dict[str, Any]] = {}
        for flat, own in enumerate(self.listed):
            entry: dict[str, Any] = {}
            for label in sorted({label for name in own for label in scalars.get(name, {})}):
                known = [scalars[n][label] for n in own if label in scalars.get(n, {})]
                values[f"{label}.{flat}"] = struct.pack("<f", max(known))
                entry[label] = tensor(f"{label}.{flat}", "float32", ())
            for slot in self.slots[flat]:
                entry[slot] = tensor(f"{slot}.{flat}", "float32", (self.flats[flat],))
            if entry:
                state[flat] = entry
        hypers = trees.hypers(aux, self.groups)
        groups = [{**h, "params": flats} for h, flats in zip(hypers, self.flats_of, strict=True)]
        return {"state": state, "param_groups": groups}, values

    def _optim_tree(
        self,
        rank: int,
        base: dict[str, Any],
        aux: Mapping[str, AuxItem],
        config: Mapping[str, Any],
    ) -> dict[str, Any]:
        masters = [tensor(f"param.{i}", "float32", (n,)) for i, n in enumerate(self.flats)]
        scaler = trees.loss_scaler(aux)
        tree: dict[str, Any] = {
            "loss_scaler": scaler,
            "dynamic_loss_scale": bool(scaler.get("dynamic", False)),
            "overflow": False,
            "zero_stage": trees.stage_enum(self.stage),
        }
        if self.stage == 3:
            return {
                **tree,
                "partition_count": self.ranks,
                "optimizer_state_dict": base,
                "fp32_flat_groups": masters,
            }
        sizes = [sum(prod(shape) for shape in own.values()) for own in self.groups]
        last = rank == self.ranks - 1
        parts = zip(self.flats, sizes, strict=True)
        return {
            **tree,
            **trees.clipping(aux),
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": [(part * self.ranks - size) * last for part, size in parts],
            "param_alignment_paddings": [[0] * len(own) for own in self.groups],
            "partition_count": [self.ranks] * len(self.groups),
            "ds_version": trees.VERSION,
            "param_slice_mappings": self._mappings(rank),
        }

    def _mappings(self, rank: int) -> list[dict[str, Any]]:
        made_by = Global("deepspeed.utils.tensor_fragment", "fragment_address")
        found: list[dict[str, Any]] = [{} for _ in self.groups]
        for piece in flat_pieces(self.groups, self.ranks):
            if piece.rank == rank:
                state = {"numel": piece.stop - piece.start, "start": piece.at}
                found[piece.flat][piece.name] = Opaque(made_by, new=True, state=state)
        return found
