"""State dicts of modules and optimizers in torch files, key by key.

The forms are those of `torch.nn.Module.state_dict` and `torch.optim.Optimizer.state_dict`, the latter with
its parameters by number, as torch has them, or by name, as FSDP gathers them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.adapters._hyper import hyper_in_files
from dynadapt.adapters.checkpoints._deepspeed_files import number
from dynadapt.adapters.checkpoints._names import placeholders, tensor_spec
from dynadapt.adapters.checkpoints._optimizer_kinds import family_of, family_told, slots_of
from dynadapt.adapters.checkpoints._optimizer_names import dealt
from dynadapt.adapters.checkpoints._pickle import Opaque, Ordered, StoredTensor
from dynadapt.adapters.checkpoints._plain import lowered
from dynadapt.adapters.checkpoints._rows import Files
from dynadapt.adapters.checkpoints._safetensors import read_header, whole_row
from dynadapt.adapters.checkpoints._torch_groups import (
    NAMES,
    are_groups,
    are_names,
    hyper_of,
    is_scalar,
    shape_of,
)
from dynadapt.errors import Finding, Refused
from dynadapt.files import FileBuffer
from dynadapt.protocols import AuxItem, Described
from dynadapt.vps.keys import Key, KeySpec, canonical_name
from dynadapt.vps.layout import file_endpoint
from dynadapt.vps.wire import encodable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from dynadapt.adapters.checkpoints._optimizer_names import Shape
    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.protocols import FileSource
    from dynadapt.vps.layout import Row

__all__ = ["BUFFERS", "EXTRA_STATE", "PLAIN", "StateDicts"]

BUFFERS = "_buffer_names"
"""Beside `_metadata` on a module's state dict: the names that are buffers, which it does not say."""

EXTRA_STATE = "_extra_state"

SLOTS = frozenset({"param", "buffer"})

PLAIN = "plain numbers"
"""The aux item that lists the scalars which the optimizer keeps as Python numbers, not as tensors."""


class StateDicts:
    """What state dicts hold, as they are read one after another: first the model's, then the rest.

    What the user says of order and groups names the states that an optimizer's state dict numbers.
    """

    def __init__(self, root: str, said: FileSource) -> None:
        self.root = root
        self.files = Files(root)
        self.said = said
        self.specs: dict[Key, KeySpec] = {}
        self.scalars: dict[str, dict[str, int | float]] = {}
        self.aux: list[AuxItem] = []
        self.ordered = True
        self._canonical: dict[str, str] = {}
        self._called: list[str] = []
        self._slots: dict[str, set[str]] = {}

    def described(self, written: str) -> Described:
        """All of it; `written` asks for the same form. Raises `Refused` with every finding."""
        if findings := [*self.files.findings, *placeholders(self.specs.values(), self.root)]:
            raise Refused(findings)
        rows = {file_endpoint(name): tuple(own) for name, own in self.files.rows.items()}
        specs, aux = tuple(self.specs.values()), tuple(self.aux)
        own = Described(specs, (), self.files.buffers, self.scalars, aux, files=rows)
        return replace(own, written=written, ordered=self.ordered, called=tuple(self._called))

    def put(self, spec: KeySpec, file: TorchFile, tensor: StoredTensor) -> None:
        """A key whose whole tensor lies in a file."""
        self.specs[spec.key] = spec
        try:
            self.files.whole(spec.key, file, tensor)
        except Refused as error:
            self.files.findings += error.findings

    def model(self, parts: Iterable[tuple[TorchFile, Mapping[str, Any]]]) -> None:
        """A module's state dict, in one file or several."""
        parts = list(parts)
        entries = [
            (str(name), file, value)
            for file, tree in parts
            for name, value in tree.items()
            if isinstance(value, StoredTensor) and not str(name).endswith(EXTRA_STATE)
        ]
        buffers = _buffers(parts, entries)
        names = canonical_names([name for name, _, _ in entries])
        if buffers is None and self.said.buffers:
            buffers = frozenset(raw for raw, name in names.items() if name in self.said.buffers)
        tied: dict[tuple[Any, ...], list[str]] = {}
        for raw, file, value in entries:
            tied.setdefault(_place(raw, file, value), []).append(names[raw])
        self._called += [own[0] for own in tied.values() if len(own) > 1]
        taken = set()
        for raw, file, value in entries:
            first, *others = sorted(tied[_place(raw, file, value)])
            self._canonical[names[raw]] = first
            if first in taken:
                continue
            taken.add(first)
            held = None if buffers is None else ({first} if raw in buffers else ())
            order, dtype = len(self.specs), value.dtype
            spec = tensor_spec(first, value.shape, dtype, order, buffers=held, aliases=others)
            self.put(spec, file, value)
        for file, tree in parts:
            self._module_extras(file, tree)
            self.files.findings += [
                Finding(
                    "unsupported-tensor",
                    str(name),
                    f"is a {value.made_by.module}.{value.made_by.name}: only that knows what it holds",
                    "save an ordinary tensor in its place",
                )
                for name, value in tree.items()
                if isinstance(value, Opaque) and not str(name).endswith(EXTRA_STATE)
            ]

    def safetensors(self, name: str) -> None:
        """A module's tensors in a safetensors file.

        What others write is not in the model's order, and has but one of a tensor's names.
        """
        path = f"{self.files.root}/{name}"
        header = read_header(path)
        names = canonical_names(list(header.entries))
        rows = self.files.rows.setdefault(name, [])
        for raw, (dtype, shape, at) in header.entries.items():
            tied = {names[raw], *map(canonical_name, header.aliases.get(raw, ()))}
            for (
                own
            ) in self.said.tied:  # of a name that is there by itself it is for the bits to say
                tied |= set(own).difference(names.values()) if tied.intersection(own) else set()
            first, *others = sorted(tied)
            held = None
            if header.buffers is not None:
                held = {first} if raw in header.buffers else ()
            elif self.said.buffers:
                held = {first}.intersection(self.said.buffers)
            order = len(self.specs)
            spec = tensor_spec(first, shape, dtype, order, buffers=held, aliases=others)
            self.specs[spec.key] = spec
            self._canonical |= dict.fromkeys((first, *others), first)
            buffer = f"{name}#{raw}"
            self.files.buffers[buffer] = FileBuffer(path, dtype, at, prod(shape))
            rows.append(whole_row(spec, buffer))
        self.ordered = self.ordered and header.buffers is not None

    def _module_extras(self, file: TorchFile, tree: Mapping[str, Any]) -> None:
        """What modules return from `get_extra_state`, as the live adapters carry it."""
        for name, value in tree.items():
            if str(name).endswith(EXTRA_STATE):
                module = canonical_name(str(name)).removesuffix(EXTRA_STATE).rstrip(".")
                self.value(f"user/extra state of {module or 'model'}", value, file)

    def value(self, path: str, value: Any, file: TorchFile) -> None:
        """An aux item; what cannot be carried is named, so that a conversion can say that it is lost."""
        plain = lowered(value, file)
        if encodable(plain):
            self.aux.append(AuxItem(path, plain))
        else:
            self.aux.append(AuxItem(f"opaque/{path}", str(type(value).__name__)))

    def extra(self, label: str, file: TorchFile, tree: Mapping[str, Any]) -> None:
        """Copies of the model's tensors under a label: an EMA."""
        for raw, value in tree.items():
            name = self.name(str(raw))
            base = self._of(name)
            key = Key(name, f"extra:{label}")
            spec = replace(base, key=key, dtype=value.dtype, kind="state", group=-1)
            self.put(spec, file, value)

    def is_copy(self, tree: Any) -> bool:
        """Whether a value is a dict of tensors which the model has, too."""
        return (
            isinstance(tree, dict)
            and bool(tree)
            and all(
                isinstance(value, StoredTensor)
                and isinstance(raw, str)
                and (base := self._find(self.name(raw))) is not None
                and base.shape == value.shape
                for raw, value in tree.items()
            )
        )

    def name(self, raw: str) -> str:
        """The canonical name of a tensor that a state dict calls `raw`."""
        name = canonical_name(raw)
        return self._canonical.get(raw, self._canonical.get(name, name))

    def _find(self, name: str) -> KeySpec | None:
        return self.specs.get(Key(name, "param")) or self.specs.get(Key(name, "buffer"))

    def _of(self, name: str) -> KeySpec:
        found = self._find(name)
        assert found is not None, name
        return found

    def optimizer(self, file: TorchFile, tree: Mapping[str, Any]) -> None:
        """An optimizer's state dict."""
        groups, state = tree.get("param_groups"), tree.get("state")
        if not isinstance(state, dict) or not are_groups(groups):
            cause = "holds no optimizer's state dict, with 'state' and 'param_groups'"
            raise Refused([Finding("bad-file", file.path, cause)])
        assert isinstance(groups, list)
        numbers = [list(group["params"]) for group in groups]
        names = self._names(file, tree, numbers)
        known = {
            n: name
            for ids, own in zip(numbers, names, strict=True)
            for n, name in zip(ids, own, strict=True)
        }
        lost = [str(n) for n in state if n not in known]
        if lost:
            cause = f"has a state of {lost[0]!r}, which is in none of its groups"
            self.files.findings.append(Finding("bad-file", file.path, cause))
        members = [(name, index) for index, own in enumerate(names) for name in own]
        self._enrol(dict(members))
        for id_, name in known.items():
            self._state(name, state.get(id_) or {}, file)
        hypers = [hyper_of(group, file) for group in groups]
        self._absent(names, hypers)
        states = {key.slot for key, spec in self.specs.items() if spec.kind == "state"}
        one = len({family_of(group) for group in hypers}) == 1
        if one and (family := family_told(hypers, states)) is not None:
            self.aux.append(AuxItem("optimizer", family))
        plain = {
            str(label)
            for entry in state.values()
            for label, value in entry.items()
            if isinstance(value, int | float)
        }
        if plain:
            self.aux.append(AuxItem(PLAIN, sorted(plain)))
        value = [
            {"names": own, "hyper": hyper_in_files(hyper)}
            for own, hyper in zip(names, hypers, strict=True)
        ]
        self.aux.append(AuxItem("param_groups", value))

    def _names(
        self,
        file: TorchFile,
        tree: Mapping[str, Any],
        numbers: Sequence[Sequence[Any]],
    ) -> list[list[str]]:
        """The canonical names of each group's members."""
        told: Any = tree.get(NAMES) or [group.get(NAMES) for group in tree["param_groups"]]
        if all(isinstance(id_, str) for own in numbers for id_ in own):
            told = numbers
        if are_names(told, numbers):
            if told is numbers:
                self._tie({self.name(name) for own in told for name in own})
            names = [[self.name(name) for name in own] for own in told]
            lost = [name for own in names for name in own if self._find(name) is None]
            if lost:
                cause = (
                    f"the model's state dict does not hold it, and {file.path} has it in a group"
                )
                raise Refused([Finding("missing-key", lost[0], cause)])
            return names
        state = tree["state"]
        shapes = [[shape_of(state.get(id_)) for id_ in own] for own in numbers]
        if (said := self._said(shapes)) is not None:
            return said
        params, order = self._in_order(), self.said.order
        ordered = self.ordered or bool(order)
        named = [(spec.key.name, spec.shape) for spec in params]
        try:
            return dealt(shapes, named, file.path, ordered=ordered)
        except Refused as error:
            every = [s for s in self.specs.values() if "float" in s.dtype and s.key.slot in SLOTS]
            if error.reason == "bad-file" and order and (left := self._unlisted()):
                cause, fix = "is not in the order that was given", "list every parameter"
                raise Refused([Finding("no-order", name, cause, fix) for name in left]) from error
            if error.reason != "bad-file" or order or len(every) == len(params):
                raise
        # What was taken for a buffer by its name may be a parameter.
        named = [(spec.key.name, spec.shape) for spec in every]
        return dealt(shapes, named, file.path, ordered=ordered)

    def _said(self, shapes: Sequence[Sequence[Shape | None]]) -> list[list[str]] | None:
        """The groups that the user names, if they fit these."""
        found = [[self._find(self.name(name)) for name in own] for own in self.said.groups]
        fits = [len(own) for own in found] == [len(own) for own in shapes] and all(
            spec is not None and shape in {None, spec.shape}
            for own, its in zip(found, shapes, strict=True)
            for spec, shape in zip(own, its, strict=True)
        )
        return (
            [[spec.key.name for spec in own if spec] for own in found] if found and fits else None
        )

    def _in_order(self) -> list[KeySpec]:
        """The parameters, in the user's order if there is one; then those that it lists."""
        if not self.said.order:
            return [spec for spec in self.specs.values() if spec.key.slot == "param"]
        place = {self.name(name): i for i, name in reversed(list(enumerate(self.said.order)))}
        listed = [spec for spec in self.specs.values() if spec.key.name in place]
        return sorted(listed, key=lambda spec: place[spec.key.name])

    def _unlisted(self) -> list[str]:
        """The parameters that the user's order leaves out."""
        place = {self.name(name) for name in self.said.order}
        return [k.name for k in self.specs if k.slot == "param" and k.name not in place]

    def _tie(self, members: set[str]) -> None:
        """Gathers give every name of a tied tensor a copy: one that is not trained, and has the bits of
        one that is, is another name of it.
        """
        trained: dict[tuple[Any, ...], list[KeySpec]] = {}
        for spec in self.specs.values():
            if spec.key.name in members:
                trained.setdefault((spec.shape, spec.dtype), []).append(spec)
        rows = {row.key: row for own in self.files.rows.values() for row in own}
        for spec in list(self.specs.values()):
            if spec.key.name in members or not spec.numel or spec.aliases:
                continue
            for other in trained.get((spec.shape, spec.dtype), ()):
                if self._equal(rows[spec.key], rows[other.key]):
                    self._unite(spec, self._of(self.name(other.key.name)))
                    break

    def _unite(self, copy: KeySpec, spec: KeySpec) -> None:
        """Drop a copy, and give the tensor the smallest of its names."""
        del self.specs[copy.key]
        for own in self.files.rows.values():
            own[:] = [row for row in own if row.key != copy.key]
        first, *others = sorted({copy.key.name, spec.key.name, *spec.aliases})
        key = Key(first, spec.key.slot)
        # In its place: the order of the specs is that of the model.
        changed = replace(spec, key=key, aliases=tuple(others))
        self.specs = {
            (key if k == spec.key else k): changed if k == spec.key else v
            for k, v in self.specs.items()
        }
        self._rename(spec.key, key)
        self._canonical |= dict.fromkeys((first, *others), first)

    def _equal(self, a: Row, b: Row) -> bool:
        """Whether two whole tensors have the same bits: first a few of them, then all.

        Bits that are all the same, as zeros are, say nothing.
        """
        one, two = (
            _view(self.files.buffers[row.buffer].array(), row.offset, row.box.shape, row.strides)
            for row in (a, b)
        )
        few = tuple(slice(0, 4) for _ in one.shape)
        if not np.array_equal(one[few], two[few]) or not np.array_equal(one, two):
            return False
        return not bool((one == one[(0,) * (one.ndim - 1)]).all())

    def _enrol(self, group_of: Mapping[str, int]) -> None:
        """What is in the optimizer is a parameter; what is not is not trained."""
        for spec in list(self.specs.values()):
            name = spec.key.name
            if name in group_of and spec.key.slot == "buffer":
                del self.specs[spec.key]
                self._rename(spec.key, Key(name, "param"))
                spec = replace(spec, key=Key(name, "param"), kind="parameter")
            if spec.key.slot == "param":
                group = group_of.get(name, -1)
                self.specs[spec.key] = replace(spec, group=group, trainable=group >= 0)

    def _rename(self, old: Key, new: Key) -> None:
        for rows in self.files.rows.values():
            rows[:] = [replace(row, key=new) if row.key == old else row for row in rows]

    def _state(self, name: str, entry: Mapping[str, Any], file: TorchFile) -> None:
        base = self._of(name)
        for label, value in entry.items():
            if value is None:
                continue
            if isinstance(value, StoredTensor) and not is_scalar(str(label), value, base.shape):
                key = Key(name, str(label))
                spec = replace(base, key=key, shape=value.shape, dtype=value.dtype, kind="state")
                self.put(spec, file, value)
                self._slots.setdefault(name, set()).add(key.slot)
            elif (found := number(value, file)) is not None:
                whole = label == "step" and float(found).is_integer()
                self.scalars.setdefault(name, {})[str(label)] = int(found) if whole else found
            else:
                cause = f"the optimizer keeps a {type(value).__name__} there"
                fix = "only tensors and numbers can be moved"
                self.files.findings.append(
                    Finding("unsupported-state", f"{name}/{label}", cause, fix)
                )

    def _absent(self, names: Sequence[Sequence[str]], hypers: Sequence[Mapping[str, Any]]) -> None:
        """The states that members were never given, since no gradient reached them.

        One that has a part of what others have was given it, and lost the rest.
        """
        common = set().union(*self._slots.values())
        for own, hyper in zip(names, hypers, strict=True):
            for name in own:
                base = self._of(name)
                slots = slots_of(hyper, base.shape)
                if not self._slots.get(name, set()) <= slots.keys():
                    continue  # an optimizer of the same entries, but another one
                for slot, shape in slots.items():
                    key = Key(name, slot)
                    if self._slots.get(name) and slot in common - self._slots[name]:
                        cause = f"is not there, and {', '.join(sorted(self._slots[name]))} is"
                        self.files.findings.append(Finding("missing-key", str(key), cause))
                    spec = replace(base, key=key, shape=shape, kind="state", presence="none")
                    self.specs.setdefault(key, spec)


def canonical_names(raws: Sequence[str]) -> dict[str, str]:
    """Names without wrapper segments, unless two would become one.

    >>> canonical_names(["module.a", "module.b", "b"])
    {'module.a': 'a', 'module.b': 'module.b', 'b': 'b'}
    """
    names = {raw: canonical_name(raw) for raw in raws}
    count = Counter(names.values())
    return {raw: name if count[name] == 1 else raw for raw, name in names.items()}


def _buffers(
    parts: Sequence[tuple[TorchFile, Mapping[str, Any]]],
    entries: Sequence[tuple[str, TorchFile, StoredTensor]],
) -> frozenset[str] | None:
    """The raw names of buffers, where the files say them; None: each name has to speak for itself."""
    told = [
        tree.attributes[BUFFERS]
        for _, tree in parts
        if isinstance(tree, Ordered) and isinstance(tree.attributes.get(BUFFERS), list)
    ]
    if told:
        return frozenset(str(name) for own in told for name in own)
    if any(value.parameter for _, _, value in entries):  # saved with keep_vars
        return frozenset(raw for raw, _, value in entries if not value.parameter)
    return None


def _place(raw: str, file: TorchFile, value: StoredTensor) -> tuple[Any, ...]:
    """Equal for the names of one tensor."""
    if not all(value.shape):
        return (raw,)
    return (file.path, value.storage.name, value.offset, value.dtype, value.shape, value.strides)


def _view(flat: NDArray[Any], offset: int, shape: Shape, strides: Sequence[int]) -> NDArray[Any]:
    """A tensor's bits in its storage, as integers."""
    bits = flat.view(f"u{min(flat.itemsize, 8)}").reshape(flat.size, -1)
    steps = [n * flat.itemsize for n in strides]
    return np.lib.stride_tricks.as_strided(
        bits[offset:], (*shape, bits.shape[1]), (*steps, bits.itemsize), writeable=False
    )
