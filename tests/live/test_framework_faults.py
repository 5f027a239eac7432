"""Faults of the frameworks themselves that the tests of migrations have to go around, each shown here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.live import _oracle, _walk, jobs
from tests.live.kinds import RECIPES

if TYPE_CHECKING:
    from tests._ranks import Pool


def _scaled(rank: int, world: int, name: str) -> list[float]:
    """How far the first moments of an fp16 engine are from plain torch's, by the scale of its loss."""
    found = []
    for scale in (1, 16):
        model, recipe = jobs.net(), RECIPES["adamw"]
        fp16 = {"enabled": True, "loss_scale": scale}
        engine = jobs.deepspeed_engine(name, model, recipe(model), fp16=fp16)
        # DeepSpeed has made a step when it is built.
        expected, _ = _oracle.step(
            jobs.zero_tensors(engine), recipe, {}, taken=1, number=1, dtype=torch.float16
        )
        engine.backward(engine(jobs.tokens(1)))
        engine.step()
        found.append(_walk.gaps(expected, jobs.zero_tensors(engine))["exp_avg"])
    return found


@pytest.mark.parametrize("name", ["zero0-fp16", "zero0fused-fp16"])
def test_without_zero_a_loss_is_not_scaled_and_its_gradients_are_unscaled(
    ranks4: Pool, name: str
) -> None:
    """DeepSpeed 0.19.8: so the kinds of these engines have a loss scale of one."""
    right, off = ranks4.run(_scaled, name)[0]
    assert right < 1e-2
    assert off > 0.1
