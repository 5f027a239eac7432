"""The dynadapt adapter of `stripes.trainer.Trainer`; `dynadapt.protocols.Adapter` says what it owes.

It translates, and moves nothing: dynadapt reads and writes the trainer's own memory through the rows
that `describe` gives. No method of this adapter communicates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Described, Outcome, TrainState, alone
from dynadapt.vps.box import Box, row_major_strides
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import Row
from stripes.trainer import Stripe, Striped, Trainer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dynadapt.protocols import Agree

__all__ = ["StripesAdapter"]

SLOTS = ("exp_avg", "exp_avg_sq")
"""torch's names of Adam's moments, in the order of the trainer's columns."""

HYPER = ("lr", "betas", "eps", "weight_decay")
"""What can be set in the trainer, one value for all parameters, by torch's names."""

RULE = {"decoupled_weight_decay": True, "amsgrad": False, "maximize": False}
"""What cannot: how the trainer's update rule answers torch's other options."""


class FlatBuffer:
    """A `dynadapt.protocols.Buffer` over a contiguous tensor of the trainer, seen as one dimension."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._flat = tensor.view(-1)
        self._nbytes = tensor.untyped_storage().nbytes()
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.device = str(tensor.device)
        self.numel = tensor.numel()

    def tensor(self) -> torch.Tensor:
        """The trainer's own memory."""
        return self._flat

    def free(self) -> None:
        """Give the bytes back: a source was parked in host memory."""
        self._flat.untyped_storage().resize_(0)

    def refill(self) -> None:
        """Take as many bytes again; what is in them is undefined."""
        self._flat.untyped_storage().resize_(self._nbytes)


@dataclass(frozen=True)
class _Before:
    """What `abandon` puts back. A target's own values need no copy: they were to be overwritten."""

    moments: torch.Tensor | None
    steps: int
    samples: int
    hyper: dict[str, Any]


# By trainer, not by adapter: dynadapt makes an adapter object whenever it needs one.
_before: WeakKeyDictionary[Trainer, _Before] = WeakKeyDictionary()


class StripesAdapter:
    """Reads and writes `TrainState(model=trainer)`.

    >>> StripesAdapter.accepts(TrainState(model=torch.nn.Linear(2, 3)))
    False
    """

    name = "stripes"

    @staticmethod
    def accepts(x: Any) -> bool:
        """Whether `x` is for this adapter."""
        return isinstance(x, TrainState) and isinstance(x.model, Trainer)

    def quiesce(self, x: Any, agree: Agree = alone) -> None:
        """Refuse (`mid-step`) while gradients are accumulated; then drop the whole weights."""
        trainer = _trainer(x)
        if trainer.micro_steps:
            where = f"rank {trainer.ranks.rank}"
            cause = f"no step has used the gradients of {trainer.micro_steps} micro-steps"
            raise Refused([Finding("mid-step", where, cause, "call Trainer.step() first")])
        # Another rank may have refused. Then this one must keep its whole weights: if only some ranks
        # had to gather them for the next forward, it would hang.
        agree()
        trainer.whole = None

    def describe(self, x: Any) -> Described:
        """The stripes that this rank was dealt, and the model's buffers whole."""
        trainer = _trainer(x)
        has_moments = trainer.moments is not None
        specs: list[KeySpec] = []
        rows: list[Row] = []
        for order, tensor in enumerate(trainer.tensors):
            own = _specs(tensor, order, "present" if has_moments else "none")
            specs += own
            for spec in own:
                rows += _rows(spec, tensor, trainer.stripes[order])
        memory = {"masters": trainer.masters, "copies": trainer.copies}
        if trainer.moments is not None:
            memory["moments"] = trainer.moments
        for name, buffer in trainer.buffers.items():
            spec = _buffer_spec(name, buffer)
            specs.append(spec)
            rows.append(_whole_row(spec))
            memory[str(spec.key)] = buffer
        trained = [tensor.names[0] for tensor in trainer.tensors if tensor.trainable]
        return Described(
            specs=tuple(specs),
            rows=tuple(rows),
            buffers={name: FlatBuffer(tensor) for name, tensor in memory.items()},
            scalars={name: {"step": trainer.steps} for name in trained} if has_moments else {},
            aux=_aux(trainer, trained),
            coordinate={"dp": trainer.ranks.rank, **TrainState.of(x).coordinate},
            flat_step=True,  # one count for all parameters
        )

    def prepare(self, x: Any, keys: tuple[KeySpec, ...]) -> Described:
        """Make the moments that the source has and a fresh trainer has not, as zeros."""
        trainer = _trainer(x)
        _before[trainer] = _Before(
            trainer.moments, trainer.steps, trainer.samples, _hyper_of(trainer)
        )
        made = 0
        wanted = any(spec.kind == "state" and spec.presence == "present" for spec in keys)
        if wanted and trainer.moments is None:
            trainer.moments = torch.zeros(trainer.masters.numel(), 2)
            made = trainer.moments.nbytes
        return replace(self.describe(x), allocated=made)

    def finish(
        self,
        x: Any,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Cast the copies from the masters that arrived; take steps, hyperparameters and samples."""
        trainer = _trainer(x)
        hyper, outcomes = _read_groups(aux.get("param_groups"))  # first, because it may refuse
        agree()
        trainer.renew()
        trainer.steps = int(max((own.get("step", 0) for own in scalars.values()), default=0))
        for name, value in hyper.items():
            setattr(trainer, name, value)
        if "data" in aux:
            trainer.samples = aux["data"].value["samples"]
            outcomes.append(Outcome("data", "exact"))
        return (*outcomes, *_left_behind(aux))

    def abandon(self, x: Any) -> None:
        """Put back what `prepare` and `finish` changed; the copies agree with the masters again."""
        trainer = _trainer(x)
        before = _before.pop(trainer, None)
        if before is not None:
            trainer.moments = before.moments
            trainer.steps, trainer.samples = before.steps, before.samples
            for name, value in before.hyper.items():
                setattr(trainer, name, value)
            trainer.renew()


def _trainer(x: Any) -> Trainer:
    """The trainer of `x`. What this adapter would not carry is refused, not lost in silence."""
    state = TrainState.of(x)
    others = ("optimizer", "scheduler", "scaler", "extra", "samples", "user", "counters", "local")
    unknown = [name for name in others if getattr(state, name)]
    if unknown:
        cause = f"the adapter does not carry {', '.join(unknown)}"
        fix = "pass TrainState(model=trainer) alone"
        raise Refused([Finding("unsupported-state", "TrainState", cause, fix)])
    trainer = state.model
    assert isinstance(trainer, Trainer)
    return trainer


def _specs(tensor: Striped, order: int, presence: Any) -> list[KeySpec]:
    """The keys of one tensor. They are equal on all ranks, also on one that was dealt nothing of it."""
    name, *aliases = tensor.names
    param = KeySpec(
        Key(name, "param"),
        tensor.shape,
        "float32",
        trainable=tensor.trainable,
        order=order,
        aliases=tuple(aliases),
    )
    copy = replace(param, key=Key(name, "compute"), dtype="bfloat16", derived=True)
    states = [
        replace(param, key=Key(name, slot), kind="state", presence=presence) for slot in SLOTS
    ]
    return [param, copy, *(states if tensor.trainable else [])]


def _rows(spec: KeySpec, tensor: Striped, stripes: Iterable[Stripe]) -> Iterator[Row]:
    """Where the stripes of one key lie: element `i` of the flat buffers, or of one of two columns."""
    if spec.presence == "none":
        return
    buffer, step, column = {
        "param": ("masters", 1, 0),
        "compute": ("copies", 1, 0),
        SLOTS[0]: ("moments", 2, 0),
        SLOTS[1]: ("moments", 2, 1),
    }[spec.key.slot]
    for stripe in stripes:
        box = Box.whole(spec.shape)
        if spec.shape:  # a tensor without dims is one stripe
            box = Box((stripe.start, *box.lo[1:]), (stripe.stop, *box.hi[1:]))
        strides = tuple(step * stride for stride in row_major_strides(box.shape))
        yield Row(spec.key, box, buffer, step * stripe.offset + column, strides)


def _buffer_spec(name: str, buffer: torch.Tensor) -> KeySpec:
    dtype = str(buffer.dtype).removeprefix("torch.")
    return KeySpec(Key(name, "buffer"), tuple(buffer.shape), dtype, kind="buffer", trainable=False)


def _whole_row(spec: KeySpec) -> Row:
    """A tensor that every rank holds whole, in memory of its own."""
    return Row(spec.key, Box.whole(spec.shape), str(spec.key), 0, row_major_strides(spec.shape))


def _hyper_of(trainer: Trainer) -> dict[str, Any]:
    return {name: getattr(trainer, name) for name in HYPER}


def _aux(trainer: Trainer, names: list[str]) -> tuple[AuxItem, ...]:
    """What is not a tensor, in the paths and forms that the built-in adapters use."""
    group = {"names": names, "hyper": {**_hyper_of(trainer), **RULE}}
    return (
        AuxItem("optimizer", "Adam"),
        AuxItem("param_groups", [group]),
        AuxItem("data", {"samples": trainer.samples}),
        AuxItem("behaviour", {"framework": "stripes", "precision": "bfloat16"}),
    )


def _read_groups(item: AuxItem | None) -> tuple[dict[str, Any], list[Outcome]]:
    """The hyperparameters for the trainer. Raises `Refused` where groups differ: it has one set."""
    groups = [] if item is None else [group["hyper"] for group in item.value if group["names"]]
    if not groups:
        return {}, [Outcome("param_groups", "dropped", "the source has none")]
    differing = sorted(k for k in HYPER if any(g.get(k) != groups[0].get(k) for g in groups))
    if differing:
        cause = f"the source's param groups differ in {', '.join(differing)}, the trainer has one"
        raise Refused([Finding("hyper-conflict", "param_groups", cause, "make them equal")])
    hyper = {name: groups[0][name] for name in HYPER if name in groups[0]}
    hyper["betas"] = tuple(hyper["betas"])
    outcomes = [Outcome("param_groups", "exact")]
    for name, value in sorted(groups[0].items()):
        if name in RULE and bool(value) != RULE[name]:
            note = f"{value!r} in the source; the trainer has {RULE[name]!r} built in"
            outcomes.append(Outcome(f"param_groups/{name}", "dropped", note))
        elif value and name not in {*HYPER, *RULE}:
            outcomes.append(Outcome(f"param_groups/{name}", "dropped", "the trainer has none"))
    return hyper, outcomes


def _left_behind(aux: Mapping[str, AuxItem]) -> Iterator[Outcome]:
    """Everything else that the source told, so that the report says that it did not come along."""
    for name, value in sorted(aux["behaviour"].value.items() if "behaviour" in aux else ()):
        if value and name not in {"framework", "precision"}:
            yield Outcome(f"behaviour/{name}", "dropped", f"the source had {value!r}")
    for path in sorted(aux.keys() - {"optimizer", "param_groups", "data", "behaviour"}):
        yield Outcome(path, "dropped", "the trainer keeps no such thing")
