"""The five methods of an adapter for torch modules: what does not depend on how they are sharded."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dynadapt.adapters._aux import (
    apply_behaviour,
    apply_groups,
    apply_scheduler,
    apply_user,
    dropped_extras,
    with_extra_states,
)
from dynadapt.adapters._beside import Beside
from dynadapt.adapters._common import unwrapped
from dynadapt.adapters._knobs import remembered
from dynadapt.adapters.live import _torch_aux
from dynadapt.adapters.live._materialise import Ghost
from dynadapt.adapters.live._stages import whole_of
from dynadapt.adapters.live._torch_optimizer import (
    SourceStates,
    StateMaker,
    consolidated,
    steps,
    write_scalars,
)
from dynadapt.errors import Refused
from dynadapt.protocols import AuxItem, Described, Outcome, TrainState, alone, modules_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from dynadapt.adapters.live._torch_view import View
    from dynadapt.protocols import Agree
    from dynadapt.vps.keys import KeySpec

__all__ = ["TorchAdapter"]


# How to undo what `prepare` and `finish` did to a model.
_undo: Beside[ExitStack] = Beside("undo")


class TorchAdapter:
    """An adapter for torch modules with a torch optimizer. A subclass says how they are sharded."""

    name: str

    def _check_step_boundary(
        self, model: torch.nn.Module, stepped: Callable[[torch.Tensor], bool]
    ) -> None:
        """Raise `Refused` for a model that is not this adapter's, or is in the middle of a step.

        `stepped` says whether a parameter's gradient has yet to be used.
        """
        raise NotImplementedError

    def _reshard(self, model: torch.nn.Module) -> None:
        """Drop gathered copies of weights, so that the next forward reads the shards. No communication."""
        raise NotImplementedError

    def _view(self, state: TrainState) -> View:
        """This rank's view of a state that is at rest."""
        raise NotImplementedError

    def quiesce(self, x: Any, agree: Agree = alone) -> None:
        """Refuse (`mid-step`) while a gradient that is to be used holds a value; drop gathered weights."""
        state = TrainState.of(x)
        model = whole_of(state.model)
        self._check_step_boundary(model, steps(unwrapped(state.optimizer)))
        agree()
        self._reshard(model)

    def describe(self, x: Any) -> Described:
        """This rank's part of the state; no communication, no allocation, no change."""
        return self._view(TrainState.of(x)).described()

    def prepare(self, x: Any, keys: tuple[KeySpec, ...]) -> Described:
        """Give a model on the meta device memory, and the optimizer the states that the source has.

        Only those: states that the source lacks are dropped. Parameters stay the same objects.
        """
        state = TrainState.of(x)
        view = self._view(state)
        source = SourceStates(keys)
        ghost = Ghost(view.model, state.device)
        findings = ghost.findings(keys)
        maker = StateMaker(view.holder) if view.optimizer is not None and source else None
        if maker is not None:
            findings += maker.findings(view.held, source)
        if findings:
            raise Refused(findings)
        _undo.take(modules_of(state.model)[0])  # of an earlier migration, which was committed
        with ExitStack() as stack:
            stack.callback(ghost.undo)
            ghost.materialise()
            if maker is not None:
                stack.callback(maker.undo)
                maker.make(view.held, source)
            made = ghost.made_bytes + (0 if maker is None else maker.made_bytes)
            described = replace(view.described(), allocated=made)
            _undo.put(modules_of(state.model)[0], stack.pop_all())
        return described

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
        self._reshard(whole_of(state.model))
        view = self._view(state)
        view.copy_buffers()
        source = SourceStates(keys)
        user = with_extra_states(view.model, state.user)
        stale = consolidated(view.optimizer)
        undo = _undo.look(modules_of(state.model)[0]) or ExitStack()
        _undo.put(modules_of(state.model)[0], undo)
        undo.callback(
            remembered(
                state,
                () if view.optimizer is None else view.optimizer.param_groups,
                () if view.optimizer is None else view.holder.state.values(),
                (state.scheduler, state.scaler, *user.values()),
                stale,
            )
        )
        for owner, name in stale:
            setattr(owner, name, [])
        outcomes: list[Outcome] = []
        if view.optimizer is not None:
            outcomes += write_scalars(view.holder, view.held, source, scalars)
            groups, names = view.optimizer.param_groups, view.group_names()
            outcomes += apply_groups(groups, names, aux.get("param_groups"), view.regroup)
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
        outcomes += apply_user(user, aux)
        return tuple(outcomes)

    def abandon(self, x: Any) -> None:
        """Take back what `prepare` made, put back what it dropped and what `finish` set."""
        stack = _undo.take(modules_of(TrainState.of(x).model)[0])
        if stack is not None:
            stack.close()
