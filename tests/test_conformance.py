"""The adapters' scenario passes for the in-memory adapter, and fails for each way to get it wrong."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dynadapt import registry
from dynadapt.errors import DynadaptError
from dynadapt.testing.adapters import check_adapter
from dynadapt.testing.layouts import random_layout, random_specs
from dynadapt.testing.seats import run_seats
from dynadapt.testing.states import MemoryAdapter, MemoryState, logical_values

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynadapt.elastic.worlds import Session
    from dynadapt.vps.keys import KeySpec
    from dynadapt.vps.layout import RowLayout

COUNT = 3


def _specs() -> tuple[KeySpec, ...]:
    """Present state everywhere: a first step makes what a fresh optimizer lacks."""
    return tuple(replace(spec, presence="present") for spec in random_specs(19, 6, 600))


class Subject:
    """States of one layout on the seats of one process; losses over all of them."""

    def __init__(
        self, layout: RowLayout, seat: int, world: dict[int, MemoryState], turn: Any
    ) -> None:
        self._layout, self._seat = layout, seat
        self._world, self._turn = world, turn

    def build(self, seed: int) -> MemoryState:
        values = {
            key: torch.nan_to_num(value.float(), 0.5, 1.0, 2.0).clamp(-9, 9).to(value.dtype)
            if value.dtype in {torch.float32, torch.bfloat16, torch.float64}
            else value
            for key, value in logical_values(seed, self._layout.keys).items()
        }
        absent = [spec.key for spec in self._layout.keys if spec.kind == "state"]
        return MemoryState(self._layout, self._seat, values, absent=absent)

    def train_step(self, x: MemoryState, step: int) -> float:
        loss = self._loss(x)
        x.step()
        return loss

    def evaluate(self, x: MemoryState) -> float:
        x.gather()
        return self._loss(x)

    def open_step(self, x: MemoryState) -> None:
        x.mid_step = x.seat == 1  # one rank alone may be in the middle of a step

    def close_step(self, x: MemoryState) -> None:
        x.mid_step = False

    def _loss(self, x: MemoryState) -> float:
        """From whole tensors, put together of what training sees on all seats."""
        self._world[self._seat] = x
        self._turn.wait(20)
        total = 0.0
        for spec in self._layout.keys:
            if spec.key.slot in {"param", "compute"}:
                whole = torch.zeros(spec.shape, dtype=torch.complex128)
                for state in self._world.values():
                    for row in state.layout.rows_of(spec.key, state.seat):
                        part = tuple(map(slice, row.box.lo, row.box.hi))
                        whole[part] = state.read(row).to(torch.complex128)
                place = torch.arange(whole.numel()).reshape(whole.shape)
                total += float((whole.real * (place + 1)).nan_to_num(1.0).sum())
        self._turn.wait(20)
        return total


def _run(kinds: tuple[str, str], adapter: type[MemoryAdapter] = MemoryAdapter) -> None:
    layouts = [random_layout(i, _specs(), range(COUNT), [kind]) for i, kind in enumerate(kinds)]
    worlds: list[dict[int, MemoryState]] = [{}, {}]
    turns = [threading.Barrier(COUNT) for _ in layouts]
    registry.register(adapter())

    def seat(session: Session) -> None:
        one, two = (
            Subject(layout, session.seat, world, turn)
            for layout, world, turn in zip(layouts, worlds, turns, strict=True)
        )
        check_adapter(one, two, session=session, timeout=10)

    try:
        run_seats(COUNT, seat, timeout=30)
    finally:
        for turn in turns:
            turn.abort()
        MemoryAdapter.install()


@pytest.mark.parametrize(
    "kinds", [("flat", "grid"), ("grid", "zero"), ("replicated", "overlapping")]
)
def test_the_memory_adapter_passes(kinds: tuple[str, str]) -> None:
    _run(kinds)


class KeepsGathered(MemoryAdapter):
    """Leaves gathered copies in place: writes to the shards are not seen."""

    def quiesce(self, x: Any, agree: Callable[[], None] = lambda: None) -> None:
        state = x.model
        gathered, state._gathered = state._gathered, {}
        super().quiesce(x, agree)
        state._gathered = gathered


class MissesOpenSteps(MemoryAdapter):
    """Does not look for a step under way."""

    def quiesce(self, x: Any, agree: Callable[[], None] = lambda: None) -> None:
        x.model.mid_step, open_step = False, x.model.mid_step
        super().quiesce(x, agree)
        x.model.mid_step = open_step


class DescribingAdvances(MemoryAdapter):
    """Changes what it describes."""

    def describe(self, x: Any) -> Any:
        for own in x.model.scalars.values():
            own["step"] += 1
        return super().describe(x)


class ForgetsToAbandon(MemoryAdapter):
    """Leaves behind what it prepared."""

    def abandon(self, x: Any) -> None:
        return None


class ForgetsDerived(MemoryAdapter):
    """Does not rebuild the lower-precision copies."""

    def finish(self, x: Any, *rest: Any) -> Any:
        x.model.rebuild = lambda: None
        try:
            return super().finish(x, *rest)
        finally:
            del x.model.rebuild


class ForgetsScalars(MemoryAdapter):
    """Keeps its own step counts."""

    def finish(self, x: Any, *rest: Any) -> Any:
        own = {name: {"step": 77} for name in x.model.scalars} or {"layers.0.weight": {"step": 77}}
        found = super().finish(x, *rest)
        x.model.scalars = {**x.model.scalars, **own}
        return found


class WrongOffset(MemoryAdapter):
    """Says that its biggest row lies one element further: reads and writes the neighbour's bytes."""

    def describe(self, x: Any) -> Any:
        return _shifted(super().describe(x))

    def prepare(self, x: Any, keys: Any) -> Any:
        return _shifted(super().prepare(x, keys))


def _shifted(own: Any) -> Any:
    biggest = max(own.rows, key=lambda row: (row.box.volume, row.key), default=None)
    return replace(
        own,
        rows=tuple(replace(r, offset=r.offset + 1) if r is biggest else r for r in own.rows),
    )


@pytest.mark.parametrize(
    "adapter",
    [
        KeepsGathered,
        MissesOpenSteps,
        DescribingAdvances,
        ForgetsToAbandon,
        ForgetsDerived,
        ForgetsScalars,
        WrongOffset,
    ],
)
def test_a_faulty_adapter_does_not_pass(adapter: type[MemoryAdapter]) -> None:
    with pytest.raises((AssertionError, DynadaptError)):
        _run(("flat", "grid"), adapter)
