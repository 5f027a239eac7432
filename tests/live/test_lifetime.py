"""A job that has migrated can be dropped, copied, and be a target again."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from dynadapt.elastic import migration
from tests import _ranks
from tests.live.kinds import build

if TYPE_CHECKING:
    from tests._ranks import Pool


def _dropped(rank: int, world: int, kinds: tuple[str, ...]) -> list[str]:
    """Those whose module is still there when nobody holds the job that was a target and a source."""
    kept = []
    for kind in kinds:
        first, job, last = build("plain"), build(kind), build("plain")
        first.step(0)
        first.evaluate()
        job.evaluate()
        dynadapt.migrate(first.state, job.state, timeout=30)
        dynadapt.migrate(job.state, last.state, timeout=30)
        module = weakref.ref(job.module)
        if hasattr(job.state.model, "destroy"):
            job.state.model.destroy()  # hooks on gradients hold an engine from C++
        del first, job, last
        _ranks.reset_deepspeed()  # DeepSpeed's globals hold the last engine
        gc.collect()
        if module() is not None:
            kept.append(kind)
    return kept


@pytest.mark.parametrize(
    "kinds",
    [
        ("zero3-bf16", "zero1-bf16", "zero2-fp32", "zero0-bf16"),
        ("ddp", "fsdp2", "tp", "fsdp1-FULL_SHARD"),
    ],
)
def test_a_job_that_was_target_and_source_can_be_dropped(
    ranks2: Pool, kinds: tuple[str, ...]
) -> None:
    """Nothing of dynadapt's holds it: an engine that is kept alive keeps its memory and its threads."""
    assert ranks2.run(_dropped, kinds) == [[], []]


def _net(seed: int, device: str = "cpu") -> dynadapt.TrainState:
    with torch.device(device):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
        return dynadapt.TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1 * seed))


def _step(state: dynadapt.TrainState) -> None:
    state.model(torch.ones(4, 3)).square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def _fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("no move")


def _content(state: dynadapt.TrainState) -> Any:
    """All that a later step reads; with the identity of each parameter."""
    kept = {id(p): state.optimizer.state[p] for p in state.model.parameters()}
    groups = [{**g, "params": len(g["params"])} for g in state.optimizer.param_groups]
    return copy.deepcopy((state.model.state_dict(), kept, groups))


def test_a_target_of_an_earlier_migration_is_not_taken_back_by_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model from the meta device holds the job, and trains, when a second migration fails."""
    first, ghost = _net(1), _net(2, "meta")
    _step(first)
    dynadapt.migrate(first, ghost)
    ghost.optimizer.param_groups[0]["lr"] = 0.77
    _step(ghost)
    before = _content(ghost)
    other = _net(3)
    _step(other)
    with monkeypatch.context() as patch:
        patch.setattr(migration, "_move", _fails)
        with pytest.raises(dynadapt.MigrationAborted, match="no move"):
            dynadapt.migrate(other, ghost)
    torch.testing.assert_close(_content(ghost), before, rtol=0, atol=0)
    dynadapt.migrate(ghost, first)
    _step(first)
    dynadapt.migrate(first, ghost)
    assert not any(p.is_meta for p in ghost.model.parameters())
    torch.testing.assert_close(ghost.model.state_dict(), first.model.state_dict(), rtol=0, atol=0)


def test_a_model_that_was_a_target_can_be_copied_and_pickled() -> None:
    """An average is often made as a deep copy. What would undo the migration stays with the original."""
    source, target = _net(1), _net(2)
    _step(source)
    dynadapt.migrate(source, target)
    twin = copy.deepcopy(target.model)
    again = pickle.loads(pickle.dumps(target.model))
    for each in (twin, again):
        torch.testing.assert_close(each.state_dict(), target.model.state_dict())
