"""One pass over files that each rank of an FSDP job wrote by itself with `torch.save`.

`SHARDED_STATE_DICT` names every tensor and says which part of it a rank has. `LOCAL_STATE_DICT` has a part
of each flat parameter: names, order and shapes come from the rest of the files (the optimizer's states, the
local parameters beside the flats) and from what the user says of the model.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.adapters._hyper import hyper_in_files
from dynadapt.adapters.checkpoints._deepspeed_files import number
from dynadapt.adapters.checkpoints._fsdp_flats import FLAT
from dynadapt.adapters.checkpoints._fsdp_local import FlatParameters
from dynadapt.adapters.checkpoints._names import looks_like_buffer
from dynadapt.adapters.checkpoints._optimizer_kinds import family_told, slots_of
from dynadapt.adapters.checkpoints._optimizer_names import dealt
from dynadapt.adapters.checkpoints._pickle import StoredTensor
from dynadapt.adapters.checkpoints._plain import lowered, plain_part
from dynadapt.adapters.checkpoints._rows import Files, rows_of_span
from dynadapt.adapters.checkpoints._shards import Part, coordinate_of, part_of
from dynadapt.adapters.checkpoints._torch_file import read_torch
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Described
from dynadapt.vps.keys import Key, KeySpec, canonical_name
from dynadapt.vps.layout import Row, file_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynadapt.adapters.checkpoints._fsdp_local import Parts, Stretch
    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.protocols import FileSource

__all__ = ["Reading", "rank_files", "read_ranks"]

_NAME = re.compile(r"^(.*?)[-_.]?rank[-_]?(\d{1,6})(?:[-_]of[-_]\d+)?\.(?:bin|pt|pth|ckpt)$")
_WORLD = re.compile(r"world[-_]?size[-_]?(\d+)")

MODEL = ("model", "state_dict", "model_state_dict")
OPTIMIZER = ("optimizer", "optimizer_state_dict", "optim")

Tree = dict[Any, Any]


class Reading:
    """`files` are each rank's, by what they are called without the rank."""

    def __init__(self, root: Path, files: Mapping[str, Sequence[str]], said: FileSource) -> None:
        self.root, self.said = root, said
        self.files = Files(str(root))
        self.specs: dict[Key, KeySpec] = {}
        self.scalars: dict[str, dict[str, int | float]] = {}
        self.aux: list[AuxItem] = []
        self.models: list[tuple[TorchFile, Tree]] = []
        self.optimizers: list[tuple[TorchFile, Tree]] = []
        for stem, names in files.items():
            self._sort(stem, [read_torch(str(root / name)) for name in names])
        values = [value for _, tree in self.models for value in tree.values()]
        places = [at for value in values if (at := coordinate_of(value)) is not None]
        self.mesh = tuple(max(own) + 1 for own in zip(*places, strict=False))
        self.parts: dict[str, Parts] = {}
        self.flats: FlatParameters | None = None
        self.numbered = False
        """Whether the optimizer's states are by number, of flats or of views of them."""

    def described(self) -> Described:
        """All of it; raises `Refused` with every finding."""
        if not self.models:
            cause = "holds no model's state dict in its ranks' files"
            raise Refused([Finding("bad-file", str(self.root), cause)])
        flats: dict[str, Parts] = {}
        for file, tree in self.models:
            for raw, value in tree.items():
                part = part_of(value, f"{raw} in {Path(file.path).name}", self.mesh)
                if part is None:
                    continue
                name = canonical_name(str(raw))
                into = flats if name.endswith(FLAT) else self.parts
                into.setdefault(name, []).append((file, part))
        if flats:
            self.flats = FlatParameters(self.root, flats, self.parts, self.said)
        groups, states = self._optimizer()
        if self.flats is not None:
            for members, _ in groups:
                members[:] = [n for name in members for n in self._in_flat(name)]
        group_of = {name: i for i, (own, _) in enumerate(groups) for name in own}
        if self.flats is not None:
            self._flats(self.flats, states, group_of)
        self._model(self.parts, group_of)
        for (name, slot), own in states.items():
            base = self.specs.get(Key(name, "param"))
            if base is None:
                cause = "has optimizer state, and is no parameter of the model that was saved"
                self.files.findings.append(Finding("groups", f"{name}/{slot}", cause))
            else:
                self._put(replace(base, key=Key(name, slot), kind="state"), own)
        self._hypers(groups)
        self._unite_ties(group_of)
        if self.files.findings:
            raise Refused(self.files.findings)
        rows = {file_endpoint(name): tuple(own) for name, own in self.files.rows.items()}
        self.aux.append(AuxItem("behaviour", {"framework": "torch"}))
        specs, aux = tuple(self.specs.values()), tuple(self.aux)
        return Described(specs, (), self.files.buffers, self.scalars, aux, files=rows)

    def _sort(self, stem: str, files: list[TorchFile]) -> None:
        """Model, optimizer, or something else: of that the first rank's values."""
        for rank, file in enumerate(files):
            own, written = _NAME.match(Path(file.path).name), _NAME.match(f"{file.root}.pt")
            if own and written and int(own[2]) != int(written[2]):
                cause = f"was written as {file.root}: it is another rank's"
                fix = "give it its name back, or copy the whole checkpoint again"
                self.files.findings.append(Finding("mixed-files", file.path, cause, fix))
            tree = file.tree if isinstance(file.tree, dict) else {}
            model = next((tree[n] for n in MODEL if isinstance(tree.get(n), dict)), None)
            optimizer = next((tree[n] for n in OPTIMIZER if isinstance(tree.get(n), dict)), None)
            if "param_groups" in tree and "state" in tree:
                optimizer, tree = tree, {}
            elif model is None and any(_is_tensor(value) for value in tree.values()):
                model, tree = tree, {}
            if model is not None:
                self.models.append((file, model))
            if optimizer is not None:
                self.optimizers.append((file, optimizer))
            rest = {k: v for k, v in tree.items() if v is not model and v is not optimizer}
            if rest and not rank:
                kept, left = plain_part(lowered(rest, file))
                self.aux.append(AuxItem(f"user/{stem}", kept | ({"left": left} if left else {})))

    def _optimizer(
        self,
    ) -> tuple[
        list[tuple[list[str], dict[str, Any]]],
        dict[tuple[str, str], Parts],
    ]:
        """Groups with their names and the rest, and what each rank has of every state."""
        states: dict[tuple[str, str], Parts] = {}
        if not self.optimizers:
            return [], states
        named = self._named(self.optimizers[0])
        for rank, (file, tree) in enumerate(self.optimizers):
            for id_, own in tree["state"].items():
                name = named.get(id_)
                if name is None or not isinstance(own, dict):
                    cause = f"has a state of {id_!r}, which is in none of its groups"
                    raise Refused([Finding("bad-file", file.path, cause)])
                for label, value in own.items():
                    cut = self.numbered and isinstance(value, StoredTensor) and value.shape
                    if cut and self.flats is not None:
                        self.flats.states.setdefault((name, str(label)), {})[rank] = (file, value)
                        continue
                    found = number(value, file)
                    if found is not None:
                        whole = label == "step" and float(found).is_integer()
                        step = int(found) if whole else found
                        self.scalars.setdefault(name, {})[str(label)] = step
                        continue
                    where = f"{name}/{label} in {Path(file.path).name}"
                    part = part_of(value, where, self.mesh)
                    if part is not None:
                        states.setdefault((name, str(label)), []).append((file, part))
        _, tree = self.optimizers[0]
        groups = [
            (
                [named[id_] for id_ in group["params"]],
                {str(k): v for k, v in group.items() if k != "params"},
            )
            for group in tree["param_groups"]
        ]
        return groups, states

    def _named(self, first: tuple[TorchFile, Tree]) -> dict[Any, str]:
        """The name of each of an optimizer's parameters, which it may number."""
        file, tree = first
        ids = [list(group["params"]) for group in tree["param_groups"]]
        every = [id_ for own in ids for id_ in own]
        if all(isinstance(id_, str) for id_ in every):
            return {id_: canonical_name(id_) for id_ in every}
        names = [[canonical_name(name) for name in own] for own in self.said.groups]
        told = [len(own) for own in names] == [len(own) for own in ids]
        if self.flats is not None:
            self.numbered = True
            if not told or not self.flats.local:
                names = self.flats.numbered(self.optimizers)
            return _pairs(ids, names)
        model: dict[str, tuple[int, ...]] = {}
        seen: set[str] = set()
        for raw, value in self.models[0][1].items():
            part = part_of(value, str(raw), self.mesh)
            storages = {tensor.storage.name for _, tensor in part.held} if part else set()
            if part is None or not part.sharded or (storages and storages <= seen):  # tied
                continue
            seen |= storages
            model[canonical_name(str(raw))] = part.shape
        shapes: list[list[tuple[int, ...] | None]] = []
        for own in ids:
            shapes.append([])
            for id_ in own:
                entries = tree["state"].get(id_) or {}
                parts = [
                    p for v in entries.values() if (p := part_of(v, "", self.mesh)) is not None
                ]
                large = [part for part in parts if part.shape]
                if any(not part.sharded for part in large):
                    cause = (
                        "has states of flat parameters by number, whose parameters nothing names"
                    )
                    fix = "save FullyShardedDataParallel.optim_state_dict(model, optimizer)"
                    raise Refused([Finding("unsupported-state", file.path, cause, fix)])
                shapes[-1].append(large[0].shape if large else None)
        if not told:
            place = {name: i for i, name in enumerate(self.said.order)}
            params = sorted(model.items(), key=lambda item: place.get(item[0], len(place)))
            names = dealt(shapes, params, file.path)
        return _pairs(ids, names)

    def _in_flat(self, name: str) -> list[str]:
        """The parameters in a flat; of another name itself."""
        flats = self.flats
        return flats.members(name) if flats is not None and name in flats.flats else [name]

    def _flats(
        self,
        flats: FlatParameters,
        states: Mapping[tuple[str, str], Parts],
        group_of: Mapping[str, int],
    ) -> None:
        """The parameters that lie in flats, and the states that are numbered as those are."""
        shapes: dict[str, tuple[int, ...]] = dict(self.said.shapes)
        for (name, _), own in states.items():
            shapes.setdefault(name, own[0][1].shape)
        self.files.findings += flats.place(shapes)
        for flat, names in flats.at.items():
            first = flats.flats[flat][0][1]
            for name in names:
                spec = KeySpec(
                    Key(name, "param"),
                    shapes[name],
                    first.dtype,
                    trainable=name in group_of if group_of else bool(first.trainable),
                    order=flats.order.index(name),
                    group=group_of.get(name, -1),
                )
                self.specs[spec.key] = spec
            self._stretches("param", flats.stretches(flat))
        for name, label in () if self.files.findings else flats.states:
            self._stretches(label, flats.states_of((name, label)))
            for each in self._in_flat(name):
                self.scalars.setdefault(each, dict(self.scalars.get(name, {})))
            if name in flats.flats:
                self.scalars.pop(name, None)

    def _stretches(self, slot: str, own: Iterable[Stretch]) -> None:
        for name, low, high, file, tensor, begin in own:
            key = Key(name, slot)
            spec = self.specs[Key(name, "param")]
            if slot != "param":
                state = replace(spec, key=key, dtype=tensor.dtype, kind="state")
                self.specs.setdefault(key, state)
            buffer = self.files.buffer(file, tensor)
            rows = rows_of_span(key, spec.shape, low, high, buffer, tensor.offset + begin)
            self.files.rows[self.files.inside(file)].extend(rows)

    def _model(self, parts: Mapping[str, Parts], group_of: Mapping[str, int]) -> None:
        for name, own in parts.items():
            part = own[0][1]
            idle = not part.sharded and name not in group_of and bool(group_of)
            if idle or looks_like_buffer(name, part.dtype):
                key = Key(name, "buffer")
                spec = KeySpec(key, part.shape, part.dtype, kind="buffer", trainable=False)
                self._put(spec, own[:1])  # each rank has its own, which may have drifted
                continue
            spec = KeySpec(
                Key(name, "param"),
                part.shape,
                part.dtype,
                trainable=name in group_of or not group_of,
                order=len(self.specs),
                group=group_of.get(name, -1),
            )
            self._put(spec, own)

    def _put(self, spec: KeySpec, own: Sequence[tuple[TorchFile, Part]]) -> None:
        """A key, and what the ranks have of it."""
        first = own[0][1]
        self.specs[spec.key] = replace(spec, shape=first.shape, dtype=first.dtype)
        for file, part in own:
            if (part.shape, part.dtype) != (first.shape, first.dtype):
                cause = f"is {list(part.shape)} {part.dtype} in {Path(file.path).name}, and other before"
                self.files.findings.append(Finding("geometry", str(spec.key), cause))
                continue
            for box, tensor in part.held:
                buffer = self.files.buffer(file, tensor)
                row = Row(spec.key, box, buffer, tensor.offset, tensor.strides)
                self.files.rows[self.files.inside(file)].append(row)

    def _hypers(self, groups: Sequence[tuple[list[str], dict[str, Any]]]) -> None:
        if not groups:
            return
        file = self.optimizers[0][0]
        value = []
        for names, group in groups:
            hyper = plain_part(lowered(group, file))[0]
            value.append({"names": names, "hyper": hyper_in_files(hyper)})
            for name in names:
                base = self.specs.get(Key(name, "param"))
                if base is None:
                    continue
                for slot, shape in slots_of(group, base.shape).items():
                    key = Key(name, slot)
                    more: dict[str, Any] = {"kind": "state", "presence": "none"}
                    self.specs.setdefault(key, replace(base, key=key, shape=shape, **more))
        self.aux.append(AuxItem("param_groups", value))
        states = {key.slot for key, spec in self.specs.items() if spec.kind == "state"}
        family = family_told((group for _, group in groups), states)
        self.aux += [AuxItem("optimizer", family)] if family else []

    def _unite_ties(self, group_of: Mapping[str, int]) -> None:
        """What is not trained, and has the bits of what is, is another name of it: gathers copy it."""
        rows: dict[Key, list[Row]] = {}
        for own in self.files.rows.values():
            for row in own:
                rows.setdefault(row.key, []).append(row)
        for key, spec in list(self.specs.items()):
            if key.slot != "param" or key.name in group_of or not group_of:
                continue
            for name in group_of:
                other = self.specs.get(Key(name, "param"))
                alike = other is not None and (other.shape, other.dtype) == (spec.shape, spec.dtype)
                if alike and self._equal(rows.get(key, []), rows.get(Key(name, "param"), [])):
                    self._rename(key.name, name)
                    break

    def _equal(self, a: Sequence[Row], b: Sequence[Row]) -> bool:
        """Whether rows that are cut alike have the same bits, which are not all one value."""
        if [row.box for row in a] != [row.box for row in b] or not a:
            return False
        values = set()
        for one, two in zip(a, b, strict=True):
            here, there = (
                self.files.buffers[row.buffer].array()[row.offset :][: row.box.volume]
                for row in (one, two)
            )
            if one.strides != two.strides or not np.array_equal(here.view("u1"), there.view("u1")):
                return False
            values |= {
                here[:1].tobytes(),
                here[-1:].tobytes(),
                here[len(here) // 2 :][:1].tobytes(),
            }
        return len(values) > 1

    def _rename(self, copy: str, kept: str) -> None:
        """Drop a copy, and give a tensor and its states the smaller of both names."""
        del self.specs[Key(copy, "param")]
        names = (copy, kept, *self.specs[Key(kept, "param")].aliases)
        first, *others = sorted(names)
        for path, own in self.files.rows.items():
            left = [row for row in own if row.key != Key(copy, "param")]
            self.files.rows[path] = [
                replace(row, key=Key(first, row.key.slot)) if row.key.name == kept else row
                for row in left
            ]
        self.specs = {
            (Key(first, k.slot) if k.name == kept else k): replace(
                v, key=Key(first, k.slot), aliases=tuple(others)
            )
            if k.name == kept
            else v
            for k, v in self.specs.items()
        }
        if kept != first and kept in self.scalars:
            self.scalars[first] = self.scalars.pop(kept)
        for item in self.aux:
            if item.path == "param_groups":
                for group in item.value:
                    group["names"] = [first if n == kept else n for n in group["names"]]


def _pairs(ids: Sequence[Sequence[Any]], names: Sequence[Sequence[str]]) -> dict[Any, str]:
    pairs = zip(ids, names, strict=True)
    return {id_: name for own, its in pairs for id_, name in zip(own, its, strict=True)}


def _is_tensor(value: Any) -> bool:
    try:
        return coordinate_of(value) is not None or part_of(value, "", ()) is not None
    except Refused:
        return True


def read_ranks(path: Path, said: FileSource) -> Described:
    """What the files of ranks in a folder hold; raises `Refused`."""
    files, findings, ranks = {}, [], set()
    for stem, own in sorted(rank_files(path).items()):
        told = _WORLD.search(stem)
        count = int(told[1]) if told else max(own) + 1
        lost = [rank for rank in range(min(count, 1 << 16)) if rank not in own]
        cause = f"has the files of {len(own)} ranks of {count}: that of rank {lost[:1]} is missing"
        if lost:
            findings.append(Finding("missing-file", f"{path}/{stem}", cause, "copy all files"))
        ranks.add(count)
        files[stem] = [own[rank] for rank in sorted(own)]
    if len(ranks) > 1:
        cause = f"has files of {sorted(ranks)} ranks: they are not of one save"
        findings.append(Finding("missing-file", str(path), cause, "copy all files of one save"))
    if findings:
        raise Refused(findings)
    return Reading(path, files, said).described()


def rank_files(path: Path) -> dict[str, dict[int, str]]:
    """The names of the files of ranks, by what they are called without the rank."""
    found: dict[str, dict[int, str]] = {}
    if path.is_dir():
        for each in sorted(path.iterdir()):
            if (match := _NAME.match(each.name)) and each.is_file():
                found.setdefault(match[1], {})[int(match[2])] = each.name
    return found
