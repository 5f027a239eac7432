"""The torch_module adapter on real ranks, with torch's own loaders and steps as judges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.adapters import _torch_worlds as worlds

if TYPE_CHECKING:
    from tests._ranks import Pool

COORDINATES = {
    "ddp": [{"dp": rank} for rank in range(4)],
    "fsdp": [{"dp": rank} for rank in range(4)],
    "fsdp_bf16": [{"dp": rank} for rank in range(4)],
    "hsdp": [{"dp": rank} for rank in range(4)],
    "tp": [{"dp": 0, "tp": rank} for rank in range(4)],
    "tp_fsdp": [{"dp": rank // 2, "tp": rank % 2} for rank in range(4)],
    "tp_replicate": [{"dp": rank // 2, "tp": rank % 2} for rank in range(4)],
}


@pytest.mark.parametrize("layout", worlds.LAYOUTS)
def test_rows_hold_what_the_framework_says(ranks4: Pool, layout: str) -> None:
    found = ranks4.run(worlds.describes_what_the_framework_says, layout)
    assert found == COORDINATES[layout]


@pytest.mark.parametrize("layout", worlds.LAYOUTS)
def test_a_filled_target_trains_on_like_an_ordinary_twin(ranks4: Pool, layout: str) -> None:
    losses = ranks4.run(worlds.trains_on_like_an_ordinary_twin, layout)
    assert losses[0] == losses[1]
