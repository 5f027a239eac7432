"""A torch distributed checkpoint in the making: which chunk lies where, then frames and metadata.

The dict is `{"model": ..., "optimizer": ..., ...}`, as `get_state_dict` makes them. Every chunk is a
`torch.save` zip in the file of the rank that would have written it; what is known only at the end (steps,
hyperparameters, the rest) goes into the last file of rank 0.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from dynadapt.adapters.checkpoints._dcp_metadata import METADATA, Chunk, boxes
from dynadapt.adapters.checkpoints._dcp_pickle import Metadata
from dynadapt.adapters.checkpoints._dcp_read import OWN
from dynadapt.adapters.checkpoints._format import homeless
from dynadapt.adapters.checkpoints._optimizer_kinds import family_of
from dynadapt.adapters.checkpoints._plain import MARK, Lifting
from dynadapt.adapters.checkpoints._repickle import tensor, write_pickle
from dynadapt.adapters.checkpoints._state_parts import Parts
from dynadapt.adapters.checkpoints._torch_state import PLAIN
from dynadapt.adapters.checkpoints._torch_write import ALIGN, Frame, lay_out
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import Outcome
from dynadapt.vps.box import Box, row_major_strides
from dynadapt.vps.keys import itemsize
from dynadapt.vps.layout import Row, file_endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynadapt.adapters.checkpoints._dcp_metadata import Names
    from dynadapt.adapters.checkpoints._making import Making
    from dynadapt.protocols import AuxItem, FileTarget
    from dynadapt.vps.keys import Key, KeySpec
    from dynadapt.vps.spec import LayoutSpec

__all__ = ["MODEL", "OPTIMIZER", "Writing"]

MODEL, OPTIMIZER, SCHEDULER = "model", "optimizer", "lr_scheduler"
FILES, FULL = 4, 64 << 20
"""Files of a checkpoint that are filled at one time, at most, and how full one is before there is another:
a file system lets one writer at a time into a file. Torch's writer does so with a `thread_count`."""

UNTOLD = "the source does not say whether weight decay is decoupled (AdamW) or not (Adam)"

#: What groups have beside hyperparameters: how an optimizer runs. A loader asks for every entry it has.
RUNS = {
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}


class _Zip(NamedTuple):
    """One tensor as `torch.save` has it, but for its bytes."""

    frame: Frame
    pickled: bytes
    length: int


class Writing:
    """The plan of one checkpoint: laid out from keys alone, sealed with scalars and aux.

    `folder` and `holds` are for Accelerate, which has model and optimizer in folders of their own.
    """

    def __init__(
        self,
        x: FileTarget,
        keys: Sequence[KeySpec],
        folder: str = "",
        holds: frozenset[str] = frozenset({MODEL, OPTIMIZER}),
    ) -> None:
        self.folder, self.holds = f"{folder}/" if folder else "", holds
        self.ranks, self.cut = _ranks(x.layout)
        whole = bool(x.groups) or any(spec.kind == "state" for spec in keys)
        whole = whole and OPTIMIZER in holds
        self.parts = Parts(x, keys, optimizer=whole)
        self.keys: dict[Key, KeySpec] = {}
        self.chunks: dict[Key, list[tuple[Chunk, _Zip, str]]] = {}
        self.rows: dict[str, list[Row]] = {}
        self.sizes = [[0] for _ in range(self.ranks)]
        self.ends: dict[str, int] = {}
        self.untold = False
        self._zips: dict[tuple[str, tuple[int, ...]], _Zip] = {}
        self.buffers: dict[str, dict[str, tuple[str, int, int]]] = {}
        labels = {spec.key.slot.removeprefix("extra:") for spec in self.parts.extras}
        taken = sorted({MODEL, OPTIMIZER, SCHEDULER, OWN} & labels)
        if taken:
            cause = "has the name of another part of a distributed checkpoint"
            raise Refused([Finding("bad-argument", f"extra:{name}", cause) for name in taken])
        for spec in self.parts.weights if MODEL in holds else ():
            self._lay(spec, cut=self.cut)
        for spec in self.parts.buffers if MODEL in holds else ():
            self._lay(spec, cut=False)
        for spec in (*self.parts.states, *self.parts.extras) if OPTIMIZER in holds else ():
            self._lay(spec, cut=self.cut)

    def _lay(self, spec: KeySpec, *, cut: bool) -> None:
        """Give a tensor's chunks their places; one that was never made is written as zeros."""
        spec = replace(spec, presence="present")
        self.keys[spec.key] = spec
        own = self.chunks[spec.key] = []
        for rank, box in boxes(spec.shape, self.ranks if cut else 1):
            if not cut:
                rank = min(range(self.ranks), key=lambda r: sum(self.sizes[r]))
            shape = box.shape
            zipped = self._zip(spec.dtype, shape)
            at, _ = zipped.frame.places["0"]
            number = self._next(self.sizes[rank])
            start, length, file = (
                self.sizes[rank][number],
                zipped.length,
                f"__{rank}_{number}.distcp",
            )
            self.ends[f"{self.folder}{file}"] = start + length
            self.sizes[rank][number] = -(-(start + length) // ALIGN) * ALIGN
            path = f"{self.folder}{file}"
            parts = self.buffers.setdefault(path, {})
            name = str(len(parts))
            parts[name] = (spec.dtype, start + at, box.volume)
            own.append((Chunk(box, file, start, length), zipped, f"{path}#{name}"))
            row = Row(spec.key, box, f"{path}#{name}", 0, row_major_strides(shape))
            self.rows.setdefault(path, []).append(row)

    def _next(self, sizes: list[int]) -> int:
        """Which of a rank's files a tensor goes into."""
        if min(sizes) >= FULL and len(sizes) < FILES // self.ranks:
            sizes.append(0)
        return sizes.index(min(sizes))

    def _zip(self, dtype: str, shape: tuple[int, ...]) -> _Zip:
        """The zip of a tensor: the same for all of one dtype and shape."""
        found = self._zips.get((dtype, shape))
        if found is None:
            frame = lay_out({"0": prod(shape) * itemsize(dtype)})
            pickled = write_pickle(tensor("0", dtype, shape))
            *_, (end, tail) = frame.seal_pickled(pickled, {"0": 0})
            found = self._zips[dtype, shape] = _Zip(frame, pickled, end + len(tail))
        return found

    def into(self, made: Making) -> dict[int, tuple[Row, ...]]:
        """Allocate all files; the rows by endpoint."""
        for file, parts in self.buffers.items():
            made.raw_file(file, self.ends[file], parts)
        made.allocate()
        return {file_endpoint(file): tuple(rows) for file, rows in self.rows.items()}

    def seal(
        self,
        made: Making,
        crcs: Mapping[str, int],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
    ) -> tuple[Outcome, ...]:
        """Write everything that is not a tensor's bytes; says what became of aux items."""
        frames: dict[str, list[tuple[int, bytes]]] = {}
        for own in self.chunks.values():
            for chunk, zipped, buffer in own:
                crc = {"0": made.crc(buffer, crcs)}
                for at, data in zipped.frame.seal_pickled(zipped.pickled, crc):
                    frames.setdefault(chunk.file, []).append((chunk.offset + at, data))
        for file, parts in frames.items():
            made.write_parts(f"{self.folder}{file}", parts)
        told, last = Metadata(), _Last(f"__0_{len(self.sizes[0])}.distcp")
        if MODEL in self.holds:
            self._model(told)
        if self.parts.groups:
            self._optimizer(told, last, scalars, aux)
        for spec in self.parts.extras if OPTIMIZER in self.holds else ():
            self._add(told, (spec.key.slot.removeprefix("extra:"), spec.key.name), spec)
        outcomes = self._rest(told, last, aux) if MODEL in self.holds else ()
        made.write(f"{self.folder}{last.file}", bytes(last.data))
        made.write(f"{self.folder}{METADATA}", told.pickled())
        return outcomes

    def _add(self, told: Metadata, names: Names, spec: KeySpec) -> None:
        chunks = [chunk for chunk, _, _ in self.chunks[spec.key]]
        told.tensor(names, spec.shape, self.keys[spec.key].dtype, chunks)

    def _model(self, told: Metadata) -> None:
        """All names of a tied tensor lead to the same bytes."""
        for spec in (*self.parts.weights, *self.parts.buffers):
            first = self.parts.first.get(spec.key.name, spec.key.name)
            for name in sorted((spec.key.name, *spec.aliases), key=lambda n: n != first):
                self._add(told, (MODEL, name), spec)

    def _optimizer(
        self,
        told: Metadata,
        last: _Last,
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
    ) -> None:
        states: dict[str, list[KeySpec]] = {}
        for spec in self.parts.states:
            states.setdefault(spec.key.name, []).append(spec)
        plain = set(aux[PLAIN].value) if PLAIN in aux else set()
        labels = {label for own in scalars.values() for label in own}
        for name in (n for own in self.parts.groups for n in own):
            front: Names = (OPTIMIZER, "state", self.parts.first.get(name, name))
            trained = name in states or name in scalars
            for label in sorted(labels) if trained else ():
                value = scalars.get(name, {}).get(label, 0)
                if label in plain:
                    told.value((*front, label), last.value(value))
                    continue
                lifting = Lifting()
                chunk = last.value(lifting.number(value), lifting)
                told.tensor((*front, label), (), "float32", [replace(chunk, box=Box((), ()))])
            for spec in states.get(name, ()):
                self._add(told, (*front, spec.key.slot), spec)
        for index, (own, hyper) in enumerate(
            zip(self.parts.groups, self.parts.hypers(aux), strict=True)
        ):
            names = [self.parts.first.get(name, name) for name in own]
            entries = {**_runs(hyper, aux), **hyper, "params": names}
            self.untold |= "amsgrad" in entries and "decoupled_weight_decay" not in entries
            for entry, value in entries.items():
                path = (OPTIMIZER, "param_groups", index, entry)
                told.value(path, last.lifted(value))

    def _rest(self, told: Metadata, last: _Last, aux: Mapping[str, AuxItem]) -> tuple[Outcome, ...]:
        """What stands beside model and optimizer: by its name, or in an entry of our own."""
        own: dict[str, Any] = {}
        outcomes = []
        taken = {name.partition(".")[0] for name in told.described} | {OWN, SCHEDULER}
        for path, item in aux.items():
            kind, note, name = "exact", "", path.removeprefix("user/")
            if path == "scheduler":
                self._tree(told, last, (SCHEDULER,), item.value["state"])
                if left := item.value.get("left"):
                    kind, note = "derived", f"all but {', '.join(left)}"
            elif path.startswith("user/") and name.partition(".")[0] not in taken:
                self._tree(told, last, (name,), item.value)
                taken.add(name.partition(".")[0])
            elif path == "behaviour" or path.startswith("opaque/"):
                outcomes.append(homeless(item, "a distributed checkpoint"))
                continue
            elif path not in {"param_groups", "optimizer", PLAIN}:
                own[path] = item.value
            if path == "param_groups" and self.untold:
                kind, note = "derived", UNTOLD
            outcomes.append(Outcome(path, kind, note))  # type: ignore[arg-type]
        names = [n for s in self.parts.buffers for n in (s.key.name, *s.aliases)]
        told.value((OWN,), last.value({"buffers": names, "aux": own}))
        return tuple(outcomes)

    def _tree(self, told: Metadata, last: _Last, names: Names, value: Any) -> None:
        """A nested dict, flattened as torch does, so that a job asks for what is there."""
        is_tensor = isinstance(value, dict) and value.keys() == {MARK}
        is_dict = isinstance(value, dict) and bool(value) and not is_tensor
        if is_dict and all(isinstance(key, str) for key in value):
            for key, part in value.items():
                self._tree(told, last, (*names, key), part)
            return
        lifting = Lifting()
        lifted = lifting.lifted(value)
        chunk = last.value(lifted, lifting)
        if is_tensor:
            box = Box.whole(lifted.shape)
            chunks = [replace(chunk, box=box)] if box.volume else []
            told.tensor(names, lifted.shape, lifted.dtype, chunks)
        else:
            told.value(names, chunk)


class _Last:
    """The file of what is small and comes last, one zip after another."""

    def __init__(self, file: str) -> None:
        self.file, self.data = file, bytearray()

    def value(self, tree: Any, lifting: Lifting | None = None) -> Chunk:
        """Append one object, with the bytes of its tensors."""
        start = len(self.data)
        for at, part in lay_out({}).seal(tree, {}, lifting.values if lifting else None):
            self.data += bytes(start + at - len(self.data)) + part
        length = len(self.data) - start
        self.data += bytes(-len(self.data) % ALIGN)
        return Chunk(None, self.file, start, length)

    def lifted(self, value: Any) -> Chunk:
        """The same of a value whose small tensors are bytes."""
        lifting = Lifting()
        return self.value(lifting.lifted(value), lifting)


def _ranks(layout: LayoutSpec | None) -> tuple[int, bool]:
    """How many ranks write, and whether each cuts dim 0 of every parameter."""
    if layout is None:
        return 1, False
    known = {"fsdp1": True, "fsdp2": True, "hsdp": True, "ddp": False}
    other = [axis for axis in layout.axes if axis not in {"dp", "rep"}]
    if layout.kind not in known or other or layout.options:
        what = layout.kind if layout.kind not in known else ", ".join([*other, *layout.options])
        cause = f"{what} cannot be written as a distributed checkpoint"
        fix = "write dcp, dcp/fsdp2:dp=N or dcp/hsdp:rep=M,dp=N: any job reads its own part of it"
        raise Refused([Finding("bad-spec", str(layout), cause, fix)])
    return layout.size("dp"), known[layout.kind]


def _runs(hyper: Mapping[str, Any], aux: Mapping[str, AuxItem]) -> dict[str, Any]:
    """Entries that torch's own class has and the source's need not have.

    Whether a weight decay is decoupled is not guessed: Adam would go on as AdamW, or the other way.
    """
    if family_of(hyper) != "Adam":
        return RUNS
    behaviour = aux["behaviour"].value if "behaviour" in aux else {}
    told: Any = behaviour.get("config")
    for name in ("optimizer", "params"):
        told = told.get(name) if isinstance(told, dict) else None
    decoupled: dict[str, bool] = {}
    if "bias_correction" in hyper:  # DeepSpeed's own Adam
        mode = told.get("adam_w_mode", True) if isinstance(told, dict) else True
        decoupled = {"decoupled_weight_decay": bool(mode)}
    elif not hyper.get("weight_decay"):
        decoupled = {"decoupled_weight_decay": False}
    return {**RUNS, "amsgrad": False, **decoupled}
