"""A tied parameter has several names, and an optimizer knows it by one: not always by the smallest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import dynadapt

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Tied(nn.Module):
    """The head comes last, and first in the alphabet, as `lm_head` and `model.embed_tokens` do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.tokens(numbers)))
        return found


def _job(seed: int) -> tuple[Tied, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Tied()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step(model: Tied, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _saved(folder: Path, model: Tied, optimizer: torch.optim.AdamW) -> Path:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize(
    "ways",
    [
        ("dcp",),
        ("dcp/fsdp2:dp=3",),
        ("universal", "dcp/fsdp2:dp=2"),
        ("zero3:dp=2", "dcp"),
        ("torch", "dcp"),
        ("live",),
    ],
)
def test_torch_finds_the_states_of_tied_parameters(tmp_path: Path, ways: tuple[str, ...]) -> None:
    """`dcp.load` of what a conversion wrote, and the next step is that of the job that never stopped."""
    model, optimizer = _job(0)
    _step(model, optimizer)
    last = _saved(tmp_path / "0", model, optimizer)
    order = [name for name, _ in model.named_parameters()]
    for number, to in enumerate(ways, 1):
        new = tmp_path / str(number)
        more: dict[str, Any] = {"order": order} if to.startswith("zero3") else {}
        if to == "live":
            dynadapt.save(dynadapt.TrainState(model, optimizer), new, "dcp")
        else:
            dynadapt.convert(last, new, to, **more)
        last = new
    other, its = _job(1)
    weights, states = get_state_dict(other, its)
    loaded = {"model": weights, "optimizer": states}
    dcp.load(loaded, checkpoint_id=last, no_dist=True)
    set_state_dict(
        other, its, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    mine, own = _step(other, its), _step(model, optimizer)
    assert all(torch.equal(mine[name], own[name]) for name in own)


def test_fsdp_names_states_by_them_too(tmp_path: Path) -> None:
    """The whole optimizer of an `accelerate` folder."""
    model, optimizer = _job(0)
    _step(model, optimizer)
    source = _saved(tmp_path / "a", model, optimizer)
    dynadapt.convert(source, tmp_path / "b", "accelerate/fsdp1:dp=2")
    found = torch.load(tmp_path / "b" / "optimizer.bin", weights_only=False)
    _, wanted = get_state_dict(model, optimizer, options=WHOLE)
    assert found["state"].keys() == wanted["state"].keys()
    groups = zip(found["param_groups"], wanted["param_groups"], strict=True)
    assert all(mine["params"] == its["params"] for mine, its in groups)
