"""Torch files as people save them: what is read, whose an optimizer's numbers are, what is refused."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from dynadapt.adapters.checkpoints._optimizer_names import dealt
from dynadapt.elastic.checkpoint import open_checkpoint
from dynadapt.elastic.conversion import convert
from dynadapt.elastic.targets import target_of
from dynadapt.errors import Refused
from dynadapt.protocols import TrainState
from tests.live import jobs
from tests.offline._plain import Job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
