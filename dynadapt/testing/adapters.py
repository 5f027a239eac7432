"""One scenario that every live adapter passes, through real migrations. All seats call `check_adapter`.

A `Subject` says how a framework builds, trains and evaluates a state; the scenario calls all five
methods of its adapter, alone and in `api.migrate`, and compares every byte that the adapter describes.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dynadapt import api
from dynadapt.errors import MigrationAborted
from dynadapt.protocols import TrainState
from dynadapt.registry import adapter_for
from dynadapt.vps import wire
from dynadapt.vps.keys import Key

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynadapt.elastic.worlds import Session
    from dynadapt.protocols import Described

__all__ = ["Subject", "check_adapter", "check_description"]


class Subject(Protocol):
    """One framework's states, as the scenario needs them. All seats make the same calls."""

    def build(self, seed: int) -> Any:
        """A fresh state (what `api.migrate` takes) of one model and optimizer; weights by `seed`."""
        ...

    def train_step(self, x: Any, step: int) -> float:
        """One optimizer step on batch `step`; the loss over all seats."""
        ...

    def evaluate(self, x: Any) -> float:
        """A forward without gradients on a fixed batch, that changes nothing; the loss over all seats."""
        ...

    def open_step(self, x: Any) -> None:
        """Leave `x` in the middle of a step: gradients held, no optimizer step yet."""
        ...

    def close_step(self, x: Any) -> None:
        """Back to a step boundary, by finishing the step or by dropping its gradients."""
        ...


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


def check_adapter(
    subject: Subject,
    other: Subject | None = None,
    *,
    session: Session | None = None,
    steps: int = 2,
    same_loss: Callable[[float, float], bool] = _close,
    timeout: float = 60.0,
) -> None:
    """Migrate from `subject` to `other` (default: to a second state of its own) and back.

    `same_loss` judges the losses of both; pass a looser one where their arithmetic differs. Raises
    `AssertionError`; what only one seat sees leaves the others waiting until their timeout.
    """
    there = other or subject
    more: dict[str, Any] = {"session": session, "timeout": timeout}
    a, b = subject.build(1), there.build(2)
    for step in range(steps):
        subject.train_step(a, step)
    _describing_changes_nothing(a)
    _prepare_and_abandon_change_nothing(b, api.describe(a, **more).layout.keys)
    _planning_changes_nothing(a, b, more)

    kept = _held(a)
    subject.evaluate(a)  # both may now hold gathered weights that hide their shards
    there.evaluate(b)
    report = api.migrate(a, b, **more)
    assert report.fingerprint_source == report.fingerprint_target
    assert report.bytes_moved == report.bytes_minimum, str(report)
    assert _held(a) == kept, "the source was changed"
    _described_well(b)
    losses = subject.evaluate(a), there.evaluate(b)
    assert same_loss(*losses), (
        f"the evaluation gives {losses[0]} in the source, {losses[1]} after it"
    )

    subject.train_step(a, steps)
    assert _held(a) != kept, "a training step changed nothing: the way back would prove nothing"
    subject.evaluate(a)
    there.evaluate(b)
    back = api.migrate(b, a, **more)
    assert back.bytes_moved == back.bytes_minimum, str(back)
    assert _held(a) == kept, "out and back is not bit for bit what it was"
    losses = subject.train_step(a, steps), there.train_step(b, steps)
    assert same_loss(*losses), (
        f"training goes on with {losses[0]} in one and {losses[1]} in the other"
    )

    _mid_step_is_refused(subject, a, b, more)
    _mid_step_is_refused(there, b, a, more)
    losses = subject.train_step(a, steps + 1), there.train_step(b, steps + 1)
    assert all(map(math.isfinite, losses)), losses
    api.migrate(a, b, **more)  # refusals left nothing behind
    assert same_loss(subject.evaluate(a), there.evaluate(b))


def check_description(own: Described) -> None:
    """The form of one description: rows inside their buffers, of their key's dtype, aux that can travel."""
    dtypes = {spec.key: spec.dtype for spec in own.specs}
    shapes = {spec.key: spec.shape for spec in own.specs}
    parts = [own.rows, *own.files.values()]
    for row in (row for rows in parts for row in rows):
        buffer = own.buffers[row.buffer]
        where = f"{row.key} {row.box}"
        assert row.box.ndim == len(shapes[row.key]), f"{where} in a shape {shapes[row.key]}"
        assert not row.box.volume or row.last < buffer.numel, f"{where} leaves {row.buffer}"
        assert buffer.dtype == dtypes[row.key], f"{where} is {dtypes[row.key]} in {buffer.dtype}"
    for name, buffer in own.buffers.items():
        tensor = buffer.tensor()
        assert tensor.ndim == 1, f"{name} is not flat"
        assert tensor.numel() == buffer.numel, f"{name} has {tensor.numel()} of {buffer.numel}"
        assert str(tensor.dtype) == f"torch.{buffer.dtype}", name
    for item in own.aux:
        assert wire.encodable(item.value), f"aux {item.path!r} cannot travel"


def _state(x: Any) -> Any:
    return TrainState.of(x)


def _described(x: Any) -> Described:
    state = _state(x)
    return adapter_for(state).describe(state)


def _held(x: Any) -> dict[str, str]:
    """A hash of every row's bytes, and all scalars, as this seat describes them at rest."""
    state = _state(x)
    adapter_for(state).quiesce(state)
    own = _described(x)
    found: dict[str, str] = {}
    for row in own.rows:
        flat = own.buffers[row.buffer].tensor().detach()
        view = flat.as_strided(row.box.shape, row.strides, row.offset).cpu()
        copy = torch.empty(row.box.shape, dtype=view.dtype).copy_(view)
        raw = copy.reshape(-1).view(torch.uint8).numpy().tobytes()
        found[f"{row.key} {row.box}"] = hashlib.sha256(raw).hexdigest()
    found.update({f"scalars of {name}": repr(sorted(v.items())) for name, v in own.scalars.items()})
    for spec in own.specs:
        found[f"presence of {spec.key}"] = spec.presence
    return found


def _face(own: Described) -> bytes:
    """Everything a description says but the bytes."""
    rows = sorted(own.rows, key=lambda row: (row.key, row.box))
    places = [[str(row.key), str(row.box), row.offset, list(row.strides)] for row in rows]
    scalars = {name: dict(values) for name, values in own.scalars.items()}
    aux = [[item.path, item.policy, item.value] for item in own.aux]
    return wire.encode([wire.encode_specs(own.specs), places, scalars, aux])


def _described_well(x: Any) -> None:
    state = _state(x)
    adapter_for(state).quiesce(state)
    check_description(_described(x))


def _describing_changes_nothing(x: Any) -> None:
    _described_well(x)
    held = _held(x)
    before = _described(x)
    assert _face(before) == _face(_described(x)), "two descriptions differ"
    assert _held(x) == held, "a description changed the state"


def _prepare_and_abandon_change_nothing(x: Any, keys: Any) -> None:
    state = _state(x)
    adapter = adapter_for(state)
    adapter.quiesce(state)
    before, held = _face(_described(x)), _held(x)
    prepared = adapter.prepare(state, keys)
    check_description(prepared)
    made = {s.key for s in prepared.specs if s.presence == "present"}
    names = {name for key in made for name in (key.name,)}
    for spec in keys:
        if spec.kind == "state" and spec.moves and spec.key.name in names:
            assert Key(*spec.key) in made, f"prepare did not make {spec.key}"
    adapter.abandon(state)
    assert _face(_described(x)) == before, "abandon left something of prepare behind"
    assert _held(x) == held, "prepare and abandon changed values"
    adapter.abandon(state)  # also where nothing was prepared
    assert _face(_described(x)) == before


def _planning_changes_nothing(a: Any, b: Any, more: dict[str, Any]) -> None:
    held = _held(a), _held(b)
    plan = api.plan(a, b, **more)
    assert plan.bytes_moved == plan.bytes_minimum
    assert (_held(a), _held(b)) == held, "planning changed a state"


def _mid_step_is_refused(subject: Subject, x: Any, partner: Any, more: dict[str, Any]) -> None:
    """As a source and as a target, with both left as they were."""
    subject.open_step(x)
    for source, target in ((x, partner), (partner, x)):
        held = _held(partner)
        reason = _refusal(source, target, more)
        assert reason == "mid-step", f"in the middle of a step, the reason is {reason!r}"
        assert _held(partner) == held, "a refused migration changed the other state"
    subject.close_step(x)


def _refusal(source: Any, target: Any, more: dict[str, Any]) -> str:
    try:
        api.migrate(source, target, **more)
    except MigrationAborted as error:
        return error.reason
    return "not refused"
