"""Awkward sizes: what is described holds every element once, and reaches any other layout and back."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stripes.adapter import StripesAdapter
from stripes.trainer import ThreadRanks, Trainer
from subjects import loss

from dynadapt import api
from dynadapt.protocols import TrainState
from dynadapt.testing import strategies as more
from dynadapt.testing.adapters import check_description
from dynadapt.testing.seats import run_seats
from dynadapt.testing.states import MemoryAdapter, MemoryState
from dynadapt.vps.cover import prove
from dynadapt.vps.layout import Row, RowLayout

Shapes = list[tuple[int, ...]]
shapes = st.lists(more.shapes(max_dims=4, max_side=5), min_size=1, max_size=4)
heights = st.integers(1, 3)


def _module(given_shapes: Shapes, start: int) -> torch.nn.Module:
    """Parameters of these shapes; no two elements are equal."""
    module = torch.nn.Module()
    for number, shape in enumerate(given_shapes):
        part = torch.empty(shape)
        part.view(-1).copy_(torch.arange(start, start + part.numel()))
        module.register_parameter(f"p{number}", torch.nn.Parameter(part))
        start += part.numel()
    return module


def _trainer(given_shapes: Shapes, ranks: Any, height: int, start: int = 0) -> Trainer:
    return Trainer(_module(given_shapes, start), loss, ranks, height=height)


def _step(trainer: Trainer) -> None:
    """A step with gradients out of the air, so that there are moments."""
    trainer.gradients = trainer.masters * 0.5 + 1
    trainer.step()


def _view(trainer: Trainer, row: Row) -> torch.Tensor:
    buffer = {"masters": trainer.masters, "copies": trainer.copies, "moments": trainer.moments}
    flat = buffer[row.buffer]
    assert flat is not None
    return flat.view(-1).as_strided(row.box.shape, row.strides, row.offset)


@given(given_shapes=shapes, size=st.integers(1, 9), height=heights)
def test_every_element_is_described_once_and_where_it_lies(
    given_shapes: Shapes, size: int, height: int
) -> None:
    """Describing needs no other rank, so one thread can describe for all of them, one after another."""
    whole = dict(_module(given_shapes, 0).named_parameters())
    described = {}
    for ranks in ThreadRanks.of(size):
        trainer = _trainer(given_shapes, ranks, height)
        own = StripesAdapter().describe(TrainState(trainer))
        check_description(own)
        for row in own.rows:
            part = tuple(map(slice, row.box.lo, row.box.hi))
            expected = whole[row.key.name].detach()[part].to(_view(trainer, row).dtype)
            assert torch.equal(_view(trainer, row), expected), row
        described[ranks.rank] = (own.specs, own.rows)
    layout = RowLayout.of_seats(described)
    assert prove(layout) == ()
    for spec in layout.keys:
        rows = [row for rank in range(size) for row in layout.rows_of(spec.key, rank)]
        present = spec.presence == "present"
        assert sum(row.box.volume for row in rows) == (spec.numel if present else 0)


@settings(max_examples=25)
@given(
    data=st.data(),
    given_shapes=shapes,
    size=st.integers(1, 5),
    height=heights,
    back=heights,
    stepped=st.booleans(),
)
def test_to_any_layout_and_back(
    data: st.DataObject, given_shapes: Shapes, size: int, height: int, back: int, stepped: bool
) -> None:
    """Through a state in memory of whatever layout, to a trainer with stripes of another height."""
    MemoryAdapter.install()
    every = ThreadRanks.of(size)
    sources = [_trainer(given_shapes, ranks, height) for ranks in every]
    targets = [_trainer(given_shapes, ranks, back, start=5000) for ranks in every]
    expected = [_trainer(given_shapes, ranks, back) for ranks in every]
    for trainer in [*sources, *expected] if stepped else []:
        _step(trainer)
    specs = StripesAdapter().describe(TrainState(sources[0])).specs
    layout = data.draw(more.layouts(specs, tuple(range(size))))

    def seat(session: Any) -> None:
        me = session.seat
        between = MemoryState(layout, me, coordinate={"dp": me})
        api.migrate(TrainState(sources[me]), between, session=session)
        api.migrate(between, TrainState(targets[me]), session=session)

    run_seats(size, seat)
    for has, should in zip(targets, expected, strict=True):
        assert has.steps == should.steps
        assert torch.equal(has.masters, should.masters)
        assert torch.equal(has.copies, should.copies)
        assert (has.moments is None) == (should.moments is None)
        if has.moments is not None and should.moments is not None:
            assert torch.equal(has.moments, should.moments)
