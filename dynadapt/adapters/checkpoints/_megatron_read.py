"""One pass over a distributed checkpoint of Megatron-Core: which tensor of a training state each entry is.

Its keys are global: `decoder.layers.self_attention.linear_qkv.weight` holds all layers, one after another
along a first dim, or `decoder.layers.3...` one of them, as it was saved. They are the names here, with that
shape. `optimizer.state.exp_avg.NAME` are a parameter's states, `optimizer.state.fp32_param.NAME` (`param`
where the distributed optimizer was gathered) its master. What is no tensor of the model lies in `common.pt`,
and as objects of the ranks (`rng_state/shard_0.1_1.2`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.adapters._hyper import NOT_HYPER
from dynadapt.adapters.checkpoints._dcp_chunks import Chunks
from dynadapt.adapters.checkpoints._megatron_flats import (
    SAMPLE,
    Flat,
    Piece,
    Weight,
    about,
    placed,
    rows_in,
)
from dynadapt.adapters.checkpoints._megatron_groups import (
    groups_of,
    number_of,
    optimizers_in,
    step_of,
)
from dynadapt.adapters.checkpoints._names import looks_like_buffer
from dynadapt.adapters.checkpoints._optimizer_kinds import family_of
from dynadapt.adapters.checkpoints._pickle import Global, Opaque, StoredTensor
from dynadapt.adapters.checkpoints._plain import lowered, plain_part
from dynadapt.adapters.checkpoints._rows import rows_of_span
from dynadapt.adapters.checkpoints._torch_file import read_torch
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Described
from dynadapt.vps.keys import Key, KeySpec, canonical_name
from dynadapt.vps.layout import file_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dynadapt.adapters.checkpoints._dcp_metadata import Chunk, Entry
    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.protocols import FileSource

__all__ = ["COMMON", "Reading"]

COMMON = "common.pt"

SMALL = 1 << 20
"""Bytes up to which an object of a rank is carried."""

MASTERS = frozenset({"param", "fp32_param", "master_param"})
"""What the fp32 copy of a weight is called by the several optimizers."""

_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)$")
_FLAT = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.(.+)$")
_PART = re.compile(r"dp_group_idx_\d+")
_BUFFERS = re.compile(r"\.(?:expert_bias|local_tokens_per_expert|inv_freq)$")


class Reading(Chunks):
    """One pass over the folder of an iteration.

    In the flats of a distributed optimizer that was saved as it lies in memory (`dp_reshardable`,
    `dp_zero_gather_scatter`) parameters are found by their values (`_megatron_flats`).
    """

    def __init__(self, root: Path, said: FileSource) -> None:
        super().__init__(root)
        self.said = said
        self.common: TorchFile = read_torch(str(root / COMMON))
        self.objects: dict[str, Any] = {}
        self.flats: dict[str, Flat] = {}
        self.shifted: list[str] = []
        self.doubts: list[Finding] = []

    def described(self) -> Described:
        """All of it; raises `Refused` with every finding."""
        if not isinstance(self.common.tree, dict):
            cause = f"holds a {type(self.common.tree).__name__}, not a dict"
            raise Refused([Finding("bad-file", self.common.path, cause)])
        states: dict[tuple[str, str], Entry] = {}
        model: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            if not entry.dtype:
                self._take(entry)
            elif state := _STATE.match(name):
                states[canonical_name(state[2]), _slot(state[1])] = entry
            elif _FLAT.match(name):
                front, _, slot = name.rpartition(".")
                self._flat(front, slot, entry)
            else:
                model[canonical_name(name)] = entry
        trees = [*optimizers_in(lowered(self.common.tree.get("optimizer"), self.common))]
        trees += [tree for value in self.objects.values() for tree in optimizers_in(value)]
        owners = {name for name, _ in states}
        buffers = {
            name
            for name, entry in model.items()
            if name not in owners
            and (looks_like_buffer(name, entry.dtype) or _BUFFERS.search(name))
        }
        for name in buffers:
            self._tensor(Key(name, "buffer"), model[name], kind="buffer", trainable=False)
        params = {name: entry for name, entry in model.items() if name not in buffers}
        self._model(params, states, self._placed(params) if self.flats else {}, bool(trees))
        if self.shifted:
            cause = (
                f"its master, and {len(self.shifted) - 1} others, have nothing of the weights: Megatron-Core "
                "0.16 gathers optimizers of several buckets (fully_reshardable) at wrong places"
            )
            fix = "take one that was saved as dp_reshardable, or --weights-only (weights_only=True)"
            found = Finding("stale-copy", self.shifted[0], cause, fix)
            (self.doubts if self.said.weights_only else self.findings).append(found)
        self._optimizer(trees)
        self._rest(trees)
        if self.findings:
            raise Refused(self.findings)
        files = {file_endpoint(name): tuple(rows) for name, rows in self.rows.items()}
        return Described(
            *(tuple(self.specs.values()), (), self.buffers, self.scalars, tuple(self.aux)),
            files=files,
            made_by="Megatron-Core",
            nameless="files",
            doubts=tuple(self.doubts),
        )

    def _model(
        self,
        model: dict[str, Entry],
        states: dict[tuple[str, str], Entry],
        flat: dict[str, dict[str, str]],
        trained: bool,
    ) -> None:
        """Parameters with their masters and states; of what lies in flats, the dtype of every slot."""
        owners = {name for name, _ in states} | flat.keys()
        for order, (name, entry) in enumerate(model.items()):
            more: dict[str, Any] = {"trainable": name in owners or not trained, "order": order}
            spec = KeySpec(Key(name, "param"), _shape(entry), entry.dtype, **more)
            master = states.get((name, "param"))
            own = flat.get(name, {})
            if master is not None and not self._alike(entry, master):
                self.shifted.append(name)
                if self.said.weights_only:
                    master = None
            if master is not None:
                self._put(spec, master)
            elif "param" in own:
                self.specs[spec.key] = replace(spec, dtype=own["param"])
            else:
                self._put(spec, entry)
            if master is not None or "param" in own:
                self._put(replace(spec, key=Key(name, "compute"), derived=True), entry)
            for slot, dtype in own.items():
                if slot != "param":
                    key = Key(name, slot)
                    self.specs[key] = replace(spec, key=key, kind="state", dtype=dtype)
        for (name, slot), entry in states.items():
            base = self.specs.get(Key(name, "param"))
            if base is None or _shape(entry) != base.shape:
                cause = (
                    f"has optimizer state of {list(_shape(entry))}, and no parameter of it is there"
                )
                fix = "save model and optimizer in one checkpoint"
                self.findings.append(Finding("groups", f"{name}/{slot}", cause, fix))
            elif slot != "param":
                self._put(replace(base, key=Key(name, slot), kind="state"), entry)

    def _alike(self, weight: Entry, master: Entry) -> bool:
        """Whether a master's first elements are about the weight's, which may have been eight bits wide."""
        pairs = zip(weight.chunks[:1], master.chunks[:1], strict=False)
        for one, two in pairs:
            (file, tensor), (other, its) = self._open(weight, one), self._open(master, two)
            if (
                tensor is None
                or its is None
                or one.box != two.box
                or weight.dtype == "float8_e4m3fn"
            ):
                continue
            few = file.buffer(tensor).array()[tensor.offset :][:SAMPLE]
            its_few = other.buffer(its).array()[its.offset :][:SAMPLE]
            return about(few[: its_few.size], weight.dtype, its_few[: few.size])
        return True

    def _flat(self, name: str, slot: str, entry: Entry) -> None:
        """A flat that is a tensor of the checkpoint."""
        flat = self.flats.setdefault(name, Flat(name, _group(name)))
        for chunk in entry.chunks:
            file, tensor = self._open(entry, chunk)
            if tensor is None or chunk.box is None or tensor.strides != (1,):
                continue
            buffer = self._buffer(chunk, entry, file, tensor)
            (start,), (stop,) = chunk.box.lo, chunk.box.hi
            piece = Piece(start, stop, chunk.file, buffer, tensor.offset)
            flat.slots.setdefault(_slot(slot), []).append(piece)

    def _placed(self, model: dict[str, Entry]) -> dict[str, dict[str, str]]:
        """Put the rows of what lies in flats; the dtype of every slot of the parameters that do."""
        weights = []
        for name, entry in model.items():
            for chunk in entry.chunks:
                file, tensor = self._open(entry, chunk)
                if tensor is None or chunk.box is None:
                    continue
                bits = file.buffer(tensor).array()[tensor.offset :][: chunk.box.volume]
                weights.append(Weight(name, chunk.box, entry.dtype, bits))
        arrays = {
            piece.buffer: self.buffers[piece.buffer].array()
            for flat in self.flats.values()
            for piece in flat.slots.get("param", ())
        }
        if any(array.dtype != np.float32 for array in arrays.values()):
            cause = "its masters are not in single precision"
            raise Refused([Finding("unsupported-state", str(self.root), cause)])
        every = [*self.flats.values()]
        found, findings = placed(every, "param", weights, arrays, self.said.order)
        self.findings += findings
        dtypes: dict[str, dict[str, str]] = {}
        for flat, at, weight in found:
            for slot, pieces in flat.slots.items():
                if slot == "param" and weight.dtype == "float32":
                    continue  # the weight itself
                for path, row in rows_in(pieces, at, weight, Key(weight.name, slot)):
                    self.rows.setdefault(path, []).append(row)
                dtype = self.buffers[pieces[0].buffer].dtype
                dtypes.setdefault(weight.name, {})[slot] = dtype
        return dtypes

    def _put(self, spec: KeySpec, entry: Entry) -> None:
        """A key, and its rows: of blocks that are flattened, spans of each."""
        if not entry.flattened:
            self._tensor(spec.key, entry, like=spec, kind=spec.kind)
            return
        self.specs[spec.key] = replace(spec, shape=entry.flattened, dtype=entry.dtype)
        grid, numel = entry.shape[:-1], entry.shape[-1]
        block = tuple(n // max(g, 1) for n, g in zip(entry.flattened, grid, strict=True))
        if prod(block) != numel or prod(grid) * numel != prod(entry.flattened):
            cause = f"its blocks of {numel:,} elements are not those of {list(entry.flattened)}"
            self.findings.append(Finding("bad-file", str(spec.key), cause, "it may be damaged"))
            return
        for chunk in entry.chunks:
            file, tensor = self._open(entry, chunk)
            if tensor is None or chunk.box is None:
                continue
            if tensor.strides[-1] != 1 or prod(chunk.box.shape[:-1]) != 1:
                cause = f"{chunk.box} is not one stretch of one block"
                self.findings.append(Finding("unsupported-format", str(spec.key), cause))
                continue
            buffer = self._buffer(chunk, entry, file, tensor)
            first = tuple(at * n for at, n in zip(chunk.box.lo[:-1], block, strict=True))
            span = chunk.box.lo[-1], chunk.box.hi[-1]
            self.rows.setdefault(chunk.file, []).extend(
                replace(row, box=row.box.shifted((0,) * len(first), first))
                for row in rows_of_span(spec.key, block, *span, buffer, tensor.offset)
            )

    def _take(self, entry: Entry) -> None:
        """An object of a rank: of the distributed optimizer what it says, of any other the bytes."""
        (chunk,) = entry.chunks[:1]
        try:
            file = self._zip(chunk)
        except Refused as error:
            self.findings += error.findings
            return
        tree = file.tree[0] if isinstance(file.tree, list) and len(file.tree) == 1 else file.tree
        if _FLAT.match(entry.name):
            self._flats(entry.name.partition("/")[0], tree, file, chunk)
            self.objects[entry.name] = lowered(tree, file)
        elif chunk.length <= SMALL:
            at = slice(chunk.offset, chunk.offset + chunk.length)
            self.objects[entry.name] = bytes(self._maps[f"{self.root}/{chunk.file}"][at])
        else:
            cause = (
                f"is an object of {chunk.length:,} bytes, which is carried unread up to {SMALL:,}"
            )
            self.findings.append(Finding("unsupported-state", entry.name, cause))

    def _flats(self, name: str, tree: Any, file: TorchFile, chunk: Chunk) -> None:
        """The flats inside an object, which `dp_zero_gather_scatter` makes."""
        for front, slot, tensor in _tensors(tree, (name,)):
            if len(tensor.shape) != 1 or tensor.strides != (1,):
                continue
            own = ".".join(front)
            flat = self.flats.setdefault(own, Flat(own, _group(name)))
            buffer = f"{chunk.file}#{chunk.offset}.{tensor.storage.name}:{tensor.dtype}"
            try:
                self.buffers[buffer] = file.buffer(tensor)
            except Refused as error:
                self.findings += error.findings
                continue
            piece = Piece(0, tensor.shape[0], chunk.file, buffer, tensor.offset)
            flat.slots.setdefault(_slot(slot), []).append(piece)

    def _optimizer(self, trees: list[dict[str, Any]]) -> None:
        """Param groups, whose members the checkpoint does not list, and steps."""
        params = {k.name: s for k, s in self.specs.items() if k.slot == "param" and s.trainable}
        hypers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for tree in trees:  # of every rank that has a part of the model: they are the same groups
            known = [hyper for _, hyper in hypers]
            groups = [group for group in tree["param_groups"] if isinstance(group, dict)]
            hypers += [(tree, group) for group in groups if group not in known]
        if not hypers:
            return
        names, findings = groups_of([h for _, h in hypers], params, self.said, str(self.root))
        self.findings += findings
        if findings:
            return
        group_of = {name: number for number, own in enumerate(names) for name in own}
        for key, spec in self.specs.items():
            if key.name in group_of:
                self.specs[key] = replace(spec, group=group_of[key.name])
        for (tree, hyper), own in zip(hypers, names, strict=True):
            step = step_of(tree, hyper)
            if step is not None:
                self.scalars |= {name: {"step": step} for name in own}
        value = [
            {
                "names": own,
                "hyper": plain_part({k: v for k, v in h.items() if k not in NOT_HYPER})[0],
            }
            for (_, h), own in zip(hypers, names, strict=True)
        ]
        self.aux.append(AuxItem("param_groups", value))
        family = next(filter(None, (family_of(hyper) for _, hyper in hypers)), None)
        self.aux += [AuxItem("optimizer", family)] if family else []

    def _rest(self, trees: list[dict[str, Any]]) -> None:
        """What `common.pt` holds beside the optimizer, and the ranks' objects."""
        counters: dict[str, int] = {}
        for key, value in self.common.tree.items():
            label, plain = str(key), _plain(lowered(value, self.common))
            if label == "optimizer":
                continue
            if type(plain) is int:
                counters[label] = plain
            elif isinstance(plain, dict):
                kept, left = plain_part(plain)
                self.aux.append(AuxItem(f"user/{label}", kept | ({"left": left} if left else {})))
            elif plain is not None and plain_part({label: plain})[0]:
                self.aux.append(AuxItem(f"user/{label}", plain))
        if counters:
            self.aux.append(AuxItem("counters", counters))
        for tree in trees:
            scaler = tree.get("grad_scaler")
            if isinstance(scaler, dict) and (scale := number_of(scaler.get("scale"))) is not None:
                state = plain_part(scaler)[0]
                value = {"class": "DynamicGradScaler", "scale": float(scale), "state": state}
                self.aux.append(AuxItem("scaler", value))
                break
        objects = {name: data for name, data in self.objects.items() if isinstance(data, bytes)}
        if objects:
            self.aux.append(AuxItem("user/megatron objects", objects))
        dtypes = sorted(
            {s.dtype for s in self.specs.values() if s.key.slot in {"param", "compute"}}
        )
        behaviour = {"framework": "megatron", "precision": ",".join(dtypes)}
        self.aux.append(AuxItem("behaviour", behaviour))


def _slot(label: str) -> str:
    return "param" if label in MASTERS else label


def _group(name: str) -> str:
    """The part of the model that a flat is of: which chain, which group of data-parallel ranks."""
    found = _PART.search(name)
    return name[: found.end()] if found else name


def _shape(entry: Entry) -> tuple[int, ...]:
    return entry.flattened or entry.shape


def _tensors(
    value: Any, names: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str, StoredTensor]]:
    """The tensors in dicts and lists, with what leads to them."""
    pairs = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in value.items() if isinstance(value, dict) else pairs:
        if isinstance(part, StoredTensor):
            yield names, str(key), part
        else:
            yield from _tensors(part, (*names, str(key)))


def _plain(value: Any) -> Any:
    """A value as it can be carried: namespaces as dicts, classes and functions as their names."""
    if isinstance(value, Opaque) and value.is_a("Namespace", "SimpleNamespace"):
        return _plain(value.state if isinstance(value.state, dict) else {})
    if isinstance(value, Global):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(part) for part in value)
    return value
