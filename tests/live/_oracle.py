"""What a training step must give: a plain torch model and optimizer, on the tensors a job was gathered to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.live import jobs
from tests.live.kinds import hidden

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.live.kinds import Recipe

SCALE = 16.0
"""By which the loss is multiplied in fp16, as the kinds do: what underflows is the same."""


def step(
    before: jobs.Tensors,
    recipe: Recipe,
    hyper: Mapping[str, Any],
    *,
    taken: int,
    number: int,
    dtype: torch.dtype,
) -> tuple[jobs.Tensors, float]:
    """All tensors after one more step, on batch `number`, of a job that has taken `taken`; and its loss.

    Forward and backward compute in `dtype`, on weights rounded to it; the step is plain torch's, in fp32.
    `hyper` is what the param groups have beside the recipe's defaults.
    """
    master, lower = (jobs.net(0, hidden=hidden(dist.get_world_size())) for _ in range(2))
    optimizer: Any = recipe(master)
    for group in optimizer.param_groups:
        group.update(changed(group, hyper))
    with torch.no_grad():
        for name, parameter in master.named_parameters():
            parameter.copy_(before[f"{name}/param"])
            if parameter.requires_grad and taken:
                slots = {slot: before[f"{name}/{slot}"].clone() for slot in recipe.slots}
                optimizer.state[parameter] = {"step": torch.tensor(float(taken)), **slots}
    lower.load_state_dict(master.state_dict())
    lower.to(dtype)
    loss = lower(jobs.tokens(number))
    scale = SCALE if dtype == torch.float16 else 1.0
    (loss * scale).backward()
    weights = dict(lower.named_parameters())
    for name, parameter in master.named_parameters():
        if parameter.requires_grad:
            parameter.grad = weights[name].grad.float() / scale
    optimizer.step()
    return jobs.torch_tensors(master, optimizer, recipe.slots), float(loss.detach())


def changed(group: Mapping[str, Any], hyper: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters with those of `hyper`; of `weight_decay` it is a factor."""
    new = {entry: value for entry, value in hyper.items() if entry in group}
    if "weight_decay" in new:
        new["weight_decay"] *= group["weight_decay"]
    return new
