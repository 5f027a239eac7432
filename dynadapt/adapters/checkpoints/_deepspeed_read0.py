"""What is in the files of a DeepSpeed checkpoint without ZeRO: all of it in one file.

In fp32 the user's optimizer has the model's own parameters, and its state dict is torch's. In bf16 and
fp16 an `FP16_Optimizer` keeps masters: one flat a param group for DeepSpeed's fused Adam, else tensor by
tensor (`runtime/fp16/{fused,unfused}_optimizer.py`). None of them names its parameters.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.adapters.checkpoints._deepspeed_files import groups_of, number, options_of
from dynadapt.adapters.checkpoints._deepspeed_read import Reading
from dynadapt.adapters.checkpoints._optimizer_kinds import slots_of
from dynadapt.adapters.checkpoints._param_order import names_in_flats, names_of_entries
from dynadapt.adapters.checkpoints._pickle import StoredTensor
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem
from dynadapt.vps.box import row_major_strides
from dynadapt.vps.keys import Key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from dynadapt.adapters.checkpoints._deepspeed_files import Folder
    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.protocols import FileSource

__all__ = ["SCALER", "Whole"]

SCALER = ("cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
"""What a `LossScaleConfig` keeps beside its scale, and whether that is dynamic."""

_WINDOW = 128
"""Elements that are compared at the start, in the middle and at the end of a tensor."""


class Whole(Reading):
    """Stage 0."""

    def __init__(self, folder: Folder, said: FileSource) -> None:
        super().__init__(folder)
        self.file: TorchFile = folder.model[0]
        self.tree: Mapping[str, Any] = folder.common["optimizer"]
        base = self.tree.get("optimizer_state_dict") if self.wrapped else self.tree
        if not isinstance(base, dict):
            raise Refused([Finding("bad-file", self.file.path, "holds no optimizer_state_dict")])
        self.state: Mapping[Any, Any] = options_of(base, "state")
        found = base.get("param_groups")
        self.param_groups = (
            [g for g in found if isinstance(g, dict)] if isinstance(found, list) else []
        )
        self.said_groups = said.groups
        if folder.stage is not None:  # the whole model's groups, of which a stage may lack some
            pool = {name for own in folder.stage.groups for name in own}
            own = tuple(tuple(n for n in group if n in pool) for group in said.groups)
            mine = tuple(group for group in own if group)
            self.said_groups = own if len(own) == len(self.param_groups) else mine

    @property
    def fused(self) -> bool:
        """Whether the masters of a group are one flat."""
        return "fp32_groups_flat" in self.tree

    @property
    def wrapped(self) -> bool:
        """Whether there are masters."""
        return "fp32_groups" in self.tree or self.fused

    @property
    def layout(self) -> str:
        """See `Reading.layout`. How many ranks there were is not told, and makes no difference."""
        return "zero0:dp=1" + (",fused=true" if self.fused else "")

    @property
    def scaler(self) -> AuxItem | None:
        """Fields of the wrapper's own."""
        scale, dynamic = self.tree.get("cur_scale"), self.tree.get("dynamic_loss_scale") is True
        if not isinstance(scale, int | float) or (scale == 1.0 and not dynamic):
            return None
        state = {name: self.tree[name] for name in SCALER if name in self.tree}
        state |= {"cur_scale": scale, "dynamic_loss_scale": dynamic}
        value = {"class": "LossScaleConfig", "scale": float(scale), "state": state}
        return AuxItem("scaler", {**value, "override": None})

    @property
    def clipped(self) -> Any:
        """See `Reading.clipped`. Only a wrapper with flats says it."""
        return self.tree.get("clip_grad")

    @property
    def names(self) -> list[list[str]]:
        """The names of each group, where the optimizer has those of all its parameters; else none."""
        found = [[str(n) for n in _list(own.get("param_names"))] for own in self.param_groups]
        return found if all(found) else []

    def entries(self) -> list[list[tuple[int, ...] | None]]:
        """The shape of every entry of each group: a flat's own, and None where no state tells it."""
        if self.wrapped:
            masters = _list(self.tree.get("fp32_groups_flat" if self.fused else "fp32_groups"))
            every = [[own] if self.fused else _list(own) for own in masters]
            return [[m.shape for m in own if isinstance(m, StoredTensor)] for own in every]
        ids = [self._ids(group) for group in range(len(self.param_groups))]
        return [[_shape(list(self._entries(each))) for each in own] for own in ids]

    def optimizer(self) -> list[AuxItem]:
        """See `Reading.optimizer`."""
        stage = self.folder.stage
        pool = self.order if stage is None else {n: 0 for own in stage.groups for n in own}
        params = {
            name: value.shape
            for name in self.order
            if name in pool and isinstance(value := self.module[name], StoredTensor)
        }
        names = self._fused(params) if self.fused else self._single(params)
        shapes = [{name: params[name] for name in own} for own in names]
        number_of = {name: i for i, own in enumerate(names) for name in own}
        self._absent(names)
        return self._groups_item(shapes, number_of, self.param_groups if any(names) else [])

    def _absent(self, names: Sequence[Sequence[str]]) -> None:
        """The states that members were never given, since no gradient reached them."""
        given = {key.name for key, spec in self.specs.items() if spec.kind == "state"}
        for group, (own, hyper) in enumerate(zip(names, self.param_groups, strict=False)):
            for name in (n for n in own if n not in given):
                param = self.specs[Key(name, "param")]
                for slot, shape in slots_of(hyper, param.shape).items():
                    self._spec(Key(name, slot), shape, param.dtype, group, presence="none")

    def _told(self, group: int, params: Mapping[str, Any]) -> list[str] | None:
        """The names of a group, if the file or the user says them."""
        listed = groups_of(self.folder.common)
        own = self.param_groups[group] if group < len(self.param_groups) else {}
        names = [str(name) for name in _list(own.get("param_names"))]
        if any(listed) and group < len(listed):
            names = list(listed[group])
        elif not names and group < len(self.said_groups):
            names = list(self.said_groups[group])
        return names if names and set(names) <= set(params) else None

    def _fused(self, params: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
        flats = [t for t in _list(self.tree["fp32_groups_flat"]) if isinstance(t, StoredTensor)]
        sizes = {name: prod(shape) for name, shape in params.items()}
        told = [self._told(group, params) for group in range(len(flats))]
        if any(
            own is None or sum(sizes[n] for n in own) != prod(flat.shape)
            for own, flat in zip(told, flats, strict=True)
        ):
            found = names_in_flats(
                [prod(flat.shape) for flat in flats],
                sizes,
                self.file.path,
                lambda flat, at, name: self._alike(flats[flat], at, name),
            )
        else:
            found = [own or [] for own in told]
        for group, (flat, own) in enumerate(zip(flats, found, strict=True)):
            at = 0
            ids = self._ids(group)
            entries = list(self._entries(ids[0] if ids else None))
            for name in own:
                stop = sizes[name]
                for slot, value in (("param", flat), *entries):
                    if isinstance(value, StoredTensor):
                        key = Key(name, slot)
                        self._spec(key, params[name], value.dtype, group)
                        self.files.span(key, params[name], (0, stop, at), self.file, value)
                    else:
                        self.scalars.setdefault(name, {})[slot] = value
                at += stop
        return found

    def _single(self, params: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
        ids = [self._ids(group) for group in range(len(self.param_groups))]
        masters = [[*_list(own)] for own in _list(self.tree.get("fp32_groups", []))]
        states = {each: list(self._entries(each)) for own in ids for each in own}
        shapes = self.entries()
        like = None
        if self.wrapped:
            entries = [m for own in masters for m in own if isinstance(m, StoredTensor)]

            def like(entry: int, name: str) -> bool:
                return self._alike(entries[entry], 0, name)

            if [len(own) for own in shapes] != [len(own) for own in ids]:
                cause = "has not one master for each entry of its optimizer"
                raise Refused([Finding("bad-file", self.file.path, cause)])
        told = [self._told(group, params) for group in range(len(ids))]
        if any(
            own is None
            or len(own) != len(has)
            or any(s not in {None, params[n]} for n, s in zip(own, has, strict=True))
            for own, has in zip(told, shapes, strict=True)
        ):
            found = names_of_entries(shapes, params, self.file.path, like)
        else:
            found = [[*own] for own in told if own is not None]
        for group, own in enumerate(found):
            for place, name in enumerate(own):
                if name is None:
                    continue
                master = masters[group][place] if self.wrapped else self.module[name]
                home = self.file if self.wrapped else self.home(name)
                for slot, value in (("param", master), *states[ids[group][place]]):
                    if isinstance(value, StoredTensor):
                        self._spec(Key(name, slot), value.shape, value.dtype, group)
                        file = home if slot == "param" else self.file
                        self.files.whole(Key(name, slot), file, value)
                    else:
                        self.scalars.setdefault(name, {})[slot] = value
        return [[name for name in own if name is not None] for own in found]

    def _ids(self, group: int) -> list[Any]:
        own = self.param_groups[group].get("params") if group < len(self.param_groups) else None
        return [each for each in _list(own) if isinstance(each, int)]

    def _entries(self, each: Any) -> Iterator[tuple[str, Any]]:
        """The state tensors and numbers of an entry."""
        state = self.state.get(each)
        for slot, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, StoredTensor) and value.shape:
                yield str(slot), value
            elif (found := number(value, self.file)) is not None:
                yield str(slot), found

    def _weight(self, name: str, file: TorchFile, tensor: StoredTensor) -> None:
        if self.wrapped or Key(name, "param") not in self.specs:
            super()._weight(name, file, tensor)

    def _alike(self, master: StoredTensor, at: int, name: str) -> bool:
        """Whether samples of a weight are what a master from index `at` on rounds to.

        Right after initialisation a master is ahead by one decay: it need not round exactly.
        """
        weight = self.module[name]
        count = prod(weight.shape)
        if row_major_strides(weight.shape) != weight.strides or not count:
            return True
        low = self.home(name).buffer(weight).array()
        high = self.file.buffer(master).array()
        for start in {0, max(count // 2 - _WINDOW, 0), max(count - _WINDOW, 0)}:
            stop = min(start + _WINDOW, count)
            a = _floats(low[weight.offset + start : weight.offset + stop], weight.dtype)
            b = _floats(high[master.offset + at + start : master.offset + at + stop], master.dtype)
            if a.shape != b.shape or not np.allclose(a, b, rtol=2**-7, atol=1e-6, equal_nan=True):
                return False
        return True


def _shape(entries: Sequence[tuple[str, Any]]) -> tuple[int, ...] | None:
    return next((v.shape for _, v in entries if isinstance(v, StoredTensor)), None)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _floats(raw: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)
