"""What a user holds of a source that has moved is named, and nothing of a framework's own is."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from dynadapt.elastic import held
from dynadapt.elastic.held import points_at_source
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool

KEPT: dict[str, Any] = {}
"""A user's global."""


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _state(seed: int) -> dynadapt.TrainState:
    model = _model(seed)
    return dynadapt.TrainState(model, torch.optim.AdamW(model.parameters()))


@pytest.fixture(autouse=True)
def _clean() -> Any:
    KEPT.clear()
    yield
    KEPT.clear()


def _warnings(source: Any, target: Any) -> list[str]:
    report = dynadapt.migrate(source, target)
    found = [w for w in report.warnings if w.reason == "points-at-source"]
    assert all(w.fix for w in found)
    return [w.where for w in found]


def _log(*_: Any) -> None:
    """A user's hook."""


class Average:
    """A user's own EMA, which reads the old parameters at every update."""

    def __init__(self, model: nn.Module) -> None:
        self.sources = list(model.parameters())
        self.values = [p.detach().clone() for p in self.sources]


def test_nothing_held_nothing_told() -> None:
    """The states themselves, their models, optimizers and schedulers are no news."""
    source, target = _state(0), _state(1)
    model, optimizer = source.model, source.optimizer
    source.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
    target.scheduler = torch.optim.lr_scheduler.LambdaLR(target.optimizer, lambda n: 0.5**n)
    assert _warnings(source, target) == []
    assert model is source.model


def test_hooks() -> None:
    """Of modules and parameters; those that the target has, too, are in order."""
    source, target = _state(0), _state(1)
    source.model[0].register_forward_hook(_log)
    source.model[2].register_full_backward_hook(functools.partial(_log, 1))
    source.model[2].bias.register_post_accumulate_grad_hook(_log)
    source.model[2].weight.register_hook(lambda gradient: gradient)
    source.model[1].register_forward_pre_hook(_log)
    target.model[1].register_forward_pre_hook(_log)
    assert _warnings(source, target) == [
        "forward hook _log on module '0'",
        "backward hook _log on module '2'",
        "gradient hook <lambda> on parameter '2.weight'",
        "post-accumulate-grad hook _log on parameter '2.bias'",
    ]


def test_containers_closures_and_objects() -> None:
    """A list for clipping, an average, a closure: by the name under which the user keeps it."""
    source, target = _state(0), _state(1)
    clipped = list(source.model.parameters())
    KEPT["decay"] = {"heavy": tuple(clipped[:2])}
    KEPT["average"] = Average(source.model)

    def norm() -> float:
        return sum(float(p.detach().norm()) for p in clipped)

    found = _warnings(source, target)
    me = "test_containers_closures_and_objects"
    assert f"list of 4 parameters in local 'clipped' of {me}()" in found
    name = f"global 'KEPT' of module {__name__}"
    assert f"tuple of 2 parameters in {name}['decay']['heavy']" in found
    assert f"list of 4 parameters in {name}['average'].sources" in found
    assert len(found) == 3
    assert norm() > 0


def test_schedulers_optimizers_averages() -> None:
    """Found wherever they are, named where a name is known."""
    source, target = _state(0), _state(1)
    schedule = torch.optim.lr_scheduler.LambdaLR(source.optimizer, lambda n: 1.0)
    KEPT["second"] = torch.optim.SGD(source.model[0].parameters(), lr=0.1)
    KEPT["average"] = torch.optim.swa_utils.AveragedModel(source.model)
    found = _warnings(source, target)
    me = "test_schedulers_optimizers_averages"
    name = f"global 'KEPT' of module {__name__}"
    assert f"torch.optim.lr_scheduler.LambdaLR (local 'schedule' of {me}())" in found
    assert f"torch.optim.sgd.SGD ({name}['second'])" in found
    assert f"torch.optim.swa_utils.AveragedModel ({name}['average'])" in found
    assert schedule.optimizer is source.optimizer


def test_looking_keeps_nothing_alive() -> None:
    """A variable that is deleted afterwards is gone, as without dynadapt."""
    import weakref

    source, target = _state(0), _state(1)
    clipped = list(source.model.parameters())
    gone = weakref.ref(clipped[0])
    points_at_source(source, target)
    del clipped, source
    import gc

    gc.collect()
    assert gone() is None


class Changing(OrderedDict[str, Any]):
    """As it is while another thread puts something in."""

    def items(self) -> Any:
        raise RuntimeError("OrderedDict mutated during iteration")


class Turning(deque[Any]):
    """The same."""

    def __iter__(self) -> Any:
        raise RuntimeError("deque mutated during iteration")


def test_containers_that_another_thread_changes() -> None:
    """A search for warnings is not what ends a migration."""
    source, target = _state(0), _state(1)
    KEPT["changing"] = Changing(weights=list(source.model.parameters()))
    KEPT["turning"] = Turning(source.model.parameters())
    found = _warnings(source, target)
    assert (
        f"list of 4 parameters in global 'KEPT' of module {__name__}['changing']['weights']"
        in found
    )


def test_it_is_bounded() -> None:
    """A huge list of samples is not walked to its end."""
    source, target = _state(0), _state(1)
    KEPT["samples"] = [[i] for i in range(2_000_000)]
    KEPT["decay"] = list(target.model.parameters())
    KEPT["clipped"] = list(source.model.parameters())
    seen = len(points_at_source(source, target))
    assert seen == 1
    search = held._Search(source, target)
    search.walk()
    assert len(search.met) < held.MOST + held.WIDE


def _wrapped(kind: str) -> dynadapt.TrainState:
    """A source that a framework has wrapped, after a step: it keeps lists of parameters of its own."""
    if kind == "zero3":
        engine = jobs.zero3(jobs.net())
        jobs.step(engine, 0)
        return dynadapt.TrainState(engine)
    model: Any = jobs.net()
    if kind.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp1":
        model = jobs.fsdp1(model)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.up)
        fully_shard(model)
    optimizer: Any = jobs.adamw(model)
    if kind == "ddp-owners":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(jobs.groups(model), torch.optim.AdamW, lr=1e-2)
    state = dynadapt.TrainState(model, optimizer)
    model(jobs.tokens(0)).backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return state


def _false_alarms(rank: int, world: int) -> dict[str, list[str]]:
    found = {}
    for kind in ("zero3", "ddp", "ddp-owners", "fsdp1", "fsdp2"):
        source, plain = _wrapped(kind), jobs.net(seed=1)
        target = dynadapt.TrainState(plain, jobs.adamw(plain))
        found[kind] = [str(f) for f in points_at_source(source, target)]
        held = list(source.model.parameters())
        found[f"{kind} held"] = [f.where for f in points_at_source(source, target)]
        del held
    return found


def test_what_frameworks_keep_for_themselves(ranks4: Pool) -> None:
    """Reducers, engines and flat parameters are no news; the user's list beside them is."""
    for found in ranks4.run(_false_alarms):
        for kind in ("zero3", "ddp", "ddp-owners", "fsdp1", "fsdp2"):
            assert found[kind] == [], kind
            (where,) = found[f"{kind} held"]
            assert where.endswith("in local 'held' of _false_alarms()")
