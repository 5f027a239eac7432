"""The scenario finds each way to get the adapter wrong, and says what is wrong."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from mutants import MUTANTS, Mutant
from stripes.trainer import ThreadRanks
from subjects import Plain, Stripes

from dynadapt.errors import DynadaptError
from dynadapt.testing.adapters import check_adapter
from dynadapt.testing.seats import run_seats

if TYPE_CHECKING:
    from dynadapt.elastic.worlds import Session


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.kind.__name__)
def test_a_wrong_adapter_does_not_pass(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point names the class by its place, so the wrong one is found there."""
    monkeypatch.setattr("stripes.adapter.StripesAdapter", mutant.kind)
    world = ThreadRanks.of(2)

    def seat(session: Session) -> None:
        ranks = world[session.seat]
        there = Stripes(ranks, height=5) if mutant.alone else Plain(ranks)
        try:
            check_adapter(Stripes(ranks), there, session=session, timeout=3)
        finally:
            ranks.barrier.abort()  # whoever waits for this rank need not wait for long

    with pytest.raises((AssertionError, DynadaptError, RuntimeError), match=re.escape(mutant.said)):
        run_seats(2, seat)
