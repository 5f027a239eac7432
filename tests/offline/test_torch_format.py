"""Plain torch files: `torch.load`, `load_state_dict` and the next steps of real jobs judge."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import dynadapt
from dynadapt.elastic.checkpoint import open_checkpoint
from dynadapt.elastic.conversion import convert
from dynadapt.elastic.selection import Selection
from dynadapt.elastic.targets import target_of
from dynadapt.protocols import TrainState
from tests import _ranks
from tests.live import jobs
from tests.offline import _made
from tests.offline._plain import OPTIMIZERS, Job, same_steps

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_next_step_is_the_same(tmp_path: Path, kind: str, unused: bool) -> None:
    """Read as torch wrote it, written so that torch reads it; some parameters never had a gradient."""
    job = Job(kind, unused=unused)
    source = open_checkpoint(job.save(tmp_path / "job.pt"))
    assert source.format == "torch"
    assert source.fingerprint() == job.fingerprint()
    report = convert(source, target_of(tmp_path / "new", "torch"))
    again = open_checkpoint(tmp_path / "new")
    assert report.fingerprint == again.fingerprint() == job.fingerprint()
    fresh = Job(kind, seed=5, unused=unused)
    tree = fresh.load(tmp_path / "new" / "checkpoint.pt")
    assert (tree["epoch"], tree["best"]) == (7, 0.25)
    assert torch.equal(tree["rng"], torch.load(tmp_path / "job.pt")["rng"])
    assert fresh.model.head.weight is fresh.model.embed.weight
    embed, head = (tree["model"][f"{n}.weight"] for n in ("embed", "head"))
    assert embed.data_ptr() == head.data_ptr()
    same_steps(job, fresh)


def test_numbers_are_those_of_torch(tmp_path: Path) -> None:
    """Frozen parameters inside of groups and an empty group have their numbers and places."""
    model = jobs.net(integers=True)
    groups = [
        {"params": [model.up.bias, model.frozen.weight]},
        {"params": [], "lr": 0.5},
        {
            "params": [
                model.embed.weight,
                model.up.weight,
                model.down.weight,
                *model.norm.parameters(),
            ]
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    model(jobs.tokens(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    told = optimizer.state_dict()
    told["param_names"] = [["up.bias", "frozen.weight"], [], ["embed.weight", "up.weight"]]
    told["param_names"][2] += ["down.weight", "norm.weight", "norm.bias"]
    torch.save({"state_dict": model.state_dict(), "optimizer_state_dict": told}, tmp_path / "a.pth")
    source = open_checkpoint(tmp_path / "a.pth")
    assert source.fingerprint() == dynadapt.fingerprint(TrainState(model, optimizer))
    convert(source, target_of(tmp_path / "b", "torch"))
    found = torch.load(tmp_path / "b" / "checkpoint.pt", weights_only=True)["optimizer"]
    assert [g["params"] for g in found["param_groups"]] == [
        g["params"] for g in told["param_groups"]
    ]
    assert found["param_groups"][1]["lr"] == 0.5
    assert found["state"].keys() == told["state"].keys()
    for id_, entry in told["state"].items():
        assert all(torch.equal(found["state"][id_][slot], value) for slot, value in entry.items())


def test_what_a_job_did_is_not_called_lost(tmp_path: Path) -> None:
    """The framework and precision are told by the files again; DeepSpeed's config is told by its parts."""
    at = Job().save(tmp_path / "job.pt")
    for number, to in enumerate(("dcp", "dcp/fsdp2:dp=2", "torch", "zero2:dp=2", "dcp", "torch")):
        report = convert(open_checkpoint(at), target_of(tmp_path / f"at-{number}", to))
        (told,) = [o for o in report.outcomes if o.path == "behaviour"]
        assert told.kind == {3: "exact", 4: "dropped"}.get(number, "derived"), told
        assert number != 4 or "(config, framework, " in told.note
        at = tmp_path / f"at-{number}"
    torch.save({"model": Job().model.state_dict()}, tmp_path / "weights.pt")
    for to in ("safetensors", "torch"):
        report = convert(open_checkpoint(tmp_path / "weights.pt"), target_of(tmp_path / to, to))
        (told,) = [o for o in report.outcomes if o.path == "behaviour"]
        assert told.kind == "derived"


def test_zero_and_universal_hold_the_same_state(tmp_path: Path) -> None:
    """Through DeepSpeed's formats and back, and DeepSpeed itself loads it on the way."""
    job = Job()
    source = open_checkpoint(job.save(tmp_path / "job.pt"))
    convert(source, target_of(tmp_path / "zero", "zero3:dp=2,sub_group_size=100"))
    convert(open_checkpoint(tmp_path / "zero"), target_of(tmp_path / "universal", "universal"))
    report = convert(open_checkpoint(tmp_path / "universal"), target_of(tmp_path / "new", "torch"))
    assert report.fingerprint == source.fingerprint() == job.fingerprint()
    fresh = Job(seed=5)
    fresh.load(tmp_path / "new" / "checkpoint.pt")
    same_steps(job, fresh)


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "Adafactor"])
def test_every_optimizer_goes_on_from_every_format(tmp_path: Path, kind: str) -> None:
    """No file says the class: it is told by its groups, else by its states, the same from everywhere."""
    job = Job(kind)
    job.save(tmp_path / "job.pt")
    after: dict[str, Any] = {}
    for to in (
        "zero2:dp=3",
        "zero3:dp=2",
        "zero0:dp=1",
        "dcp/fsdp2:dp=3",
        "accelerate",
        "universal",
    ):
        at = tmp_path / to.partition(":")[0]
        report = dynadapt.convert(tmp_path / "job.pt", at, to, model=job.model)
        lost = {o.path for o in report.outcomes if o.path.startswith("scalars/")}
        assert bool(lost) == (to == "universal" and kind in {"NAdam", "ASGD"}), lost
        if lost:
            continue
        assert dynadapt.diff(tmp_path / "job.pt", at, model=job.model, ignore_missing=True).same, to
        fresh = Job(kind, seed=5)
        if kind in {"Rprop", "ASGD"}:  # whose first state is not known: the way out that is told
            fresh.step(0)
        state = TrainState(fresh.model, fresh.optimizer, fresh.scheduler)
        dynadapt.load(state, at, model=fresh.model)
        losses = [fresh.step(number) for number in range(4, 7)]
        found = {**fresh.tensors(), "losses": torch.tensor(losses)}
        after = after or found
        assert [name for name in after if not torch.equal(after[name], found[name])] == [], to
    stayed = [job.step(number) for number in range(4, 7)]
    assert stayed == after.pop("losses").tolist()
    assert all(torch.equal(value, after[name]) for name, value in job.tensors().items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_parameter_that_was_never_stepped_is_the_same_everywhere(tmp_path: Path) -> None:
    """Its states are zeros or not there: one fingerprint, and every process reads them in one order."""
    job = Job(unused=True)
    job.save(tmp_path / "job.pt")
    wanted = job.fingerprint()
    for to in ("zero0:dp=1", "universal", "zero2:dp=3", "zero3:dp=2", "dcp", "torch", "accelerate"):
        at = tmp_path / to.partition(":")[0]
        dynadapt.convert(tmp_path / "job.pt", at, to)
        assert dynadapt.fingerprint(at, model=job.model) == wanted, to
        fresh = Job(seed=5, unused=True)
        dynadapt.load(TrainState(fresh.model, fresh.optimizer), at, model=fresh.model)
        assert fresh.fingerprint() == wanted, to
        dynadapt.convert(at, f"{at}-zero1", "zero1:dp=2", model=job.model)
        assert dynadapt.fingerprint(f"{at}-zero1") == wanted, to
    steps = [torch.load(p) for p in (tmp_path / "universal").rglob("step.pt")]
    assert (
        len(steps) == len({*job.optimizer.state_dict()["state"]}) + 3
    )  # `extra`'s two, the tied one
    assert set(map(float, steps)) == {4.0}  # DeepSpeed asks for one step in each group
    model, states = get_state_dict(job.model, job.optimizer)
    dcp.save({"model": model, "optimizer": states}, checkpoint_id=tmp_path / "saved", no_dist=True)
    program = "import sys, dynadapt; print(*dynadapt.open(sys.argv[1]).own.specs, sep='\\n')"
    told = set()
    for seed in "12345":
        arguments = [sys.executable, "-c", program, str(tmp_path / "saved")]
        env = {**os.environ, "PYTHONHASHSEED": seed}
        told.add(subprocess.run(arguments, env=env, check=True, capture_output=True).stdout)
    assert len(told) == 1
    assert b"presence='none'" in told.pop()


def test_a_deepspeed_job_becomes_a_plain_one(
    saved: Path, held: jobs.Tensors, tmp_path: Path
) -> None:
    """Its masters and moments, and the groups' numbers in the order of a plain optimizer."""
    convert(open_checkpoint(saved), target_of(tmp_path / "new", "torch"))
    model = jobs.net(seed=5)
    optimizer = jobs.adamw(model)
    tree = torch.load(tmp_path / "new" / "checkpoint.pt", weights_only=True)
    model.load_state_dict(tree["model"])
    optimizer.load_state_dict(tree["optimizer"])
    assert jobs.differing(held, jobs.torch_tensors(model, optimizer)) == []
    assert {float(s["step"]) for s in optimizer.state.values()} == {2.0}
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    model(jobs.tokens(9)).backward()
    optimizer.step()


def test_weights_alone_are_a_state_dict(tmp_path: Path) -> None:
    """In the form of `pytorch_model.bin`, buffers of any name told apart."""
    job = Job()
    job.save(tmp_path / "job.pt")
    convert(
        open_checkpoint(tmp_path / "job.pt"),
        target_of(tmp_path / "new", "torch", {"dtype": "bfloat16", "keep_dtype": ("norm.*",)}),
        selection=Selection(weights_only=True),
        narrow="allow",
    )
    found = torch.load(tmp_path / "new" / "pytorch_model.bin", weights_only=True)
    for name, value in job.model.state_dict().items():
        kept = name.startswith("norm") or not value.is_floating_point()
        assert torch.equal(found[name], value if kept else value.bfloat16())
    torch.save(jobs.net().state_dict(), tmp_path / "x.pt")  # here a float buffer is called `scale`
    guessed = open_checkpoint(tmp_path / "x.pt")
    assert "scale/param" in [str(spec.key) for spec in guessed.layout.keys]


def test_buffers_are_said_by_what_is_written(tmp_path: Path) -> None:
    old = str(tmp_path / "old")
    _ranks.pool(2).run(_made.save_deepspeed, "zero2-bf16", old, 1, {}, timeout=200)
    source = open_checkpoint(old)
    report = convert(source, target_of(tmp_path / "new", "torch"))
    assert report.fingerprint == open_checkpoint(tmp_path / "new").fingerprint()
    assert report.fingerprint == source.fingerprint()
    jobs.net().load_state_dict(torch.load(tmp_path / "new" / "checkpoint.pt")["model"])


def test_an_average_is_a_slot_of_its_own(tmp_path: Path) -> None:
    job = Job()
    job.step(0)
    ema = {name: p.detach() * 0.5 for name, p in job.model.named_parameters()}
    tree = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "ema": ema}
    torch.save(tree, tmp_path / "x.pt")
    source = open_checkpoint(tmp_path / "x.pt")
    live = TrainState(job.model, job.optimizer, extra={"ema": ema})
    assert source.fingerprint() == dynadapt.fingerprint(live)
    convert(source, target_of(tmp_path / "new", "torch"))
    found = torch.load(tmp_path / "new" / "checkpoint.pt", weights_only=True)["ema"]
    assert found.keys() == ema.keys()
    assert all(torch.equal(found[name], value) for name, value in ema.items())


class Stateful(nn.Linear):
    """A module with state of its own in its state dict."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": 3, "scale": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        assert state["seen"] == 3
        assert torch.equal(state["scale"], torch.ones(2))


def test_extra_state_of_modules_comes_along(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Stateful(2, 2))
    torch.save(model.state_dict(), tmp_path / "x.pt")
    convert(open_checkpoint(tmp_path / "x.pt"), target_of(tmp_path / "new", "torch"))
    found = torch.load(tmp_path / "new" / "pytorch_model.bin", weights_only=True)
    model.load_state_dict(found)


@pytest.mark.parametrize("to", ["zero0:dp=2", "zero2:dp=2", "zero3:dp=2", "universal"])
def test_steps_that_nobody_counted_are_the_optimizers(tmp_path: Path, to: str) -> None:
    """DeepSpeed's engine counts its steps; a torch job leaves that to its optimizer, weights to nobody."""
    source = Job().save(tmp_path / "job.pt")
    for name, only, count in (("a", False, 4), ("b", True, 0)):
        if only and to == "zero0:dp=2":
            continue
        report = dynadapt.convert(source, tmp_path / name, to, weights_only=only)
        told = {o.path: (o.kind, o.note) for o in report.outcomes}["counters"]
        assert told[0] == "derived"
        assert f"global_steps is {count}" in told[1]
        (file,) = sorted((tmp_path / name).rglob("*mp_rank_00_model_states.pt"))[:1]
        assert torch.load(file, weights_only=False)["global_steps"] == count
        assert dynadapt.diff(source, tmp_path / name, weights_only=only).same


@pytest.mark.parametrize(
    "through", ["zero0:dp=2", "zero2:dp=2", "universal", "dcp", "accelerate/fsdp1:dp=2"]
)
def test_an_optimizer_that_runs_fused_goes_on_so(tmp_path: Path, through: str) -> None:
    """A loader takes all of a group from the file, and fused steps round otherwise."""
    job = Job()
    for group in job.optimizer.param_groups:
        group["fused"] = True
    job.save(tmp_path / "job.pt")
    dynadapt.convert(tmp_path / "job.pt", tmp_path / "there", through)
    assert dynadapt.diff(tmp_path / "job.pt", tmp_path / "there", ignore_missing=True).same
    dynadapt.convert(tmp_path / "there", tmp_path / "back", "torch")
    other = Job(seed=5)
    other.load(tmp_path / "back" / "checkpoint.pt")
    assert [group.get("fused") for group in other.optimizer.param_groups] == [True, True]
    same_steps(job, other)


def test_a_live_job_that_runs_fused_is_saved_so(tmp_path: Path) -> None:
    """And another that takes its state over keeps its own way."""
    job, other = Job(), Job(seed=5)
    for group in job.optimizer.param_groups:
        group["fused"] = True
    job.step(0)
    dynadapt.save(TrainState(job.model, job.optimizer), tmp_path / "a", "torch")
    tree = torch.load(tmp_path / "a" / "checkpoint.pt", weights_only=True)
    assert [group["fused"] for group in tree["optimizer"]["param_groups"]] == [True, True]
    report = dynadapt.load(TrainState(other.model, other.optimizer), tmp_path / "a")
    assert [group["fused"] for group in other.optimizer.param_groups] == [None, None]
    assert not [outcome for outcome in report.outcomes if "fused" in outcome.path]
    assert other.fingerprint() == job.fingerprint()
