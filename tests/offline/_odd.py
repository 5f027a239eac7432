"""A job with everything that conversions have lost, saved by real frameworks once for all tests of cases."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import dynadapt
from tests.live import jobs, kinds
from tests.live.cases.test_peft import lora

STEPS = 2

#: DeepSpeed engines of four ranks by the names of their checkpoints: kind and further settings.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero0": ("zero0-bf16", {}),
    "zero2": ("zero2-bf16", {}),
    "zero2off": ("zero2off-bf16", {}),
    "zero2fp16": ("zero2-fp16", {"fp16": {"enabled": True, "initial_scale_power": 5}}),
    "zero3": ("zero3-fp32", {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}),
    "sgd": ("zero2-fp32", {}),
}

#: Kinds of `tests.live.kinds` that are saved by torch's distributed checkpoint.
SHARDED = ("fsdp2", "tpfsdp", "hsdp", "fsdp1-FULL_SHARD")


class Odd(jobs.Net):
    """`Net`, and a tensor of one element, one of one row, and buffers of dtypes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.Parameter(torch.full((1,), 0.5))
        self.thin = nn.Linear(jobs.WIDTH, 1, bias=False)
        with torch.no_grad():
            self.frozen.weight.mul_(256).round_().div_(256)
        self.register_buffer("third", torch.full((5,), 1 / 3))
        self.register_buffer("seen", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`Net`'s loss, and something of the other two."""
        more = (self.thin(self.embed(tokens)) * self.tiny).float().mean()
        return super().forward(tokens) + more


def odd(seed: int = 0) -> Odd:
    """One with the weights of a seed."""
    torch.manual_seed(seed)
    return Odd()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, vectors, and the one element, each with hyperparameters of its own."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    vectors = [n for n, _ in named if "norm" in n or n.endswith("bias")]
    return [
        {"params": [p for n, p in named if n not in {*vectors, "tiny"}], "weight_decay": 0.1},
        {"params": [p for n, p in named if n in vectors], "weight_decay": 0.0, "lr": 0.02},
        {"params": [p for n, p in named if n == "tiny"], "betas": (0.5, 0.75)},
    ]


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, but SGD for "sgd"."""
    if name == "sgd":
        own = [{"params": group["params"]} for group in groups(model)]
        return torch.optim.SGD(own, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(groups(model), lr=0.01)


def engine_of(name: str, seed: int = 0) -> Any:
    """A fresh engine."""
    kind, config = ENGINES[name]
    model = odd(seed)
    return jobs.deepspeed_engine(kind, model, optimizer_of(name, model), **config)


def held(name: str, engine: Any) -> jobs.Tensors:
    """What it has, by DeepSpeed's own gathers, and its buffers."""
    slots = ("momentum_buffer",) if name == "sgd" else ("exp_avg", "exp_avg_sq")
    buffers = {f"{n}/buffer": b.clone() for n, b in engine.module.named_buffers() if n != "table"}
    return {**jobs.zero_tensors(engine, slots), **buffers}


def save_all(rank: int, world: int, folder: str) -> dict[str, dict[str, Any]]:
    """Every checkpoint; rank 0 answers what the jobs held, and their fingerprints."""
    told: dict[str, dict[str, Any]] = {}
    for name in ENGINES:
        engine = engine_of(name)
        for number in range(STEPS):
            jobs.step(engine, number)
        engine.save_checkpoint(f"{folder}/{name}", tag="here", client_state={"epoch": 3})
        told[name] = {"held": held(name, engine), "print": dynadapt.fingerprint(engine)}
    for name in SHARDED:
        job: Any = kinds.build(name, "adamw", seed=0)
        for number in range(STEPS):
            job.step(number)
        model, states = get_state_dict(job.model, job.optimizer)
        dcp.save({"model": model, "optimizer": states}, checkpoint_id=f"{folder}/{name}")
        told[name] = {"held": job.tensors(), "print": dynadapt.fingerprint(job.state)}
    _save_ones(folder)
    adapters = lora(0)
    engine = jobs.deepspeed_engine("zero3-bf16", adapters, jobs.adamw(adapters))
    jobs.step(engine, 0)
    engine.save_checkpoint(f"{folder}/lora", tag="here")
    told["lora"] = {"held": jobs.zero_tensors(engine), "print": dynadapt.fingerprint(engine)}
    return told if rank == 0 else {}


def _save_ones(folder: str) -> None:
    """A norm as it begins, which every rank has equal bytes of."""
    from torch.distributed.fsdp import fully_shard

    norm = nn.LayerNorm(8)
    fully_shard(norm)
    dcp.save({"model": norm.state_dict()}, checkpoint_id=f"{folder}/ones")


def load_all(rank: int, world: int, cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Load checkpoints by DeepSpeed's own loader into other engines; saved again at once, and a step."""
    answers = []
    for name, where in cases:
        engine = engine_of(name, seed=5)
        path, client = engine.load_checkpoint(where)
        told: dict[str, Any] = {"path": path, "epoch": (client or {}).get("epoch")}
        told["held"] = held(name, engine)
        told["hyper"] = [(g["weight_decay"], g.get("betas")) for g in engine.optimizer.param_groups]
        scheduler = engine.lr_scheduler
        told["scheduler"] = None if scheduler is None else scheduler.state_dict()
        told["lr"] = [g["lr"] for g in engine.optimizer.param_groups]
        scaler = getattr(getattr(engine.optimizer, "loss_scaler", None), "__dict__", {})
        told["scaler"] = {k: v for k, v in scaler.items() if isinstance(v, int | float)}
        engine.save_checkpoint(f"{where}-again", tag="here")
        told["loss"] = jobs.step(engine, STEPS)
        answers.append(told)
    return answers


def plain(seed: int = 0, steps: int = STEPS) -> dynadapt.TrainState:
    """A plain job that has taken steps; its optimizer knows its parameters' names."""
    model = odd(seed)
    names = {p: n for n, p in model.named_parameters()}
    named: list[dict[str, Any]] = [
        {**group, "params": [(names[p], p) for p in group["params"]]} for group in groups(model)
    ]
    state = dynadapt.TrainState(model, torch.optim.AdamW(named, lr=0.01))
    for number in range(steps):
        advance(state, number)
    return state


def advance(state: dynadapt.TrainState, number: int) -> float:
    """One step of a plain job."""
    loss = state.model(jobs.tokens(number))
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return float(loss.detach())


def tree(state: dynadapt.TrainState) -> dict[str, Any]:
    """What is saved of it; the model's part says which entries are buffers, as `dynadapt` writes it."""
    model = state.model.state_dict()
    model._buffer_names = [n for n, _ in state.model.named_buffers() if n in model]
    return {"model": model, "optimizer": state.optimizer.state_dict()}
