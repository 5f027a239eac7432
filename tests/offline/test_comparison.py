"""What `diff` says of values at the edges: infinities, NaNs, zeros, and tensors that are alike in part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import dynadapt

if TYPE_CHECKING:
    from pathlib import Path

F4 = np.float32
INF, NAN = np.inf, np.nan


def _diff(folder: Path, a: dict[str, Any], b: dict[str, Any], **options: Any) -> Any:
    for name, own in (("a", a), ("b", b)):
        save_file({k: np.asarray(v) for k, v in own.items()}, folder / f"{name}.safetensors")
    return dynadapt.diff(folder / "a.safetensors", folder / "b.safetensors", **options)


def _next(value: float) -> float:
    bits = np.array([value], F4)
    bits.view("u4")[0] += 1
    return float(bits[0])


LOOSE = {"rtol": 10.0, "atol": 10.0, "ulp": 10}


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (1.0, INF, "different"),
        (INF, 1.0, "different"),
        (INF, -INF, "different"),
        (NAN, 1.0, "different"),
        (INF, NAN, "different"),
        (np.finfo(F4).max, INF, "different"),  # neighbours by their bits
        (0.0, -0.0, "rounding"),
        (1.0, _next(1.0), "rounding"),
    ],
)
def test_no_tolerance_makes_an_infinity_or_a_nan_a_number(
    tmp_path: Path, a: float, b: float, verdict: str
) -> None:
    one, two = ({"w": np.array([1, x], F4)} for x in (a, b))
    found = _diff(tmp_path, one, two)
    assert not found.same
    assert found.tensors[0].verdict == verdict
    assert _diff(tmp_path, one, two, **LOOSE).same == (verdict == "rounding")
    assert _diff(tmp_path, one, one).same


def test_one_dtypes_bits_are_compared(tmp_path: Path) -> None:
    x = np.array([1, NAN], F4)
    y = x.copy()
    y.view("u4")[1] ^= 1
    found = _diff(tmp_path, {"w": x}, {"w": y})
    assert (found.same, found.tensors[0].verdict, found.tensors[0].max_abs) == (
        False,
        "rounding",
        0,
    )
    assert _diff(tmp_path, {"w": x}, {"w": y}, ulp=1).same
    assert not _diff(tmp_path, {"w": x * 0}, {"w": -x.astype("f2") * 0}).same  # -0.0 in another


def test_a_tolerance_of_one_kind_is_not_another(tmp_path: Path) -> None:
    x = {"w": np.array([1.001], F4)}
    half = {"w": x["w"].astype("f2")}  # equal in the coarser dtype, 0.0005 apart
    assert not _diff(tmp_path, x, half, rtol=1e-6).same
    assert _diff(tmp_path, x, half, ulp=1).same


@pytest.mark.parametrize(
    ("a", "b", "hint"),
    [
        (np.zeros((0, 3), F4), np.zeros((3, 0), F4), ""),
        (np.ones((2, 3), F4), np.eye(4, 3, dtype=F4) * 0, ""),
        (
            np.ones((2, 3), F4),
            np.vstack([np.ones((2, 3), F4), np.zeros((1, 3), F4)]),
            "only padding",
        ),
        (np.ones((2, 3), F4), np.vstack([np.ones((2, 3), F4), np.ones((1, 3), F4)]), "more rows"),
        (np.arange(3, dtype=F4), np.zeros(3, F4), ""),  # `other` is zeros too: no tie
    ],
)
def test_a_hint_is_said_only_of_what_it_explains(tmp_path: Path, a: Any, b: Any, hint: str) -> None:
    other = np.zeros(3, F4)
    found = _diff(tmp_path, {"other": other, "w": a}, {"other": other, "w": b})
    told = next(d.hint for d in found.tensors if d.key == "w/param")
    assert told.startswith(hint) if hint else not told


def test_a_state_that_was_never_made_is_zeros(tmp_path: Path) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    for name, used in (("all", 2), ("one", 1)):
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.0)
        for layer in list(model)[:used]:
            layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(tree, tmp_path / f"{name}.pt")
    found = dynadapt.diff(tmp_path / "all.pt", tmp_path / "one.pt")
    unlike = {d.key: d.places for d in found.tensors if d.verdict == "different"}
    assert sorted(unlike) == [
        f"1.{name}/{slot}" for name in ("bias", "weight") for slot in ("exp_avg", "exp_avg_sq")
    ]
    assert all("nothing is held" in there for _, there in unlike.values())
    dynadapt.convert(tmp_path / "one.pt", tmp_path / "dcp", "dcp")  # where zeros and step 0 stand
    assert dynadapt.diff(tmp_path / "one.pt", tmp_path / "dcp").same


def test_of_a_schedule_what_differs_is_told(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    for name, gamma, steps in (("a", 0.5, 2), ("b", 0.25, 2), ("c", 0.5, 3)):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        tree = {"model": model.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(tree, tmp_path / f"{name}.pt")
    a, b, c = (tmp_path / f"{name}.pt" for name in "abc")
    assert dynadapt.diff(a, b).aux == {"scheduler/state/gamma": (0.5, 0.25)}
    told = dynadapt.diff(a, c).aux
    assert told.pop("scheduler/state/last_epoch") == (2, 3)
    assert told.keys() == {"scheduler/state/_step_count"}
    torch.save({"model": model.state_dict()}, tmp_path / "none.pt")
    assert list(dynadapt.diff(a, tmp_path / "none.pt").aux) == ["scheduler"]


def test_a_count_is_one_wherever_it_is_kept(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3).state_dict()
    torch.save({"model": model, "epoch": 3, "seen": 0}, tmp_path / "a.pt")
    torch.save({"model": model, "epoch": 3}, tmp_path / "b.pt")
    torch.save({"model": model, "epoch": 4}, tmp_path / "c.pt")
    assert dynadapt.diff(tmp_path / "a.pt", tmp_path / "b.pt").same
    assert dynadapt.diff(tmp_path / "a.pt", tmp_path / "c.pt").aux == {"counters/epoch": (3, 4)}


def test_a_nan_beside_tensors_is_like_another(tmp_path: Path) -> None:
    """A best loss that was never measured: two copies of a file do not differ by it."""
    best = {"best": float("nan"), "plateau": {"seen": [float("nan"), 1.0]}}
    for name, more in (("a", best), ("b", best), ("c", {**best, "best": 1.0})):
        torch.save({"model": {"w": torch.ones(2)}, **more}, tmp_path / f"{name}.pt")
    assert dynadapt.diff(tmp_path / "a.pt", tmp_path / "b.pt").same
    other = dynadapt.diff(tmp_path / "a.pt", tmp_path / "c.pt")
    assert [path for path in other.aux if "best" in path] == [*other.aux]
    assert not other.same
