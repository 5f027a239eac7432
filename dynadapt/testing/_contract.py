"""What one adapter owes by itself, without a migration: the rules that `check_adapter` tries first."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dynadapt.protocols import AuxItem, TrainState
from dynadapt.registry import adapter_for
from dynadapt.vps import cover, wire
from dynadapt.vps.box import Box
from dynadapt.vps.keys import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynadapt.api import State
    from dynadapt.elastic.worlds import Session
    from dynadapt.protocols import Described, Outcome
    from dynadapt.vps.keys import KeySpec

__all__ = [
    "Turns",
    "buffers_come_back",
    "check_description",
    "describing_changes_nothing",
    "held",
    "hyperparameters_are_taken",
    "is_whole",
    "nothing_is_passed_over",
    "prepare_and_abandon_change_nothing",
    "unchanged",
]

T = TypeVar("T")
Held = dict[str, str]


class Turns:
    """Lets one seat act while all others wait: an act that needs another rank then never ends.

    All seats make the same calls. The seat that hangs is left to its own timeout; the others say why.
    """

    def __init__(self, session: Session, timeout: float) -> None:
        self._session, self._timeout = session, timeout
        self._calls = 0

    def alone(self, what: str, act: Callable[[], T]) -> T:
        """What `act` returns on this seat. Raises `AssertionError` if it does not end elsewhere."""
        self._calls += 1
        place = f"turns/{self._session.number()}/{self._calls}"
        for seat in self._session.seats:
            mark = f"{place}/{seat}"
            if seat == self._session.seat:
                try:
                    found = act()
                finally:
                    self._session.root.set(mark, "done")
            else:
                self._wait(mark, f"{what} on seat {seat} does not end while the others wait")
        return found

    def _wait(self, mark: str, otherwise: str) -> None:
        deadline = time.monotonic() + self._timeout
        while not self._session.root.check([mark]):
            assert time.monotonic() < deadline, f"{otherwise}: it must not communicate"
            time.sleep(0.001)


def check_description(own: Described) -> None:
    """The form of one description: rows inside their buffers, of their key's dtype, aux that can travel."""
    dtypes = {spec.key: spec.dtype for spec in own.specs}
    shapes = {spec.key: spec.shape for spec in own.specs}
    parts = [own.rows, *own.files.values()]
    for row in (row for rows in parts for row in rows):
        where = f"{row.key} {row.box}"
        assert row.key in shapes, f"{where} has no KeySpec"
        assert row.buffer in own.buffers, f"{where} is in {row.buffer!r}, which is no buffer"
        buffer = own.buffers[row.buffer]
        shape = shapes[row.key]
        fits = row.box.ndim == len(shape) and Box.whole(shape).contains(row.box)
        assert fits, f"{where} leaves the shape {shape}"
        assert not row.box.volume or row.last < buffer.numel, f"{where} leaves {row.buffer}"
        assert buffer.dtype == dtypes[row.key], f"{where} is {dtypes[row.key]} in {buffer.dtype}"
    for name, buffer in own.buffers.items():
        tensor = buffer.tensor()
        assert tensor.ndim == 1, f"{name} is not flat"
        assert tensor.numel() == buffer.numel, f"{name} has {tensor.numel()} of {buffer.numel}"
        assert str(tensor.dtype) == f"torch.{buffer.dtype}", name
    for item in own.aux:
        assert wire.encodable(item.value), f"aux {item.path!r} cannot travel"


def is_whole(seen: State) -> None:
    """Every element of every key that is said to be present has a holder."""
    gaps = cover.prove(seen.layout)
    assert not gaps, "\n".join(map(str, gaps))


def held(x: Any) -> Held:
    """A hash of every row's bytes, all scalars and presences, as this seat describes them at rest."""
    state = TrainState.of(x)
    adapter = adapter_for(state)
    adapter.quiesce(state)
    own = adapter.describe(state)
    found: Held = {}
    for row in own.rows:
        flat = own.buffers[row.buffer].tensor().detach()
        view = flat.as_strided(row.box.shape, row.strides, row.offset).cpu()
        copy = torch.empty(row.box.shape, dtype=view.dtype).copy_(view)
        raw = copy.reshape(-1).view(torch.uint8).numpy().tobytes()
        found[f"{row.key} {row.box}"] = hashlib.sha256(raw).hexdigest()
    found.update(_numbers(own))
    return found


def _numbers(own: Described) -> Held:
    """Scalars and presences: what a description says of optimizer state beside its bytes."""
    found = {f"scalars of {name}": repr(sorted(v.items())) for name, v in own.scalars.items()}
    found.update({f"presence of {spec.key}": spec.presence for spec in own.specs})
    return found


def unchanged(before: Held, after: Held, otherwise: str) -> None:
    """Raise `AssertionError` with the first differences of two answers of `held`."""
    differing = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    shown = ", ".join(differing[:3]) + (" and others" if len(differing) > 3 else "")
    assert not differing, f"{otherwise}: {shown}"


def _face(own: Described) -> bytes:
    """Everything a description says but the bytes."""
    rows = sorted(own.rows, key=lambda row: (row.key, row.box))
    places = [[str(row.key), str(row.box), row.offset, list(row.strides)] for row in rows]
    scalars = {name: dict(values) for name, values in own.scalars.items()}
    aux = [[item.path, item.policy, item.value] for item in own.aux]
    return wire.encode([wire.encode_specs(own.specs), places, scalars, aux])


def _at_rest(x: Any) -> tuple[Any, Any]:
    state = TrainState.of(x)
    adapter = adapter_for(state)
    adapter.quiesce(state)
    return state, adapter


def describing_changes_nothing(x: Any, turns: Turns) -> None:
    """A description is well formed, equal to the next one, and needs no other rank."""
    state, adapter = _at_rest(x)
    own = adapter.describe(state)
    check_description(own)
    before = held(x)
    first = _face(own)
    again = turns.alone("describe", lambda: adapter.describe(state))
    assert first == _face(again), "two descriptions of one state differ"
    unchanged(before, held(x), "a description changed the state")


def prepare_and_abandon_change_nothing(x: Any, keys: Sequence[KeySpec], turns: Turns) -> None:
    """`prepare` makes what the keys have, `abandon` takes it back; neither needs another rank."""
    state, adapter = _at_rest(x)
    before, values = _face(adapter.describe(state)), held(x)
    prepared = turns.alone("prepare", lambda: adapter.prepare(state, tuple(keys)))
    check_description(prepared)
    made = {spec.key for spec in prepared.specs if spec.presence == "present"}
    # A seat without a part of a tensor may keep no state for it.
    names = {row.key.name for row in prepared.rows if row.box.volume}
    for spec in keys:
        if spec.kind == "state" and spec.moves and spec.key.name in names:
            assert Key(*spec.key) in made, f"prepare did not make {spec.key}"
    turns.alone("abandon", lambda: adapter.abandon(state))
    assert _face(adapter.describe(state)) == before, "abandon left something of prepare behind"
    unchanged(values, held(x), "prepare and abandon changed values")
    adapter.abandon(state)  # also where nothing was prepared
    assert _face(adapter.describe(state)) == before, "a second abandon changed something"


def buffers_come_back(x: Any) -> None:
    """Memory that a buffer gives back is whole again after `refill`, under the same views."""
    state, adapter = _at_rest(x)
    before = held(x)
    own = adapter.describe(state)
    for name, buffer in own.buffers.items():
        copy = buffer.tensor().clone()
        buffer.free()
        for _ in range(2):
            buffer.refill()
        flat = buffer.tensor()
        needed = (int(flat.storage_offset()) + flat.numel()) * flat.element_size()
        size = flat.untyped_storage().nbytes()
        assert size >= needed, f"buffer {name!r} needs {needed} bytes and has {size} after refill"
        flat.detach().copy_(copy)
    unchanged(before, held(x), "buffers that were freed and filled again are not what they were")


def nothing_is_passed_over(outcomes: Sequence[Outcome], aux: Mapping[str, Any]) -> None:
    """`finish` says of every aux item of the source what became of it, were it that it was dropped."""
    for path in sorted(aux.keys() - {"optimizer", "behaviour"}):
        told = any(o.path == path or o.path.startswith((f"{path}/", f"{path}[")) for o in outcomes)
        assert told, f"finish does not say what became of the aux item {path!r}"


def hyperparameters_are_taken(x: Any, seen: State) -> None:
    """`finish` with other numbers in the source's param groups: they are described afterwards.

    The two states of a scenario mostly have the same ones, so a migration alone would not show it.
    Leaves `x` with these numbers.
    """
    state, adapter = _at_rest(x)
    item = seen.side.aux.get("param_groups")
    if item is None:
        return
    groups = [{**g, "hyper": {k: _other(v) for k, v in g["hyper"].items()}} for g in item.value]
    aux = {path: own for path, own in seen.side.aux.items() if path != "scheduler"}
    aux["param_groups"] = AuxItem("param_groups", groups)
    adapter.prepare(state, seen.layout.keys)
    outcomes = adapter.finish(state, seen.layout.keys, seen.side.scalars, aux)
    lost = {o.path.rpartition("/")[2] for o in outcomes if o.kind != "exact"}
    own = {item.path: item.value for item in adapter.describe(state).aux}.get("param_groups", ())
    has = {name: group["hyper"] for group in own for name in group["names"]}
    for group in groups:
        for name in group["names"]:
            for entry, value in group["hyper"].items():
                if entry in has.get(name, {}) and lost.isdisjoint({entry, "param_groups"}):
                    kept = has[name][entry]
                    assert _plain(kept) == _plain(value), (
                        f"{entry} of {name} is {kept} after finish, and {value} in the source"
                    )


def _other(value: Any) -> Any:
    """Another valid value of a hyperparameter, if it is made of floats."""
    if isinstance(value, list | tuple):
        return type(value)(map(_other, value))
    return value / 2 if isinstance(value, float) else value


def _plain(value: Any) -> Any:
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value
