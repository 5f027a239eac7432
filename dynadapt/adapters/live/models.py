"""Several models of one job, each read and written by the adapter of its own framework.

Everything of a model is called after it: the tensor `w` of the model `actor` is `actor/w`, its param
groups are `actor/param_groups`. The job's own counters, data position and user objects have no prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dynadapt.adapters._aux import apply_user, user_items
from dynadapt.adapters._beside import Beside
from dynadapt.adapters._knobs import remembered
from dynadapt.adapters.live._torch_aux import apply_counters
from dynadapt.errors import DynadaptError, Finding, Refused
from dynadapt.protocols import (
    AuxItem,
    Described,
    Outcome,
    TrainState,
    Vote,
    alone,
    in_model,
    models_of,
    watched,
)
from dynadapt.registry import adapter_for
from dynadapt.vps.keys import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dynadapt.protocols import Adapter, Agree
    from dynadapt.vps.keys import KeySpec

__all__ = ["ModelsAdapter"]

_OF_ONE = ("optimizer", "scheduler", "scaler", "extra", "local", "tied", "device")
"""What a `TrainState` has of one model."""


@dataclass(eq=False)
class _Model:
    """One model, its state, and its adapter, which remembers how to undo what it did."""

    name: str
    state: TrainState
    adapter: Adapter
    touched: bool = False

    @property
    def prefix(self) -> str:
        return f"{self.name}/"


@dataclass(eq=False)
class _Job:
    """The models in the order of their names, and what has been done to the job so far."""

    models: tuple[_Model, ...]
    finished: list[_Model] = field(default_factory=list)
    put_back: Callable[[], None] | None = None


_jobs: Beside[_Job] = Beside("job")


class ModelsAdapter:
    """Reads and writes a `TrainState` whose model is a dict, name -> engine, module or `TrainState`.

    A rank may have some of the models only. The local checks of all models come before the one vote.

    >>> ModelsAdapter.name
    'models'
    """

    name = "models"

    def _job(self, x: Any) -> _Job:
        state = TrainState.of(x)
        job = _jobs.look(state)
        if job is None:
            job = _Job(tuple(_models(state)))
            _jobs.put(state, job)
        return job

    def quiesce(self, x: Any, agree: Agree = alone) -> None:
        """Every model at a step boundary, one vote, then the gathered copies of all are dropped."""
        models = self._job(x).models
        try:
            _nested(models, lambda each, vote: each.adapter.quiesce(each.state, vote), agree)
        except Refused as refused:
            findings = [*refused.findings]
            for each in models:  # what else is wrong, beside what was met first
                with _told(each, findings):
                    _stopped(each)
            raise Refused(findings) from None

    def describe(self, x: Any) -> Described:
        """This rank's part of every model."""
        state, job = TrainState.of(x), self._job(x)
        findings: list[Finding] = []
        found: list[tuple[_Model, Described]] = []
        for each in job.models:
            with _told(each, findings):
                found.append((each, each.adapter.describe(each.state)))
        findings += _shared(found)
        if findings:
            raise Refused(findings)
        return _whole(state, found)

    def prepare(self, x: Any, keys: tuple[KeySpec, ...]) -> Described:
        """Every model's own `prepare`, with the source's keys of that model."""
        state, job = TrainState.of(x), self._job(x)
        job.finished, job.put_back = [], None  # of an earlier migration, which was committed
        findings: list[Finding] = []
        found: list[tuple[_Model, Described]] = []
        for each in job.models:
            each.touched = True
            with _told(each, findings):
                own = tuple(_keys_in(each, keys))
                found.append((each, each.adapter.prepare(each.state, own)))
        if findings:
            raise Refused(findings)
        return _whole(state, found)

    def finish(
        self,
        x: Any,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Every model's own `finish`, then the job's counters and objects; one vote before any communicates.

        A model that the source does not have is left as it is.
        """
        state, job = TrainState.of(x), self._job(x)
        outcomes: list[Outcome] = []

        def each_one(each: _Model, vote: Agree) -> None:
            own = tuple(_keys_in(each, keys))
            if not own:
                outcomes.append(Outcome(each.name, "kept", "the source has no model of this name"))
                return
            told = each.adapter.finish(
                each.state, own, _scalars_in(each, scalars), _aux_in(each, aux), vote
            )
            job.finished.append(each)
            outcomes.extend(
                replace(outcome, path=f"{each.prefix}{outcome.path}") for outcome in told
            )

        def of_job() -> None:
            job.put_back = remembered(state, (), (), state.user.values())
            outcomes.extend(apply_counters(state, aux.get("counters"), aux.get("data")))
            outcomes.extend(apply_user(state.user, aux))
            agree()

        _nested(job.models, each_one, of_job)
        return tuple(outcomes)

    def abandon(self, x: Any) -> None:
        """Undo every model, the one that was finished last first, whatever becomes of the others."""
        job = self._job(x)
        failures: list[Exception] = []
        if job.put_back is not None:
            _tried(job.put_back, failures)
        rest = [each for each in job.models if each not in job.finished]
        for each in (*reversed(job.finished), *rest):
            if each.touched:
                each.touched = False
                _tried(partial(each.adapter.abandon, each.state), failures)
        job.finished, job.put_back = [], None
        if failures:
            raise failures[0]


def _models(state: TrainState) -> Iterator[_Model]:
    """The models with their adapters; raises `Refused` for what a job of several cannot have."""
    findings = []
    for entry in _OF_ONE:
        value = getattr(state, entry)
        if value is not None and not (isinstance(value, Sequence | Mapping) and not value):
            cause = "it belongs to one model, and the state has several"
            fix = f'pass it with its model: {{"actor": TrainState(model, {entry}=...)}}'
            findings.append(Finding("bad-argument", entry, cause, fix))
    if not state.model:
        findings.append(Finding("bad-argument", "model", "is a dict of no models", "name one"))
    for name, each in state.model.items():
        if not isinstance(name, str) or not name or "/" in name or name == "user":
            cause = "a model's name is a text that is not empty, has no slash, and is not 'user'"
            findings.append(Finding("bad-argument", f"model {name!r}", cause, "rename it"))
        elif isinstance(TrainState.of(each).model, dict):
            cause = "it is a dict of models, inside another one"
            findings.append(Finding("bad-argument", f"model {name!r}", cause, "name all in one"))
    if findings:
        raise Refused(findings)
    for name, own in models_of(state).items():
        try:
            yield _Model(name, own, adapter_for(own))
        except DynadaptError as error:
            raise DynadaptError(f"model {name!r}: {error}", reason=error.reason) from error


class _StopError(Exception):
    """Raised in the place of a vote, where only what comes before it is wanted."""


def _stopped(model: _Model) -> None:
    """What a model's `quiesce` checks."""

    def stop() -> None:
        raise _StopError

    with suppress(_StopError):
        model.adapter.quiesce(model.state, stop)


@contextmanager
def _told(model: _Model, findings: list[Finding]) -> Iterator[None]:
    """Collects what a model is refused for, placed in that model."""
    try:
        yield
    except Refused as refused:
        findings += _placed(model, refused)


def _placed(model: _Model, refused: Refused) -> list[Finding]:
    return [replace(each, where=f"{model.prefix}{each.where}") for each in refused.findings]


def _nested(models: Sequence[_Model], call: Callable[[_Model, Agree], None], agree: Agree) -> None:
    """Call all with votes that are one: each model's vote begins the next model, the last one's is real.

    So all that a model does before its vote comes before the real one, and what it does after it, after.
    """
    if not models:
        agree()
        return
    first, *others = models
    begun = False
    passed: list[Exception] = []

    def vote() -> None:
        nonlocal begun
        if not begun:
            begun = True
            try:
                _nested(others, call, agree)
            except Exception as error:
                passed.append(error)
                raise

    try:
        call(first, Vote(vote, lambda work: watched(agree, work)))
    except Refused as refused:
        if refused in passed:
            raise
        raise Refused(_placed(first, refused)) from None
    vote()


def _tried(call: Callable[[], None], failures: list[Exception]) -> None:
    try:
        call()
    except Exception as error:
        failures.append(error)


def _shared(found: Iterable[tuple[_Model, Described]]) -> list[Finding]:
    """Memory that two models have in common: it would be moved twice, and be two tensors in the target."""
    first: dict[int, tuple[_Model, str]] = {}
    alive = []  # else another storage could get its address
    findings = []
    for model, own in found:
        for name, buffer in own.buffers.items():
            alive.append(buffer.tensor().untyped_storage())
            known = first.setdefault(int(alive[-1]._cdata), (model, name))
            if known[0] is not model:
                cause = f"lies in the same memory as {known[0].prefix}{known[1]}"
                fix = 'pass both as one model: torch.nn.ModuleDict({"actor": ..., "critic": ...})'
                findings.append(Finding("shared-by-models", f"{model.prefix}{name}", cause, fix))
    return findings


def _whole(state: TrainState, found: Sequence[tuple[_Model, Described]]) -> Described:
    """What all models have, under the names of the job."""
    places = (own.coordinate for _, own in found)
    return Described(
        specs=tuple(_spec(model.prefix, spec) for model, own in found for spec in own.specs),
        rows=tuple(
            replace(
                row,
                key=Key(f"{model.prefix}{row.key.name}", row.key.slot),
                buffer=f"{model.prefix}{row.buffer}",
            )
            for model, own in found
            for row in own.rows
        ),
        buffers={
            f"{model.prefix}{name}": buffer
            for model, own in found
            for name, buffer in own.buffers.items()
        },
        scalars={
            f"{model.prefix}{name}": numbers
            for model, own in found
            for name, numbers in own.scalars.items()
        },
        aux=(
            *(_item(model.prefix, item) for model, own in found for item in own.aux),
            *user_items(state.user, state.samples, state.counters),
        ),
        coordinate=state.coordinate or next((place for place in places if place), {}),
        allocated=sum(own.allocated for _, own in found),
        flat_models=tuple(model.name for model, own in found if own.flat_step),
        keep=tuple(each for _, own in found for each in own.keep),
    )


def _spec(prefix: str, spec: KeySpec) -> KeySpec:
    aliases = tuple(f"{prefix}{name}" for name in spec.aliases)
    return replace(spec, key=Key(f"{prefix}{spec.key.name}", spec.key.slot), aliases=aliases)


def _item(prefix: str, item: AuxItem) -> AuxItem:
    value = item.value
    if item.path == "param_groups":
        value = [{**group, "names": [f"{prefix}{n}" for n in group["names"]]} for group in value]
    return AuxItem(f"{prefix}{item.path}", value, item.policy)


def _keys_in(model: _Model, keys: Iterable[KeySpec]) -> Iterator[KeySpec]:
    """A model's keys, under the names that it has itself."""
    start = len(model.prefix)
    for spec in keys:
        if spec.key.name.startswith(model.prefix):
            aliases = tuple(n[start:] for n in spec.aliases if n.startswith(model.prefix))
            yield replace(spec, key=Key(spec.key.name[start:], spec.key.slot), aliases=aliases)


def _scalars_in(
    model: _Model, scalars: Mapping[str, Mapping[str, int | float]]
) -> dict[str, Mapping[str, int | float]]:
    own = ((n, v) for n, v in scalars.items() if n.startswith(model.prefix))
    return {name[len(model.prefix) :]: value for name, value in own}


def _aux_in(model: _Model, aux: Mapping[str, AuxItem]) -> dict[str, AuxItem]:
    found = {}
    start = len(model.prefix)
    for name, item in aux.items():
        prefix, path = in_model(name)
        if prefix != model.prefix:
            continue
        value = item.value
        if path == "param_groups":
            value = [{**group, "names": [n[start:] for n in group["names"]]} for group in value]
        found[path] = AuxItem(path, value, item.policy)
    return found
