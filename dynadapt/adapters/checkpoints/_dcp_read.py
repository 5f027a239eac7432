"""One pass over a torch distributed checkpoint: which tensor of a training state each entry is."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.adapters._hyper import hyper_in_files
from dynadapt.adapters.checkpoints._dcp_chunks import Chunks
from dynadapt.adapters.checkpoints._dcp_metadata import Entry, boxes
from dynadapt.adapters.checkpoints._dcp_tree import sorted_out
from dynadapt.adapters.checkpoints._names import looks_like_buffer
from dynadapt.adapters.checkpoints._optimizer_kinds import FACTORED, SCALARS, family_told, slots_of
from dynadapt.adapters.checkpoints._optimizer_names import dealt
from dynadapt.adapters.checkpoints._plain import MARK
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Described
from dynadapt.vps.keys import Key
from dynadapt.vps.layout import file_endpoint
from dynadapt.vps.wire import encodable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.adapters.checkpoints._dcp_tree import Optimizer, Saved

__all__ = ["OWN", "Reading"]

SCHEDULES = frozenset({"last_epoch", "last_batch_iteration"})
"""What torch's schedules count, and DeepSpeed's."""

SMALL = 64 << 10
"""Bytes up to which a tensor that belongs to no model is a value, such as the state of a generator."""

SAMPLE = 64
"""Elements that two tensors are first compared by."""

OWN = "dynadapt"
"""The entry that holds what the format has no place for, in a checkpoint that was written here."""


class Reading(Chunks):
    """One pass over a checkpoint, in one folder or, as Accelerate has it, model and optimizer apart.

    Whether an entry of the model is a buffer is told by what is trained, by whether it is sharded as
    parameters are, and by its name. One that is not trained, and equal bit by bit to one that is, is tied
    to it: the format holds both.
    """

    def described(self) -> Described:
        """All of it; raises `Refused` with every finding."""
        saved = sorted_out(self.entries, self._object)
        own = saved.rest.pop((OWN,), None)
        self.told: dict[str, Any] = own if isinstance(own, dict) else {}
        self._model(saved)
        for label, tensors in saved.copies.items():
            for name, entry in tensors.items():
                self._tensor(Key(name, f"extra:{label}"), entry, kind="state")
        self._rest(saved)
        if self.findings:
            raise Refused(self.findings)
        files = {file_endpoint(name): tuple(rows) for name, rows in self.rows.items()}
        return Described(
            tuple(self.specs.values()),
            (),
            self.buffers,
            self.scalars,
            tuple(self.aux),
            files=files,
            written=self._written(saved),
            nameless="files",
        )

    def _written(self, saved: Saved) -> str:
        """What asks for a checkpoint that is cut alike; nothing if it is cut in another way."""
        cut = [entry for entry in saved.model.values() if len(entry.chunks) > 1]
        ranks = max((len(entry.chunks) for entry in cut), default=1)
        alike = all(
            [chunk.box for chunk in entry.chunks] == [box for _, box in boxes(entry.shape, ranks)]
            for entry in cut
        )
        if ranks == 1:
            return "dcp"
        return f"dcp/fsdp2:dp={ranks}" if alike else ""

    def _model(self, saved: Saved) -> None:
        if saved.optimizer is not None and saved.optimizer.is_numbered:
            self._name(saved, saved.optimizer)
        group_of: dict[str, int] = {}
        hypers: list[dict[str, Any]] = []
        for number, (names, hyper) in enumerate(saved.optimizer.groups if saved.optimizer else ()):
            group_of |= dict.fromkeys(names, number)
            plain = hyper_in_files({k: self._plain(v) for k, v in hyper.items()})
            value = {k: v for k, v in plain.items() if encodable(v)}
            hypers.append({"names": list(names), "hyper": value})
        aliases = self._ties(saved, group_of)
        tied = {alias for own in aliases.values() for alias in own}
        buffers = self._buffers(saved, group_of)
        order = 0
        for name, entry in saved.model.items():
            if name in tied:
                continue
            if name in buffers:
                self._tensor(Key(name, "buffer"), entry, kind="buffer", trainable=False)
                continue
            group = group_of.get(name, -1)
            trainable = group >= 0 or saved.optimizer is None
            more: dict[str, Any] = {"trainable": trainable, "group": group, "order": order}
            self._tensor(Key(name, "param"), entry, aliases=aliases.get(name, ()), **more)
            order += 1
        dtypes = sorted({s.dtype for s in self.specs.values() if s.key.slot == "param"})
        behaviour = {"framework": "torch", "precision": ",".join(dtypes)}
        self.aux.append(AuxItem("behaviour", behaviour))
        if saved.optimizer is not None:
            self._states(saved.optimizer)
            self._absent(hypers)
            self.aux.append(AuxItem("param_groups", hypers))
            states = {key.slot for key, spec in self.specs.items() if spec.kind == "state"}
            family = family_told((group["hyper"] for group in hypers), states)
            self.aux += [AuxItem("optimizer", family)] if family else []

    def _name(self, saved: Saved, optimizer: Optimizer) -> None:
        """Give an optimizer that numbers its parameters their names."""
        ties = self._ties(saved, dict.fromkeys(saved.model, 0))
        tied = {alias for own in ties.values() for alias in own}
        params = [
            (name, entry.shape)
            for name, entry in saved.model.items()
            if name not in tied and not looks_like_buffer(name, entry.dtype)
        ]
        entries = [
            [_shape_of(optimizer.states.get(number, {})) for number in numbers]
            for numbers, _ in optimizer.groups
        ]
        saved.optimizer = optimizer.renamed(dealt(entries, params, str(self.root)))

    def _states(self, optimizer: Optimizer) -> None:
        for name, own in optimizer.states.items():
            param = self.specs.get(Key(name, "param"))
            if param is None:
                cause = "has optimizer state, and is no parameter of the model that was saved"
                self.findings.append(Finding("groups", name, cause, "save model and optimizer"))
                continue
            for slot, value in own.items():
                if isinstance(value, Entry) and not _is_number(slot, value, param.shape):
                    self._tensor(Key(name, slot), value, like=param, kind="state")
                elif (number := self._plain(value)) is not None and type(number) in {int, float}:
                    whole = slot == "step" and number == int(number)
                    self.scalars.setdefault(name, {})[slot] = int(number) if whole else number
                elif value is not None:
                    cause = f"the optimizer keeps a {type(value).__name__} there"
                    fix = "only tensors and numbers can be read"
                    self.findings.append(Finding("unsupported-state", f"{name}/{slot}", cause, fix))

    def _absent(self, groups: list[dict[str, Any]]) -> None:
        """The states that members were never given, since no gradient reached them."""
        have: dict[str, set[str]] = {}
        for key, spec in self.specs.items():
            if spec.kind == "state":
                have.setdefault(key.name, set()).add(key.slot)
        for group in groups:
            for name in group["names"]:
                param = self.specs.get(Key(name, "param"))
                slots = slots_of(group["hyper"], param.shape) if param is not None else {}
                if param is None or not have.get(name, set()) <= slots.keys():
                    continue
                for slot, shape in slots.items():  # the same order in every process
                    key = Key(name, slot)
                    more: dict[str, Any] = {"kind": "state", "presence": "none"}
                    self.specs.setdefault(key, replace(param, key=key, shape=shape, **more))

    def _rest(self, saved: Saved) -> None:
        """What is neither model nor optimizer: a schedule, small tensors and objects as values."""
        user: dict[str, Any] = {}
        for names, value in saved.rest.items():
            if isinstance(value, Entry):
                if value.nbytes > SMALL:
                    *front, name = map(str, names)
                    label = ".".join(front) or "other"
                    self._tensor(Key(name, f"extra:{label}"), value, kind="state")
                    continue
                array = self._small(value)
                data = b"" if array is None else array.tobytes()
                value = {MARK: [value.dtype, list(value.shape), data]}
            elif not encodable(value):
                continue
            node = user
            for part in names[:-1]:
                node = node.setdefault(str(part), {})
            node[str(names[-1])] = value
        for name, value in user.items():
            schedule = isinstance(value, dict) and not SCHEDULES.isdisjoint(value)
            if schedule and "sched" in name:
                state = {"class": "", "state": value, "left": []}
                self.aux.append(AuxItem("scheduler", state))
            else:
                self.aux.append(AuxItem(f"user/{name}", value))
        have = {item.path for item in self.aux}
        for path, value in (self.told.get("aux") or {}).items():
            if path in have:
                self.aux = [item for item in self.aux if item.path != path]
            self.aux.append(AuxItem(str(path), value))

    def _ties(self, saved: Saved, group_of: dict[str, int]) -> dict[str, tuple[str, ...]]:
        """Other names of a parameter: entries at one place, or with the bits of one that is trained.

        Where all are said to be trained, whatever has the bits of an earlier one.
        """
        found: dict[str, list[str]] = {}
        first: dict[Any, str] = {}
        every = group_of.keys() >= saved.model.keys()
        idle = [e for name, e in saved.model.items() if every or name not in group_of]
        doubted = {(entry.shape, entry.dtype) for entry in idle} if group_of else set()
        for name in sorted(saved.model, key=lambda name: name not in group_of):
            entry = saved.model[name]
            if not entry.chunks:
                continue
            alike = (entry.shape, entry.dtype)
            other = first.setdefault((alike, tuple(entry.chunks)), name)
            if other == name and alike in doubted and (sample := self._sample(entry)) is not None:
                near = first.get((alike, sample))
                if near is not None and (every or name not in group_of):
                    other = near if self._equal(saved.model[near], entry) else name
                elif name in group_of:
                    first.setdefault((alike, sample), name)
            if other != name:
                found.setdefault(other, []).append(name)
        return {name: tuple(sorted(own)) for name, own in found.items()}

    def _sample(self, entry: Entry) -> bytes | None:
        """The first elements; None where they say nothing, being all the same."""
        file, tensor = self._open(entry, entry.chunks[0])
        if tensor is None:
            return None
        array = file.buffer(tensor).array()[tensor.offset :][:SAMPLE]
        found = array.tobytes()
        return None if found == found[: array.itemsize] * array.size else found

    def _equal(self, a: Entry, b: Entry) -> bool:
        """Whether two tensors that are cut alike have the same bits."""
        if [c.box for c in a.chunks] != [c.box for c in b.chunks]:
            return False
        for one, two in zip(a.chunks, b.chunks, strict=True):
            (file, tensor), (other, its) = self._open(a, one), self._open(b, two)
            if tensor is None or its is None or tensor.strides != its.strides:
                return False
            here, there = file.buffer(tensor).array(), other.buffer(its).array()
            n = min(here.size - tensor.offset, there.size - its.offset)
            here, there = here[tensor.offset :][:n], there[its.offset :][:n]
            if not np.array_equal(here.view("u1"), there.view("u1")):
                return False
        return True

    def _buffers(self, saved: Saved, group_of: dict[str, int]) -> set[str]:
        """Which entries of the model are buffers."""
        named = self.told.get("buffers")
        if isinstance(named, list):
            return set(map(str, named))
        leaves = {name.rpartition(".")[2] for name in group_of} | {"weight", "bias"}
        sharded = any(len(entry.boxes) > 1 for entry in saved.model.values())
        found = set()
        for name, entry in saved.model.items():
            if name in group_of or len(entry.boxes) > 1:
                continue
            odd = (sharded or bool(group_of)) and name.rpartition(".")[2] not in leaves
            if odd or looks_like_buffer(name, entry.dtype):
                found.add(name)
        return found


def _shape_of(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of a parameter as its state tells it."""
    return next((v.shape for v in state.values() if isinstance(v, Entry) and v.shape), None)


def _is_number(slot: str, entry: Entry, shape: tuple[int, ...]) -> bool:
    """As live optimizers' states are told apart."""
    one = prod(entry.shape) == 1 and entry.shape != shape
    return slot in SCALARS or (slot not in FACTORED and one)
