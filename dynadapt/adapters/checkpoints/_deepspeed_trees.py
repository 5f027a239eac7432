"""The parts of DeepSpeed's files that hold no tensors' bytes, made from keys, scalars and aux items.

The trees are those that `DeepSpeedZeroOptimizer_Stage3.load_state_dict`,
`DeepSpeedZeroOptimizer.load_state_dict` and `DeepSpeedEngine.load_checkpoint` of DeepSpeed 0.19 take.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dynadapt.adapters._loss_scales import as_deepspeed, is_deepspeeds
from dynadapt.adapters.checkpoints._names import first_names, natural
from dynadapt.adapters.checkpoints._pickle import Global, Opaque, Size, StoredTensor
from dynadapt.adapters.checkpoints._repickle import tensor
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Outcome
from dynadapt.vps.flat import zero3_part
from dynadapt.vps.keys import Key, KeySpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynadapt.adapters.checkpoints._deepspeed_geometry import Shapes
    from dynadapt.adapters.checkpoints._plain import Lifting
    from dynadapt.protocols import FileTarget

__all__ = [
    "VERSION",
    "Model",
    "config_of",
    "hypers",
    "joined",
    "loss_scaler",
    "model_tree",
    "scaler_fields",
    "settled",
    "stage_enum",
    "weight",
]

VERSION = "0.19.8"
"""The DeepSpeed whose format is written."""


@dataclass(frozen=True)
class Model:
    """What a checkpoint's keys say of the model: parameters by group, frozen ones, buffers.

    `groups` are name -> shape in the optimizer's order, `order` all parameters in the model's;
    `dtype` is what the model computes in, `first` the name that the framework has for a parameter: of a
    tied one the first of the model's, where that is known.
    """

    groups: tuple[Shapes, ...]
    frozen: tuple[KeySpec, ...]
    buffers: tuple[KeySpec, ...]
    order: tuple[str, ...]
    by_key: Mapping[Key, KeySpec]
    dtype: str
    first: Mapping[str, str]

    @classmethod
    def of(cls, x: FileTarget, keys: Sequence[KeySpec]) -> Model:
        """Sort the keys; raises `Refused` with everything that no DeepSpeed checkpoint can hold."""
        params = [spec for spec in keys if spec.key.slot == "param"]
        place = {name: i for i, name in enumerate(x.order)}
        ordered = sorted(params, key=lambda s: (place.get(s.key.name, len(place)), *_place(s)))
        groups = _grouped(x, [spec for spec in ordered if spec.trainable])
        findings = [*_unfit(keys, groups)]
        if x.layout is not None and x.layout.kind == "zero3":
            findings += _empty(ordered)
        if findings:
            raise Refused(findings)
        dtype = str(x.options.get("compute") or _compute_dtype(keys))
        if x.layout is not None:
            dtype = x.layout.dtype("dtype", dtype)
        return cls(
            groups=tuple(groups),
            frozen=tuple(spec for spec in ordered if not spec.trainable),
            buffers=tuple(sorted((s for s in keys if s.kind == "buffer"), key=_place)),
            order=tuple(spec.key.name for spec in ordered),
            by_key={spec.key: spec for spec in keys},
            dtype=dtype,
            first=first_names(x, params),
        )

    def slots(self, name: str) -> Sequence[str]:
        """The states of a parameter."""
        return self._slots.get(name, ())

    @cached_property
    def _slots(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for key, spec in self.by_key.items():
            if spec.kind == "state":
                found.setdefault(key.name, []).append(key.slot)
        return found


def _place(spec: KeySpec) -> tuple[Any, ...]:
    return (spec.order, natural(spec.key.name))


def _compute_dtype(keys: Iterable[KeySpec]) -> str:
    """What the model computes in: the dtype of its copies, else of frozen weights, else of all weights."""
    params = [s for s in keys if s.key.slot == "param"]
    kinds = [s.dtype for s in keys if s.key.slot == "compute"]
    kinds = kinds or [s.dtype for s in params if not s.trainable] or [s.dtype for s in params]
    return max(sorted(set(kinds)), key=kinds.count, default="float32")


def _grouped(x: FileTarget, trainable: Sequence[KeySpec]) -> list[Shapes]:
    """Shapes by group, in the optimizer's order: as the target says, else as the source had them."""
    specs = {spec.key.name: spec for spec in trainable}
    by_any = {alias: n for n, spec in specs.items() for alias in (n, *spec.aliases)}
    if x.groups:
        named = [[by_any[n] for n in own if n in by_any] for own in x.groups]
        left = sorted(set(specs) - {n for own in named for n in own})
        if left:
            cause, fix = "is trained, and in no group", "list every one in a group"
            raise Refused([Finding("groups", name, cause, fix) for name in left])
    else:
        numbers = sorted({spec.group for spec in trainable})
        named = [[s.key.name for s in trainable if s.group == number] for number in numbers]
    return [{n: specs[n].shape for n in own} for own in named if own]


def _unfit(keys: Sequence[KeySpec], groups: Sequence[Shapes]) -> Iterable[Finding]:
    held = {name: shape for own in groups for name, shape in own.items()}
    if not held:
        fix = "a DeepSpeed checkpoint is of a training state: convert to safetensors instead"
        yield Finding("missing-key", "the source", "holds no trainable parameter", fix)
    for spec in keys:
        if spec.kind == "state" and spec.key.name in held and spec.shape != held[spec.key.name]:
            cause = f"its shape {list(spec.shape)} is not its parameter's: no flat can hold it"
            yield Finding(
                "unsupported-state", str(spec.key), cause, "leave it out with --exclude (exclude=)"
            )
    for name, shape in held.items():
        if not shape:
            yield Finding("unsupported-shape", name, "DeepSpeed cannot train a tensor without dims")


def _empty(params: Iterable[KeySpec]) -> Iterable[Finding]:
    for spec in params:
        if not spec.numel and spec.shape:
            cause = "has no elements: DeepSpeed's stage 3 fails in its first forward with such a parameter"
            fix = "choose stage 2, or leave it out with --exclude (exclude=)"
            yield Finding("unsupported-shape", spec.key.name, cause, fix)


def hypers(aux: Mapping[str, AuxItem], groups: Sequence[Shapes]) -> list[dict[str, Any]]:
    """The hyperparameters of each group; of members that differ the first's."""
    item = aux.get("param_groups")
    by_name = {n: g["hyper"] for g in (item.value if item else ()) for n in g["names"]}
    return [next((dict(by_name[n]) for n in own if n in by_name), {}) for own in groups]


def joined(
    units: Iterable[Iterable[str]], scalars: Mapping[str, Mapping[str, int | float]]
) -> tuple[Outcome, ...]:
    """Numbers that the parameters of a flat had each of its own, and have in common there.

    `units` are the names in each flat.

    >>> joined([["a", "b"]], {"a": {"step": 2}, "b": {"step": 7}})[0].note
    'a flat has one: a was at 2, and is at 7 as b'
    """
    told = []
    for own in map(tuple, units):
        for label in sorted({label for name in own for label in scalars.get(name, {})}):
            known = {n: scalars[n][label] for n in own if label in scalars.get(n, {})}
            low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
            if known[low] != known[high]:
                note = f"a flat has one: {low} was at {known[low]:g}, and is at {known[high]:g} as {high}"
                told.append(Outcome(f"scalars/{label}", "derived", note))
    return tuple(told)


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"


def loss_scaler(aux: Mapping[str, AuxItem]) -> Opaque:
    """The `loss_scaler` object of stages 1 to 3: the source's, else one that multiplies by one.

    `aux` are items of `settled`.
    """
    item = aux.get("scaler")
    if item is None:
        state: dict[str, Any] = {"cur_scale": 1.0, "dynamic": False}
        return Opaque(Global(_SCALERS, "LossScaler"), new=True, state=state)
    state = dict(item.value["state"])
    if item.value["class"] == "DynamicLossScaler":
        state["dtype"] = Global("torch", "float16")
    return Opaque(Global(_SCALERS, item.value["class"]), new=True, state=state)


def scaler_fields(aux: Mapping[str, AuxItem]) -> dict[str, Any]:
    """The loss scaler as stage 0 keeps it: fields of its wrapper's state. `aux` are items of `settled`."""
    item = aux.get("scaler")
    state = item.value["state"] if item is not None else {}
    found = {
        "dynamic_loss_scale": bool(state.get("dynamic", False)),
        "cur_scale": float(state.get("cur_scale", 1.0)),
        "cur_iter": int(state.get("cur_iter", 0)),
    }
    if found["dynamic_loss_scale"]:
        usual = {"last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000}
        found |= {name: state.get(name, value) for name, value in usual.items()}
    return found


def stage_enum(stage: int) -> Opaque:
    """`ZeroStageEnum(stage)`."""
    return Opaque(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))


def config_of(aux: Mapping[str, AuxItem], model: Model, zero: Mapping[str, Any]) -> dict[str, Any]:
    """The source's `ds_config`, if there is one, with `zero` put into its ZeRO section."""
    behaviour = aux["behaviour"].value if "behaviour" in aux else {}
    config = dict(behaviour.get("config") or {})
    own = dict(config.get("zero_optimization") or {})
    for name in ("sub_group_size", "round_robin_gradients"):
        own.pop(name, None)
    config["zero_optimization"] = {**own, **zero}
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        section = dict(config.pop(name, None) or {})
        if dtype == model.dtype:
            config[name] = {**section, "enabled": True}
    return config


def clipping(aux: Mapping[str, AuxItem]) -> dict[str, float]:
    """What a DeepSpeed job clipped by. Nothing where that is not known: the loading job keeps its own.

    DeepSpeed takes it from the checkpoint, where a zero would switch clipping off.
    """
    behaviour = aux["behaviour"].value if "behaviour" in aux else {}
    value = behaviour.get("gradient_clipping")
    if behaviour.get("framework") != "deepspeed" or not isinstance(value, int | float):
        return {}
    return {"clip_grad": float(value)}


def settled(
    aux: Mapping[str, AuxItem], scalars: Mapping[str, Mapping[str, int | float]]
) -> tuple[dict[str, AuxItem], tuple[Outcome, ...]]:
    """Aux items as an engine has them, and what is to say of those that it has otherwise.

    The steps that it counts are its optimizer's if the source counts none: an engine counts those too that
    it skipped, which nobody knows any more. A loss scale is kept by DeepSpeed's own classes.
    """
    found, told = dict(aux), []
    known = dict(aux["counters"].value) if "counters" in aux else {}
    if "global_steps" not in known:
        steps = [int(own["step"]) for own in scalars.values() if "step" in own]
        count = max(steps, default=0)
        of = "the optimizer's" if steps else "none: the source has no counts and no steps"
        found["counters"] = AuxItem("counters", {**known, "global_steps": count})
        told.append(Outcome("counters", "derived", f"global_steps is {count}, {of}"))
    if "scaler" in aux:
        behaviour = aux["behaviour"].value if "behaviour" in aux else {}
        found["scaler"] = as_deepspeed(aux["scaler"], behaviour.get("config") or {})
        if not is_deepspeeds(aux["scaler"]):
            note = f"the scale and its count of a {aux['scaler'].value['class']}, as DeepSpeed's"
            told.append(Outcome("scaler", "derived", note))
    return found, tuple(told)


def weight(name: str) -> str:
    """The storage of a whole tensor of the model: no parameter is called as another's state then."""
    return f"weight.{name}"


def model_tree(
    model: Model,
    aux: Mapping[str, AuxItem],
    config: Mapping[str, Any],
    listed: Sequence[Shapes],
    ranks: int,
    lifting: Lifting,
    *,
    sharded: bool,
) -> dict[str, Any]:
    """A file of model states. Storages: `weight` of a name; `empty.*`, `frozen.*` if `sharded` (stage 3).

    The user's small tensors get storages by `lifting`.
    """
    frozen = {spec.key.name: spec for spec in model.frozen}
    module: dict[str, StoredTensor] = {}
    for spec in model.buffers:
        module[spec.key.name] = tensor(weight(spec.key.name), spec.dtype, spec.shape)
    aliases: dict[str, str] = {}
    for name in model.order:
        spec = model.by_key[Key(name, "param")]
        dtype = spec.dtype if name in frozen else model.dtype
        storage, shape = (f"empty.{name}", (0,)) if sharded else (weight(name), spec.shape)
        module[name] = tensor(storage, dtype, shape)
        for other in {name, *spec.aliases}:
            module[other] = module[name]
            if other != model.first[name]:
                aliases[other] = model.first[name]
    fragments = {
        model.first[name]: tensor(f"frozen.{name}", spec.dtype, (zero3_part(spec.numel, ranks),))
        if sharded
        else module[name]
        for name, spec in frozen.items()
    }
    counters = dict(aux["counters"].value) if "counters" in aux else {}
    users = {
        path.partition("/")[2]: lifting.lifted(item.value)
        for path, item in aux.items()
        if path.startswith("user/")
    }
    schedule = users.get("lr_scheduler")  # one of DeepSpeed's own, which other formats do not know
    return {
        # Client state, under which nothing that DeepSpeed reads may get lost.
        **counters,
        **users,
        "module": module,
        "buffer_names": [spec.key.name for spec in model.buffers],
        "optimizer": None,
        "param_shapes": [
            {model.first.get(n, n): Size(shape) for n, shape in own.items()} for own in listed
        ],
        # None, as where they were left out: a loader of `{}` asks for every frozen weight of its model.
        "frozen_param_shapes": {model.first[n]: Size(spec.shape) for n, spec in frozen.items()}
        or None,
        "shared_params": aliases,
        "frozen_param_fragments": fragments or None,
        "lr_scheduler": aux["scheduler"].value["state"] if "scheduler" in aux else schedule,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": counters.get("skipped_steps", 0),
        "global_steps": counters.get("global_steps", 0),
        "global_samples": counters.get("global_samples", 0),
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": dict(config),
        "ds_version": VERSION,
    }
