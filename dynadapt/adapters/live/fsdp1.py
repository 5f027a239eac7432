"""FullyShardedDataParallel (FSDP1): a flat parameter per wrapped unit, cut evenly over the ranks.

How the five methods go about it:

- `quiesce` refuses while a gradient that is yet to be used holds a value, then frees gathered weights.
- `describe` reads this rank's part of each tensor from the shard of its unit's flat parameter.
- `prepare` makes the optimizer state that a fresh optimizer lacks: per flat parameter, or with
  `use_orig_params` per tensor on the ranks that hold a part of it.
- `finish` sets steps, hyperparameters and counters; gathered and low-precision copies are made anew by
  the next forward.
- `abandon` takes back what `prepare` made and puts back what it dropped.

Without `use_orig_params` an optimizer has one state, one step and one set of hyperparameters for all
tensors of a unit. A source whose tensors differ in them is refused (`step`, `hyper-conflict`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynadapt.adapters._common import whole_only
from dynadapt.adapters.live import _fsdp1
from dynadapt.adapters.live._coordinate import coordinate_of
from dynadapt.adapters.live._fsdp1_parts import Part, named_parts, units
from dynadapt.adapters.live._stages import place_of
from dynadapt.adapters.live._torch_adapter import TorchAdapter
from dynadapt.adapters.live._torch_view import View, add_rows
from dynadapt.errors import Finding, Refused
from dynadapt.vps.keys import Key, canonical_name

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dynadapt.adapters._common import BufferTable, NamedTensor
    from dynadapt.adapters.live._torch_optimizer import Member
    from dynadapt.protocols import TrainState

__all__ = ["Fsdp1Adapter"]

_FLAT = "_flat_param"


class Fsdp1Adapter(TorchAdapter):
    """Reads and writes a `TrainState` whose model has FullyShardedDataParallel units.

    >>> Fsdp1Adapter.name
    'fsdp1'
    """

    name = "fsdp1"

    def _check_step_boundary(
        self, model: torch.nn.Module, stepped: Callable[[torch.Tensor], bool]
    ) -> None:
        _fsdp1.check_supported(model)
        _fsdp1.check_step_boundary(model, stepped)

    def _reshard(self, model: torch.nn.Module) -> None:
        _fsdp1.reshard(model)

    def _view(self, state: TrainState) -> View:
        return _FlatView(state)


class _FlatView(View):
    """A state whose tensors are parts of flat parameters.

    What belongs to a tensor lies like one of three: like the shard (state of a flat), like its part
    (state with `use_orig_params`), or whole (the same with `NO_SHARD`, and what the user keeps whole).
    """

    regroup = (
        "wrap the target with use_orig_params=True and give its optimizer the source's param groups"
    )

    def __init__(self, state: TrainState) -> None:
        self._parts: dict[str, Part] = {}
        super().__init__(state)
        if refused := whole_only(self.holder) if self._parts and self.members else []:
            raise Refused(refused)
        self.flat_step = any(
            part.flat and id(part.parameter) in {id(member.parameter) for member in self.members}
            for part in self._parts.values()
        )

    def _named(self) -> tuple[NamedTensor, ...]:
        _fsdp1.check_supported(self.model)
        _fsdp1.require_sharded(self.model)
        found = named_parts(self.model)
        self._parts = {named.name: part for named, part in found if part is not None}
        return tuple(named for named, _ in found)

    def _names_in(self) -> dict[int, tuple[str, ...]]:
        names = super()._names_in()
        for name, part in self._parts.items():
            names[id(part.parameter)] = (*names.get(id(part.parameter), ()), name)
        return names

    def _keeps_state(self, member: Member) -> bool:
        parts = [self._parts[name] for name in member.names if name in self._parts]
        return not parts or any(part.is_here for part in parts)

    def _shape(self, named: NamedTensor, tensor: torch.Tensor) -> tuple[int, ...]:
        part = self._parts.get(named.name)
        return tuple(tensor.shape) if part is None else part.shape

    def _add_rows(
        self, table: BufferTable, key: Key, named: NamedTensor, tensor: torch.Tensor
    ) -> None:
        part = self._parts.get(named.name)
        if part is None or tuple(tensor.shape) == part.shape:
            add_rows(table, key, tensor)
            return
        lies = (1, len(part.span)) == (tensor.ndim, tensor.numel())
        for box, view in part.views(tensor.detach()) if lies else ():
            table.add(key, box, view)
        if not lies:
            cause = f"shape {tuple(tensor.shape)} is neither {part.shape} nor ({len(part.span)},)"
            fix = "keep one tensor per parameter, whole or shaped after this rank's part"
            raise Refused([Finding("unsupported-state", str(key), cause, fix)])

    def _within(self, named: NamedTensor, like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        part = self._parts.get(named.name)
        if part is not None and part.flat and tensor.shape == like.shape:
            return part.of_flat(tensor)
        return tensor

    def _named_by(
        self, raw: str, tensor: torch.Tensor
    ) -> tuple[tuple[NamedTensor, torch.Tensor], ...]:
        """A copy of a flat parameter, under its name, is one of each tensor in it."""
        name = canonical_name(raw)
        if name.rpartition(".")[2] != _FLAT:
            return super()._named_by(raw, tensor)
        at = name.removesuffix(_FLAT).removesuffix(".")
        flats = {n: u._handle.flat_param for n, u in units(self.model)}
        return tuple(
            (self._by_name[each], self._within(self._by_name[each], flats[at], tensor))
            for each, part in self._parts.items()
            if part.parameter is flats.get(at)
        )

    def _coordinate(self) -> dict[str, int]:
        if self.state.coordinate:
            return dict(self.state.coordinate)
        place = place_of(self.state.model)
        every = [unit for _, unit in units(self.model)]
        meshes = tuple({id(u._device_mesh): u._device_mesh for u in every}.values())
        if all(mesh is not None for mesh in meshes) and meshes:
            return coordinate_of((), meshes, place)
        if not every:
            return coordinate_of((), (), place)
        first = every[0]
        replicas = getattr(first, "_inter_node_pg", None)
        replica = 0 if replicas is None else replicas.rank()
        return {**place, "dp": replica * first.world_size + first.rank}

    def _policies(self) -> dict[str, str]:
        return _fsdp1.param_policies(self.model)
