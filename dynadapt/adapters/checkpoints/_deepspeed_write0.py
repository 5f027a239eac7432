"""A DeepSpeed checkpoint without ZeRO in the making: one file, for any number of ranks.

See `_deepspeed_read0` for its three forms. DeepSpeed takes a flat a group only into its fused Adam and
tensor by tensor only into every other optimizer: `fused=true` says the first.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints import _deepspeed_trees as trees
from dynadapt.adapters.checkpoints._deepspeed_write import TAG
from dynadapt.adapters.checkpoints._plain import Lifting
from dynadapt.adapters.checkpoints._repickle import tensor
from dynadapt.adapters.checkpoints._rows import Laid
from dynadapt.errors import Finding, Refused
from dynadapt.vps.keys import Key, KeySpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynadapt.adapters.checkpoints._making import Making
    from dynadapt.protocols import AuxItem, FileTarget, Outcome

__all__ = ["Writing0"]


class Writing0:
    """The plan of one checkpoint: laid out from keys alone, sealed with scalars and aux."""

    def __init__(self, x: FileTarget, keys: Sequence[KeySpec]) -> None:
        layout = x.layout
        if layout is None or set(layout.axes) - {"dp"}:
            cause = "is written for data parallelism only"
            raise Refused([Finding("bad-spec", str(layout), cause, "use dp= alone")])
        self.x, self.ranks = x, layout.size("dp")
        self.model = trees.Model.of(x, keys)
        self.plain = self.model.dtype == "float32"
        self.fused = not self.plain and layout.flag("fused")
        self.path = f"{x.options.get('tag') or TAG}/mp_rank_00_model_states.pt"
        self.laid = Laid()
        self.slots = {n: self._slots(n) for own in self.model.groups for n in own}
        for group, own in enumerate(self.model.groups):
            if self.fused:
                self._flat(group, own)
            for name in own:
                if not self.fused:
                    self._single(name)
                if not self.plain:
                    copy = replace(self._spec(name, "param"), dtype=self.model.dtype)
                    key = Key(name, "compute")
                    copy = replace(copy, key=key, derived=True)
                    self.laid.whole(self.path, copy, trees.weight(name))
        for spec in (*self.model.buffers, *self.model.frozen):
            self.laid.whole(self.path, spec, trees.weight(spec.key.name))

    def _slots(self, name: str) -> list[str]:
        known = self.model.by_key
        return sorted(s for s in self.model.slots(name) if known[Key(name, s)].presence != "none")

    def _spec(self, name: str, slot: str) -> KeySpec:
        master = self.model.by_key[Key(name, "param")]
        known = self.model.by_key.get(Key(name, slot))
        if known is None:
            known = replace(master, key=Key(name, slot), kind="state")
        return replace(known, dtype="float32", presence="present")

    def _single(self, name: str) -> None:
        """A master and its states, each a tensor; in fp32 the master is the weight."""
        master = self._spec(name, "param")
        self.laid.whole(self.path, master, trees.weight(name) if self.plain else f"param.{name}")
        for slot in self.slots[name]:
            self.laid.whole(self.path, self._spec(name, slot), f"{slot}.{name}")

    def _flat(self, group: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Masters of a group one after another, and each state in the same way."""
        sizes = [prod(shape) for shape in shapes.values()]
        slots = sorted({slot for name in shapes for slot in self.slots[name]})
        for slot in ("param", *slots):
            buffer = self.laid.storage(self.path, f"{slot}.{group}", "float32", sum(sizes))
            for name, at, size in zip(shapes, accumulate([0, *sizes]), sizes, strict=False):
                self.laid.span(self._spec(name, slot), 0, size, buffer, at)

    def seal(
        self,
        made: Making,
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
    ) -> tuple[Outcome, ...]:
        """Write everything that is not a tensor's bytes; numbers that members of a flat now share."""
        aux, told = trees.settled(aux, scalars)
        config = trees.config_of(aux, self.model, {"stage": 0})
        values: dict[str, bytes] = {}
        base = self._base(scalars, aux, values)
        tree = base
        if not self.plain:
            masters: Any = [
                [tensor(f"param.{name}", "float32", shape) for name, shape in own.items()]
                for own in self.model.groups
            ]
            if self.fused:
                masters = [
                    tensor(f"param.{group}", "float32", (sum(map(prod, own.values())),))
                    for group, own in enumerate(self.model.groups)
                ]
            tree = {
                **trees.scaler_fields(aux),
                "optimizer_state_dict": base,
                "fp32_groups_flat" if self.fused else "fp32_groups": masters,
                "clip_grad": 0.0,  # without it FP16_Optimizer does not load
                **trees.clipping(aux),
            }
        # The shapes by group, which DeepSpeed leaves out at stage 0, say whose each entry is.
        lifting = Lifting("user.")
        groups = self.model.groups
        model = trees.model_tree(
            self.model, aux, config, groups, self.ranks, lifting, sharded=False
        )
        values |= lifting.values
        made.seal_torch(self.path, {**model, "optimizer": tree}, self.x.crcs, values)
        made.write("latest", self.path.partition("/")[0].encode())
        return (*trees.joined(self.model.groups if self.fused else (), scalars), *told)

    def _base(
        self,
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        values: dict[str, bytes],
    ) -> dict[str, Any]:
        """torch's state dict; the bytes of its numbers into `values`."""
        state: dict[int, dict[str, Any]] = {}
        ids: list[list[int]] = []
        entry = 0
        for group, shapes in enumerate(self.model.groups):
            ids.append([])
            whole = (sum(map(prod, shapes.values())),)
            units: list[tuple[list[str], str, tuple[int, ...]]] = []
            if self.fused:
                units.append((list(shapes), str(group), whole))
            for name, shape in shapes.items() if not self.fused else ():
                units.append(([name], name, shape))
            for names, label, shape in units:
                slots = sorted({slot for name in names for slot in self.slots[name]})
                own = {slot: tensor(f"{slot}.{label}", "float32", shape) for slot in slots}
                for number in sorted({n for name in names for n in scalars.get(name, {})}):
                    known = [scalars[n][number] for n in names if number in scalars.get(n, {})]
                    values[f"{number}.{label}"] = struct.pack("<f", max(known))
                    own[number] = tensor(f"{number}.{label}", "float32", ())
                if own:
                    state[entry] = own
                ids[-1].append(entry)
                entry += 1
        hypers = trees.hypers(aux, self.model.groups)
        groups = [{**h, "params": own} for h, own in zip(hypers, ids, strict=True)]
        return {"state": state, "param_groups": groups}
