"""OPTSTATE, STEP, DTYPE and RESUME on disk: what an optimizer and a job keep beside the weights."""

from __future__ import annotations

import argparse
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import dynadapt
from dynadapt.errors import Refused
from tests.live import jobs
from tests.offline import _odd
from tests.offline.test_cases_weights import loads, saved

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.offline.conftest import Made

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    """What a plain job saves; tests change copies of it."""
    return _odd.tree(_odd.plain())


def changed(tree: dict[str, Any], path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A file in which the optimizer's state dict is another."""
    torch.save(tree, path)
    copy = loads(path)
    change(copy["optimizer"])
    return saved(copy, path)


def test_optstate_names_come_from_the_data(made: Made, tmp_path: Path) -> None:
    """OPTSTATE B48: SGD's momentum, and slots that nobody knows, are carried under their own names."""
    held = made.held("sgd")
    source = made["sgd"]
    for number, to in enumerate(("universal", "zero3:dp=3", "torch", "dcp")):
        dynadapt.convert(source, tmp_path / str(number), to)
        source = tmp_path / str(number)
        found = dynadapt.open(source)
        slots = {s.key.slot for s in found.keys if s.kind == "state"}
        assert slots == {"momentum_buffer"}, to
        assert found.fingerprint() == made.print("sgd"), to
        for key in held:
            if key.endswith("momentum_buffer"):
                assert np.array_equal(found.tensors[key], held[key].numpy())


def test_optstate_says_how_an_optimizer_runs(
    made: Made, tree: dict[str, Any], tmp_path: Path
) -> None:
    """OPTSTATE: loaders take a whole group from the file, and torch's SGD an absent `fused` for False."""
    one = changed(
        tree, tmp_path / "a.pt", lambda o: [g.update(foreach=False) for g in o["param_groups"]]
    )
    for name, path, wanted in (("one", one, (None, False)), ("sgd", made["sgd"], (None, None))):
        dynadapt.convert(path, tmp_path / name / "0", "zero2:dp=2")
        dynadapt.convert(tmp_path / name / "0", tmp_path / name / "1", "torch")
        states = loads(tmp_path / name / "1" / "checkpoint.pt")["optimizer"]
        members = [
            {"params": [torch.zeros(1) for _ in g["params"]]} for g in states["param_groups"]
        ]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(members)
        if name == "one":
            optimizer = torch.optim.AdamW(members)
        optimizer.load_state_dict(states)
        assert {(g["fused"], g["foreach"]) for g in optimizer.param_groups} == {wanted}


def test_optstate_of_unknown_optimizers_of_the_parameters_shape(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    """OPTSTATE B48: a third moment of a fork, through flats and back."""

    def more(optimizer: dict[str, Any]) -> None:
        for number, entry in optimizer["state"].items():
            entry["third_moment"] = entry["exp_avg"] * (number + 2)

    path = changed(tree, tmp_path / "a.pt", more)
    whole = dynadapt.open(path).fingerprint()
    dynadapt.convert(path, tmp_path / "b", "zero2:dp=3")
    report = dynadapt.convert(tmp_path / "b", tmp_path / "c", "torch")
    assert report.fingerprint == whole
    back = loads(tmp_path / "c" / "checkpoint.pt")["optimizer"]["state"]
    for number, entry in loads(path)["optimizer"]["state"].items():
        assert torch.equal(back[number]["third_moment"], entry["third_moment"])


def test_optstate_of_other_shapes_stays_whole_or_is_refused(tmp_path: Path) -> None:
    """OPTSTATE B50: Adafactor's rows and columns in files of whole tensors; in flats they have no place."""
    model = _odd.odd()
    optimizer = torch.optim.Adafactor(
        [p for _, p in model.named_parameters() if p.requires_grad], lr=0.01
    )
    state = dynadapt.TrainState(model, optimizer)
    _odd.advance(state, 0)
    path = saved(_odd.tree(state), tmp_path / "a.pt")
    report = dynadapt.convert(path, tmp_path / "b", "dcp")
    assert report.fingerprint == dynadapt.open(path).fingerprint()
    with pytest.raises(Refused) as caught:
        dynadapt.convert(path, tmp_path / "c", "zero2:dp=2")
    assert caught.value.reason == "unsupported-state"
    assert not (tmp_path / "c").exists()


def test_optstate_in_blocks_is_refused_and_weights_are_not_lost(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    """OPTSTATE B51, B53, B54: 8-bit moments with scales of blocks, as bitsandbytes saves them."""

    def quantized(optimizer: dict[str, Any]) -> None:
        for entry in optimizer["state"].values():
            shape = entry.pop("exp_avg").shape
            del entry["exp_avg_sq"]
            entry |= {f"state{i}": torch.zeros(shape, dtype=torch.uint8) for i in (1, 2)}
            entry |= {f"{what}{i}": torch.zeros(256) for i in (1, 2) for what in ("qmap", "absmax")}

    path = changed(tree, tmp_path / "a.pt", quantized)
    with pytest.raises(Refused) as caught:
        dynadapt.convert(path, tmp_path / "b", "zero1:dp=2")
    assert caught.value.reason in {
        "unsupported-quantized",
        "unsupported-state",
        "unsupported-optimizer",
    }
    dynadapt.convert(path, tmp_path / "w", "safetensors")
    weights = safetensors.torch.load_file(tmp_path / "w" / "model.safetensors")
    assert torch.equal(weights["up.weight"], tree["model"]["up.weight"])


def test_optstate_entries_of_another_version(tree: dict[str, Any], tmp_path: Path) -> None:
    """OPTSTATE B56, RESUME B173: what is missing stays missing, what nobody knows, `initial_lr`, is kept."""

    def older(optimizer: dict[str, Any]) -> None:
        for group in optimizer["param_groups"]:
            del group["decoupled_weight_decay"]
            group |= {"initial_lr": 0.5, "layer_scale": 0.75}

    path = changed(tree, tmp_path / "a.pt", older)
    for number, to in enumerate(("dcp", "zero2:dp=2", "torch")):
        dynadapt.convert(path, tmp_path / str(number), to)
        path = tmp_path / str(number)
        for group in dynadapt.open(path).aux["param_groups"].value:
            assert (group["hyper"]["initial_lr"], group["hyper"]["layer_scale"]) == (0.5, 0.75), to
    fresh = _odd.plain(5, steps=0)
    fresh.optimizer.load_state_dict(loads(path / "checkpoint.pt")["optimizer"])
    torch.optim.lr_scheduler.LambdaLR(fresh.optimizer, lambda n: 0.5**n, last_epoch=2)
    assert {group["lr"] for group in fresh.optimizer.param_groups} == {0.5 * 0.125}


def test_optstate_that_is_absent_is_said_and_stays_absent(tmp_path: Path) -> None:
    """OPTSTATE B57, DTYPE B70: before the first step, gradients or not; never taken for a whole state."""
    state = _odd.plain(steps=0)
    state.model(jobs.tokens(0)).backward()
    path = saved(_odd.tree(state), tmp_path / "a.pt")
    found = dynadapt.open(path)
    assert found.summary()["steps"] == []
    assert {s.presence for s in found.keys if s.kind == "state"} == {"none"}
    dynadapt.convert(path, tmp_path / "b", "torch")
    back = loads(tmp_path / "b" / "checkpoint.pt")["optimizer"]
    assert back["state"] == {}
    assert len(back["param_groups"]) == 3
    stepped = saved(_odd.tree(_odd.plain()), tmp_path / "c.pt")
    missing = {d.key for d in dynadapt.diff(path, stepped).tensors if d.verdict != "identical"}
    assert "up.weight/exp_avg" in missing


def test_optstate_that_lacks_a_part_is_named(tree: dict[str, Any], tmp_path: Path) -> None:
    """OPTSTATE B59: moments without a step, or one moment of two, before an optimizer meets it."""
    names = [n for g in tree["optimizer"]["param_groups"] for n in g["param_names"]]
    for slot in ("step", "exp_avg_sq"):
        path = changed(tree, tmp_path / f"{slot}.pt", lambda o, s=slot: o["state"][1].pop(s))
        fresh = _odd.plain(5, steps=1)
        before = {n: p.detach().clone() for n, p in fresh.model.named_parameters()}
        with pytest.raises(dynadapt.MigrationAborted) as caught:
            dynadapt.load(fresh, path)
        assert f"{names[1]}/{slot}" in str(caught.value), slot
        if slot != "step":  # a number is looked for when tensors are there already
            assert all(torch.equal(before[n], p) for n, p in fresh.model.named_parameters())


FORMS: dict[str, Callable[[float], Any]] = {
    "int": int,
    "float": float,
    "one element": lambda n: torch.tensor([n]),
    "float64": lambda n: torch.tensor(n, dtype=torch.float64),
    "int64": lambda n: torch.tensor(int(n)),
}


@pytest.mark.parametrize("form", FORMS)
def test_step_in_any_form(tree: dict[str, Any], tmp_path: Path, form: str) -> None:
    """STEP B61, B63, B64, B66: one number a parameter, written where the next optimizer reads it."""

    def other(optimizer: dict[str, Any]) -> None:
        for entry in optimizer["state"].values():
            entry["step"] = FORMS[form](float(entry["step"]))

    path = changed(tree, tmp_path / "a.pt", other)
    found = dynadapt.open(path)
    assert {entry["step"] for entry in found.scalars.values()} == {_odd.STEPS}
    dynadapt.convert(path, tmp_path / "b", "zero2:dp=2")
    dynadapt.convert(tmp_path / "b", tmp_path / "c", "torch")
    job, fresh = _odd.plain(), _odd.plain(5, steps=0)
    back = loads(tmp_path / "c" / "checkpoint.pt")
    fresh.model.load_state_dict(back["model"])
    fresh.optimizer.load_state_dict(back["optimizer"])
    assert [_odd.advance(job, n) for n in (2, 3)] == [_odd.advance(fresh, n) for n in (2, 3)]


def test_step_of_each_parameter_is_its_own(tree: dict[str, Any], tmp_path: Path) -> None:
    """STEP B61: they differ in files of whole tensors; in a flat they have one, and whose is told.

    Of a universal checkpoint DeepSpeed makes flats, and asks for one step in each group.
    """
    path = changed(tree, tmp_path / "a.pt", lambda o: o["state"][1]["step"].fill_(7))
    steps = dynadapt.open(path).scalars
    assert steps["up.weight"]["step"] == 7
    for number, to in enumerate(("dcp", "zero0:dp=1")):
        report = dynadapt.convert(path, tmp_path / str(number), to)
        assert dynadapt.open(tmp_path / str(number)).scalars == steps, to
        assert not any(o.path == "scalars/step" and o.kind != "exact" for o in report.outcomes)
    for to in ("zero1:dp=2", "universal"):
        report = dynadapt.convert(path, tmp_path / to, to)
        (told,) = [o for o in report.outcomes if o.path == "scalars/step"]
        assert told.kind == "derived"
        assert "was at 2, and is at 7 as up.weight" in told.note
        assert dynadapt.open(tmp_path / to).scalars["down.weight"]["step"] == 7


def test_dtype_masters_keep_every_bit_and_loss_is_told(made: Made, tmp_path: Path) -> None:
    """DTYPE B67, B69: fp32 masters of a bf16 job; rounded only where asked for, and `diff` says so."""
    held = made.held("zero2")
    dynadapt.convert(made["zero2"], tmp_path / "torch", "torch")
    weights = loads(tmp_path / "torch" / "checkpoint.pt")["model"]
    trained = [s.key.name for s in dynadapt.open(made["zero2"]).keys if s.key.slot == "compute"]
    assert "tiny" in trained
    for name in trained:
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], held[f"{name}/param"]), name
    dynadapt.convert(made["zero2"], tmp_path / "w", "safetensors")
    assert dynadapt.diff(tmp_path / "torch", tmp_path / "w", weights_only=True).same
    dynadapt.convert(made["zero2"], tmp_path / "low", "safetensors", dtype="bfloat16")
    compared = dynadapt.diff(tmp_path / "torch", tmp_path / "low", weights_only=True)
    told = {d.key: d.verdict for d in compared.tensors}
    assert told["up.weight/param"] == "rounding"


def test_dtype_of_an_optimizer_without_zero_is_found(made: Made, tmp_path: Path) -> None:
    """DTYPE B70: bf16 at stage 0 has masters, moments and steps, and they go along."""
    held = made.held("zero0")
    report = dynadapt.convert(made["zero0"], tmp_path / "a", "zero3:dp=3")
    assert report.fingerprint == made.print("zero0")
    found = dynadapt.open(tmp_path / "a")
    moments = [key for key in held if "exp_avg" in key]
    assert moments
    assert all(np.array_equal(found.tensors[key], held[key].numpy()) for key in moments)


class Scaled(torch.Tensor):
    """A tensor class of somebody's, as float8 training has one."""


def test_dtype_of_float8_and_of_tensor_classes(tmp_path: Path) -> None:
    """DTYPE B72, B73: torch's float8 are values and go through all formats; an own class is refused."""
    torch.manual_seed(0)
    tensors = {
        "e4": torch.randn(5, 3).to(torch.float8_e4m3fn),
        "e5": torch.randn(4).to(torch.float8_e5m2),
        "w": torch.randn(3),
    }
    path = saved({"model": tensors}, tmp_path / "a.pt")
    for number, to in enumerate(("safetensors", "dcp", "torch")):
        dynadapt.convert(path, tmp_path / str(number), to)
        path = tmp_path / str(number)
    back = loads(path / "pytorch_model.bin")
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name].view(torch.uint8), value.view(torch.uint8)), name
    own = {**tensors, "x": torch.randn(2).as_subclass(Scaled), "p": nn.Parameter(torch.ones(2))}
    with pytest.raises(Refused) as caught:
        dynadapt.open(saved({"model": own}, tmp_path / "b.pt"))
    assert "x" in str(caught.value)


def test_resume_schedules_are_listed_or_missed(made: Made, tmp_path: Path) -> None:
    """RESUME B171: there or not there is told by `inspect` and `diff`; it goes through other formats."""
    assert "scheduler" in dynadapt.open(made["zero3"]).summary()["aux"]
    assert "scheduler" not in dynadapt.open(made["zero2"]).summary()["aux"]
    dynadapt.convert(made["zero3"], tmp_path / "a", "dcp")
    dynadapt.convert(tmp_path / "a", tmp_path / "b", "zero2:dp=2")
    one, two = (dynadapt.open(p).aux["scheduler"].value for p in (made["zero3"], tmp_path / "b"))
    assert one["state"] == two["state"]
    assert dynadapt.diff(made["zero3"], tmp_path / "a").same
    assert "scheduler" in dynadapt.diff(made["zero3"], made["zero2"]).aux


def test_resume_loss_scalers_keep_all_their_counts(made: Made, tmp_path: Path) -> None:
    """RESUME B179: scale, window, hysteresis and the last overflow, through a format without ZeRO."""
    whole = dynadapt.open(made["zero2fp16"]).aux["scaler"].value
    assert {"cur_scale", "cur_iter", "last_overflow_iter", "scale_window"} <= whole["state"].keys()
    dynadapt.convert(made["zero2fp16"], tmp_path / "a", "universal")
    dynadapt.convert(tmp_path / "a", tmp_path / "b", "zero3:dp=3")
    assert dynadapt.open(tmp_path / "b").aux["scaler"].value["state"] == whole["state"]


@pytest.mark.parametrize("others", [("torch",), ("accelerate", "zero0:dp=1"), ("trainer",)])
def test_resume_loss_scalers_of_another_kind_grow_when_they_would_have(
    made: Made, tmp_path: Path, others: tuple[str, ...]
) -> None:
    """RESUME B179: as a GradScaler's and back, and DeepSpeed unpickles what it is given."""
    path, to = made["zero2fp16"], tmp_path / "zero3"
    for number, other in enumerate((*others, "zero3:dp=2")):
        last, path = path, to if other.startswith("zero3") else tmp_path / str(number)
        report = dynadapt.convert(last, path, other)
    assert [o.kind for o in report.outcomes if o.path == "scaler"][-1] == (
        "exact" if "zero0:dp=1" in others else "derived"
    )
    grown = []
    for folder in (made["zero2fp16"], to):
        file = next(folder.rglob("*zero_pp_rank_0_mp_rank_00_optim_states.pt"))
        states = torch.load(file, weights_only=False)
        scaler = states.get("optimizer_state_dict", states)["loss_scaler"]
        scales = []
        for _ in range(2 * scaler.scale_window):
            scaler.update_scale(overflow=False)
            scales.append(scaler.cur_scale)
        grown.append((scaler.cur_hysteresis, scales))
    assert grown[0] == grown[1]
    if others == ("torch",):
        assert dynadapt.diff(made["zero2fp16"], tmp_path / "0").same
        state = torch.load(next((tmp_path / "0").glob("*.pt")), weights_only=True)["scaler"]
        scaler = torch.amp.GradScaler("cpu")
        scaler.load_state_dict(state)
        left = scaler.get_growth_interval() - scaler._get_growth_tracker()
        assert left == grown[0][1].index(2 * grown[0][1][0]) + 1


def test_resume_what_a_script_saved_with_it_comes_along_or_is_told(
    made: Made, tmp_path: Path
) -> None:
    """RESUME: `client_state`: values and small tensors, such as a generator's state; objects are named."""
    shutil.copytree(made["zero2"], tmp_path / "a")
    at = tmp_path / "a" / "here" / "mp_rank_00_model_states.pt"
    tree = torch.load(at, weights_only=False)
    own = {"rng": torch.get_rng_state(), "best": [0.5, {"at": torch.tensor(7)}]}
    torch.save({**tree, **own, "args": argparse.Namespace(lr=1)}, at)
    for to in ("zero3:dp=2", "zero0:dp=1", "universal", "torch", "dcp", "zero1:dp=2"):
        source = tmp_path / ("torch" if to == "zero1:dp=2" else "a")
        report = dynadapt.convert(source, tmp_path / to, to)
        lost = {o.path for o in report.outcomes if o.kind == "dropped"} - {"behaviour"}
        assert lost == ({"opaque/user/args"} if source.name == "a" else set()), to
        if to in {"torch", "dcp"}:
            continue
        (states,) = list((tmp_path / to).rglob("*mp_rank_00_model_states.pt"))[:1]
        found = torch.load(states, weights_only=False)
        assert torch.equal(found["rng"], own["rng"]), to
        assert (found["best"][0], int(found["best"][1]["at"])) == (0.5, 7)
        assert "args" not in found
    problems = dynadapt.diff(tmp_path / "a", tmp_path / "zero3:dp=2").aux
    assert set(problems) == {"opaque/user/args"}


def _kinds(state: dynadapt.TrainState) -> list[tuple[Any, ...]]:
    """What tensors of a job are, beside their values."""
    every = [*state.model.parameters(), *state.model.buffers()]
    every += [t for entry in state.optimizer.state.values() for t in entry.values()]
    return [(type(t), t.dtype, t.device, t.stride(), t.requires_grad, t.is_leaf) for t in every]


def test_resume_leaves_the_objects_that_a_schedule_holds(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    """RESUME B174, MEMTIME B141: groups are changed in place; tensors are as in a job that trained."""
    path = saved(tree, tmp_path / "a.pt")
    fresh = _odd.plain(5, steps=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(fresh.optimizer, lambda n: 0.5**n)
    listed, groups = fresh.optimizer.param_groups, list(fresh.optimizer.param_groups)
    dynadapt.load(fresh, path)
    assert schedule.optimizer.param_groups is fresh.optimizer.param_groups is listed
    assert all(a is b for a, b in zip(listed, groups, strict=True))
    assert _kinds(fresh) == _kinds(_odd.plain())
    before = [group["lr"] for group in listed]
    _odd.advance(fresh, 2)
    schedule.step()
    assert [group["lr"] for group in listed] == [lr * 0.5 for lr in before]
