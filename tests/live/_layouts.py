"""The job of `jobs` in any layout, behind one face."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dynadapt
from tests.live import jobs

ADAM = ("exp_avg", "exp_avg_sq")


class Job:
    """One layout of the job: its state for dynadapt, a step, an evaluation, its tensors."""

    def __init__(self, kind: str, optimizer: str = "adamw") -> None:
        self.kind = kind
        self.slots = ("momentum_buffer",) if optimizer == "sgd" else ADAM
        makers = {"adamw": jobs.adamw, "even": jobs.even, "adam": _adam, "sgd": _sgd}
        self._make = makers[optimizer]
        model = jobs.net(seed=len(kind))
        self.engine: Any = None
        self.model: nn.Module = model
        self.optimizer: Any = None
        if kind.startswith("zero"):
            self.engine = jobs.deepspeed_engine(kind, model, self._make(model))
        else:
            getattr(self, f"_{kind.partition('-')[0]}")(model)
        if self.engine is not None:
            self.state = dynadapt.TrainState(model=self.engine, counters={})
        else:
            self.optimizer = self._make(self.model)
            self.state = dynadapt.TrainState(self.model, self.optimizer, counters={})

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
