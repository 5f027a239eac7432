"""Targets that were built on the meta device: memory is made for them, and no tensor becomes another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dynadapt
from tests.declared import _worlds
from tests.live import jobs
from tests.live.kinds import KINDS, RECIPES, build, hidden

if TYPE_CHECKING:
    from tests._ranks import Pool


def _ghost() -> jobs.Net:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    with torch.device("meta"):
        return jobs.Net(hidden(ranks))


def _train(state: dynadapt.TrainState, first: int, steps: int = 2) -> list[float]:
    losses = []
    for number in range(first, first + steps):
        loss = state.model(jobs.tokens(number))
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _whole(seed: int) -> dynadapt.TrainState:
    model = jobs.net(seed)
    return dynadapt.TrainState(model, jobs.adamw(model))


def _identities(state: dynadapt.TrainState) -> list[int]:
    return [id(t) for t in (*state.model.parameters(), *state.model.buffers())]


def test_a_ghost_with_its_optimizer_trains_on_as_the_source() -> None:
    """The tie, the frozen weight, both kinds of buffer, and an optimizer that was made before."""
    source, model = _whole(1), _ghost()
    model.up.weight.tag = "kept"
    target = dynadapt.TrainState(model, jobs.adamw(model))
    before = _identities(target)
    _train(source, 0)
    report = dynadapt.migrate(source, target)
    assert report.fingerprint_source == report.fingerprint_target
    assert _identities(target) == before
    assert model.head.weight is model.embed.weight
    assert model.up.weight.tag == "kept"
    assert not model.frozen.weight.requires_grad
    assert torch.equal(model.table, source.model.table)
    assert _train(target, 2) == _train(source, 2)


def test_memory_that_was_made_is_counted() -> None:
    """Weights, buffers and the optimizer's state, to the byte."""
    source, model = _whole(1), _ghost()
    target = dynadapt.TrainState(model, jobs.adamw(model))
    _train(source, 0)
    report = dynadapt.migrate(source, target)
    tensors = [*model.parameters(), *model.buffers()]
    states = [v for s in target.optimizer.state.values() for v in s.values()]
    made = sum(t.nbytes for t in (*tensors, *states))
    assert report.memory["0"]["made"] == made
    assert report.peak_extra_bytes >= made


@pytest.mark.parametrize("how", ["plan", "refusal"])
def test_without_a_commit_it_is_a_ghost_again(how: str) -> None:
    """And a later migration finds it as it was."""
    source, model = _whole(1), _ghost()
    target = dynadapt.TrainState(model, jobs.adamw(model))
    before = _identities(target)
    _train(source, 0)
    if how == "plan":
        dynadapt.plan(source, target)
    else:

        def late(phase: str) -> None:
            if phase == "certify":
                raise RuntimeError("on purpose")

        with pytest.raises(dynadapt.MigrationAborted):
            dynadapt.migrate(source, target, on_phase=late)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert not target.optimizer.state
    assert _identities(target) == before
    dynadapt.migrate(source, target)
    assert _train(target, 2) == _train(source, 2)


@pytest.mark.parametrize("call", [dynadapt.fingerprint, lambda x: dynadapt.migrate(x, _whole(1))])
def test_a_ghost_is_no_source(call: Any) -> None:
    """It has no values."""
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        call(_ghost())
    assert caught.value.reason == "not-materialised"
    assert "embed.weight/param" in str(caught.value)


class Fused(nn.Module):
    """Three parameters that are stretches of one storage, one of them turned round."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(12, 4)
        self.q, self.k = (nn.Parameter(whole[i : i + 4]) for i in (0, 4))
        self.v = nn.Parameter(whole[8:].t())


def test_views_of_one_storage_stay_that() -> None:
    """Strides and offsets are those of the ghost."""
    with torch.device("meta"):
        ghost = Fused()
    source = Fused()
    assert len({p.untyped_storage()._cdata for p in ghost.parameters()}) == 1
    dynadapt.migrate(source, ghost)
    assert len({p.untyped_storage()._cdata for p in ghost.parameters()}) == 1
    for mine, its in zip(source.parameters(), ghost.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert mine.stride() == its.stride()
        assert mine.storage_offset() == its.storage_offset()


def test_a_state_that_was_made_under_the_meta_device_is_made_anew() -> None:
    """Adagrad makes its own when it is built."""

    def make(model: nn.Module) -> dynadapt.TrainState:
        return dynadapt.TrainState(model, torch.optim.Adagrad(jobs.groups(model), lr=0.1))

    with torch.device("meta"):
        target = make(jobs.Net())
    source = make(jobs.net(1))
    _train(source, 0)
    dynadapt.migrate(source, target)
    assert _train(target, 2) == _train(source, 2)


def test_a_tensor_with_weak_references_is_named() -> None:
    """An LSTM keeps some to its weights; their content cannot be exchanged."""
    with torch.device("meta"):
        ghost = nn.LSTM(2, 3)
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(nn.LSTM(2, 3), ghost)
    assert caught.value.reason == "not-materialised"
    assert "to_empty" in str(caught.value)


def test_it_gets_memory_where_it_is_told_to() -> None:
    """A model that is on the meta device in part follows the rest, or `device`."""
    model = jobs.net(2)
    model.up = nn.Linear(jobs.WIDTH, jobs.HIDDEN, device="meta")
    source = jobs.net(1)
    dynadapt.migrate(source, dynadapt.TrainState(model, device="cpu"))
    assert torch.equal(model.up.weight, source.up.weight)


def _sharded_ghost(kind: str) -> dynadapt.TrainState:
    """What the kind does to a model with memory."""
    return KINDS[kind].make(_ghost(), RECIPES["adamw"]).state


def _onto_ghosts(rank: int, world: int, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    source, twin = build("zero3-fp32"), build("zero3-fp32")
    for number in range(2):
        assert source.step(number) == twin.step(number)
    before = source.tensors()
    answers = []
    for kind in kinds:
        target = _sharded_ghost(kind)
        kept = _identities(target)
        dynadapt.plan(source.state, target)
        assert all(t.is_meta for t in (*target.model.parameters(), *target.model.buffers()))
        report = dynadapt.migrate(source.state, target)
        assert _identities(target) == kept
        assert report.bytes_moved == report.bytes_minimum
        differing = jobs.differing(before, jobs.torch_tensors(target.model, target.optimizer))
        reference = build(kind)
        dynadapt.migrate(source.state, reference.state)
        losses = _train(target, 2), _train(reference.state, 2)
        after = [jobs.torch_tensors(s.model, s.optimizer) for s in (target, reference.state)]
        answers.append(
            {
                "kind": kind,
                "differing": [*differing, *jobs.differing(*after)],
                "losses": losses,
                "tied": target.model.head.weight is target.model.embed.weight,
            }
        )
        dist.barrier()
    return answers


def _check(answers: list[list[dict[str, Any]]]) -> None:
    for answer in (answer for rank in answers for answer in rank):
        assert answer["differing"] == [], answer
        assert answer["losses"][0] == answer["losses"][1], answer
        assert answer["tied"], answer


def test_sharded_ghosts(ranks4: Pool) -> None:
    """From ZeRO-3 into `fully_shard` over tensor parallelism, applied to a model on meta."""
    _check(ranks4.run(_onto_ghosts, ("tpfsdp",), timeout=200))


@pytest.mark.nightly
def test_more_sharded_ghosts(ranks4: Pool) -> None:
    """The other layouts of DTensor."""
    _check(ranks4.run(_onto_ghosts, ("fsdp2", "tp", "hsdp", "tpdp"), timeout=200))


def test_a_sharded_ghost_on_three_ranks() -> None:
    """FSDP2 pads its shards there."""
    _check(_worlds.run(3, _onto_ghosts, ("fsdp2",)))
