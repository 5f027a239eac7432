"""Plain torch files: `torch.load`, `load_state_dict` and the next steps of real jobs judge."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from dynadapt.adapters._hyper import NOT_HYPER
from dynadapt.adapters.checkpoints._optimizer_names import dealt
from dynadapt.elastic.checkpoint import open_checkpoint
from dynadapt.elastic.conversion import convert
from dynadapt.elastic.selection import Selection
from dynadapt.elastic.targets import target_of
from dynadapt.errors import Refused
from dynadapt.protocols import TrainState
from tests import _ranks
from tests.live import jobs
from tests.offline import _made

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "AMSGrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "RAdam": lambda groups: torch.optim.RAdam(groups, lr=1e-2),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-1, momentum=0.9, nesterov=True),
    "SGD without momentum": lambda groups: torch.optim.SGD(groups, lr=1e-1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.9, centered=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "Rprop": lambda groups: torch.optim.Rprop(groups, lr=1e-2),
    "ASGD": lambda groups: torch.optim.ASGD(groups, lr=1e-2),
}


class Job:
    """A plain job: tied and frozen tensors, two groups, a schedule, buffers that say what they are."""

    def __init__(self, kind: str = "AdamW", seed: int = 0, unused: bool = False) -> None:
        self.model = jobs.net(seed, extra=unused, integers=True)
        groups = jobs.groups(self.model)
        if unused or kind == "SGD without momentum":  # shapes of states do not tell whose they are
            names = {p: name for name, p in self.model.named_parameters()}
            for group in groups:
                group["params"] = [(names[p], p) for p in group["params"]]
        self.optimizer = OPTIMIZERS[kind](groups)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 3, 5], 0.5)

    def step(self, number: int) -> float:
        loss = self.model(jobs.tokens(number))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach())

    def save(self, path: Path, steps: int = 4) -> Path:
        """What people write, after some steps."""
        for number in range(steps):
            self.step(number)
        tree = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": 7,
            "best": 0.25,
            "rng": torch.get_rng_state(),
        }
        torch.save(tree, path)
        return path

    def load(self, path: Path) -> dict[str, Any]:
        """As everybody loads: nothing but what `weights_only` allows."""
        tree: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.load_state_dict(tree["model"])
        self.optimizer.load_state_dict(tree["optimizer"])
        if "scheduler" in tree:
            self.scheduler.load_state_dict(tree["scheduler"])
        return tree

    def fingerprint(self) -> str:
        return dynadapt.fingerprint(TrainState(self.model, self.optimizer))

    def tensors(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for id_, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"{id_}/{k}": torch.as_tensor(v) for k, v in entry.items() if v is not None}
        return found


def same_steps(a: Job, b: Job, number: int = 4) -> None:
    """The next steps of both are one, bit for bit, with all rates and counts."""
    for each in range(number, number + 3):
        assert a.step(each) == b.step(each)
    mine, its = a.tensors(), b.tensors()
    assert mine.keys() == its.keys()
    assert [name for name in mine if not torch.equal(mine[name], its[name])] == []
    hypers = [
        [
            {k: v for k, v in group.items() if k not in NOT_HYPER}
            for group in job.optimizer.param_groups
        ]
        for job in (a, b)
    ]
    assert hypers[0] == hypers[1]
    assert a.scheduler.state_dict() == b.scheduler.state_dict()


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


def test_a_deepspeed_job_becomes_a_plain_one(tmp_path: Path) -> None:
    """Its masters and moments, and the groups' numbers in the order of a plain optimizer."""
    old = str(tmp_path / "old")
    held = _ranks.pool(2).run(_made.save_deepspeed, "zero3-bf16", old, 2, {}, timeout=200)[0]
    convert(open_checkpoint(old), target_of(tmp_path / "new", "torch"))
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


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "bare": lambda m, o: m,
    "data parallel": lambda m, o: {
        "state_dict": {f"module.{n}": t for n, t in m.items()},
        "optimizer": o,
    },
    "compiled": lambda m, o: {"model": {f"_orig_mod.{n}": t for n, t in m.items()}, "optim": o},
    "lightning": lambda m, o: {
        "state_dict": m,
        "optimizer_states": [o],
        "lr_schedulers": [{"last_epoch": 3}],
        "global_step": 4,
        "pytorch-lightning_version": "2.5",
    },
    "weights and counts": lambda m, o: {"model_state_dict": m, "epoch": 3},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_people_save(tmp_path: Path, form: str) -> None:
    job = Job()
    job.step(0)
    tree = FORMS[form](dict(job.model.state_dict()), job.optimizer.state_dict())
    torch.save(tree, tmp_path / "x.ckpt")
    found = open_checkpoint(tmp_path / "x.ckpt")
    plain = "optim" not in str(tree.keys())
    optimizer = None if plain else job.optimizer
    assert found.fingerprint() == dynadapt.fingerprint(TrainState(job.model, optimizer))


def test_states_by_name(tmp_path: Path) -> None:
    """As FSDP gathers an optimizer's state."""
    job = Job()
    job.step(0)
    names = {p: n for n, p in job.model.named_parameters()}
    told = {
        "state": {names[p]: entry for p, entry in job.optimizer.state.items()},
        "param_groups": [
            {**group, "params": [names[p] for p in group["params"]]}
            for group in job.optimizer.param_groups
        ],
    }
    torch.save({"model": job.model.state_dict(), "optimizer": told}, tmp_path / "x.pt")
    assert open_checkpoint(tmp_path / "x.pt").fingerprint() == job.fingerprint()


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


def test_several_files_and_an_index(tmp_path: Path) -> None:
    """As transformers cuts a model; what the index promises has to be there."""
    state = jobs.net(integers=True).state_dict()
    names = list(state)
    cut = {
        "pytorch_model-00001-of-00002.bin": names[:4],
        "pytorch_model-00002-of-00002.bin": names[4:],
    }
    for file, own in cut.items():
        torch.save({name: state[name] for name in own}, tmp_path / file)
    index = {name: file for file, own in cut.items() for name in own}
    at = tmp_path / "pytorch_model.bin.index.json"
    at.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    found = open_checkpoint(tmp_path)
    assert len(found.layout.endpoints) == 2
    convert(found, target_of(tmp_path.with_name("one"), "torch"))
    one = torch.load(tmp_path.with_name("one") / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(one[name], value) for name, value in state.items())
    at.write_text(json.dumps({"weight_map": {**index, "more": names[0] and next(iter(cut))}}))
    with pytest.raises(Refused) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.reason == "missing-key"
    at.write_text(json.dumps({"weight_map": {"x": "../x.bin"}}))
    with pytest.raises(Refused) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.reason == "path-traversal"


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


def test_what_cannot_be_told_apart_is_refused(tmp_path: Path) -> None:
    """Two of three equal layers are trained: by numbers and shapes they may be any two."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, tmp_path / "x.pt")
    with pytest.raises(Refused) as caught:
        open_checkpoint(tmp_path / "x.pt")
    assert caught.value.reason == "ambiguous-order"
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    by_group = dynadapt.open(tmp_path / "x.pt", groups=[trained])
    assert by_group.fingerprint() == dynadapt.open(tmp_path / "x.pt", order=trained).fingerprint()
    assert by_group.fingerprint() == dynadapt.fingerprint(TrainState(model, optimizer))
    with pytest.raises(Refused, match="ambiguous-order"):  # groups of another model say nothing
        dynadapt.open(tmp_path / "x.pt", model=model, groups=[["a", "b", "c", "d"]])
    tree["optimizer"]["param_names"] = [["1.weight", "1.bias", "2.weight", "2.bias"]]
    torch.save(tree, tmp_path / "x.pt")
    fingerprint = dynadapt.fingerprint(TrainState(model, optimizer))
    assert open_checkpoint(tmp_path / "x.pt").fingerprint() == fingerprint
    named = torch.optim.AdamW([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    named.load_state_dict(optimizer.state_dict())
    torch.save({**tree, "optimizer": named.state_dict()}, tmp_path / "x.pt")
    assert open_checkpoint(tmp_path / "x.pt").fingerprint() == fingerprint


def test_names_against_every_way_to_deal() -> None:
    """The one way, and only where there is one, against a search through all of them."""
    rng = random.Random(0)
    told = refused = 0
    for _ in range(600):
        shapes = [(rng.choice([2, 3]),) for _ in range(rng.randint(1, 6))]
        params = [(str(i), shape) for i, shape in enumerate(shapes)]
        owner = [rng.choice([-1, 0, 1]) for _ in params]
        groups = [
            [
                shape if rng.random() < 0.9 else None
                for (_, shape), own in zip(params, owner, strict=True)
                if own == group
            ]
            for group in (0, 1)
        ]
        ways = set(_every_way(groups, params, 0, (0, 0), ((), ())))
        if len(ways) > 1:
            with pytest.raises(Refused) as caught:
                dealt(groups, params, "x")
            assert caught.value.reason == "ambiguous-order"
            refused += 1
            continue
        assert ways == {tuple(map(tuple, dealt(groups, params, "x")))}
        told += 1
    assert min(told, refused) > 100


def _every_way(groups: Any, params: Any, at: int, taken: Any, names: Any) -> Any:
    if at == len(params):
        if all(n == len(own) for n, own in zip(taken, groups, strict=True)):
            yield names
        return
    yield from _every_way(groups, params, at + 1, taken, names)
    name, shape = params[at]
    for group in (0, 1):
        number = taken[group]
        if number < len(groups[group]) and groups[group][number] in (None, shape):
            more = tuple(n + (i == group) for i, n in enumerate(taken))
            given = tuple((*own, name) if i == group else own for i, own in enumerate(names))
            yield from _every_way(groups, params, at + 1, more, given)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (nn.Linear(2, 2), "bad-file"),
        ({"state": {}, "param_groups": []}, "bad-file"),
        ([1, 2], "bad-file"),
        ({"model": {"w": torch.ones(2)}, "optimizer": {"state": {}}}, "bad-file"),
        (
            {
                "model": {"w": torch.ones(2)},
                "optimizer": {
                    "state": {0: {"m": torch.ones(3)}},
                    "param_groups": [{"params": [0]}],
                },
            },
            "bad-file",
        ),
        (
            {
                "model": {"w": torch.ones(2)},
                "optimizer": {
                    "state": {5: {"m": torch.ones(2)}},
                    "param_groups": [{"params": [0]}],
                },
            },
            "bad-file",
        ),
        (
            {
                "model": {"w": torch.ones(2)},
                "optimizer": {"state": {}, "param_groups": [{"params": ["v"]}]},
            },
            "missing-key",
        ),
        (
            {
                "model": {"w": torch.ones(2)},
                "optimizer": {"state": {0: {"old": [1]}}, "param_groups": [{"params": [0]}]},
            },
            "unsupported-state",
        ),
    ],
)
def test_what_is_no_training_state_says_so(tmp_path: Path, tree: Any, reason: str) -> None:
    torch.save(tree, tmp_path / "x.pt")
    with pytest.raises(Refused) as caught:
        open_checkpoint(tmp_path / "x.pt")
    assert caught.value.reason == reason


def test_damaged_files_are_findings(tmp_path: Path) -> None:
    """Any byte changed, any length cut: an answer or `Refused`, never another error."""
    path = Job().save(tmp_path / "x.pt")
    whole = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for number in range(200):
        data = bytearray(whole)
        if number % 4 == 0:
            data = data[: rng.randrange(len(data))]
        else:
            start = len(data) // 2 if number % 2 else 0  # where the tree lies
            for _ in range(rng.choice([1, 1, 4, 30])):
                data[rng.randrange(start, len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))
        try:
            open_checkpoint(path)
        except Refused:
            refused += 1
    assert refused > 50


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
