"""LAYOUT, EMPTY, GROUPS, RESIZE, REPL, TPPP and MOE on disk: who holds what is what the files say."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import dynadapt
from dynadapt.errors import Refused
from dynadapt.protocols import TrainState
from tests import _ranks
from tests.live import jobs
from tests.offline import _odd
from tests.offline.test_cases_weights import loads, saved

if TYPE_CHECKING:
    from pathlib import Path

    from tests.offline.conftest import Made

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def merged(path: Path) -> dict[str, torch.Tensor]:
    """Every fp32 weight, as DeepSpeed's own `zero_to_fp32` finds them."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(path))
    return found


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("zero2", ["zero2:dp=12", "zero1:dp=3", "zero2:dp=7,round_robin=true"]),
        ("zero3", ["zero3:dp=11,sub_group_size=50", "zero3:dp=5"]),
    ],
)
def test_layout_over_any_number_of_ranks(
    made: Made, tmp_path: Path, name: str, specs: list[str]
) -> None:
    """LAYOUT B22, B24, B30, RESIZE B89, B92: other padding each time, two-digit ranks, up and down."""
    source, held = made[name], made.held(name)
    for number, spec in enumerate([*specs, f"{name}:dp=4"]):
        there = tmp_path / str(number)
        report = dynadapt.convert(source, there, spec)
        assert report.fingerprint == made.print(name), spec
        for key, full in merged(there).items():
            expected = held.get(f"{key.replace('head.', 'embed.')}/param")
            assert expected is None or torch.equal(full.float(), expected.float()), (spec, key)
        source = there
    assert dynadapt.diff(made[name], source).same


def test_layout_with_ranks_that_are_missing_or_twice_there(made: Made, tmp_path: Path) -> None:
    """LAYOUT B24, ATOMIC B155, RESIZE B91: in the middle, at the end, half of them; and of two jobs."""
    for number, lost in enumerate([[1], [3], [2, 3], [0]]):
        copy = tmp_path / str(number)
        shutil.copytree(made["zero2"], copy)
        for rank in lost:
            (copy / "here" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
        with pytest.raises(Refused, match="missing-file") as caught:
            dynadapt.open(copy)
        assert f"ranks {lost}" in str(caught.value)
    copy = tmp_path / "twice"
    shutil.copytree(made["zero2"], copy)
    at = copy / "here" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(at, at.with_name("zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    with pytest.raises(Refused, match="more than one file of a rank"):
        dynadapt.open(copy)


def test_layout_that_leaves_its_flat_is_placed(made: Made, tmp_path: Path) -> None:
    """RESIZE B91: parameter, file and sizes, before anything is written."""
    copy = tmp_path / "a"
    shutil.copytree(made["zero3"], copy)
    for at in sorted((copy / "here").glob("*model_states.pt")):
        tree = torch.load(at, weights_only=False)
        for group in tree["param_shapes"]:
            if "up.weight" in group:
                group["up.weight"] = torch.Size([4000, 8])
        torch.save(tree, at)
    with pytest.raises(Refused) as caught:
        dynadapt.convert(copy, tmp_path / "b", "zero3:dp=2")
    assert caught.value.reason == "geometry"
    assert "up.weight" in str(caught.value)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("name", _odd.SHARDED)
def test_layout_of_torch_is_what_its_metadata_says(made: Made, tmp_path: Path, name: str) -> None:
    """LAYOUT B25, B27, B28, B31, RESIZE B97, TPPP B113, EMPTY B32, B37: rows that do not divide, strided
    shards under two axes, ranks without an element; and then as flats of another number of ranks.
    """
    found, held = dynadapt.open(made[name]), made.held(name)
    assert found.problems() == ()
    for key, full in held.items():
        assert np.array_equal(found.tensors[key], full.numpy()), key
    assert found.fingerprint() == made.print(name)
    order = [n for n, _ in jobs.net().named_parameters()]
    dynadapt.convert(made[name], tmp_path / "flat", "zero1:dp=3", order=order)
    weights = merged(tmp_path / "flat")
    for key, expected in held.items():
        if key.endswith("/param"):
            assert torch.equal(weights[key.removesuffix("/param")].float(), expected), key


def test_repl_has_each_range_once(made: Made, tmp_path: Path) -> None:
    """REPL B123, B125, B126: two replicas of two shards are read, and written, as one state's bytes."""
    found = dynadapt.open(made["hsdp"])
    size = sum(spec.nbytes for spec in found.keys if spec.presence == "present")
    report = dynadapt.convert(made["hsdp"], tmp_path / "a", "dcp/hsdp:rep=2,dp=2")
    assert (report.bytes_read, report.bytes_written) == (size, size)
    assert report.fingerprint == made.print("hsdp") == made.print("fsdp2")


def _spoilt(source: Path, copy: Path, change: Any) -> Path:
    """A copy whose model states were changed by somebody."""
    shutil.copytree(source, copy)
    at = copy / "here" / "mp_rank_00_model_states.pt"
    tree = torch.load(at, weights_only=False)
    change(tree)
    torch.save(tree, at)
    return copy


def test_repl_copies_that_are_not_their_masters(made: Made, tmp_path: Path) -> None:
    """REPL B129, B132: half-precision weights are made anew from the masters, whatever a file had of them."""

    def change(tree: dict[str, Any]) -> None:
        tree["module"]["up.weight"].add_(1)

    copy = _spoilt(made["zero2"], tmp_path / "a", change)
    dynadapt.convert(copy, tmp_path / "b", "zero2:dp=2")
    (at,) = (tmp_path / "b").rglob("mp_rank_00_model_states.pt")
    module = torch.load(at, weights_only=False)["module"]
    masters = made.held("zero2")
    for name in ("up.weight", "embed.weight", "tiny"):
        assert torch.equal(module[name], masters[f"{name}/param"].bfloat16()), name


def test_empty_tensors_keep_their_shapes(tmp_path: Path) -> None:
    """EMPTY B34, B35, B38: (0, 8), (4, 0) and () in every format; what one cannot hold is refused."""
    torch.manual_seed(0)
    model = nn.ParameterDict(
        {"none": torch.zeros(0, 8), "a": torch.randn(5, 3), "b": torch.randn(1)}
    )
    model["columns"] = nn.Parameter(torch.zeros(4, 0))
    optimizer = torch.optim.AdamW(model.named_parameters())
    sum(p.sum() for p in model.values()).backward()
    optimizer.step()
    optimizer.zero_grad()
    path = saved(
        {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}, tmp_path / "0.pt"
    )
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    first = dynadapt.open(path)
    for number, to in enumerate(["zero2:dp=4", "dcp", "universal", "zero1:dp=3", "torch"], 1):
        dynadapt.convert(path, tmp_path / str(number), to, order=list(shapes))
        path = tmp_path / str(number)
        found = dynadapt.open(path, order=list(shapes))
        assert {n: found.tensors.spec(n).shape for n in shapes} == shapes, to
        assert dynadapt.diff(first, found, weights_only=True).same, to
    back = loads(path / "checkpoint.pt")
    model.load_state_dict(back["model"], strict=True)
    scalar = nn.ParameterDict({"s": torch.tensor(2.0), "v": torch.ones(3)})
    zero = saved({"model": dict(scalar.state_dict())}, tmp_path / "s.pt")
    dynadapt.convert(zero, tmp_path / "t", "safetensors")
    assert dynadapt.open(tmp_path / "t").tensors["s"].shape == ()
    with pytest.raises(Refused, match="unsupported-shape"):
        dynadapt.convert(zero, tmp_path / "u", "zero1:dp=2", order=["s", "v"])


def test_groups_through_every_layout(made: Made, tmp_path: Path) -> None:
    """GROUPS B40, B42: three groups over small sub-groups; members, rates, decay and betas of each."""
    whole = {
        name: group["hyper"]
        for group in dynadapt.open(made["zero3"]).aux["param_groups"].value
        for name in group["names"]
    }
    assert len({str(hyper) for hyper in whole.values()}) == 3
    source = made["zero3"]
    specs = [
        "universal",
        "zero3:dp=2,sub_group_size=30",
        "zero1:dp=3",
        "dcp",
        "torch",
        "zero2:dp=2",
    ]
    for number, spec in enumerate(specs):
        there = tmp_path / str(number)
        dynadapt.convert(source, there, spec, order=[n for n, _ in _odd.odd().named_parameters()])
        found = dynadapt.open(there).aux["param_groups"].value
        assert len(found) == 3, spec
        for group in found:
            for name in group["names"]:
                have = {k: v for k, v in group["hyper"].items() if k in whole[name]}
                assert {k: whole[name][k] for k in have} == have, (spec, name)
                assert {"lr", "betas", "weight_decay"} <= set(have)
        source = there


def test_groups_that_are_empty_partial_or_permuted(tmp_path: Path) -> None:
    """GROUPS B43, B45, B46: an empty group keeps its rate; who is in no group has no state; names pair."""
    model = _odd.odd()
    named = [(n, p) for n, p in model.named_parameters() if n.startswith(("up", "down"))]
    own: list[dict[str, Any]] = [
        {"params": [p for _, p in named[::-1]], "lr": 0.5},
        {"params": [], "lr": 0.25, "weight_decay": 0.125},
    ]
    state = TrainState(model, torch.optim.AdamW(own))
    _odd.advance(state, 0)
    tree = _odd.tree(state)
    tree["optimizer"]["param_names"] = [[n for n, _ in named[::-1]], []]
    path = saved(tree, tmp_path / "a.pt")
    for number, to in enumerate(("dcp", "torch")):
        dynadapt.convert(path, tmp_path / str(number), to)
        path = tmp_path / str(number)
        keys = dynadapt.open(path).keys
        assert {s.key.name for s in keys if s.key.slot == "exp_avg"} == {n for n, _ in named}, to
    back = loads(path / "checkpoint.pt")["optimizer"]
    assert [(g["lr"], len(g["params"])) for g in back["param_groups"]] == [(0.5, 3), (0.25, 0)]
    assert back["param_groups"][1]["weight_decay"] == 0.125
    fresh = _odd.odd(5)
    members = dict(fresh.named_parameters())
    turned = [{"params": [members[n] for n in names]} for names in back["param_names"]]
    optimizer = torch.optim.AdamW(turned)
    optimizer.load_state_dict(back)
    for name, parameter in named:
        mine, its = optimizer.state[members[name]], state.optimizer.state[parameter]
        assert torch.equal(mine["exp_avg"], its["exp_avg"]), name


def test_resize_is_what_deepspeed_loads(made: Made, tmp_path: Path) -> None:
    """RESIZE B89, B92, B95, FROZEN B09, BUFFER B14, RESUME B171, B179, B180, B182, OPTSTATE B48.

    OFFLOAD B195. Four ranks' checkpoints on two, by DeepSpeed's own loader: every tensor and buffer,
    hyperparameters, the schedule, the loss scale; saved again at once it is the same state.
    """
    cases = [
        ("zero0", "zero0:dp=2"),
        ("zero2", "zero2:dp=2"),
        ("zero2off", "zero2:dp=2"),
        ("zero2fp16", "zero2:dp=2"),
        ("zero3", "zero3:dp=2,sub_group_size=100"),
        ("sgd", "zero2:dp=2"),
    ]
    for name, spec in cases:
        dynadapt.convert(made[name], tmp_path / name, spec)
    where = [(name, str(tmp_path / name)) for name, _ in cases]
    for answers in _ranks.pool(2).run(_odd.load_all, where, timeout=400):
        for (name, _), told in zip(cases, answers, strict=True):
            assert told["path"], name
            held = made.held(name)
            assert told["held"].keys() == held.keys(), name
            assert [n for n in held if not torch.equal(told["held"][n], held[n])] == [], name
            assert told["epoch"] == 3, name
            if name != "sgd":
                assert [decay for decay, _ in told["hyper"]][:2] == [0.1, 0.0], name
                assert told["hyper"][2][1] in ((0.5, 0.75), [0.5, 0.75]), name
    assert answers[4]["scheduler"]["last_batch_iteration"] == _odd.STEPS - 1
    assert answers[3]["scaler"]["cur_scale"] == 32.0
    assert answers[3]["scaler"]["cur_iter"] == _odd.STEPS
    for name, _ in cases:
        again = dynadapt.open(tmp_path / f"{name}-again")
        assert again.fingerprint() == made.print(name), name


def test_tppp_what_no_optimizer_class_lists(made: Made, tmp_path: Path) -> None:
    """TPPP B105: stage 0 writes no `param_slice_mappings`; the form is known by what is in the files."""
    dynadapt.convert(made["zero0"], tmp_path / "u", "universal")
    assert dynadapt.open(tmp_path / "u").fingerprint() == made.print("zero0")


def test_moe_experts_in_files_of_their_own_are_not_left_out(made: Made, tmp_path: Path) -> None:
    """MOE B116, B118, B119, B121, B122: DeepSpeed's experts and their states are refused by name."""
    for number, name in enumerate(
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "expp_rank_1_mp_rank_00_optim_states.pt")
    ):
        copy = tmp_path / str(number)
        shutil.copytree(made["zero2"], copy)
        torch.save({"module.moe.experts.0.w": torch.ones(2)}, copy / "here" / name)
        with pytest.raises(Refused, match="unsupported-parallel") as caught:
            dynadapt.open(copy)
        assert name in str(caught.value)
