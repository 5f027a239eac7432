"""The torch_module adapter on real ranks, with torch's own loaders and steps as judges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.adapters import _torch_edges as edges
from tests.adapters import _torch_worlds as worlds

if TYPE_CHECKING:
    from tests._ranks import Pool

#: set_model_state_dict of torch 2.13 asserts on uneven shards of shards.
UNLOADABLE = ("tp_fsdp", "tp_hsdp")

COORDINATES = {
    "ddp": [{"dp": rank} for rank in range(4)],
    "fsdp": [{"dp": rank} for rank in range(4)],
    "fsdp_bf16": [{"dp": rank} for rank in range(4)],
    "hsdp": [{"dp": rank} for rank in range(4)],
    "tp": [{"dp": 0, "tp": rank} for rank in range(4)],
    "tp_fsdp": [{"dp": rank // 2, "tp": rank % 2} for rank in range(4)],
    "tp_hsdp": [{"dp": rank // 2, "tp": rank % 2} for rank in range(4)],
    "tp_replicate": [{"dp": rank // 2, "tp": rank % 2} for rank in range(4)],
}


@pytest.mark.parametrize("layout", worlds.LAYOUTS)
def test_rows_hold_what_the_framework_says(ranks4: Pool, layout: str) -> None:
    found = ranks4.run(worlds.describes_what_the_framework_says, layout)
    assert found == COORDINATES[layout]


@pytest.mark.parametrize("layout", sorted(worlds.LAYOUTS.keys() - UNLOADABLE))
def test_a_filled_target_goes_on_like_a_loaded_twin(ranks4: Pool, layout: str) -> None:
    losses = ranks4.run(worlds.goes_on_like_a_loaded_twin, layout)
    assert losses == [losses[0]] * 4


@pytest.mark.parametrize("layout", UNLOADABLE)
def test_a_filled_target_goes_on_like_its_source(ranks4: Pool, layout: str) -> None:
    losses = ranks4.run(worlds.goes_on_like_a_twin_that_never_stopped, layout)
    assert losses == [losses[0]] * 4


def test_gradients_that_no_parameter_shows_are_refused(ranks4: Pool) -> None:
    ranks4.run(edges.gradients_that_no_parameter_shows)


def test_nothing_is_sent_before_finish(ranks4: Pool) -> None:
    made = ranks4.run(edges.one_rank_alone)
    assert all(number > 0 for number in made[1])


def test_ties_and_pending_sums(ranks4: Pool) -> None:
    ranks4.run(edges.ties_and_sums)


def test_odd_placements(ranks4: Pool) -> None:
    ranks4.run(edges.odd_placements)


def test_other_optimizers(ranks4: Pool) -> None:
    ranks4.run(edges.other_optimizers)


def test_state_on_its_owner(ranks4: Pool) -> None:
    held = ranks4.run(edges.state_on_its_owner)
    assert sum(number for (number,) in held) == 14  # every trained parameter but the unused one
    assert all(number < 14 for (number,) in held)
