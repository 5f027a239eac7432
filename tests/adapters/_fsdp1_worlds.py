"""FSDP1 models on real ranks, next to twins that dynadapt never sees, and what has to be refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    fully_shard,
)

import dynadapt
from dynadapt.adapters.live.fsdp1 import Fsdp1Adapter
from dynadapt.errors import MigrationAborted, Refused
from dynadapt.protocols import TrainState
from dynadapt.vps.keys import Key
from tests.adapters._torch_worlds import assemble
from tests.live import jobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.live.jobs import Tensors

BF16 = MixedPrecision(param_dtype=torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """An FSDP1 job, and what it migrates to and comes back from."""

    strategy: str = "FULL_SHARD"
    orig_params: bool = True
    bf16: bool = False
    between: str = "ddp"

    def build(self, seed: int) -> TrainState:
        """With `use_orig_params` the frozen tensor shares its flat with trained ones."""
        units = ("up",) if self.orig_params else ("up", "frozen")
        more = {"mixed_precision": BF16 if self.bf16 else None}
        made = jobs.fsdp1(
            jobs.net(seed), self.strategy, orig_params=self.orig_params, units=units, **more
        )
        return self._state(made)

    def other(self, seed: int) -> TrainState:
        """A target of another kind."""
        model: Any = jobs.net(seed)
        if self.between == "zero3":
            make = jobs.adamw if self.orig_params else jobs.even
            return TrainState(jobs.zero3(model, make(model), bf16={"enabled": False}))
        if self.between == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        if self.between == "fsdp2":
            fully_shard(model.up)
            fully_shard(model)
        return self._state(model)

    def _state(self, model: nn.Module) -> TrainState:
        return TrainState(model, (jobs.adamw if self.orig_params else jobs.even)(model))


def train(x: TrainState, number: int) -> float:
    """One step on the same batch everywhere."""
    if not isinstance(x.model, nn.Module) or x.optimizer is None:
        loss = x.model(jobs.tokens(number))
        x.model.backward(loss)
        x.model.step()
        return float(loss.detach())
    loss = x.model(jobs.tokens(number))
    loss.backward()
    x.optimizer.step()
    x.optimizer.zero_grad()
    return float(loss.detach())


def evaluate(x: TrainState) -> float:
    """A forward that leaves gathered weights behind."""
    with torch.no_grad():
        return float(x.model(jobs.tokens(99)))


def everything(x: TrainState) -> Tensors:
    """By FSDP1's own gathers."""
    return jobs.fsdp1_tensors(x.model, x.optimizer)


def move(source: TrainState, target: TrainState) -> None:
    """A migration that has to be minimal and exact."""
    report = dynadapt.migrate(source, target, timeout=30)
    assert report.bytes_moved == report.bytes_minimum, str(report)
    assert report.fingerprint_source == report.fingerprint_target, str(report)


def goes_on_like_its_twin(rank: int, world: int, case: Case) -> list[float]:
    """Out and back into a fresh model: bits, losses and weights are those of an untouched twin."""
    source, twin = case.build(1), case.build(1)
    for number in range(3):
        assert train(source, number) == train(twin, number)
    between, back = case.other(2), case.build(3)
    for x in (source, between, back):
        evaluate(x)
    move(source, between)
    evaluate(between)
    move(between, back)
    assert padding_of(back) == padding_of(twin)
    assert jobs.differing(everything(back), everything(twin)) == []
    assert evaluate(back) == evaluate(twin)
    losses = [train(x, 3) for x in (twin, back, source)]
    assert losses == [losses[0]] * 3
    for x in (back, source):
        assert jobs.differing(everything(x), everything(twin)) == []
    assert padding_of(back) == padding_of(twin)
    near = train(between, 3)
    assert abs(near - losses[0]) < (0.1 if case.bf16 else 1e-4), (near, losses[0])
    return losses


def padding_of(x: TrainState) -> list[list[float]]:
    """What lies in a shard, and in the state of a flat parameter, beside the tensors' own elements."""
    found = []
    for unit in FullyShardedDataParallel.fsdp_modules(x.model):
        flat = unit._handle.flat_param
        mask = torch.ones(flat.numel(), dtype=torch.bool)
        for info in flat._shard_param_infos:
            if info.in_shard:
                mask[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard] = False
        states = x.optimizer.state.get(flat, {})
        slots = [states[name] for name in ("exp_avg", "exp_avg_sq") if name in states]
        found += [each.detach()[mask].tolist() for each in (unit._handle.flat_param, *slots)]
    return found


# --- refusals ---------------------------------------------------------------------------------


def refusal(call: Callable[..., object], *args: object) -> set[tuple[str, str]]:
    """Reasons and places."""
    try:
        call(*args)
    except Refused as error:
        # Without a way out a finding is not found by any test.
        return {(finding.reason, finding.where) for finding in error.findings if finding.fix}
    raise AssertionError("not refused")


def everyones(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """What any rank refused: a rank without a part of a tensor has no gradient of it."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return set().union(*gathered)


def mid_steps(rank: int, world: int) -> None:
    """Gradients wherever FSDP1 keeps them; passes under way; weights that it has yet to take over."""
    adapter = Fsdp1Adapter()
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for orig_params in (True, False):
            x = Case(strategy, orig_params).build(1)
            x.model(jobs.tokens(0)).backward()
            found = everyones(refusal(adapter.quiesce, x))
            assert {reason for reason, _ in found} == {"mid-step"}
            assert ("mid-step", "down.weight" if orig_params else "up.weight") in found
            assert ("mid-step", "frozen.weight") not in found
            x.optimizer.step()
            x.optimizer.zero_grad()
            adapter.quiesce(x)  # FSDP1's own flat gradient may still hold the old values
            with x.model.no_sync():
                x.model(jobs.tokens(0)).backward()
            assert {reason for reason, _ in refusal(adapter.quiesce, x)} == {"mid-step"}
            x.model.zero_grad()  # the frozen tensor's too
            adapter.quiesce(x)
            with FullyShardedDataParallel.summon_full_params(x.model):
                assert ("mid-step", "up") in refusal(adapter.quiesce, x)
            x.model(jobs.tokens(0))  # gathered weights of a forward that no backward followed
            if strategy != "NO_SHARD":
                assert {reason for reason, _ in refusal(adapter.describe, x)} == {"not-quiesced"}
            adapter.quiesce(x)
            adapter.describe(x)
            train(x, 1)

    x = Case().build(1)
    train(x, 0)
    for parameter in x.model.parameters():
        parameter.data = parameter.data.clone()
    assert {reason for reason, _ in refusal(adapter.quiesce, x)} == {"mid-step"}
    evaluate(x)
    adapter.quiesce(x)


def one_rank_alone(rank: int, world: int) -> int:
    """`describe`, `prepare` and `abandon` send nothing: other ranks need not call them."""
    made = 0
    for orig_params in (True, False):
        source, target = (Case(orig_params=orig_params).build(seed) for seed in (1, 2))
        train(source, 0)
        adapter = Fsdp1Adapter()
        adapter.quiesce(source)
        adapter.quiesce(target)
        specs = adapter.describe(source).specs
        if rank == 1:
            prepared = adapter.prepare(target, specs)
            made += prepared.allocated
            assert prepared.flat_step is not orig_params
            adapter.abandon(target)
            assert not target.optimizer.state
        dist.barrier()
    return made


def aborted(source: TrainState, target: TrainState) -> MigrationAborted:
    """The error of a migration that has to fail, with the target as if it had never been one."""
    twin_state = len(target.optimizer.state)
    try:
        dynadapt.migrate(source, target, timeout=30)
    except MigrationAborted as error:
        assert len(target.optimizer.state) == twin_state
        evaluate(target)
        return error
    raise AssertionError("not refused")


def one_set_for_a_flat(rank: int, world: int) -> list[tuple[str, str]]:
    """What a flat parameter has no place for: two decays, two steps. With use_orig_params all fits."""
    plain = jobs.net(1)
    source = TrainState(plain, jobs.adamw(plain))
    train(source, 0)
    answers = [aborted(source, Case(orig_params=False).build(2))]
    uneven = TrainState(plain, jobs.even(plain))
    for number in range(2):
        plain(jobs.tokens(number)).backward()
        if number:
            plain.norm.zero_grad()
        uneven.optimizer.step()
        uneven.optimizer.zero_grad()
    answers.append(aborted(uneven, Case(orig_params=False).build(2)))
    fits = Case().build(2)
    move(uneven, fits)
    steps = {int(state["step"]): None for p, state in fits.optimizer.state.items() if p.numel()}
    assert set(steps) <= {1, 2}
    return [(error.reason, str(error)) for error in answers]


# --- odd models -------------------------------------------------------------------------------


class Odd(nn.Module):
    """Fewer elements than ranks, an empty tensor, one that is no matrix, one in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.cube = nn.Conv2d(3, 2, 3)
        self.cube.weight.data = self.cube.weight.data.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.never = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return (self.scale(self.cube(x).mean((1, 2, 3)).unsqueeze(1)) * self.turned.sum()).mean()


def odd_models(rank: int, world: int) -> None:
    """Odd tensors out and back, each with an average kept beside it in the two ways it can lie."""

    def build(seed: int, orig_params: bool | None) -> TrainState:
        torch.manual_seed(seed)
        model: Any = Odd()
        if orig_params is not None:
            outside = list(model.never.parameters())
            options = {"device_id": torch.device("cpu"), "use_orig_params": orig_params}
            model.scale = FullyShardedDataParallel(model.scale, **options)
            model = FullyShardedDataParallel(model, ignored_states=outside, **options)
        average = {name: p.detach() * seed for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return TrainState(model, optimizer, extra={"ema": average})

    batch = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))

    def go(x: TrainState) -> float:
        loss = x.model(batch)
        loss.backward()
        x.optimizer.step()
        x.optimizer.zero_grad()
        return float(loss.detach())

    for orig_params in (True, False):
        source, twin, plain = build(1, None), build(1, None), build(2, None)
        flat = build(3, orig_params)
        for x in (source, twin, flat):
            go(x)
        move(source, flat)
        move(flat, plain)
        for (name, a), b in zip(
            plain.model.named_parameters(), twin.model.parameters(), strict=True
        ):
            assert torch.equal(a, b), name
            assert torch.equal(plain.extra["ema"][name], twin.extra["ema"][name]), name
            state = plain.optimizer.state.get(a, {}), twin.optimizer.state.get(b, {})
            if name != "empty":
                assert state[0].keys() == state[1].keys(), name
            for slot in ("exp_avg", "exp_avg_sq") if state[1] else ():
                assert torch.equal(state[0][slot], state[1][slot]), (name, slot)
        assert go(plain) == go(twin)
        assert abs(go(flat) - go(source)) < 1e-5


def strange_mixtures(rank: int, world: int) -> None:
    """What flats do not tell is refused with its name; what the user keeps has to have a known shape."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    adapter = Fsdp1Adapter()
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}

    def state(beside: nn.Module, **more: Any) -> TrainState:
        inner = FullyShardedDataParallel(nn.Linear(4, 4), **options)
        return TrainState(nn.ModuleDict({"unit": inner, "beside": beside}), **more)

    mesh = init_device_mesh("cpu", (world,))
    assert refusal(adapter.quiesce, state(fully_shard(nn.Linear(4, 4)))) >= {
        ("unsupported-parallel", "beside")
    }
    tensor = nn.Linear(4, 4, bias=False)
    tensor.weight = nn.Parameter(distribute_tensor(tensor.weight.detach(), mesh, [Shard(0)]))
    assert refusal(adapter.quiesce, state(tensor)) == {("unsupported-parallel", "beside.weight")}
    x = state(nn.Linear(2, 2), extra={"ema": {"unit.weight": torch.zeros(7)}})
    adapter.quiesce(x)
    assert refusal(adapter.describe, x) == {("unsupported-state", "unit.weight/extra:ema")}
    x = state(nn.Linear(2, 2), extra={"ema": {"unit.weight": torch.full((4, 4), 7.0)}})
    assert torch.equal(
        assemble(adapter.describe(x))[Key("unit.weight", "extra:ema")], torch.full((4, 4), 7.0)
    )
    x.optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    assert {reason for reason, _ in refusal(adapter.describe, x)} == {"foreign-parameter"}

    # A model that is offloaded needs an accelerator to run; until then it is as any other.
    linear = nn.Linear(3, 3)
    weight = linear.weight.detach().clone()
    x = TrainState(FullyShardedDataParallel(linear, cpu_offload=CPUOffload(True), **options))
    adapter.quiesce(x)
    assert torch.equal(assemble(adapter.describe(x))[Key("weight", "param")], weight)

    # torch itself fails on gaps where nothing follows them in the flat.
    gaps = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(8, 8))
    gaps[0].weight = nn.Parameter(torch.zeros(4, 8)[:, ::2])
    strided = TrainState(FullyShardedDataParallel(gaps, **options))
    assert refusal(adapter.describe, strided) == {("unsupported-tensor", "0.weight")}
