"""Plain torch models: one process, DistributedDataParallel, and DTensor parameters on any mesh.

FSDP2, tensor parallelism, `replicate()` and their combinations are all DTensor parameters. How the
five methods go about it:

- `quiesce` refuses while a gradient holds a value, then frees what an eval forward left gathered.
- `describe` reads the local tensors by mesh arithmetic; a plain tensor is whole on every rank.
- `prepare` makes the optimizer state that a fresh optimizer lacks, and drops what the source lacks.
- `finish` sets steps, hyperparameters and counters; no copy of a weight is kept between steps.
- `abandon` takes back what `prepare` made and puts back what it dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dynadapt.adapters._aux import (
    apply_behaviour,
    apply_groups,
    apply_scheduler,
    apply_user,
    dropped_extras,
    with_extra_states,
)
from dynadapt.adapters._common import unwrapped
from dynadapt.adapters.live import _fsdp2, _torch_aux
from dynadapt.adapters.live._torch_optimizer import SourceStates, StateMaker, write_scalars
from dynadapt.adapters.live._torch_view import View, check_supported
from dynadapt.errors import Refused
from dynadapt.protocols import AuxItem, Described, Outcome, TrainState, alone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.protocols import Agree
    from dynadapt.vps.keys import KeySpec

__all__ = ["TorchModuleAdapter"]


class TorchModuleAdapter:
    """Reads and writes a `TrainState` whose model is a torch module, however it is sharded.

    >>> import torch
    >>> model = torch.nn.Linear(2, 3)
    >>> [str(spec.key) for spec in TorchModuleAdapter().describe(TrainState(model)).specs]
    ['weight/param', 'bias/param']
    """

    name = "torch_module"

    def __init__(self) -> None:
        self._makers: WeakKeyDictionary[Any, StateMaker] = WeakKeyDictionary()

    def quiesce(self, x: Any, agree: Agree = alone) -> None:
        """Refuse (`mid-step`) while any gradient holds a value; then drop gathered weights."""
        model = TrainState.of(x).model
        check_supported(model)
        _fsdp2.check_step_boundary(model)
        agree()
        _fsdp2.reshard(model)

    def describe(self, x: Any) -> Described:
        """This rank's part of the state; no communication, no allocation, no change."""
        return View(TrainState.of(x)).described()

    def prepare(self, x: Any, keys: tuple[KeySpec, ...]) -> Described:
        """Give the target's optimizer the states that the source has, and only those."""
        view = View(TrainState.of(x))
        source = SourceStates(keys)
        findings = view.not_materialised()
        if view.optimizer is None or not source:
            if findings:
                raise Refused(findings)
            return view.described()
        maker = StateMaker(view.holder)
        findings += maker.findings(view.held, source)
        if findings:
            raise Refused(findings)
        self.abandon(x)
        self._makers[view.optimizer] = maker
        maker.make(view.held, source)
        return replace(view.described(), allocated=maker.made_bytes)

    def finish(
        self,
        x: Any,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Set scalars, hyperparameters, scheduler, scaler, counters and user objects.

        All of it is local, so `agree` is left to the caller.
        """
        state = TrainState.of(x)
        _fsdp2.reshard(state.model)
        view = View(state)
        source = SourceStates(keys)
        outcomes: list[Outcome] = []
        if view.optimizer is not None:
            outcomes += write_scalars(view.holder, view.held, source, scalars)
            groups = view.optimizer.param_groups
            outcomes += apply_groups(groups, view.group_names(), aux.get("param_groups"))
        elif source:
            outcomes.append(Outcome("optimizer", "dropped", "the target has no optimizer"))
        outcomes += apply_scheduler(
            state.scheduler,
            aux.get("scheduler"),
            aux.get("param_groups"),
            view.group_names() if view.optimizer is not None else (),
        )
        outcomes += _torch_aux.apply_scaler(state.scaler, aux.get("scaler"))
        outcomes += _torch_aux.apply_counters(state, aux.get("counters"), aux.get("data"))
        outcomes += apply_behaviour(view.behaviour(), aux.get("behaviour"))
        outcomes += dropped_extras(state, keys)
        outcomes += apply_user(with_extra_states(state.model, state.user), aux)
        return tuple(outcomes)

    def abandon(self, x: Any) -> None:
        """Take back the optimizer states that `prepare` made, and put back those it dropped."""
        optimizer = unwrapped(TrainState.of(x).optimizer)
        maker = None if optimizer is None else self._makers.pop(optimizer, None)
        if maker is not None:
            maker.undo()
