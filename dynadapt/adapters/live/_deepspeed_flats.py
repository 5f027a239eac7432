"""What all of DeepSpeed's optimizers have in common: tensors of many parameters, and their states.

Each of them gives torch's optimizer *units* in place of the model's parameters: a unit is a tensor in
which pieces of several parameters lie one after another (or one parameter alone). A rank's piece of a
parameter is a `Share`. Where pieces lie, and how copies of them are rebuilt, is in the modules of the
single optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dynadapt.adapters._aux import plain
from dynadapt.adapters._common import decided_names, fresh_state, optimizer_slots
from dynadapt.adapters._odd_tensors import odd_state
from dynadapt.adapters.live._deepspeed_cut import cuts_of
from dynadapt.adapters.live._deepspeed_pipe import parameters_of
from dynadapt.adapters.live._deepspeed_share import (
    bad_extra,
    is_scalar,
    is_slot,
    kind_of,
    put,
    replaced,
    same_memory,
    spec_of,
    state_keys,
    unknown_optimizer,
)
from dynadapt.errors import Finding
from dynadapt.vps.keys import canonical_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dynadapt.adapters._common import BufferTable
    from dynadapt.adapters.live._deepspeed_share import Share
    from dynadapt.vps.keys import KeySpec

__all__ = ["Flats"]


class Flats(ABC):
    """One engine's optimizer, seen as shares of parameters in units. Made anew for every call."""

    #: The units keep one step for many parameters.
    flat_step: ClassVar[bool] = True
    #: DeepSpeed steps the optimizer when it is built, so masters differ from the weights at first.
    hidden_step: ClassVar[bool] = False
    #: `renew` needs the other ranks.
    communicates: ClassVar[bool] = False

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self.parameters = parameters_of(engine)
        self.cuts, self.bad_cuts = cuts_of(engine)
        self.shares: tuple[Share, ...] = tuple(self._shares())

    # --- what the single optimizers say -------------------------------------------------------

    @property
    @abstractmethod
    def masters(self) -> Sequence[torch.Tensor]:
        """The authoritative copy of each unit: what torch's optimizer has as its parameter."""

    @property
    @abstractmethod
    def copies(self) -> Sequence[torch.Tensor]:
        """For each unit the weights of the same elements; the same memory where there is no copy."""

    @property
    @abstractmethod
    def unit_groups(self) -> Sequence[int]:
        """The param group of each unit."""

    @abstractmethod
    def _shares(self) -> Iterator[Share]:
        """All parameters of the model, in its order, wherever the optimizer put them."""

    @abstractmethod
    def pending_backwards(self) -> int:
        """Backward passes whose gradients wait for a step: at least so many, and 0 if there is none."""

    @abstractmethod
    def renew(self) -> None:
        """After a write to masters and states: rebuild the weights, forget what is stale."""

    def drop_copies(self) -> None:  # noqa: B027 (most have none)
        """Drop weights that an evaluation left gathered. No communication."""

    def state_changed(self) -> None:  # noqa: B027 (most have none)
        """States were made or taken back: forget links to them."""

    @property
    def rank(self) -> int:
        """This rank's number among the ranks that the state is cut over."""
        from deepspeed import comm

        return int(comm.get_rank(group=self.process_group))

    @property
    def process_group(self) -> Any:
        """The ranks that the state is cut over, or that hold replicas of it."""
        return self.engine.seq_data_parallel_group

    def loose_gradients(self) -> bool:
        """Whether gradients wait at parameters; at those outside the optimizer they stay for good."""
        return any(s.named.tensor.grad is not None for s in self.shares if s.unit >= 0)

    # --- reading ------------------------------------------------------------------------------

    def state(self, unit: int) -> dict[str, Any]:
        """The optimizer's state of one unit; empty before its first step."""
        found: dict[str, Any] = self.inner.state.get(self.masters[unit]) or {}
        return {label: value for label, value in found.items() if value is not None}

    def slots(self, unit: int) -> dict[str, torch.Tensor]:
        """The unit's state tensors: shaped like its master, or with its members whole."""
        master, whole = self.masters[unit], self.whole_slots(unit)
        return {k: v for k, v in self.state(unit).items() if k in whole or is_slot(k, v, master)}

    def whole_slots(self, unit: int) -> frozenset[str]:
        """The state tensors in which all that has a piece in the unit lies whole, not in pieces."""
        return frozenset()

    def within(self, share: Share, label: str, tensor: torch.Tensor) -> torch.Tensor:
        """What a state tensor of the share's unit holds of its parameter."""
        return share.within(tensor)

    def state_dtype(self, unit: int, label: str) -> torch.dtype:
        """In which dtype the optimizer makes a state tensor."""
        return self.masters[unit].dtype

    def fresh_state(self, unit: int) -> dict[str, Any]:
        """The unit's state before its first step, as the optimizer would make it."""
        master = self.masters[unit].detach()
        group = self.inner.param_groups[self.unit_groups[unit]]
        state = fresh_state(self.inner, group, master) or {}
        for label, value in state.items():
            dtype = self.state_dtype(unit, label)
            if is_slot(label, value, master) and dtype != master.dtype:
                state[label] = value.to(dtype)
        return state

    def scalars(self, unit: int) -> dict[str, int | float]:
        """The unit's state numbers; a whole step count is an integer."""
        found = {k: plain(v) for k, v in self.state(unit).items() if is_scalar(k, v)}
        return {k: int(v) if k == "step" and v == int(v) else v for k, v in found.items()}

    def odd_state(self) -> list[Finding]:
        """State that is neither a number nor shaped like the unit it belongs to."""
        findings = []
        members: dict[int, str] = {}
        for share in self.shares:
            members.setdefault(share.unit, share.named.name)
        for unit, master in enumerate(self.masters):
            where = members.get(unit, f"unit {unit}")
            entries = self.state(unit).items()
            whole = self.whole_slots(unit)
            quantised = {label: odd_state(where, label, value) for label, value in entries}
            findings += [finding for finding in quantised.values() if finding is not None]
            findings += [
                Finding(
                    "unsupported-state",
                    f"{members[unit]}/{label}" if unit in members else f"unit {unit}: {label}",
                    f"{type(self.inner).__name__} keeps {kind_of(value)} for a tensor of "
                    f"{master.numel()} elements",
                    "use an optimizer whose state has the shape of its parameter",
                )
                for label, value in entries
                if quantised[label] is None
                and label not in whole
                and not is_scalar(label, value)
                and not is_slot(label, value, master)
            ]
        return findings

    def describe_extra(
        self, table: BufferTable, label: str, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[list[KeySpec], list[Finding]]:
        """A user's copies of parameters: whole on every rank, or cut as DeepSpeed cuts the weights."""
        by_name = {name: share for share in self.shares for name in share.names}
        specs: list[KeySpec] = []
        findings: list[Finding] = []
        for raw, tensor in sorted(tensors.items()):
            name = canonical_name(raw)
            share = by_name.get(name)
            shape = tuple(tensor.shape)
            if share is None or shape not in {share.shape, share.cut_shape}:
                findings.append(bad_extra(name, label, share, shape))
                continue
            trainable = share.named.tensor.requires_grad
            spec = spec_of(share, f"extra:{label}", tensor.dtype, trainable, kind="state")
            specs.append(spec)
            put(table, spec.key, share, tensor.detach())
        return specs, findings

    def describe(self, table: BufferTable) -> list[KeySpec]:
        """Rows of this rank's shares into `table`; the specs of all parameters."""
        specs: list[KeySpec] = []
        for share in self.shares:
            if share.nothing:
                continue  # the other ranks know what states it has
            for spec, tensor in self._slots_of(share):
                specs.append(spec)
                if tensor is not None:
                    put(table, spec.key, share, tensor)
        return specs

    def _slots_of(self, share: Share) -> Iterator[tuple[KeySpec, torch.Tensor | None]]:
        trainable = share.named.tensor.requires_grad
        copy = share.copy()
        if share.unit < 0:
            yield spec_of(share, "param", copy.dtype, trainable), copy
            return
        master = self.masters[share.unit]
        yield spec_of(share, "param", master.dtype, trainable), share.within(master)
        if not same_memory(master, copy):
            yield spec_of(share, "compute", copy.dtype, trainable, derived=True), copy
        made = self.slots(share.unit)
        for label, tensor in made.items():
            spec = spec_of(share, label, tensor.dtype, trainable, kind="state")
            yield spec, self.within(share, label, tensor)
        group = self.inner.param_groups[share.group]
        for label in optimizer_slots(self.inner, group) or ():
            if label not in made:
                dtype = self.state_dtype(share.unit, label)
                spec = spec_of(share, label, dtype, trainable, kind="state", presence="none")
                yield spec, None

    def names(self) -> list[list[str]]:
        """The parameters of each of the user's groups; frozen ones belong to none.

        DeepSpeed empties the groups' own lists.
        """
        found: list[list[str]] = [[] for _ in self.inner.param_groups]
        for share in self.shares:
            if share.group >= 0:
                found[share.group].append(share.named.name)
        return found

    # --- writing ------------------------------------------------------------------------------

    def make_state(self, keys: Iterable[KeySpec]) -> tuple[list[int], int, list[Finding]]:
        """Give units without state what the source holds for them: (units, bytes, findings).

        Nothing is made when there are findings. A unit none of whose members has state in the source
        stays without: that is the same state.
        """
        held: dict[str, set[str]] = {}
        for key in (key for spec in keys for key in state_keys(spec)):
            held.setdefault(key.name, set()).add(key.slot)
        wanted: dict[int, tuple[Share, set[str]]] = {}
        for share in self.shares:
            labels = set().union(*(held.get(name, set()) for name in share.names))
            if share.unit >= 0 and labels and not self.state(share.unit):
                wanted.setdefault(share.unit, (share, set()))[1].update(labels)
        findings: list[Finding] = []
        states: dict[int, dict[str, Any]] = {}
        for unit, (share, labels) in sorted(wanted.items()):
            group = self.inner.param_groups[share.group]
            slots = optimizer_slots(self.inner, group)
            if slots is None:
                findings.append(unknown_optimizer(self.inner, share))
            elif labels.intersection(slots):
                states[unit] = self.fresh_state(unit)
        if findings:
            return [], 0, findings
        for unit, state in states.items():
            self.inner.state[self.masters[unit]] = state
        tensors = [t for s in states.values() for t in s.values() if isinstance(t, torch.Tensor)]
        return list(states), sum(t.nbytes for t in tensors), []

    def drop_state(self, units: Iterable[int]) -> None:
        """Take back what `make_state` made."""
        for unit in units:
            self.inner.state.pop(self.masters[unit], None)
        self.state_changed()

    def set_scalars(
        self, keys: Iterable[KeySpec], scalars: Mapping[str, Mapping[str, int | float]]
    ) -> None:
        """Write step counts and the like into the units' states: those of the member furthest on.

        A unit whose members' state is no business of the source keeps its own.
        """
        names = set(decided_names(keys))
        known: dict[int, list[Mapping[str, int | float]]] = {}
        for share in self.shares:
            if names.intersection(share.names):
                found = [scalars[name] for name in share.names if name in scalars]
                known.setdefault(share.unit, []).extend(found)
        for unit in range(len(self.masters)):
            if unit in known:
                best = max(known[unit], key=lambda entry: entry.get("step", 0), default={})
                self.write_scalars(unit, {"step": 0, **best})

    def write_scalars(self, unit: int, values: Mapping[str, int | float]) -> None:
        """Write numbers into the state of one unit, those that it has."""
        state = self.inner.state.get(self.masters[unit]) or {}
        for label, old in state.items():
            if is_scalar(label, old) and label in values:
                state[label] = replaced(old, values[label])

    def set_group_steps(self) -> None:
        """FusedAdam starts states that it has yet to make from a count of the param group."""
        for number, group in enumerate(self.inner.param_groups):
            if "step" in group:
                units = [unit for unit, own in enumerate(self.unit_groups) if own == number]
                steps = [self.scalars(unit).get("step", 0) for unit in units]
                group["step"] = int(max(steps, default=0))

    def forget_gradients(self) -> None:
        """Zero what a unit keeps of its last gradient: it may be stepped with it once more."""
        for master in self.masters:
            if master.grad is not None:
                master.grad.zero_()

    def restore_master(self, unit: int) -> None:
        """Give a master that no longer agrees with its weights their values. No communication.

        An untouched master rounds to its weight and is left as it is.
        """
        master, copy = self.masters[unit].detach(), self.copies[unit].detach()
        if not same_memory(master, copy):
            with torch.no_grad():
                agrees = master.to(copy.dtype) == copy
                master.copy_(torch.where(agrees, master, copy.to(master.dtype)))
