"""Checks of the torch_module adapter that need ranks: refusals, odd placements, other optimizers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from dynadapt.adapters.live.torch_module import TorchModuleAdapter
from dynadapt.errors import Refused
from dynadapt.protocols import TrainState
from dynadapt.vps.keys import Key, merge_specs
from tests.adapters._torch_worlds import (
    LAYOUTS,
    Net,
    assemble,
    build,
    evaluate,
    loss_of,
    state_of,
    train,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def refusal(call: Callable[..., object], *args: object) -> set[tuple[str, str]]:
    try:
        call(*args)
    except Refused as error:
        return {(finding.reason, finding.where) for finding in error.findings}
    raise AssertionError("not refused")


def gradients_that_no_parameter_shows(rank: int, world: int) -> None:
    """FSDP2 keeps unreduced gradients beside the parameters, and gathered weights in their place."""
    adapter = TorchModuleAdapter()
    state = state_of(build("fsdp", seed=1))
    model: Any = state.model
    model.set_requires_gradient_sync(False)
    loss_of(model, 0).backward()
    assert all(p.grad is None for _, p in model.named_parameters())
    found = refusal(adapter.quiesce, state)
    assert ("mid-step", "blocks.0.up.weight") in found
    assert ("mid-step", "unused") not in found
    model.set_requires_gradient_sync(True)
    train(state, 1, 1)
    adapter.quiesce(state)

    evaluate(model)
    assert {reason for reason, _ in refusal(adapter.describe, state)} == {"not-quiesced"}
    adapter.quiesce(state)
    adapter.describe(state)
    handle = model.unshard(async_op=True)
    assert {reason for reason, _ in refusal(adapter.quiesce, state)} == {"mid-step"}
    handle.wait()
    adapter.quiesce(state)
    adapter.describe(state)

    hybrid = state_of(build("hsdp", seed=1))
    hybrid.model.set_requires_all_reduce(False)
    loss_of(hybrid.model, 0).backward()
    assert {reason for reason, _ in refusal(adapter.quiesce, hybrid)} == {"mid-step"}

    old = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    found = refusal(adapter.quiesce, TrainState(nn.Sequential(old)))
    assert found == {("unsupported-framework", "Sequential")}


def one_rank_alone(rank: int, world: int) -> list[int]:
    """`describe`, `prepare` and `abandon` send nothing: other ranks need not call them."""
    made = []
    for layout in LAYOUTS:
        source, target = (state_of(build(layout, seed)) for seed in (1, 2))
        train(source, 0, 1)
        adapter = TorchModuleAdapter()
        adapter.quiesce(source)
        adapter.quiesce(target)
        if rank == 1:
            specs = adapter.describe(source).specs
            made.append(adapter.prepare(target, specs).allocated)
            adapter.abandon(target)
            assert not target.optimizer.state
        dist.barrier()
    return made


def ties_and_sums(rank: int, world: int) -> None:
    """A tie survives FSDP2 and is lost in parallelize_module; a pending sum is refused."""
    adapter = TorchModuleAdapter()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))

    def tied() -> Net:
        net = Net()
        net.head.weight = net.embed.weight
        return net

    source = state_of(fully_shard(tied(), mesh=mesh))
    train(source, 0, 1)
    adapter.quiesce(source)
    specs = adapter.describe(source).specs
    assert {s.aliases for s in specs if s.key.name == "embed.weight"} == {("head.weight",)}
    assert "head.weight" not in {s.key.name for s in specs}
    plan = {"embed": ColwiseParallel(), "head": ColwiseParallel()}
    apart = state_of(parallelize_module(tied(), mesh, plan))
    names = {spec.key.name for spec in adapter.prepare(apart, specs).specs}
    assert {"embed.weight", "head.weight"} <= names  # two tensors: the match of keys refuses that

    pending = nn.Module()
    pending.sum = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    assert refusal(adapter.describe, TrainState(pending)) == {("partial-placement", "sum/param")}


PLACEMENTS: list[tuple[tuple[int, ...], tuple[Any, Any]]] = [
    ((5, 10), (Shard(0), Replicate())),
    ((5, 10), (Replicate(), Shard(1))),
    ((5, 7), (Shard(0), Shard(1))),
    ((5, 7), (Shard(1), Shard(0))),
    ((7, 2), (Shard(0), Shard(0))),
    ((3, 2), (Shard(0), Shard(0))),
    ((1, 17), (Shard(0), Replicate())),
    ((8, 3), (_StridedShard(0, split_factor=2), Shard(0))),
    ((6,), (_StridedShard(0, split_factor=3), Replicate())),
    ((8, 12), (_StridedShard(1, split_factor=2), Shard(0))),
    ((2, 3, 4, 5), (Shard(3), Shard(2))),
    ((), (Replicate(), Replicate())),
    ((0, 3), (Shard(0), Shard(1))),
]


def odd_placements(rank: int, world: int) -> None:
    """Tensors that distribute_tensor placed, put together from rows, are what it was given."""
    mesh = init_device_mesh("cpu", (2, 2))
    model = nn.Module()
    given: dict[str, torch.Tensor] = {}
    for number, (shape, placements) in enumerate(PLACEMENTS):
        whole = given[f"p{number}"] = torch.randn(shape)
        parameter = nn.Parameter(distribute_tensor(whole, mesh, placements))
        model.register_parameter(f"p{number}", parameter)
    found = assemble(TorchModuleAdapter().describe(TrainState(model)))
    for name, whole in given.items():
        assert torch.equal(found[Key(name, "param")], whole), name

    columns = nn.Linear(8, 3, bias=False)
    given_columns = columns.weight.detach().clone()
    fully_shard(columns, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=lambda _: Shard(1))
    described = TorchModuleAdapter().describe(TrainState(columns))
    assert [row.box.shape for row in described.rows] == [(3, 2)]
    assert torch.equal(assemble(described)[Key("weight", "param")], given_columns)


def other_optimizers(rank: int, world: int) -> None:
    """amsgrad, fused and momentum states, and an average kept beside them, on FSDP2."""
    kinds: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    ]
    for kind, options in kinds:
        source, target = (_averaged(kind, options, seed) for seed in (1, 2))
        train(source, 0, 3)
        adapter = TorchModuleAdapter()
        adapter.quiesce(source)
        adapter.quiesce(target)
        described = adapter.describe(source)
        prepared = adapter.prepare(target, described.specs)
        write(prepared, assemble(described))
        aux = {item.path: item for item in described.aux}
        adapter.finish(target, described.specs, described.scalars, aux, lambda: None)
        assert train(target, 3, 2) == train(source, 3, 2)
        for name, average in source.extra["ema"].items():
            assert torch.equal(average._local_tensor, target.extra["ema"][name]._local_tensor)


def _averaged(kind: type[torch.optim.Optimizer], options: dict[str, Any], seed: int) -> TrainState:
    model = build("fsdp", seed)
    average = {n: p.detach() * seed for n, p in model.named_parameters()}
    optimizer: Any = kind(model.parameters(), lr=0.05, **options)  # type: ignore[call-arg]
    return TrainState(model, optimizer, extra={"ema": average})


def state_on_its_owner(rank: int, world: int) -> list[int]:
    """ZeroRedundancyOptimizer keeps each parameter's state on one rank; steps stay those of AdamW."""
    # Its package warns when it is imported, which the tests themselves forbid.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    adapter = TorchModuleAdapter()

    def make(seed: int, redundant: bool) -> TrainState:
        model = build("ddp", seed)
        trained = [p for p in model.parameters() if p.requires_grad]
        if redundant:
            return TrainState(model, torch.optim.AdamW(trained, lr=0.05))
        kind = torch.optim.AdamW
        return TrainState(model, ZeroRedundancyOptimizer(trained, optimizer_class=kind, lr=0.05))

    for first in (True, False):
        source, target = make(1, first), make(2, not first)
        train(source, 0, 3)
        adapter.quiesce(source)
        adapter.quiesce(target)
        described = adapter.describe(source)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, (described.specs, described.scalars))
        keys, findings = merge_specs({seat: specs for seat, (specs, _) in enumerate(everyone)})
        assert not findings
        scalars = {name: entry for _, known in everyone for name, entry in known.items()}
        prepared = adapter.prepare(target, keys)
        write(prepared, assemble(replace(described, specs=keys)))
        aux = {item.path: item for item in described.aux}
        adapter.finish(target, keys, scalars, aux, lambda: None)
        assert train(target, 3, 2) == train(source, 3, 2)
        if first:
            held = len({row.key.name for row in prepared.rows if row.key.slot == "exp_avg"})
    return [held]
