"""Live DeepSpeed engines (deepspeed 0.19): ZeRO stages 0 to 3, each in bf16, fp16 and fp32.

How the five methods go about it:

- `quiesce` refuses while gradients are accumulated, then frees what an eval forward left gathered.
- `describe` reads this rank's piece of each flat tensor; padding is never described.
- `prepare` makes the optimizer state that a fresh engine does not have, as zeros and step 0.
- `finish` sets steps and hyperparameters, and renews the weights from the masters.
- `abandon` takes back made state and lets masters agree with the weights again.

`_deepspeed_flats` has what all optimizers share, `_deepspeed_zero3`, `_deepspeed_zero12` and
`_deepspeed_zero0` what each of them does otherwise, `_deepspeed_support` which one an engine has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dynadapt.adapters._aux import (
    apply_behaviour,
    apply_data,
    apply_groups,
    apply_scheduler,
    apply_user,
    dropped_extras,
    groups_item,
    optimizer_item,
    scheduler_item,
    user_items,
    with_extra_states,
)
from dynadapt.adapters._beside import Beside
from dynadapt.adapters._common import BufferTable, is_local
from dynadapt.adapters._knobs import remembered
from dynadapt.adapters.live import _deepspeed_engine as aside
from dynadapt.adapters.live._deepspeed_globals import (
    beside,
    known_globals,
    put_in_force,
    set_globals,
)
from dynadapt.adapters.live._deepspeed_pipe import buffers_of, is_pipeline, place_of
from dynadapt.adapters.live._deepspeed_support import view_of
from dynadapt.adapters.live._deepspeed_undo import Before
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Described, Outcome, TrainState, alone, watched
from dynadapt.torch_dtypes import dtype_name
from dynadapt.vps.box import Box
from dynadapt.vps.keys import Key, KeySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dynadapt.adapters.live._deepspeed_flats import Flats
    from dynadapt.protocols import Agree

__all__ = ["DeepSpeedZeroAdapter", "beside", "put_in_force"]

# Kept with the engine: the API may use one adapter object for `prepare` and another one for `abandon`.
# What `prepare` found, and which units it made states for.
_before: Beside[tuple[Before, list[int]]] = Beside("before")
# How to put back what `finish` set.
_knobs: Beside[Callable[[], None]] = Beside("knobs")
# DeepSpeed's globals as `finish` found them.
_others: Beside[Mapping[tuple[Any, str], Any]] = Beside("globals")


class DeepSpeedZeroAdapter:
    """Reads and writes the state behind a `DeepSpeedEngine` of any ZeRO stage.

    Also that of a pipeline (`PipelineModule`), whose ranks each have a stage, and that of AutoTP, whose ranks
    each have parts of tensors. Build an engine of another layout next to one that lives inside `beside()`.

    >>> DeepSpeedZeroAdapter.name
    'deepspeed_zero'
    """

    name = "deepspeed_zero"

    def quiesce(self, x: Any, agree: Agree = alone) -> None:
        """Prove a step boundary, then drop gathered copies. No communication."""
        state = TrainState.of(x)
        view = view_of(state.model)
        findings = _mid_step(state.model, view)
        if findings:
            raise Refused(findings)
        agree()
        view.drop_copies()

    def describe(self, x: Any) -> Described:
        """This rank's piece of every parameter, and the model's buffers whole."""
        state = TrainState.of(x)
        engine = state.model
        view = view_of(engine)
        findings = view.odd_state()
        table = BufferTable()
        specs = [*view.describe(table), *_describe_buffers(engine, table)]
        for label, tensors in sorted(state.extra.items()):
            more, bad = view.describe_extra(table, label, tensors)
            specs += more
            findings += bad
        if findings:
            raise Refused(findings)
        return Described(
            specs=tuple(
                replace(spec, local=True) if is_local(spec.key.name, state.local) else spec
                for spec in specs
            ),
            rows=tuple(table.rows),
            buffers=table.buffers,
            scalars={
                share.named.name: scalars
                for share in view.shares
                if share.unit >= 0 and (scalars := view.scalars(share.unit))
            },
            aux=_aux(state, view),
            coordinate={**place_of(engine, view.rank), **state.coordinate},
            flat_step=view.flat_step,
        )

    def prepare(self, x: Any, keys: tuple[KeySpec, ...]) -> Described:
        """Make the optimizer state that the source has and this engine has not, then describe."""
        engine = TrainState.of(x).model
        _forget(engine)
        view = view_of(engine)
        before = Before.of(view)
        made, allocated, findings = view.make_state(keys)
        if findings:
            raise Refused(findings)
        _before.put(engine, (before, made))
        return replace(self.describe(x), allocated=allocated)

    def finish(
        self,
        x: Any,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Set steps and hyperparameters, then renew every copy of the weights.

        Stages 1 and 2 gather their weights here, so all that may fail comes first and is voted on. No
        other stage communicates: ZeRO-3 leaves its parameters cut, the next forward gathers them.
        """
        state = TrainState.of(x)
        engine = state.model
        view = view_of(engine)
        user = with_extra_states(engine.module, state.user)
        put_back = remembered(
            state,
            view.inner.param_groups,
            (),  # numbers of the units are in `_before`
            (_scheduler(state), *user.values()),
            aside.attributes(engine),
        )
        _knobs.put(engine, put_back)
        # First, since it may refuse.
        outcomes = list(
            apply_groups(view.inner.param_groups, view.names(), aux.get("param_groups"))
        )
        outcomes += apply_scheduler(
            _scheduler(state), aux.get("scheduler"), aux.get("param_groups"), view.names()
        )
        view.set_scalars(keys, scalars)
        view.set_group_steps()
        outcomes += aside.apply_counters(engine, state.counters, aux.get("counters"))
        outcomes += apply_data(state, aux.get("data"))
        outcomes += aside.apply_scaler(engine, aux.get("scaler"))
        outcomes += apply_behaviour(aside.behaviour(engine), aux.get("behaviour"))
        outcomes += dropped_extras(state, keys)
        outcomes += apply_user(user, aux)
        if view.communicates:
            agree()
            watched(agree, view.renew)
        else:
            view.renew()
        _others.put(engine, known_globals())
        put_in_force(engine)
        return tuple(outcomes)

    def abandon(self, x: Any) -> None:
        """Take back what `prepare` made, and let masters agree with the weights. No communication.

        Bytes that already arrived cannot be told from the target's own where there is no second copy:
        in frozen weights, in the weights of an fp32 engine without ZeRO, and in optimizer state of
        earlier steps. Such a target is as if half loaded.
        """
        engine = TrainState.of(x).model
        if (put_back := _knobs.take(engine)) is not None:
            put_back()
        if (others := _others.take(engine)) is not None:
            set_globals(others)
        if (found := _before.take(engine)) is not None:
            before, made = found
            before.put_back(view_of(engine), made)


def _forget(engine: Any) -> None:
    """An earlier migration to this engine was committed: there is nothing of it to undo."""
    _before.take(engine)
    _knobs.take(engine)
    _others.take(engine)


def _mid_step(engine: Any, view: Flats) -> list[Finding]:
    every = int(engine.gradient_accumulation_steps())
    done = max(view.pending_backwards(), engine.micro_steps % every)
    if not done:
        return []
    return [
        Finding(
            "mid-step",
            f"rank {view.rank}",
            f"micro-step {done} of {every}: gradients are accumulated that no step has used",
            "migrate right after train_batch() has returned"
            if is_pipeline(engine)
            else "migrate right after the engine.step() that updates the weights",
        )
    ]


def _describe_buffers(engine: Any, table: BufferTable) -> list[KeySpec]:
    """The model's buffers, which DeepSpeed keeps whole on every rank."""
    specs = []
    for named in buffers_of(engine):
        shape = tuple(named.tensor.shape)
        specs.append(
            KeySpec(
                Key(named.name, "buffer"),
                shape,
                dtype_name(named.tensor.dtype),
                kind="buffer" if named.persistent else "transient",
                trainable=False,
                order=named.order,
                aliases=named.aliases,
            )
        )
        table.add(specs[-1].key, Box.whole(shape), named.tensor.detach())
    return specs


def _scheduler(state: TrainState) -> Any:
    return state.scheduler if state.scheduler is not None else state.model.lr_scheduler


def _aux(state: TrainState, view: Flats) -> tuple[AuxItem, ...]:
    engine = state.model
    counters = {**aside.counters_of(engine), **state.counters}
    parts = [
        groups_item(view.inner.param_groups, view.names()),
        scheduler_item(_scheduler(state)),
    ]
    if is_pipeline(engine) or view.cuts:  # a rank's groups have its own parameters only
        parts = [each and replace(each, policy="by-part") for each in parts]
    items = (
        optimizer_item(view.inner),
        *parts,
        aside.scaler_item(engine),
        AuxItem("behaviour", aside.behaviour(engine)),
        *user_items(with_extra_states(engine.module, state.user), state.samples, counters),
    )
    return tuple(item for item in items if item is not None)
