"""One job through every live layout, a training step in each: every hop bit for bit and minimal.

The oracles are the frameworks' own gathers, before and after each hop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from tests import _ranks
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool

ADAM = ("exp_avg", "exp_avg_sq")


class Job:
    """One layout of the job: its state for dynadapt, a step, an evaluation, its tensors."""

    def __init__(self, kind: str, optimizer: str = "adamw") -> None:
        self.kind = kind
        self.slots = ("momentum_buffer",) if optimizer == "sgd" else ADAM
        makers = {"adamw": jobs.adamw, "even": jobs.even, "adam": _adam, "sgd": _sgd}
        self._make = makers[optimizer]
        model = jobs.net(seed=len(kind))
        build = getattr(self, f"_{kind.partition('-')[0]}")
        self.engine: Any = None
        self.model: nn.Module = model
        self.optimizer: Any = None
        build(model)
        if self.engine is not None:
            self.state = dynadapt.TrainState(model=self.engine, counters={})
        else:
            self.optimizer = self._make(self.model)
            self.state = dynadapt.TrainState(self.model, self.optimizer, counters={})

    def _zero3(self, model: nn.Module) -> None:
        dtype = self.kind.partition("-")[2]
        config: dict[str, Any] = {"bf16": {"enabled": dtype == "bf16"}}
        if dtype == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 4}
        self.engine = jobs.zero3(model, self._make(model), **config)

    def _fsdp2(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.up)
        fully_shard(model)

    def _hsdp(self, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)

    def _tpfsdp(self, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        jobs.parallelize(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])

    def _tp(self, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        jobs.parallelize(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))

    def _tpdp(self, model: nn.Module) -> None:
        self.model, _, _ = jobs.tensor_parallel(model)

    def _fsdp1(self, model: nn.Module) -> None:
        """`fsdp1-<strategy>` or `fsdp1-<strategy>-flat`, without use_orig_params."""
        _, strategy, *flat = self.kind.split("-")
        self.model = jobs.fsdp1(model, strategy, orig_params=not flat)

    def _ddp(self, model: nn.Module) -> None:
        self.model = nn.parallel.DistributedDataParallel(model)

    def _plain(self, model: nn.Module) -> None:
        """As it is, on every rank."""

    def step(self, number: int) -> float:
        """One optimizer step on the same batch on every rank, so any layout sees the same gradient."""
        batch = jobs.tokens(number)
        if self.engine is not None:
            loss = self.engine(batch)
            self.engine.backward(loss)
            self.engine.step()
            return float(loss.detach())
        loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def evaluate(self) -> None:
        """A forward without gradients, which leaves gathered weights behind."""
        with torch.no_grad():
            (self.engine if self.engine is not None else self.model)(jobs.tokens(99))

    def tensors(self) -> jobs.Tensors:
        """Everything, gathered by the framework itself."""
        if self.engine is not None:
            return jobs.zero_tensors(self.engine, self.slots)
        if self.kind.startswith("fsdp1"):
            return jobs.fsdp1_tensors(self.model, self.optimizer, self.slots)
        return jobs.torch_tensors(self.model, self.optimizer, self.slots)


def _adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(jobs.groups(model), lr=1e-2, amsgrad=False)


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(jobs.groups(model), lr=1e-2, momentum=0.9)


CHAINS = {
    "bf16": ("zero3-bf16", "fsdp2", "tpfsdp", "hsdp", "ddp", "tp", "tpdp", "plain", "zero3-bf16"),
    "fp32": ("zero3-fp32", "tpdp", "zero3-fp32", "ddp", "zero3-fp32", "fsdp2", "zero3-fp32"),
    "fp16": ("zero3-fp16", "tpdp", "zero3-fp16"),
    "adam": ("zero3-bf16", "fsdp2", "zero3-bf16"),
    "sgd": ("zero3-bf16", "tpdp", "fsdp1-FULL_SHARD", "zero3-bf16"),
    "fsdp1": (
        *("zero3-bf16", "fsdp1-FULL_SHARD", "fsdp2", "fsdp1-SHARD_GRAD_OP", "tpfsdp"),
        *("fsdp1-HYBRID_SHARD", "zero3-fp32", "fsdp1-NO_SHARD", "ddp"),
    ),
    "even": (
        *("zero3-bf16", "fsdp1-FULL_SHARD-flat", "tpdp", "fsdp1-SHARD_GRAD_OP-flat", "ddp"),
        *("fsdp1-HYBRID_SHARD-flat", "fsdp1-FULL_SHARD", "fsdp1-NO_SHARD-flat", "zero3-fp32"),
    ),
}


def _walk(rank: int, world: int, name: str) -> list[dict[str, Any]]:
    if name == "fp16":
        _ranks.allow_fp16()
    optimizer = name if name in {"adam", "sgd", "even"} else "adamw"
    job = Job(CHAINS[name][0], optimizer)
    answers = []
    for number, kind in enumerate(CHAINS[name][1:]):
        job.step(2 * number)
        before = job.tensors()
        job.evaluate()
        next_job = Job(kind, optimizer)
        next_job.evaluate()
        report = dynadapt.migrate(job.state, next_job.state, timeout=30, budget=64 << 10)
        differing = jobs.differing(before, next_job.tensors())
        losses = [each.step(2 * number + 1) for each in (job, next_job)]
        answers.append(
            {
                "hop": f"{job.kind} -> {kind}",
                "moved": (report.bytes_moved, report.bytes_minimum),
                "equal": report.fingerprint_source == report.fingerprint_target,
                "differing": differing,
                "gap": abs(losses[0] - losses[1]),
            }
        )
        job = next_job
    return answers


@pytest.mark.parametrize("name", list(CHAINS))
def test_every_hop(ranks4: Pool, name: str) -> None:
    """No hop loses a bit, moves a byte too many, or leaves a stale copy that a step would see."""
    for answers in ranks4.run(_walk, name, timeout=200):
        for answer in answers:
            assert answer["equal"], answer
            assert answer["moved"][0] == answer["moved"][1], answer
            assert answer["differing"] == [], answer
            assert answer["gap"] < 0.05, answer
