"""Which files a DeepSpeed checkpoint has, and what the parts that say nothing of tensors say.

The names are made by `_get_zero_ckpt_name` and `_get_ckpt_name` of DeepSpeed's runtime/engine.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dynadapt.adapters._hyper import hyper_in_files
from dynadapt.adapters.checkpoints._deepspeed_geometry import shapes_of
from dynadapt.adapters.checkpoints._format import named_folder
from dynadapt.adapters.checkpoints._names import looks_like_buffer
from dynadapt.adapters.checkpoints._pickle import Opaque, StoredTensor
from dynadapt.adapters.checkpoints._plain import lowered
from dynadapt.adapters.checkpoints._torch_file import TorchFile, read_torch
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Outcome
from dynadapt.vps.wire import encodable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from dynadapt.adapters.checkpoints._deepspeed_geometry import Shapes

__all__ = [
    "Folder",
    "Stage",
    "aliases_of",
    "aux_items",
    "buffers_of",
    "groups_of",
    "hyper_item",
    "made_by",
    "model_states",
    "number",
    "optimizer_states",
    "options_of",
    "outcomes_of",
    "scaler_item",
    "tag_folder",
    "ties_of",
]

_OPTIM = re.compile(r"^(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt$")
_MODEL3 = re.compile(r"^zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_MOST = 1 << 16
"""Ranks whose files are listed as missing."""

_MODEL = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
_EXPERT = re.compile(r"^(layer_\d+_expert_\d+|expp_rank_\d+)_mp_rank_\d+_(model|optim)_states\.pt$")


def tag_folder(path: Path) -> Path | None:
    """The folder with the files: the path, or the one that its `latest` names; None: no such thing."""
    if not path.is_dir():
        return None
    if any(_OPTIM.match(p.name) or _MODEL.match(p.name) for p in path.iterdir()):
        return path
    return named_folder(path, "latest")


@dataclass(frozen=True)
class Stage:
    """What a stage of a pipeline has in files of layers, under the names of the whole model.

    `module` has the parameters and buffers of all stages, in the whole model's order; `own` are the names
    that are read with this one, `buffers` those of buffers, `groups` the shapes in this one's flats.
    """

    module: Mapping[str, tuple[TorchFile, StoredTensor]]
    own: frozenset[str]
    buffers: frozenset[str]
    groups: tuple[Shapes, ...]


@dataclass(frozen=True)
class Folder:
    """The files of one checkpoint, by kind; `optim` and `model` are by data-parallel rank.

    Below stage 3 all ranks share one file of model states, which is then `model[0]`. Of a checkpoint under
    tensor or pipeline parallelism these are the files of one part of the model.
    """

    root: Path
    optim_names: tuple[str, ...]
    model_names: tuple[str, ...]
    stage: Stage | None = None

    @classmethod
    def parts(cls, root: Path) -> tuple[Folder, ...]:
        """Look at a folder: one of each part of the model; raises `Refused` for what is missing."""
        names = sorted(p.name for p in root.iterdir())
        optim = {(int(m[3]), int(m[2])): n for n in names if (m := _OPTIM.match(n))}
        wide = {(int(m[2]), int(m[1])): n for n in names if (m := _MODEL3.match(n))}
        model = {int(m[1]): n for n in names if (m := _MODEL.match(n))}
        every = {part for part, _ in (*optim, *wide)} | set(model) or {0}
        findings: list[Finding] = []
        fix = "copy the whole checkpoint"
        if lost := _gone(every):
            cause = f"the files of the model's parts (mp_rank) {lost} are missing"
            findings.append(Finding("missing-file", str(root), cause, fix))
        if experts := [n for n in names if _EXPERT.match(n)]:
            cause = f"holds experts in files of their own, such as {experts[0]}, which are not read"
            way = "gather the experts in a job without expert parallelism"
            findings.append(Finding("unsupported-parallel", str(root), cause, way))
        if twice := [n for n in names if _OPTIM.match(n) and n not in optim.values()]:
            cause = f"has more than one file of a rank's optimizer states, {twice[0]} among them"
            findings.append(
                Finding("bad-file", str(root), cause, "take away what is not this job's")
            )
        for part in sorted(every):
            of = f" of mp_rank {part}" if len(every) > 1 else ""
            for what, found in (("optimizer", optim), ("model", wide)):
                ranks = {rank for own, rank in found if own == part}
                if lost := _gone(ranks, {rank for _, rank in found}):
                    cause = f"the {what} states of ranks {lost}{of} are missing"
                    findings.append(Finding("missing-file", str(root), cause, fix))
            if part not in model and not wide:
                cause = f"has no file of model states{of}"
                findings.append(Finding("missing-file", str(root), cause, fix))
        if findings:
            raise Refused(findings)
        return tuple(
            cls(
                root,
                tuple(n for (p, _), n in sorted(optim.items()) if p == part),
                tuple(n for (p, _), n in sorted(wide.items()) if p == part) or (model[part],),
            )
            for part in sorted(every)
        )

    @cached_property
    def optim(self) -> tuple[TorchFile, ...]:
        """The optimizer states of each rank; empty at stage 0."""
        return _every(self.root, self.optim_names)

    @cached_property
    def model(self) -> tuple[TorchFile, ...]:
        """The model states: one file, or at stage 3 one of each rank."""
        return _every(self.root, self.model_names)

    @cached_property
    def common(self) -> Mapping[str, Any]:
        """What the first file of model states says; the others say the same."""
        return model_states(self.model[0])

    @property
    def config(self) -> Mapping[str, Any]:
        """The `ds_config` that the job ran with."""
        config = self.common.get("ds_config")
        return config if isinstance(config, dict) else {}

    def option(self, name: str, default: Any = None) -> Any:
        """A setting of `zero_optimization`."""
        zero = self.config.get("zero_optimization")
        return zero.get(name, default) if isinstance(zero, dict) else default


def _gone(have: Collection[int], of: Collection[int] = ()) -> list[int]:
    """The numbers that are missing up to the greatest: of a name with too great a one only the next."""
    most = max((*have, *of), default=-1)
    if most > len(have) + len(of) + _MOST:
        return [next(n for n in range(most) if n not in have)]
    return [n for n in range(most + 1) if n not in have]


def _every(root: Path, names: Iterable[str]) -> tuple[TorchFile, ...]:
    """All files of a kind; raises `Refused` with what is wrong with each."""
    found: list[TorchFile] = []
    findings: list[Finding] = []
    for name in names:
        try:
            found.append(read_torch(str(root / name)))
        except Refused as error:
            findings += error.findings
    if findings:
        raise Refused(findings)
    return tuple(found)


def optimizer_states(file: TorchFile) -> dict[str, Any]:
    """The `optimizer_state_dict` of one rank's file; raises `Refused` (`bad-file`)."""
    found = file.tree.get("optimizer_state_dict") if isinstance(file.tree, dict) else None
    if not isinstance(found, dict):
        raise Refused([Finding("bad-file", file.path, "holds no optimizer_state_dict")])
    return found


def model_states(file: TorchFile) -> dict[str, Any]:
    """The tree of a file of model states; raises `Refused` (`bad-file`)."""
    tree = file.tree
    if not isinstance(tree, dict) or not isinstance(tree.get("module", 0), dict | None):
        cause = "holds no 'module': it is no file of model states"
        raise Refused([Finding("bad-file", file.path, cause)])
    return tree


def hyper_item(groups: Sequence[Iterable[str]], param_groups: Sequence[Any]) -> AuxItem:
    """The `param_groups` item: names and hyperparameters of each group."""
    value = [
        {"names": list(names), "hyper": hyper_in_files(own)}
        for names, own in zip(groups, param_groups, strict=False)
    ]
    return AuxItem("param_groups", value)


def aux_items(common: Mapping[str, Any], file: TorchFile, clipped: Any = None) -> list[AuxItem]:
    """Counters, scheduler, what the job did to a step by configuration, and the user's own (`client_state`).

    `file` is the one that `common` is of. What of the user's cannot be carried is named, so that a
    conversion can say that it is lost.

    `clipped` is what its optimizer says to have clipped gradients by. Without that the config tells it, if
    it has it: what it was by default depends on the version.
    """
    counters = {
        name: common[name]
        for name in ("global_steps", "global_samples", "skipped_steps")
        if type(common.get(name)) is int
    }
    items = [AuxItem("counters", counters)] if counters else []
    scheduler = common.get("lr_scheduler")
    if isinstance(scheduler, dict) and encodable(scheduler):
        items.append(AuxItem("scheduler", {"class": "", "state": scheduler, "left": []}))
    config = common.get("ds_config")
    config = config if isinstance(config, dict) else {}
    zero = config.get("zero_optimization")
    precision = next(
        (
            dtype
            for name, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16"))
            if isinstance(config.get(name), dict) and config[name].get("enabled")
        ),
        "float32",
    )
    behaviour: dict[str, Any] = {
        "framework": "deepspeed",
        "zero_stage": int(_number(zero.get("stage"))) if isinstance(zero, dict) else 0,
        "precision": precision,
        "config": {name: v for name, v in config.items() if encodable(v)},
    }
    clips = [v for v in (clipped, config.get("gradient_clipping")) if type(v) in {int, float}]
    if clips:
        behaviour["gradient_clipping"] = _number(clips[0])
    items.append(AuxItem("behaviour", behaviour))
    known = {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
        *("shared_params", "frozen_param_fragments", "lr_scheduler", "ds_config", "ds_version"),
        *counters,
        *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "data_sampler"),
        *("random_ltd", "sparse_tensor_module_names", "csr_tensor_module_names"),
        "universal_checkpoint_info",
    }
    for name, value in common.items():
        if name in known:
            continue
        plain = lowered(value, file)
        if encodable(plain):
            items.append(AuxItem(f"user/{name}", plain))
        else:
            items.append(AuxItem(f"opaque/user/{name}", type(value).__name__))
    return items


def made_by(common: Mapping[str, Any]) -> str:
    """The framework and its version, as a file of model states has it."""
    version = common.get("ds_version")
    return f"DeepSpeed {version}" if isinstance(version, str) and len(version) < 64 else "DeepSpeed"


def _number(value: Any) -> float:
    """A number of a config; what is none counts as nothing, as DeepSpeed refuses to run with it."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def scaler_item(scaler: Any) -> AuxItem | None:
    """The `loss_scaler` of stages 1 to 3, if it does anything."""
    if not isinstance(scaler, Opaque) or not isinstance(scaler.state, dict):
        return None
    state = {name: v for name, v in scaler.state.items() if encodable(v)}
    scale = _number(state.get("cur_scale", 1.0))
    if not state.get("dynamic") and scale == 1.0:
        return None
    value = {"class": scaler.made_by.name, "scale": scale, "state": state, "override": None}
    return AuxItem("scaler", value)


_HELD = frozenset({"param_groups", "counters", "scheduler", "scaler", "behaviour", "optimizer"})


def outcomes_of(aux: Iterable[str], what: str) -> tuple[Outcome, ...]:
    """What became of aux items, by path, in a checkpoint; `what` names its kind."""
    return tuple(
        Outcome(path, "exact")
        if path in _HELD or path.startswith("user/")
        else Outcome(path, "dropped", f"{what} has no place for it")
        for path in aux
    )


def groups_of(tree: Mapping[str, Any]) -> list[Shapes]:
    """The shapes that a file lists: by group, or at stage 3 by sub-group.

    DeepSpeed before 0.6 put the list into the files of optimizer states, before 0.5 as one dict of all.
    """
    listed = tree.get("param_shapes")
    found = [shapes_of(each) for each in (listed if isinstance(listed, list) else [listed])]
    return found if any(found) else []


def aliases_of(common: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Name -> its other names, sorted, of the tensors that are shared."""
    shared = common.get("shared_params")
    found: dict[str, list[str]] = {}
    for alias, name in (shared if isinstance(shared, dict) else {}).items():
        found.setdefault(str(name), []).append(str(alias))
    return {name: tuple(sorted(own)) for name, own in found.items()}


def ties_of(module: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The same, where nothing lists it: entries that are one and the same tensor; the first is the name."""
    found: dict[StoredTensor, list[str]] = {}
    for name, value in module.items():
        if isinstance(value, StoredTensor):
            found.setdefault(value, []).append(str(name))
    return {own[0]: tuple(sorted(own[1:])) for own in found.values() if len(own) > 1}


def buffers_of(folder: Folder) -> set[str]:
    """The entries of the model that are buffers.

    DeepSpeed before 0.4 does not list them, but all parameters (stages 1 to 3) or none (stage 0).
    """
    if folder.stage is not None:
        return set(folder.stage.buffers)
    module = options_of(folder.common, "module")
    names = folder.common.get("buffer_names")
    if isinstance(names, list):
        return {str(name) for name in names}
    listed = groups_of(folder.common) or (groups_of(folder.optim[0].tree) if folder.optim else [])
    parameters = {name for own in listed for name in own}
    return {
        str(name)
        for name, value in module.items()
        if isinstance(value, StoredTensor)
        and (name not in parameters if parameters else looks_like_buffer(str(name), value.dtype))
    }


def options_of(tree: Mapping[str, Any], name: str) -> Mapping[Any, Any]:
    """An entry that is a dict; an empty one if it is none."""
    found = tree.get(name)
    return found if isinstance(found, dict) else {}


def number(value: Any, file: TorchFile) -> float | int | None:
    """A number, or the one element of a tensor that is one."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, StoredTensor) and not sum(n - 1 for n in value.shape):
        found = file.buffer(value).array()[value.offset].item()
        return int(found) if float(found).is_integer() else float(found)
    return None
