"""DeepSpeed without ZeRO names none of the parameters of its optimizer: whose is what, and when not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import dynadapt
from dynadapt.elastic.checkpoint import open_checkpoint
from dynadapt.errors import Refused
from tests import _ranks
from tests.live import jobs

if TYPE_CHECKING:
    from pathlib import Path


class _Alike(torch.nn.Module):
    """Layers of one shape, and a frozen one among them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5))
        self.layers[2].requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def _save_alike(rank: int, world: int, kind: str, where: str, named: bool) -> str:
    """Groups by turns, the second one backwards; the fingerprint of the live job."""
    model = _Alike()
    every = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    turns = [every[::2], every[1::2][::-1]]
    groups: list[dict[str, Any]] = [
        {"params": own if named else [p for _, p in own], "lr": 0.01 * (i + 1)}
        for i, own in enumerate(turns)
    ]
    engine = jobs.deepspeed_engine(kind, model, torch.optim.AdamW(groups))
    for number in range(2):
        torch.manual_seed(number + 10 * dist.get_rank())
        dtype = next(model.parameters()).dtype
        engine.backward(engine(torch.randn(3, 4).to(dtype)))
        engine.step()
    engine.save_checkpoint(where)
    return dynadapt.fingerprint(engine)


@pytest.mark.parametrize(
    ("kind", "named"),
    [("zero0-bf16", False), ("zero0-fp16", False), ("zero0-fp32", True), ("zero0-bf16", True)],
)
def test_values_or_names_say_whose_an_entry_is(tmp_path: Path, kind: str, named: bool) -> None:
    """Masters round to the weights that they are of."""
    live = _ranks.pool(2).run(_save_alike, kind, str(tmp_path), named, timeout=200)[0]
    found = open_checkpoint(tmp_path)
    assert found.fingerprint() == live
    groups = found.aux["param_groups"].value
    names = [n for n, p in _Alike().named_parameters() if p.requires_grad]
    assert [group["names"] for group in groups] == [names[::2], names[1::2][::-1]]
    assert [group["hyper"]["lr"] for group in groups] == [0.01, 0.02]


def test_where_nothing_says_it_is_refused(tmp_path: Path) -> None:
    """In fp32 there are no masters: of layers that are alike any may be in any group."""
    live = _ranks.pool(2).run(_save_alike, "zero0-fp32", str(tmp_path), False, timeout=200)[0]
    with pytest.raises(Refused) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.reason == "ambiguous-order"
    assert "layers.0.weight" in str(caught.value)
    names = [n for n, p in _Alike().named_parameters() if p.requires_grad]
    groups = [names[::2], names[1::2][::-1]]
    found = dynadapt.open(tmp_path, groups=groups)
    assert found.fingerprint() == live
    assert [group["names"] for group in found.aux["param_groups"].value] == groups


def _fingerprint(rank: int, world: int, kind: str, where: str) -> str:
    engine = jobs.deepspeed_engine(kind, jobs.net())
    for number in range(2):
        jobs.step(engine, number)
    engine.save_checkpoint(where)
    return dynadapt.fingerprint(engine)


@pytest.mark.parametrize("kind", ["zero0-bf16", "zero0fused-bf16", "zero0fused-fp16", "zero0-fp32"])
def test_the_live_job_has_the_same_fingerprint(tmp_path: Path, kind: str) -> None:
    live = _ranks.pool(2).run(_fingerprint, kind, str(tmp_path), timeout=200)[0]
    assert open_checkpoint(tmp_path).fingerprint() == live
