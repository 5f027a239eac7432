"""Odd parameters: names that look like something else (paths in a zip, states of others), no elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from dynadapt.errors import Refused
from tests import _ranks
from tests.offline import _made

if TYPE_CHECKING:
    from pathlib import Path

BUFFERS = ("running_mean", "empty.running_mean", "frozen.running_mean")
NAMES = (
    *("a/data/b", "a/data/data/0", "data", "data.pkl", "b", "0", "a"),
    *("empty.b", "frozen.b", "weight.b", "param.b", "exp_avg.b", "step.b"),
    *("param.0", "exp_avg.0", "step.0", "x#y", "w w", "é ü", "q\nq", "%s", "c:c"),
)
TARGETS = (
    *("zero0:dp=2", "zero0:dp=2,fused=true", "zero1:dp=2", "zero2:dp=2,dtype=bfloat16"),
    *("zero3:dp=2", "universal", "dcp", "dcp/fsdp2:dp=2", "torch", "trainer/fsdp1:dp=2"),
    *("accelerate/ddp:dp=2", "accelerate/fsdp2:dp=2", "accelerate/zero3:dp=2"),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A torch file of a model with such names and its stepped optimizer; one parameter is frozen."""
    torch.manual_seed(0)
    model = {name: torch.nn.Parameter(torch.randn(3 + i, 2)) for i, name in enumerate(NAMES)}
    optimizer = torch.optim.AdamW([(n, p) for n, p in model.items() if n != "b"])
    for param in model.values():
        param.grad = torch.randn_like(param)
    optimizer.step()
    values = {name: param.detach() for name, param in model.items()}
    values |= {name: torch.full((2,), float(i)) for i, name in enumerate(BUFFERS)}
    path = tmp_path_factory.mktemp("names") / "job.pt"
    torch.save({"model": values, "optimizer": optimizer.state_dict()}, path)
    return path, values


@pytest.mark.parametrize("to", TARGETS)
def test_no_name_is_taken_for_another(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, to: str
) -> None:
    source, values = saved
    dynadapt.convert(source, tmp_path / "new", to, order=NAMES)
    found = dynadapt.diff(source, tmp_path / "new")
    assert [d.key for d in found.tensors if d.verdict != "identical"] == []
    trees: list[Any] = [
        torch.load(path, weights_only=False) for path in (tmp_path / "new").rglob("*.pt")
    ]
    for module in (tree["module"] for tree in trees if isinstance(tree, dict) and "module" in tree):
        for name, value in module.items():
            if value.numel():
                assert torch.equal(value, values[name].to(value.dtype)), name


def test_a_parameter_of_no_elements(tmp_path: Path) -> None:
    """Goes along, but to stage 3, which is refused at once: DeepSpeed fails there itself."""
    model = {
        "w": torch.nn.Parameter(torch.ones(3)),
        "nothing": torch.nn.Parameter(torch.empty(0, 4)),
    }
    optimizer = torch.optim.AdamW(model.items())
    for param in model.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    values = {name: param.detach() for name, param in model.items()}
    torch.save({"model": values, "optimizer": optimizer.state_dict()}, tmp_path / "job.pt")
    whole = dynadapt.open(tmp_path / "job.pt").fingerprint()
    for i, to in enumerate(("zero0:dp=2", "zero2:dp=2", "universal", "dcp/fsdp2:dp=2", "torch")):
        report = dynadapt.convert(tmp_path / "job.pt", tmp_path / str(i), to)
        new = dynadapt.open(tmp_path / str(i))
        assert report.fingerprint == new.fingerprint() == whole
        assert dynadapt.diff(tmp_path / "job.pt", tmp_path / str(i)).same, to
    for to in ("zero3:dp=2", "accelerate/zero3:dp=2"):
        with pytest.raises(Refused, match="has no elements") as refused:
            dynadapt.convert(tmp_path / "job.pt", tmp_path / "x", to)
        assert [(f.reason, f.where) for f in refused.value.findings] == [
            ("unsupported-shape", "nothing")
        ]
    how = (_made.step_with_nothing, "zero2-bf16", str(tmp_path / "real"))
    assert _ranks.pool(2).run(*how, timeout=200)[0] == (
        "",
        dynadapt.open(tmp_path / "real").fingerprint(),
    )
    how = (_made.step_with_nothing, "zero3-bf16", "")
    assert "NOT_AVAILABLE" in _ranks.pool(2).run(*how, timeout=200)[0][0]
