"""EMPTY B32, B34, B35, B37, B38: ranks that hold nothing, and tensors that hold nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import dynadapt
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool


class Few(nn.Module):
    """Fewer elements than ranks, in every parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one = nn.Linear(3, 1)
        self.two = nn.Linear(1, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.two(torch.tanh(self.one(x))).square().sum()


def _job(model: nn.Module, how: str) -> dynadapt.TrainState:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if how == "fsdp1":  # without a mesh, as S2 has it
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif how == "fsdp2":
        fully_shard(model)
    return dynadapt.TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def _step(state: dynadapt.TrainState) -> float:
    loss = state.model(torch.tensor([[1.0, -1.0, 0.5]]))
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return float(loss.detach())


def _few(rank: int, world: int) -> list[dict[str, Any]]:
    source, answers = _job(Few(0), "plain"), []
    twin = _job(Few(0), "plain")
    for each in (source, twin):
        _step(each)
    for number, how in enumerate(("fsdp1", "fsdp2", "fsdp1", "plain"), 1):
        target = _job(Few(number), how)
        report = dynadapt.migrate(source, target, timeout=30)
        keys = [str(spec.key) for spec in dynadapt.describe(target).layout.keys]
        pair = _step(target), _step(twin)
        states = len(target.optimizer.state)
        local = [getattr(p, "_local_tensor", p).numel() for p in target.model.parameters()]
        answers.append(
            {
                "how": how,
                "waste": report.bytes_moved - report.bytes_minimum,
                "equal": report.fingerprint_source == report.fingerprint_target,
                "keys": keys,
                "gap": abs(pair[0] - pair[1]),
                "states": states,
                "held": sum(local),
            }
        )
        source = target
    return answers


def test_ranks_that_own_nothing(ranks4: Pool) -> None:
    """B32, B37, B38: 1 to 3 elements over four ranks; every rank knows of every key, in one order."""
    by_rank = ranks4.run(_few, timeout=100)
    for answers in by_rank:
        for answer, first in zip(answers, by_rank[0], strict=True):
            assert answer["equal"], answer
            assert answer["waste"] == 0, answer
            assert answer["gap"] < 1e-6, answer
            assert answer["keys"] == first["keys"]
            assert len(answer["keys"]) == 9
    assert [answers[1]["held"] for answers in by_rank][2:] == [0, 0]  # FSDP2 cuts by rows
    assert min(answers[0]["states"] for answers in by_rank) < 3  # S9


class Hollow(nn.Module):
    """A layer without outputs behind one with."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(4, 4)
        self.nothing = nn.Linear(4, 0, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        x = self.body(x)
        return x.square().sum() + self.nothing(x).sum()


def _hollow(rank: int, world: int) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    plain = _job(Hollow(0), "plain")
    plain.model(torch.ones(1, 4)).backward()
    plain.optimizer.step()
    plain.optimizer.zero_grad()
    for kind in ("zero1-bf16", "zero2-fp32"):
        model = Hollow(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        engine = jobs.deepspeed_engine(kind, model, optimizer)
        there = dynadapt.migrate(plain, engine, timeout=30)
        again = _job(Hollow(2), "plain")
        back = dynadapt.migrate(engine, again, timeout=30)
        shapes = {
            str(s.key): s.shape for s in dynadapt.describe(engine).layout.keys if not s.derived
        }
        answers[kind] = {
            "shape": shapes["nothing.weight/param"],
            "equal": [r.fingerprint_source == r.fingerprint_target for r in (there, back)],
            "body": torch.equal(again.model.body.weight, plain.model.body.weight),
            "kept": tuple(again.model.nothing.weight.shape),
        }
    return answers


def test_a_layer_of_no_elements_keeps_its_shape(ranks2: Pool) -> None:
    """B35: name and shape go through ZeRO's flats, in which it has no place."""
    for answers in ranks2.run(_hollow, timeout=100):
        for kind, answer in answers.items():
            expected = {"shape": (0, 4), "equal": [True] * 2, "body": True, "kept": (0, 4)}
            assert answer == expected, kind


def _hole(rank: int, world: int) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    states = []
    for seed, how in enumerate(("plain", "fsdp2", "plain")):
        model = Hollow(seed)
        model.nothing.register_parameter("hole", nn.Parameter(torch.empty(5, 0, 2)))
        states.append(_job(model, how))
    model = states[0].model
    (model(torch.ones(1, 4)).sum() + model.nothing.hole.sum()).backward()
    states[0].optimizer.step()
    states[0].optimizer.zero_grad()
    for there, back in pairwise(states):
        dynadapt.migrate(there, back, timeout=30)
    answers["hole"] = tuple(states[2].model.nothing.hole.shape)
    answers["body"] = torch.equal(states[2].model.body.weight, model.body.weight)
    return answers


def test_a_hole_between_dims_is_cut_as_fsdp2_likes(ranks2: Pool) -> None:
    """FSDP2 gives every rank no rows of what is empty, whatever its placements say."""
    for answer in ranks2.run(_hole, timeout=100):
        assert answer == {"hole": (5, 0, 2), "body": True}


class Scaled(nn.Module):
    """A temperature without dims."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return (self.body(x) * self.temperature).square().sum()


def _scalar(rank: int, world: int) -> dict[str, Any]:
    source = _job(Scaled(1.5), "plain")
    wrapped = nn.parallel.DistributedDataParallel(Scaled(2.5))
    target = _job(wrapped, "ddp")
    source.model(torch.ones(1, 4)).backward()
    source.optimizer.step()
    source.optimizer.zero_grad()
    dynadapt.migrate(source, target, timeout=30)
    inner = wrapped.module.temperature
    answers: dict[str, Any] = {
        "shape": (inner.shape, target.optimizer.state[inner]["exp_avg"].shape),
        "same": torch.equal(inner, source.model.temperature),
    }
    for name, build in {
        "fsdp2": lambda: _job(Scaled(1.0), "fsdp2"),
        "zero3": lambda: jobs.deepspeed_engine("zero3-bf16", *_with_adamw()),
    }.items():
        try:
            build()
            answers[name] = "built"
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
    return answers


def _with_adamw() -> tuple[nn.Module, Any]:
    model = Scaled(1.0)
    return model, torch.optim.AdamW(model.parameters())


def test_a_parameter_without_dims(ranks2: Pool) -> None:
    """B34: it stays one; FSDP2 of torch 2.13 and ZeRO-3 of DeepSpeed 0.19.8 do not build with one."""
    for answers in ranks2.run(_scalar, timeout=60):
        assert answers["shape"] == (torch.Size([]), torch.Size([]))
        assert answers["same"]
        assert "scalar" in answers["fsdp2"]
        assert answers["zero3"] != "built"
