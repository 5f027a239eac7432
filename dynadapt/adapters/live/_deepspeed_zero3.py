"""ZeRO stage 3: where a rank's part of each parameter lies, and how its copies are rebuilt.

DeepSpeed cuts every parameter, flattened and padded to a multiple of the ranks, into equal pieces.
The pieces of one sub-group lie one after another in one flat fp32 tensor (the master), in one flat
low-precision tensor (`ds_tensor`, what a forward gathers), and in one flat tensor per optimizer slot.
Parameters outside the optimizer have a `ds_tensor` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dynadapt.adapters._aux import plain
from dynadapt.adapters._common import (
    BufferTable,
    NamedTensor,
    dtype_name,
    fresh_state,
    named_parameters,
    optimizer_slots,
)
from dynadapt.errors import Finding
from dynadapt.vps.box import Box, Span
from dynadapt.vps.keys import Key, KeySpec, canonical_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["Share", "Zero3"]


@dataclass(frozen=True, eq=False)
class Share:
    """This rank's piece of one parameter: elements `span`, at `offset` in sub-group `sub_group`.

    `padded` counts the piece with its padding. A parameter outside the optimizer has no sub-group
    (-1), and its piece is its `ds_tensor`.
    """

    named: NamedTensor
    span: Span
    padded: int
    sub_group: int = -1
    offset: int = 0
    group: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's own shape, unpadded; the parameter itself may be empty by now."""
        return tuple(self.named.tensor.ds_shape)  # type: ignore[attr-defined]

    @property
    def partition(self) -> torch.Tensor:
        """The low-precision piece, padding included."""
        return self.named.tensor.ds_tensor.detach()  # type: ignore[attr-defined, no-any-return]

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """The piece's true elements in one of its sub-group's flat tensors."""
        return flat.detach().narrow(0, self.offset, len(self.span))

    def padding(self, flat: torch.Tensor) -> torch.Tensor:
        """What follows them up to the next piece."""
        unused = self.padded - len(self.span)
        return flat.detach().narrow(0, self.offset + len(self.span), unused)


class Zero3:
    """One engine's ZeRO-3 optimizer, seen as shares of parameters. Made anew for every call."""

    stage = 3

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.inner = engine.optimizer.optimizer
        self.shares = tuple(self._shares())

    def _shares(self) -> Iterator[Share]:
        """All parameters of the model, in its order, wherever the optimizer put them."""
        place: dict[int, tuple[int, int]] = {}
        for index, members in enumerate(self.optimizer.fp16_groups):
            offset = 0
            for member in members:
                place[id(member)] = (index, offset)
                offset += member.partition_numel()
        for named in named_parameters(self.engine.module):
            param: Any = named.tensor
            padded = param.ds_tensor.ds_numel
            start = min(param.ds_zero_partition_rank * padded, param.ds_numel)
            span = Span(start, min(start + padded, param.ds_numel))
            if id(param) not in place:
                yield Share(named, span, padded)
                continue
            index, offset = place[id(param)]
            group = self.optimizer.sub_group_to_group_id[index]
            yield Share(named, span, padded, index, offset, group)

    # --- a step boundary ----------------------------------------------------------------------

    def pending_backwards(self) -> int:
        """Backward passes whose gradients wait for a step.

        DeepSpeed counts one only when the next forward begins, hence the flag beside the count; both
        are cleared by `step` and by `zero_grad`.
        """
        optimizer = self.optimizer
        count = optimizer.micro_step_id + bool(optimizer._epilogue_ran_this_backward)
        loose = any(share.named.tensor.grad is not None for share in self.shares)
        return max(int(count), int(loose))

    def drop_copies(self) -> None:
        """Free gathered weights and hpZ's secondary pieces, so that the next forward gathers anew.

        In this order: freeing a gathered weight *makes* its secondary piece. DeepSpeed's own
        `invalidate_secondary_tensor` forgets parameters outside the optimizer.
        """
        self.optimizer._partition_all_parameters()
        for share in self.shares:
            param: Any = share.named.tensor
            param.ds_secondary_tensor = None

    # --- reading ------------------------------------------------------------------------------

    def master(self, share: Share) -> torch.Tensor:
        """The flat tensor that holds the authoritative copy of a share in the optimizer."""
        flat: torch.Tensor = self.optimizer.fp32_partitioned_groups_flat[share.sub_group]
        return flat

    def state(self, sub_group: int) -> dict[str, Any]:
        """The optimizer's state of one sub-group; empty before its first step."""
        flat = self.optimizer.fp32_partitioned_groups_flat[sub_group]
        found: dict[str, Any] = self.inner.state.get(flat) or {}
        return {label: value for label, value in found.items() if value is not None}

    def slots(self, sub_group: int) -> dict[str, torch.Tensor]:
        """The sub-group's state tensors that are shaped like its master."""
        flat = self.optimizer.fp32_partitioned_groups_flat[sub_group]
        return {k: v for k, v in self.state(sub_group).items() if _is_slot(k, v, flat)}

    def scalars(self, sub_group: int) -> dict[str, int | float]:
        """The sub-group's state numbers; a whole step count is an integer."""
        found = {k: plain(v) for k, v in self.state(sub_group).items() if _is_scalar(k, v)}
        return {k: int(v) if k == "step" and v == int(v) else v for k, v in found.items()}

    def odd_state(self) -> list[Finding]:
        """State that is neither a number nor shaped like the flat tensor it belongs to."""
        findings = []
        for index, flat in enumerate(self.optimizer.fp32_partitioned_groups_flat):
            names = [s.named.name for s in self.shares if s.sub_group == index]
            findings += [
                Finding(
                    "unsupported-state",
                    f"{names[0]}/{label}" if names else f"sub-group {index}: {label}",
                    f"{type(self.inner).__name__} keeps {_kind_of(value)} for a flat tensor of "
                    f"{flat.numel()} elements",
                    "use an optimizer whose state has the shape of its parameter",
                )
                for label, value in self.state(index).items()
                if not _is_scalar(label, value) and not _is_slot(label, value, flat)
            ]
        return findings

    def describe_extra(
        self, table: BufferTable, label: str, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[list[KeySpec], list[Finding]]:
        """A user's copies of parameters: whole on every rank, or cut as DeepSpeed cuts `ds_tensor`."""
        by_name = {n: s for s in self.shares for n in (s.named.name, *s.named.aliases)}
        specs: list[KeySpec] = []
        findings: list[Finding] = []
        for raw, tensor in sorted(tensors.items()):
            name = canonical_name(raw)
            share = by_name.get(name)
            shape = tuple(tensor.shape)
            if share is None or shape not in {share.shape, (share.padded,)}:
                findings.append(_bad_extra(name, label, share, shape))
                continue
            trainable = share.named.tensor.requires_grad
            spec = _spec(share, f"extra:{label}", tensor.dtype, trainable, kind="state")
            specs.append(spec)
            if shape == share.shape:
                table.add(spec.key, Box.whole(shape), tensor.detach())
            elif len(share.span):
                table.add_flat(spec.key, share.span.boxes(share.shape), tensor.detach())
        return specs, findings

    def describe(self, table: BufferTable) -> list[KeySpec]:
        """Rows of this rank's shares into `table`; the specs of all parameters."""
        specs: list[KeySpec] = []
        for share in self.shares:
            boxes = share.span.boxes(share.shape)
            for spec, flat in self._slots_of(share):
                specs.append(spec)
                if flat is not None and len(share.span):
                    table.add_flat(spec.key, boxes, flat)
        return specs

    def _slots_of(self, share: Share) -> Iterator[tuple[KeySpec, torch.Tensor | None]]:
        trainable = share.named.tensor.requires_grad
        partition = share.partition.narrow(0, 0, len(share.span))
        if share.sub_group < 0:
            yield _spec(share, "param", partition.dtype, trainable), partition
            return
        flat = self.master(share)
        yield _spec(share, "param", flat.dtype, trainable), share.within(flat)
        # In a pure fp32 run the master *is* the memory that a forward gathers.
        if not same_memory(flat, partition):
            yield _spec(share, "compute", partition.dtype, trainable, derived=True), partition
        made = self.slots(share.sub_group)
        for label, tensor in made.items():
            spec = _spec(share, label, tensor.dtype, trainable, kind="state")
            yield spec, share.within(tensor)
        group = self.inner.param_groups[share.group]
        for label in optimizer_slots(self.inner, group) or ():
            if label not in made:
                spec = _spec(share, label, flat.dtype, trainable, kind="state", presence="none")
                yield spec, None

    def names(self) -> list[list[str]]:
        """The parameters of each of the user's groups; frozen ones belong to none.

        The groups' own lists are empty outside of a step.
        """
        found: list[list[str]] = [[] for _ in self.inner.param_groups]
        for share in self.shares:
            if share.group >= 0:
                found[share.group].append(share.named.name)
        return found

    # --- writing ------------------------------------------------------------------------------

    def make_state(self, keys: Iterable[KeySpec]) -> tuple[list[torch.Tensor], int, list[Finding]]:
        """Give sub-groups without state what the source holds for them: (flats, bytes, findings).

        Nothing is made when there are findings. A sub-group none of whose members has state in the
        source stays without: that is the same state.
        """
        held = {key for spec in keys for key in _state_keys(spec)}
        wanted: dict[int, tuple[Share, set[str]]] = {}
        for share in self.shares:
            own = (share.named.name, *share.named.aliases)
            labels = {key.slot for key in held if key.name in own}
            if share.sub_group >= 0 and labels and not self.state(share.sub_group):
                wanted.setdefault(share.sub_group, (share, set()))[1].update(labels)
        findings: list[Finding] = []
        states: dict[int, dict[str, Any]] = {}
        for index, (share, labels) in sorted(wanted.items()):
            group = self.inner.param_groups[share.group]
            slots = optimizer_slots(self.inner, group)
            if slots is None:
                findings.append(_unknown(self.inner, share))
            elif labels.intersection(slots):
                made = fresh_state(self.inner, group, self.master(share).detach())
                states[index] = made or {}
        if findings:
            return [], 0, findings
        flats = []
        for index, state in states.items():
            flat = self.optimizer.fp32_partitioned_groups_flat[index]
            self.inner.state[flat] = state
            flats.append(flat)
        tensors = [t for s in states.values() for t in s.values() if isinstance(t, torch.Tensor)]
        return flats, sum(t.nbytes for t in tensors), []

    def set_scalars(self, scalars: Mapping[str, Mapping[str, int | float]]) -> None:
        """Write step counts and the like into the flat states: those of the member furthest on."""
        steps: dict[int, int | float] = {}
        for index in range(len(self.optimizer.fp32_partitioned_groups_flat)):
            members = [s for s in self.shares if s.sub_group == index]
            known = [scalars[n] for s in members for n in _any_name(s, scalars)]
            best = max(known, key=lambda entry: entry.get("step", 0), default={})
            state = self.inner.state.get(self.optimizer.fp32_partitioned_groups_flat[index]) or {}
            for label, old in state.items():
                if _is_scalar(label, old) and (label == "step" or label in best):
                    state[label] = _replaced(old, best.get(label, 0))
            group = self.optimizer.sub_group_to_group_id[index]
            steps[group] = max(steps.get(group, 0), best.get("step", 0))
        for group, step in steps.items():
            # FusedAdam starts states that it has yet to make from this count.
            if "step" in self.inner.param_groups[group]:
                self.inner.param_groups[group]["step"] = int(step)

    def renew(self) -> None:
        """After a write to masters and frozen pieces: renew the weights' pieces, zero what is stale.

        No communication; the persistent parameters are gathered by the next forward.
        """
        self.drop_copies()
        with torch.no_grad():
            for share in self.shares:
                if share.sub_group < 0:
                    share.padding(share.partition).zero_()
                    continue
                for flat in (self.master(share), *self.slots(share.sub_group).values()):
                    share.padding(flat).zero_()
            # A parameter that a forward does not use is stepped with its last gradient again, so
            # gradients of weights that are gone must not stay.
            self.optimizer.grad_partitions_flat_buffer.zero_()
            for flat in self.optimizer.fp32_partitioned_groups_flat:
                if flat.grad is not None:
                    flat.grad.zero_()
        for index in range(len(self.optimizer.fp16_groups)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(index)

    def restore_masters(self) -> None:
        """Give masters that no longer agree with the weights the weights' values. No communication.

        An untouched master rounds to its weight and is left as it is.
        """
        with torch.no_grad():
            for index, flat in enumerate(self.optimizer.fp32_partitioned_groups_flat):
                low = self.optimizer.fp16_partitioned_groups_flat[index].detach()
                master = flat.detach()
                if not same_memory(master, low):
                    agrees = master.to(low.dtype) == low
                    master.copy_(torch.where(agrees, master, low.to(master.dtype)))


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are views of one storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _spec(share: Share, slot: str, dtype: torch.dtype, trainable: bool, **more: Any) -> KeySpec:
    return KeySpec(
        Key(share.named.name, slot),
        share.shape,
        dtype_name(dtype),
        trainable=trainable,
        order=share.named.order,
        group=share.group,
        aliases=share.named.aliases,
        **more,
    )


def _state_keys(spec: KeySpec) -> tuple[Key, ...]:
    """The key of an optimizer's tensor under each of its names, if the source really holds it."""
    if spec.kind != "state" or not spec.moves or spec.key.slot.startswith("extra:"):
        return ()
    return tuple(Key(name, spec.key.slot) for name in (spec.key.name, *spec.aliases))


def _any_name(share: Share, scalars: Mapping[str, Any]) -> Sequence[str]:
    return [n for n in (share.named.name, *share.named.aliases) if n in scalars]


def _is_scalar(label: str, value: Any) -> bool:
    """A number, in whatever form; a flat tensor of one element is none, unless it is a step."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 or (label == "step" and value.numel() == 1)
    return isinstance(value, int | float)


def _is_slot(label: str, value: Any, flat: torch.Tensor) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not _is_scalar(label, value)
    return is_tensor and bool(value.shape == flat.shape)


def _replaced(old: Any, value: int | float) -> Any:
    """The new number in the form of the old one; a tensor keeps its identity."""
    if isinstance(old, torch.Tensor):
        return old.fill_(value)
    return type(old)(value)


def _kind_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _unknown(optimizer: Any, share: Share) -> Finding:
    return Finding(
        "unknown-optimizer",
        share.named.name,
        f"{type(optimizer).__name__} has not stepped yet and its state cannot be made for it",
        "take one step with the target before the migration, or use an optimizer of torch or DeepSpeed",
    )


def _bad_extra(name: str, label: str, share: Share | None, shape: tuple[int, ...]) -> Finding:
    cause = "the model has no such parameter"
    if share is not None:
        cause = (
            f"shape {list(shape)} is neither {list(share.shape)} nor this rank's [{share.padded}]"
        )
    return Finding("extra-shape", f"{name}/extra:{label}", cause, "keep one tensor per parameter")
