"""The scenario that every adapter has to pass, on ranks that are threads and on real ones."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from stripes.adapter import StripesAdapter
from stripes.trainer import GlooRanks, ThreadRanks
from subjects import Plain, Stripes
from torch.multiprocessing.spawn import spawn

from dynadapt.registry import adapter_for, entries
from dynadapt.testing.adapters import check_adapter
from dynadapt.testing.seats import run_seats

if TYPE_CHECKING:
    from pathlib import Path

    from dynadapt.elastic.worlds import Session

KINDS: dict[str, Any] = {
    "stripes of 2": lambda ranks: Stripes(ranks, height=2),
    "stripes of 3": lambda ranks: Stripes(ranks, height=3),
    "torch": Plain,
}


def test_dynadapt_finds_the_adapter_by_its_entry_point() -> None:
    """Nothing in these tests registers it: the package has to be installed."""
    assert "stripes" in {entry.name for entry in entries()}
    state = Stripes(ThreadRanks.of(1)[0]).build(1)
    assert isinstance(adapter_for(state), StripesAdapter)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("one", "two"), [("stripes of 2", "stripes of 3"), ("stripes of 3", "torch")]
)
def test_conformance(one: str, two: str, size: int) -> None:
    """Out and back; 4 ranks are more than some tensors have stripes."""
    world = ThreadRanks.of(size)

    def seat(session: Session) -> None:
        ranks = world[session.seat]
        check_adapter(KINDS[one](ranks), KINDS[two](ranks), session=session)

    run_seats(size, seat)


def _rank(rank: int, size: int, meet: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size)
    ranks = GlooRanks()
    check_adapter(Stripes(ranks), Plain(ranks))
    dist.barrier()
    os._exit(0)  # gloo may abort in an interpreter's normal shutdown


def test_conformance_on_real_ranks(tmp_path: Path) -> None:
    """Processes, and dynadapt's own channel between them."""
    spawn(_rank, (2, str(tmp_path / "meet")), nprocs=2)  # type: ignore[no-untyped-call]
