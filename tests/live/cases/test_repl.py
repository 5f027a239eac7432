"""REPL B123, B125, B126, B128, B129, B131, B132: replicas, who has them, and which of them counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dynadapt
from tests.live import jobs
from tests.live.kinds import build

if TYPE_CHECKING:
    from tests._ranks import Pool


def _plain(seed: int) -> dynadapt.TrainState:
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    return dynadapt.TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def _attempt(source: Any, target: Any, **more: Any) -> tuple[str, str]:
    try:
        dynadapt.migrate(source, target, timeout=30, **more)
    except dynadapt.MigrationAborted as error:
        return error.reason, str(error)
    return "moved", ""


def _hybrid(rank: int, world: int) -> dict[str, Any]:
    source = build("fsdp1-HYBRID_SHARD")
    source.step(0)
    before, whole = source.tensors(), build("plain")
    out = dynadapt.migrate(source.state, whole.state, timeout=30)
    into = build("hsdp")
    back = dynadapt.migrate(whole.state, into.state, timeout=30)
    with torch.no_grad():
        if rank >= 2:  # the second replica of every shard
            into.model.norm.weight._local_tensor.add_(0.5)
    drifted = _attempt(into.state, whole.state)
    dynadapt.migrate(into.state, whole.state, timeout=30, on_drift="take-first")
    return {
        "differing": jobs.differing(before, whole.tensors()),
        "equal": [r.fingerprint_source == r.fingerprint_target for r in (out, back)],
        "minimal": [r.bytes_moved - r.bytes_minimum for r in (out, back)],
        "moved": (back.bytes_moved, out.bytes_moved),
        "drifted": drifted,
    }


def test_two_replicas_of_shards(ranks4: Pool) -> None:
    """B123, B126, B129: 2 x 2; each range is sent once, and a replica that drifted is named, not averaged."""
    for answer in ranks4.run(_hybrid, timeout=100):
        assert answer["differing"] == []
        assert answer["equal"] == [True, True]
        assert answer["minimal"] == [0, 0]
        assert answer["moved"][0] == 0  # whoever has it all need not be sent a piece
        assert answer["moved"][1] > 0
        reason, text = answer["drifted"]
        assert reason == "replicas-differ"
        assert "norm.weight/param [0]" in text
        assert "endpoint 2" in text


def _pending(rank: int, world: int) -> tuple[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (world,))
    source = nn.Linear(4, 4)
    summand = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    source.weight = nn.Parameter(summand)
    return _attempt(source, _plain(0).model)


def test_a_sum_that_is_pending_is_refused(ranks2: Pool) -> None:
    """B131: no rank has the value."""
    for reason, text in ranks2.run(_pending):
        assert reason == "partial-placement"
        assert "weight" in text


def _ones(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    source, target = nn.LayerNorm(8), nn.LayerNorm(8)
    nn.init.zeros_(target.weight)
    fully_shard(source)
    dynadapt.migrate(source, target, timeout=30)
    return {"ones": target.weight.tolist(), "held": source.weight._local_tensor.numel()}


def test_equal_values_do_not_make_a_replica(ranks2: Pool) -> None:
    """BUFFER B16: a norm of all ones, cut in two, has equal bytes on both ranks and is whole in neither."""
    for answer in ranks2.run(_ones):
        assert answer == {"ones": [1.0] * 8, "held": 4}


def _other_ranks(rank: int, world: int) -> dict[str, Any]:
    source = _plain(1) if rank >= 2 else None
    if source is not None:
        source.model(torch.ones(1, 4)).sum().backward()
        source.optimizer.step()
        source.optimizer.zero_grad()
    target = _plain(2) if rank == 1 else None
    report = dynadapt.migrate(source, target, timeout=30)
    told: list[Any] = [None] * world
    held = source or target
    own = None
    if held is not None:
        moments = held.optimizer.state[held.model.weight]
        own = [held.model.weight.tolist(), moments["exp_avg"].tolist(), float(moments["step"])]
    dist.all_gather_object(told, own)
    return {"told": told, "equal": report.fingerprint_source == report.fingerprint_target}


def test_a_model_on_some_ranks_only(ranks4: Pool) -> None:
    """B125, HANG B149: ranks 2 and 3 have it, rank 1 wants it; rank 0 has no part in it."""
    for answer in ranks4.run(_other_ranks, timeout=60):
        nobody, wanted, *have = answer["told"]
        assert nobody is None
        assert have == [wanted, wanted]
        assert wanted[2] == 1.0
        assert answer["equal"]


def _consolidated(rank: int, world: int) -> dict[str, Any]:
    source, target = build("plain"), build("ddp-owners")
    source.step(0)
    target.step(0)
    target.tensors()  # consolidates on rank 0
    kept = len(target.optimizer._all_state_dicts)

    def late(phase: str) -> None:
        if phase == "certify":
            raise RuntimeError("on purpose")

    failed = _attempt(source.state, target.state, on_phase=late)[0]
    undone = len(target.optimizer._all_state_dicts)
    dynadapt.migrate(source.state, target.state, timeout=30)
    try:
        target.optimizer.state_dict()
        stale = "it told an old state"
    except RuntimeError as error:
        stale = str(error)
    return {
        "kept": (kept, undone),
        "failed": failed,
        "stale": stale,
        "differing": jobs.differing(source.tensors(), target.tensors()),
        "overlapping": _overlapping(),
    }


def _overlapping() -> tuple[str, str]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    kind = torch.optim.AdamW
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=kind, overlap_with_ddp=True, lr=0.1
    )
    return _attempt(_plain(0), dynadapt.TrainState(wrapped, optimizer))


def test_states_that_were_gathered_before_are_not_told_after(ranks2: Pool) -> None:
    """OPTSTATE: `ZeroRedundancyOptimizer.state_dict` would save what the target had before."""
    for rank, answer in enumerate(ranks2.run(_consolidated, timeout=60)):
        assert answer["kept"] == ((2, 2) if rank == 0 else (0, 0))
        assert answer["failed"] not in {"moved", "bad-argument"}
        assert "consolidate_state_dict" in answer["stale"]
        assert answer["differing"] == []
        reason, text = answer["overlapping"]
        assert reason == "unsupported-optimizer"
        assert "overlap_with_ddp" in text


@pytest.mark.parametrize("on_drift", ["error", "take-first"])
def test_equal_names_with_other_bytes(on_drift: Any) -> None:
    """B129: two threads as two seats with a whole model each; one element of one of them is off."""
    from dynadapt.testing.seats import run_seats

    sources, targets = [_plain(3), _plain(3)], [_plain(4), _plain(4)]
    with torch.no_grad():
        sources[1].model.weight[2, 1] += 1

    def call(session: Any) -> Any:
        number = session.seat
        try:
            dynadapt.migrate(
                sources[number], targets[number], session=session, timeout=20, on_drift=on_drift
            )
        except dynadapt.MigrationAborted as error:
            return error.reason, str(error)
        return "moved", ""

    answers = run_seats(2, call)
    if on_drift == "error":
        for reason, text in answers:
            assert reason == "replicas-differ"
            assert "weight/param [2,1]" in text
        return
    assert answers == [("moved", "")] * 2
    for target in targets:
        assert torch.equal(target.model.weight, sources[0].model.weight)


COPIED = ("zero0-bf16", "zero1-bf16", "zero1acc-bf16", "zero2-fp16", "zero3-bf16", "muon")


def _forward_weights(engine: Any) -> jobs.Tensors:
    """What a forward on this rank uses of every trained parameter, gathered as a forward does."""
    import deepspeed

    found: jobs.Tensors = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                found[name] = param.detach().clone()
    return found


def _copies_are_the_masters(rank: int, world: int) -> dict[str, list[str]]:
    from tests.live.cases.test_muon import _job as muon

    found = {}
    for kind in COPIED:

        def make(seed: int, kind: str = kind) -> Any:
            return muon("zero2-bf16", seed) if kind == "muon" else build(kind, seed=seed)

        source, target = make(1), make(2)
        source.step(0)
        target.evaluate()
        dynadapt.migrate(source.state, target.state, timeout=30)
        held = source.tensors() if kind != "muon" else {}
        masters = _masters(target)
        copies = _forward_weights(target.engine)
        wrong = [n for n, t in copies.items() if not torch.equal(t, masters[n].to(t.dtype))]
        wrong += [n for n in masters if held and not torch.equal(masters[n], held[f"{n}/param"])]
        found[kind] = wrong if copies.keys() == masters.keys() else ["names"]
    return found


def _masters(job: Any) -> jobs.Tensors:
    from tests.live.cases.test_muon import _weights

    if job.engine.zero_optimization_stage():
        return _weights(job.engine)
    trained = {n for n, p in job.engine.module.named_parameters() if p.requires_grad}
    every = jobs.zero_tensors(job.engine)
    return {name: every[f"{name}/param"] for name in trained}


def test_every_copy_is_its_master_before_the_next_forward(ranks2: Pool) -> None:
    """B132: on every rank, for every optimizer; a sync that forgets some leaves the loss looking normal."""
    for found in ranks2.run(_copies_are_the_masters, timeout=200):
        assert found == {kind: [] for kind in COPIED}
