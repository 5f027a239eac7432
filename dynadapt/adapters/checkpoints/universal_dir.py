"""DeepSpeed universal checkpoints: a folder a parameter, a file a state, each holding a whole tensor.

The format is that of `deepspeed/checkpoint/ds_to_universal.py` and `universal_checkpoint.py`, 0.19. What
is written has the model states of both kinds of loader: `mp_rank_00` for stages 1 and 2, `zero_pp_rank_0`
for stage 3.
"""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints import _deepspeed_geometry as geometry
from dynadapt.adapters.checkpoints import _deepspeed_trees as trees
from dynadapt.adapters.checkpoints._deepspeed_files import (
    aliases_of,
    aux_items,
    groups_of,
    hyper_item,
    made_by,
    model_states,
    number,
    options_of,
    outcomes_of,
    scaler_item,
)
from dynadapt.adapters.checkpoints._deepspeed_write import TAG
from dynadapt.adapters.checkpoints._format import Format, named_folder
from dynadapt.adapters.checkpoints._making import Making
from dynadapt.adapters.checkpoints._names import leaves
from dynadapt.adapters.checkpoints._optimizer_kinds import family_told
from dynadapt.adapters.checkpoints._pickle import StoredTensor
from dynadapt.adapters.checkpoints._plain import Lifting
from dynadapt.adapters.checkpoints._repickle import tensor
from dynadapt.adapters.checkpoints._rows import Files, Laid
from dynadapt.adapters.checkpoints._torch_file import read_torch
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Described, FileSource, FileTarget, Outcome, alone
from dynadapt.vps.box import row_major_strides
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import file_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.protocols import Agree

__all__ = ["UniversalDir"]

MODEL = "mp_rank_00_model_states.pt"
MODEL3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"

_BY_LOADER = {"zero3": (MODEL3,), "zero2": (MODEL,), "zero1": (MODEL,)}

_STATES = frozenset({"fp32", "exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "step"})
"""Names under which DeepSpeed's converter writes the states of a parameter."""


class UniversalDir(Format):
    """Reads and writes a universal checkpoint (a folder with `latest_universal`, or its tag folder)."""

    name = "universal"

    @staticmethod
    def holds(path: Path) -> bool:
        """A folder with `zero/`, or with a `latest_universal` that leads to one."""
        return _folder(path) is not None

    def read(self, path: Path, said: FileSource) -> Described:
        """See `Format.describe`."""
        root = _folder(path)
        if root is None:
            raise Refused([Finding("bad-file", str(path), "is no universal checkpoint")])
        return _read(root)

    def prepare(self, x: FileTarget, keys: tuple[KeySpec, ...]) -> Described:
        """Lay out all files; raises `Refused` with everything that cannot be so written."""
        model = trees.Model.of(x, keys)
        tag, loaders = str(x.options.get("tag") or TAG), _loaders(x)
        laid = Laid()
        for name in (n for own in model.groups for n in own):
            master = model.by_key[Key(name, "param")]
            for slot in ("param", *model.slots(name)):
                known = model.by_key.get(Key(name, slot), master)
                # A state that was never made is zeros: the loaders ask for every parameter's.
                spec = replace(known, dtype="float32", presence="present")
                laid.whole(f"{tag}/zero/{name}/{_file(slot)}.pt", spec, "0")
            if MODEL in loaders:
                key = Key(name, "compute")
                copy = replace(master, key=key, dtype=model.dtype, derived=True)
                laid.whole(f"{tag}/{MODEL}", copy, trees.weight(name))
        for file in loaders:
            for spec in model.buffers:
                laid.whole(f"{tag}/{file}", spec, trees.weight(spec.key.name))
            for spec in model.frozen:
                name = spec.key.name
                laid.whole(
                    f"{tag}/{file}",
                    spec,
                    f"frozen.{name}" if file == MODEL3 else trees.weight(name),
                )
        made = Making(Path(x.path), x.dry)
        rows = laid.into(made)
        x.made = (model, made, laid, tag)
        return Described(tuple(laid.keys.values()), (), made.buffers, files=rows, flat_step=True)

    def finish(
        self,
        x: FileTarget,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Write the frames of all files, the steps and the global state."""
        agree()
        model, made, laid, tag = x.made
        for path, own in laid.storages.items():
            if path.startswith(f"{tag}/zero/"):
                (row,) = laid.rows[path] or (None,)
                ((dtype, _),) = own.values()
                shape = row.box.shape if row is not None else ()
                made.seal_torch(path, {"param": tensor("0", dtype, shape), "cat_dim": 0}, x.crcs)
        counts = {name: {"step": v["step"]} for name, v in scalars.items() if "step" in v}
        for own in model.groups:  # of which the loaders make flats: they ask for one step in each
            steps = [counts[name]["step"] for name in own if name in counts]
            for name in own if steps else ():
                path, values = f"{tag}/zero/{name}/step.pt", {"0": struct.pack("<f", max(steps))}
                made.seal_torch(path, tensor("0", "float32", ()), {}, values)
        for name in (n for own in model.groups for n in own):
            # The loader asks for a tied tensor by the first of its names in the model.
            slots = [*map(_file, ("param", *model.slots(name))), "step"]
            paths = [f"{tag}/zero/{name}/{slot}.pt" for slot in slots]
            for path in (each for each in paths if each in made.frames):
                for alias in model.by_key[Key(name, "param")].aliases:
                    made.also(path, path.replace(f"/zero/{name}/", f"/zero/{alias}/"))
        kept, told = trees.settled(aux, scalars)
        self._common(x, scalars, kept)
        made.write("latest_universal", tag.encode())
        lost = {label for own in scalars.values() for label in own} - {"step"}
        note = "a universal checkpoint has steps, and no other numbers"
        told += tuple(Outcome(f"scalars/{label}", "dropped", note) for label in sorted(lost))
        told += trees.joined(model.groups, counts)
        return (*outcomes_of(aux, "a universal checkpoint"), *told)

    def _common(
        self,
        x: FileTarget,
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
    ) -> None:
        """`optimizer_state.pt`, as both loaders read it, and the model states."""
        model, made, _, tag = x.made
        config = trees.config_of(aux, model, {})
        hypers = trees.hypers(aux, model.groups)
        groups = [{**hyper, "params": [i]} for i, hyper in enumerate(hypers)]
        steps = [values["step"] for values in scalars.values() if "step" in values]
        values = {"0": struct.pack("<f", max(steps, default=0))}
        scaler = trees.loss_scaler(aux)
        tree = {
            "loss_scaler": scaler,
            "dynamic_loss_scale": bool(scaler.get("dynamic", False)),
            "overflow": False,
            **trees.clipping(aux),
            "ds_version": trees.VERSION,
            "param_groups": groups,
            "optimizer_state_dict": {
                "state": {0: {"step": tensor("0", "float32", ())}},
                "param_groups": groups,
            },
        }
        made.seal_torch(f"{tag}/zero/optimizer_state.pt", tree, {}, values)
        info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}
        for name in _loaders(x):
            lifting, sharded = Lifting("user."), name == MODEL3
            tree = trees.model_tree(
                *(model, aux, config, model.groups, 1, lifting), sharded=sharded
            )
            none = {f"empty.{n}": b"" for n in model.order} if sharded else {}
            made.seal_torch(f"{tag}/{name}", tree | info, x.crcs, none | lifting.values)


def _loaders(x: FileTarget) -> tuple[str, ...]:
    """The files of model states: those that the stages ask for which are to load it."""
    return _BY_LOADER.get(str(x.options.get("loader")), (MODEL, MODEL3))


def _written(root: Path) -> str:
    """The word that asks for the same again."""
    have = [(root / name).is_file() for name in (MODEL, MODEL3)]
    return "universal" if all(have) else f"universal/{'zero3' if have[1] else 'zero2'}"


def _file(slot: str) -> str:
    return "fp32" if slot == "param" else slot


def _folder(path: Path) -> Path | None:
    if (path / "zero").is_dir():
        return path
    tagged = named_folder(path, "latest_universal")
    return tagged if tagged is not None and (tagged / "zero").is_dir() else None


def _read(root: Path) -> Described:
    parts = _parts(root)
    model, common = parts[0], model_states(parts[0])
    files = Files(str(root))
    specs: dict[Key, KeySpec] = {}
    scalars: dict[str, dict[str, int | float]] = {}
    groups = _groups(parts)
    zero, zero_root = (
        options_of(options_of(common, "ds_config"), "zero_optimization"),
        root / "zero",
    )
    if zero.get("round_robin_gradients") and type(ranks := common.get("dp_world_size")) is int:
        groups = [geometry.undealt(own, max(ranks, 1)) for own in groups]
    if len(parts) > 1:  # each lists what it has itself of a tensor
        groups = [{n: _shape(root, n) or shape for n, shape in own.items()} for own in groups]
    shapes = {name: shape for own in groups for name, shape in own.items()}
    aliases = aliases_of(common)
    module = options_of(common, "module")
    buffer_names = set(common.get("buffer_names") or ())
    params = [n for n in module or shapes if n not in buffer_names]
    files.findings += _unlisted(root, parts, {*shapes, *module, *chain(*aliases.values())})
    order = {name: i for i, name in enumerate(params)}
    number_of = {name: i for i, own in enumerate(groups) for name in own}
    frozen = geometry.shapes_of(common.get("frozen_param_shapes"))
    for name, shape in shapes.items():
        if leaves(name):
            cause = "would lie outside the checkpoint"
            files.findings.append(Finding("path-traversal", name, cause, "do not trust it"))
            continue
        folder = f"{zero_root}/{name}"
        found = _files_of(folder)
        if "fp32.pt" not in found:
            cause = "has no fp32.pt: its folder is missing or not whole"
            files.findings.append(Finding("missing-file", f"zero/{name}", cause))
        more = {
            "order": order.get(name, len(order)),
            "group": number_of[name],
            "aliases": aliases.get(name, ()),
        }
        for each in found:
            file = read_torch(f"{folder}/{each}")
            if file.root in _STATES and f"{file.root}.pt" != each:
                cause = f"was written as {file.root}.pt: it is another state's"
                fix = "give it its name back, or copy the whole checkpoint again"
                files.findings.append(Finding("mixed-files", f"zero/{name}/{each}", cause, fix))
            value = file.tree.get("param") if isinstance(file.tree, dict) else file.tree
            slot = each.removesuffix(".pt")
            key = Key(name, "param" if slot == "fp32" else slot)
            if slot == "step":
                if (step := number(value, file)) is not None:
                    scalars.setdefault(name, {})["step"] = step
                continue
            if not isinstance(value, StoredTensor) or prod(value.shape) != prod(shape):
                cause = f"holds no tensor of {list(shape)}"
                files.findings.append(Finding("shape", f"zero/{name}/{each}", cause))
                continue
            # What DeepSpeed's conversion of a stage 3 checkpoint wrote is flat.
            strides = value.strides if value.shape == shape else row_major_strides(shape)
            flat = replace(value, shape=shape, strides=strides)
            kind = "parameter" if slot == "fp32" else "state"
            specs[key] = KeySpec(key, shape, value.dtype, kind=kind, **more)  # type: ignore[arg-type]
            files.whole(key, file, flat)
    files.findings += _lost_states(specs)
    for name, value in module.items():
        if not isinstance(value, StoredTensor):
            continue
        if name in buffer_names:
            key = Key(name, "buffer")
            specs[key] = KeySpec(key, value.shape, value.dtype, kind="buffer", trainable=False)
            files.whole(key, model, value)
        elif name in frozen and value.shape == frozen[name]:
            key = Key(name, "param")
            specs[key] = KeySpec(
                key, value.shape, value.dtype, trainable=False, order=order.get(name, 0)
            )
            files.whole(key, model, value)
        elif name in shapes and value.shape == shapes[name]:
            master = specs.get(Key(name, "param"))
            if master is not None:
                key = Key(name, "compute")
                specs[key] = replace(master, key=key, dtype=value.dtype, derived=True)
                files.whole(key, model, value)
    for name, value in options_of(common, "frozen_param_fragments").items():
        key, whole = Key(name, "param"), frozen.get(name)
        if whole is None or key in specs or not isinstance(value, StoredTensor):
            continue
        if prod(value.shape) == prod(whole):  # else one rank's part
            specs[key] = KeySpec(key, whole, value.dtype, trainable=False, order=order.get(name, 0))
            files.whole(key, model, replace(value, shape=whole, strides=row_major_strides(whole)))
    lost = [n for n in frozen if Key(n, "param") not in specs]
    files.findings += [
        Finding(
            "missing-key", n, "is frozen, and a universal checkpoint of stage 3 drops its value"
        )
        for n in lost
    ]
    if files.findings:
        raise Refused(files.findings)
    tree = _optimizer(root)
    items = _optimizer_items(tree, groups)
    hypers = [own["hyper"] for x in items if x.path == "param_groups" for own in x.value]
    family = family_told(hypers, {k.slot for k, spec in specs.items() if spec.kind == "state"})
    named = [AuxItem("optimizer", family)] if family else []
    aux = [*items, *named, *aux_items(common, model, tree.get("clip_grad"))]
    rows = {file_endpoint(path): tuple(own) for path, own in files.rows.items()}
    told = tuple(specs.values())
    return Described(
        *(told, (), files.buffers, scalars, tuple(aux)),
        files=rows,
        written=_written(root),
        made_by=made_by(common),
        nameless="folders",
        ordered=bool(module),
    )


def _files_of(folder: str) -> list[str]:
    """The states of a parameter, by its folder; none where that is missing."""
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(".pt"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _parts(root: Path) -> list[TorchFile]:
    """The model states of each part of the model: one, if it was not pipeline- or tensor-parallel."""
    for first in (MODEL, MODEL3):
        found: list[TorchFile] = []
        while (path := root / first.replace("mp_rank_00", f"mp_rank_{len(found):02}")).is_file():
            found.append(read_torch(str(path)))
        if found:
            return found
    cause = "has no file of model states"
    raise Refused([Finding("missing-file", str(root), cause, "copy the whole checkpoint")])


def _groups(parts: Sequence[TorchFile]) -> list[geometry.Shapes]:
    """The shapes of each group, of all parts; raises `Refused` if those have not the same groups."""
    every = [groups_of(model_states(part)) for part in parts]
    if len({len(own) for own in every}) > 1:
        cause = "its stages have not the same param groups, of which it keeps the first one's"
        fix = "convert the checkpoint that it was made of: it is read, too"
        raise Refused([Finding("unsupported-parallel", parts[0].path, cause, fix)])
    return [
        {n: shape for own in same for n, shape in own.items()} for same in zip(*every, strict=True)
    ]


def _shape(root: Path, name: str) -> tuple[int, ...] | None:
    """The whole shape of a parameter, as its own file has it."""
    path = root / "zero" / name / "fp32.pt"
    tree = read_torch(str(path)).tree if not leaves(name) and path.is_file() else {}
    value = tree.get("param") if isinstance(tree, dict) else tree
    return value.shape if isinstance(value, StoredTensor) else None


def _unlisted(root: Path, parts: Sequence[TorchFile], names: set[str]) -> Iterator[Finding]:
    """Tensors that have folders, and that nothing lists."""
    for own in map(model_states, parts):
        names |= {*(own.get("buffer_names") or ()), *options_of(own, "frozen_param_shapes")}
    for path in sorted((root / "zero").iterdir()):
        if path.name not in names and (path / "fp32.pt").is_file():
            cause = "has states, and no file of model states lists it"
            yield Finding("missing-file", f"zero/{path.name}", cause, "copy the whole checkpoint")


def _lost_states(specs: Mapping[Key, KeySpec]) -> list[Finding]:
    """States that a parameter has lost: it has some of those that others of its group have, and not all.

    Which states there are depends on the group, and with some optimizers (Muon) on the parameter.
    """
    held: dict[tuple[int, str], set[str]] = {}
    for key, spec in specs.items():
        if spec.kind == "state":
            held.setdefault((spec.group, key.name), set()).add(key.slot)
    fuller = {(group, frozenset(slots)) for (group, _), slots in held.items()}
    return [
        Finding("missing-file", f"zero/{name}/{slot}.pt", "is missing", "copy the whole checkpoint")
        for (group, name), slots in sorted(held.items())
        for slot in sorted(set().union(*(f for g, f in fuller if g == group and slots < f)) - slots)
    ]


def _optimizer(root: Path) -> dict[Any, Any]:
    path = root / "zero" / "optimizer_state.pt"
    tree = read_torch(str(path)).tree if path.is_file() else {}
    if not isinstance(tree, dict):
        raise Refused([Finding("bad-file", str(path), "is no file of optimizer states")])
    return tree


def _optimizer_items(tree: Mapping[Any, Any], groups: Sequence[geometry.Shapes]) -> list[AuxItem]:
    found = options_of(tree, "optimizer_state_dict").get("param_groups") or tree.get("param_groups")
    found = [own for own in found if isinstance(own, dict)] if isinstance(found, list) else []
    scaler = scaler_item(tree.get("loss_scaler"))
    items = [hyper_item(groups, found)] if len(found) == len(groups) else []
    return [*items, *([scaler] if scaler else [])]
