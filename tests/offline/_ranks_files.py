"""Real FSDP1 jobs, each rank of which saves its own part with `torch.save`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import dynadapt
from tests.live import jobs

__all__ = ["load", "save", "save_fsdp2"]


def save(
    rank: int, world: int, kind: str, orig: bool, mesh: bool, where: str, style: str
) -> dict[str, Any]:
    """Train, save, train on: the live fingerprint, FSDP's own gathers, and what came after.

    `style` is how scripts call their files; `numbered` keeps the optimizer's own state dict.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    more = {"device_mesh": init_device_mesh("cpu", (world,))} if mesh else {}
    model = jobs.fsdp1(jobs.net(), orig_params=orig, **more)
    optimizer = jobs.adamw(model)
    for number in range(2):
        _step(model, optimizer, number, rank)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
        weights = model.state_dict()
        states = (
            optimizer.state_dict()
            if style == "numbered"
            else FullyShardedDataParallel.optim_state_dict(model, optimizer)
        )
    root = Path(where)
    root.mkdir(parents=True, exist_ok=True)
    if style == "one":
        torch.save({"model": weights, "optimizer": states}, root / f"state_rank_{rank}.pt")
    elif style == "world":
        torch.save(weights, root / f"model_world_size_{world}_rank_{rank}.pt")
        torch.save(states, root / f"optim_world_size_{world}_rank_{rank}.pt")
        torch.save({"epoch": 3}, root / f"extra_state_world_size_{world}_rank_{rank}.pt")
    else:
        torch.save(weights, root / f"pytorch_model_fsdp_rank{rank}.bin")
        torch.save(states, root / f"optimizer_rank{rank}.bin")
    answer: dict[str, Any] = {
        "live": dynadapt.fingerprint(dynadapt.TrainState(model, optimizer)),
        "tensors": jobs.fsdp1_tensors(model, optimizer),
    }
    answer["losses"] = [_step(model, optimizer, number, rank) for number in (2, 3)]
    return answer


def save_fsdp2(rank: int, world: int, where: str) -> str:
    """Under FSDP2, by number as its optimizer has its states; the live fingerprint."""
    model, optimizer = _fsdp2(0)
    for number in range(2):
        _step(model, optimizer, number, rank)
    root = Path(where)
    root.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), root / f"model_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), root / f"optim_rank_{rank}.pt")
    return dynadapt.fingerprint(dynadapt.TrainState(model, optimizer))


def _fsdp2(seed: int) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    model = jobs.net(seed=seed)
    for unit in (model.up, model.frozen):
        fully_shard(unit)
    fully_shard(model)
    return model, jobs.adamw(model)


def _step(model: Any, optimizer: Any, number: int, rank: int) -> float:
    loss = model(jobs.tokens(number, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def load(rank: int, world: int, where: str, module: bool) -> list[float]:
    """Into a fresh FSDP2 job, and two steps on; `module` says the model that the files are of."""
    model, optimizer = _fsdp2(5)
    known = jobs.net() if module else None
    dynadapt.load(dynadapt.TrainState(model, optimizer), where, model=known)
    return [_step(model, optimizer, number, rank) for number in (2, 3)]
