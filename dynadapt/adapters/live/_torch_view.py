"""A torch train state under canonical names: its tensors, its optimizer's state, what else it keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dynadapt.adapters._aux import (
    REGROUP,
    groups_item,
    optimizer_item,
    scheduler_item,
    user_items,
    with_extra_states,
)
from dynadapt.adapters._common import (
    BufferTable,
    NamedTensor,
    is_local,
    named_buffers,
    named_parameters,
    slot_shapes,
    unwrapped,
)
from dynadapt.adapters._odd_tensors import odd_tensor, odd_tensors
from dynadapt.adapters.live import _fsdp2, _torch_aux
from dynadapt.adapters.live._coordinate import coordinate_of
from dynadapt.adapters.live._dtensor import placed_rows
from dynadapt.adapters.live._stages import apart, clash, place_of, tied_by_user, united, whole_of
from dynadapt.adapters.live._torch_optimizer import (
    Member,
    held_by,
    read_state,
    state_holder,
)
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Described, TrainState
from dynadapt.torch_dtypes import dtype_name
from dynadapt.vps.keys import Key, KeySpec, canonical_name

__all__ = ["View", "add_rows", "check_supported"]


def check_supported(model: torch.nn.Module) -> None:
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise Refused(
            [
                Finding(
                    "unsupported-framework",
                    type(model).__name__,
                    "FullyShardedDataParallel (FSDP1) is read by the adapter fsdp1",
                    "leave the choice of the adapter to dynadapt",
                )
            ]
        )


class View:
    """One rank's view of a train state.

    `optimizer` has the groups, `holder` the states: the same object, but for an optimizer that gives
    each parameter's state to one rank. `members` are all of its parameters, `held` those whose state
    is kept here. What a subclass may replace: which tensors there are, how a tensor of the optimizer
    or the user belongs to them, and what of it lies here.
    """

    #: What to do where a param group cannot take the source's hyperparameters.
    regroup = REGROUP

    #: Whether one state, with one step, is that of several tensors.
    flat_step = False

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.model = whole_of(state.model)
        self.parameters = tied_by_user(self._named(), state.tied)
        self.buffers, self.copies = apart(united(state.model, named_buffers))
        if bad := [a for a, b in self.copies if _form(a) != _form(b)]:
            raise Refused(clash(named) for named in bad)
        self.optimizer = unwrapped(state.optimizer)
        self.holder = state_holder(self.optimizer)
        self.members = self._members()
        self.held = tuple(filter(self._keeps_state, held_by(self.holder, self.members)))
        self._by_name = {
            name: named for named in self.parameters for name in (named.name, *named.aliases)
        }

    def _named(self) -> tuple[NamedTensor, ...]:
        """All parameters, once their shards are what a forward reads; raises `Refused` before."""
        check_supported(self.model)
        _fsdp2.require_sharded(self.model)
        return united(self.state.model, named_parameters)

    def _names_in(self) -> dict[int, tuple[str, ...]]:
        """For each parameter that an optimizer may have, by `id`, the names of the tensors in it."""
        return {id(each.tensor): (each.name,) for each in self.parameters}

    def _keeps_state(self, member: Member) -> bool:
        """Whether the optimizer keeps a state here for a parameter that has been trained."""
        return True

    def _shape(self, named: NamedTensor, tensor: torch.Tensor) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(tensor.shape)

    def _add_rows(
        self, table: BufferTable, key: Key, named: NamedTensor, tensor: torch.Tensor
    ) -> None:
        """Add what this rank holds of a parameter, or of a tensor that lies as a parameter does."""
        add_rows(table, key, tensor)

    def _within(self, named: NamedTensor, like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor that lies as `like`, an optimizer's parameter, does: what belongs to `named`."""
        return tensor

    def _named_by(
        self, raw: str, tensor: torch.Tensor
    ) -> tuple[tuple[NamedTensor, torch.Tensor], ...]:
        """The parameters that a tensor of the user's is a copy of, each with its part of the copy."""
        name = canonical_name(raw)
        return ((self._by_name.get(name) or NamedTensor(name, (), 0, tensor), tensor),)

    def _policies(self) -> dict[str, str]:
        """Dtypes that the wrapper computes in, where they differ from the parameters'."""
        return _fsdp2.param_policies(self.model)

    def _members(self) -> tuple[Member, ...]:
        """The optimizer's parameters in group order; raises `Refused` for one that is not the model's."""
        if self.optimizer is None:
            return ()
        names = self._names_in()
        found: list[Member] = []
        findings: list[Finding] = []
        for index, group in enumerate(self.optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                own = names.get(id(parameter))
                if own is not None:
                    found.append(Member(own, parameter, group, index))
                    continue
                findings.append(
                    Finding(
                        "foreign-parameter",
                        f"param group {index}, parameter {position} of {tuple(parameter.shape)}",
                        "the model does not hold this parameter",
                        "make the optimizer after the model is sharded, from its own parameters",
                    )
                )
        if findings:
            raise Refused(findings)
        return tuple(found)

    def group_names(self) -> list[list[str]]:
        """Per group of the optimizer, the names of its parameters."""
        names: list[list[str]] = [[] for _ in self.optimizer.param_groups]
        for member in self.members:
            names[member.group_index].extend(member.names)
        return names

    def described(self) -> Described:
        """Specs, rows, scalars and aux of this rank."""
        if findings := [*odd_tensors(self.model)]:
            raise Refused(findings)
        table = BufferTable()
        specs: list[KeySpec] = []
        groups = {name: member.group_index for member in self.members for name in member.names}
        for named in self.parameters:
            specs.append(self._spec(named, "param", named.tensor, groups.get(named.name, -1)))
            self._add_rows(table, specs[-1].key, named, named.tensor)
        specs += self._buffers(table)
        scalars = self._states(table, specs)
        specs += self._extras(table)
        return Described(
            specs=tuple(specs),
            rows=tuple(table.rows),
            buffers=dict(table.buffers),
            scalars=scalars,
            aux=self._aux(),
            coordinate=self._coordinate(),
            flat_step=self.flat_step,
        )

    def copy_buffers(self) -> None:
        """Give every stage's own copy of a buffer what the first was given."""
        with torch.no_grad():
            for first, copy in self.copies:
                _local(copy.tensor).copy_(_local(first.tensor))

    def _spec(
        self, named: NamedTensor, slot: str, tensor: torch.Tensor, group: int, **more: Any
    ) -> KeySpec:
        entries: dict[str, Any] = {
            "trainable": named.tensor.requires_grad,
            "order": named.order,
            "group": group,
            "aliases": named.aliases,
            "local": is_local(named.name, self.state.local),
        }
        key = Key(named.name, slot)
        shape = self._shape(named, tensor)
        return KeySpec(key, shape, dtype_name(tensor.dtype), **{**entries, **more})

    def _buffers(self, table: BufferTable) -> list[KeySpec]:
        specs = []
        for named in self.buffers:
            kind = "buffer" if named.persistent else "transient"
            specs.append(self._spec(named, "buffer", named.tensor, -1, kind=kind, trainable=False))
            add_rows(table, specs[-1].key, named.tensor)
        return specs

    def _states(
        self, table: BufferTable, specs: list[KeySpec]
    ) -> dict[str, dict[str, int | float]]:
        """Add the optimizer's tensors; return its scalars by parameter."""
        scalars: dict[str, dict[str, int | float]] = {}
        for member in self.held:
            tensors, numbers = read_state(self.holder, member)
            for name in member.names:
                named = self._by_name[name]
                shape = self._shape(named, member.parameter)
                known = slot_shapes(self.holder, member.group, shape) or {}
                for slot, whole in tensors.items():
                    tensor = self._within(named, member.parameter, whole)
                    spec = self._spec(named, slot, tensor, member.group_index, kind="state")
                    specs.append(spec)
                    self._add_rows(table, spec.key, named, tensor)
                more: dict[str, Any] = {"kind": "state", "presence": "none"}
                specs += [
                    replace(
                        self._spec(named, slot, member.parameter, member.group_index, **more),
                        shape=known[slot],
                    )
                    for slot in known
                    if slot not in tensors
                ]
                if numbers:
                    scalars[name] = dict(numbers)
        return scalars

    def _extras(self, table: BufferTable) -> list[KeySpec]:
        specs = []
        for label, tensors in sorted(self.state.extra.items()):
            for raw, tensor in sorted(tensors.items()):
                for named, own in self._named_by(raw, tensor):
                    specs.append(self._spec(named, f"extra:{label}", own, -1, kind="state"))
                    self._add_rows(table, specs[-1].key, named, own)
        return specs

    def _coordinate(self) -> dict[str, int]:
        if self.state.coordinate:
            return dict(self.state.coordinate)
        tensors = (named.tensor for named in self.parameters)
        meshes = _fsdp2.fsdp_meshes(self.model)
        return coordinate_of(tensors, meshes, place_of(self.state.model))

    def _aux(self) -> tuple[AuxItem, ...]:
        state = self.state
        scheduler = scheduler_item(state.scheduler)
        items: list[AuxItem | None] = [
            _torch_aux.scaler_item(state.scaler),
            AuxItem("behaviour", self.behaviour()),
            *user_items(with_extra_states(self.model, state.user), state.samples, state.counters),
        ]
        if self.optimizer is not None:
            items.append(optimizer_item(self.holder))
            groups = groups_item(self.optimizer.param_groups, self.group_names())
            # A rank's groups have its own part of a model only, and a schedule a value for each group.
            items += [item and replace(item, policy="by-part") for item in (groups, scheduler)]
        else:
            items.append(scheduler)
        return tuple(item for item in items if item is not None)

    def behaviour(self) -> dict[str, Any]:
        """What a step does by set-up rather than by state."""
        dtypes = sorted({dtype_name(named.tensor.dtype) for named in self.parameters})
        policies = self._policies()
        unlike = [a.name for a, b in self.copies if not _equal(a.tensor, b.tensor)]
        if unlike:
            policies["buffers of one name that differ between stages"] = ",".join(unlike)
        return {
            "framework": "torch",
            "precision": policies.pop("param_dtype", None) or ",".join(dtypes),
            "loss_scaling": "none" if self.state.scaler is None else "dynamic",
            **policies,
        }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _form(named: NamedTensor) -> tuple[object, ...]:
    return named.tensor.shape, named.tensor.dtype, type(named.tensor)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same here; what has no memory holds nothing."""
    a, b = _local(a), _local(b)
    return a.is_meta or b.is_meta or torch.equal(a, b)


def add_rows(table: BufferTable, key: Key, tensor: torch.Tensor) -> None:
    """Add what this rank holds of a tensor."""
    if finding := odd_tensor(str(key), tensor):
        raise Refused([finding])
    for box, view in placed_rows(str(key), tensor):
        table.add(key, box, view)
