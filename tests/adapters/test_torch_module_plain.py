"""The torch_module adapter in one process: names, states, refusals, and taking things back."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dynadapt.adapters.live.torch_module import TorchModuleAdapter
from dynadapt.errors import Refused
from dynadapt.protocols import Described, TrainState
from dynadapt.registry import adapter_for
from dynadapt.vps.keys import Key, KeySpec

if TYPE_CHECKING:
    from collections.abc import Callable

ADAPTER = TorchModuleAdapter()
MakeOptimizer = type[torch.optim.Optimizer]


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def step(state: TrainState, times: int = 1) -> None:
    for _ in range(times):
        state.model(torch.ones(2, 3)).square().sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()


def adamw(model: nn.Module, **more: Any) -> TrainState:
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1, **more))


def presences(described: Described, name: str) -> dict[str, str]:
    return {s.key.slot: s.presence for s in described.specs if s.key.name == name}


def fill(source: Described, prepared: Described) -> None:
    """Copy rows of one process to rows of another."""
    found = {row.key: row for row in source.rows}
    for row in prepared.rows:
        old = found[row.key]
        value = source.buffers[old.buffer].tensor()
        value = value.as_strided(old.box.shape, old.strides, old.offset)
        into = prepared.buffers[row.buffer].tensor()
        into.as_strided(row.box.shape, row.strides, row.offset).copy_(value)


def migrate(source: TrainState, target: TrainState) -> dict[str, str]:
    """Everything but the transport; what became of each aux item."""
    ADAPTER.quiesce(source)
    ADAPTER.quiesce(target)
    told = ADAPTER.describe(source)
    fill(told, ADAPTER.prepare(target, told.specs))
    aux = {item.path: item for item in told.aux}
    outcomes = ADAPTER.finish(target, told.specs, told.scalars, aux, lambda: None)
    return {outcome.path: outcome.kind for outcome in outcomes}


def refusal(call: Callable[..., object], *args: object) -> set[tuple[str, str]]:
    with pytest.raises(Refused) as caught:
        call(*args)
    assert all(finding.cause for finding in caught.value.findings)
    return {(finding.reason, finding.where) for finding in caught.value.findings}


def test_the_registry_finds_it() -> None:
    assert adapter_for(TrainState(mlp())).name == "torch_module"


# --- describe ---------------------------------------------------------------------------------


def test_states_by_presence_and_not_by_requires_grad() -> None:
    """Never touched: none. Frozen after training: kept. Frozen from the start: weights only."""
    model = mlp()
    model[2].bias.requires_grad_(False)
    state = TrainState(
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    )
    never = ADAPTER.describe(state)
    assert presences(never, "0.weight") == {
        "param": "present",
        "exp_avg": "none",
        "exp_avg_sq": "none",
    }
    assert never.scalars == {}
    step(state)
    model[0].weight.requires_grad_(False)
    after = ADAPTER.describe(state)
    assert set(presences(after, "0.weight").values()) == {"present"}
    assert presences(after, "2.bias") == {"param": "present"}
    assert after.scalars["0.weight"] == {"step": 1}
    specs = {str(spec.key): spec for spec in after.specs}
    assert not specs["0.weight/param"].trainable
    assert specs["0.weight/param"].group == 0
    assert specs["2.bias/param"].group == -1


def test_pending_gradients_do_not_hide_states() -> None:
    state = adamw(mlp())
    step(state)
    state.model(torch.ones(2, 3)).sum().backward()
    assert set(presences(ADAPTER.describe(state), "0.weight").values()) == {"present"}


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def test_wrappers_leave_no_trace_in_names() -> None:
    inner = mlp()
    plain = [spec.key for spec in ADAPTER.describe(TrainState(inner)).specs]
    wrapped = nn.Sequential(
        checkpoint_wrapper(compiled(inner[0])), nn.ReLU(), compiled(checkpoint_wrapper(inner[2]))
    )
    assert [spec.key for spec in ADAPTER.describe(TrainState(wrapped)).specs] == plain


def test_tied_parameters_are_described_once() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    described = ADAPTER.describe(adamw(model))
    assert {(s.key.name, s.aliases) for s in described.specs} == {
        ("embed.weight", ("head.weight",))
    }
    assert [row.key for row in described.rows] == [Key("embed.weight", "param")]


class Odd(nn.Module):
    """A scalar, a tensor of no elements, a transposed one, and buffers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("table", torch.ones(2, dtype=torch.int64), persistent=False)
        self.register_buffer("same", self.mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scalar * (x[:, :1] + self.turned.sum() + self.empty.sum())


def test_odd_shapes_strides_and_buffers() -> None:
    source, target = adamw(Odd()), adamw(Odd())
    step(source)
    told = ADAPTER.describe(source)
    kinds = {str(s.key): (s.kind, s.shape, s.aliases) for s in told.specs if s.kind != "state"}
    assert kinds["mean/buffer"] == ("buffer", (4,), ("same",))
    assert kinds["table/buffer"] == ("transient", (2,), ())
    assert kinds["empty/param"][1] == (0, 4)
    assert "empty/param" not in {str(row.key) for row in told.rows}
    assert {str(s.key) for s in told.specs if s.key.name == "scalar"} == {
        "scalar/param", "scalar/exp_avg", "scalar/exp_avg_sq",
    }  # fmt: skip
    migrate(source, target)
    step(source)
    step(target)
    for mine, its in zip(source.model.parameters(), target.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert torch.equal(
        source.optimizer.state[source.model.scalar]["exp_avg_sq"],
        target.optimizer.state[target.model.scalar]["exp_avg_sq"],
    )


def test_extra_tensors_and_local_names() -> None:
    model = mlp()
    average = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    state = TrainState(model, extra={"ema": average}, local=("0.*",))
    specs = {str(spec.key): spec for spec in ADAPTER.describe(state).specs}
    assert specs["2.weight/extra:ema"].kind == "state"
    assert specs["0.weight/extra:ema"].local
    assert not specs["2.weight/param"].local
    told = ADAPTER.describe(state)
    outcomes = ADAPTER.finish(TrainState(mlp()), told.specs, {}, {}, lambda: None)
    assert [o.path for o in outcomes] == ["optimizer", "extra:ema"][1:]


def test_an_optimizer_made_before_sharding_is_refused() -> None:
    state = TrainState(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1))
    assert {reason for reason, _ in refusal(ADAPTER.describe, state)} == {"foreign-parameter"}


def test_states_that_are_no_tensors_are_refused() -> None:
    model = mlp()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state.optimizer.state[model[0].bias]["history"] = [1, 2]
    assert refusal(ADAPTER.describe, state) == {("unsupported-state", "0.bias/history")}


# --- quiesce ----------------------------------------------------------------------------------


def test_a_gradient_that_holds_a_value_is_refused() -> None:
    state = adamw(mlp())
    state.model(torch.ones(2, 3)).sum().backward()
    where = {name for name, p in state.model.named_parameters() if p.grad.count_nonzero()}
    assert refusal(ADAPTER.quiesce, state) == {("mid-step", name) for name in where}
    state.optimizer.zero_grad(set_to_none=False)
    ADAPTER.quiesce(state)
    state.model[0].bias.grad.fill_(float("nan"))
    assert refusal(ADAPTER.quiesce, state) == {("mid-step", "0.bias")}


# --- prepare and abandon ----------------------------------------------------------------------

OPTIMIZERS: list[tuple[MakeOptimizer, dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_made_states_are_those_of_a_first_step(
    kind: MakeOptimizer, options: dict[str, Any], default: torch.dtype
) -> None:
    """Same entries in the same order and of the same kind; the next steps are bit-identical."""
    torch.set_default_dtype(default)
    try:
        source, target = (
            TrainState(model, kind(model.parameters(), lr=0.01, **options))
            for model in (mlp(1).float(), mlp(2).float())
        )
        for each in (source, target):
            each.model.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        step(source, 3)
        migrate(source, target)
        for mine, its in zip(source.model.parameters(), target.model.parameters(), strict=True):
            old, new = source.optimizer.state.get(mine, {}), target.optimizer.state.get(its, {})
            assert list(old) == list(new)
            for label, value in old.items():
                assert (value.dtype, value.shape) == (new[label].dtype, new[label].shape), label
                assert torch.equal(value, new[label])
        step(source, 2)
        step(target, 2)
        for mine, its in zip(source.model.parameters(), target.model.parameters(), strict=True):
            assert torch.equal(mine, its)
    finally:
        torch.set_default_dtype(torch.float32)


def test_abandon_leaves_a_fresh_optimizer_fresh() -> None:
    source, target = adamw(mlp()), adamw(mlp(1))
    step(source)
    before = deepcopy(target.optimizer.state_dict())
    prepared = ADAPTER.prepare(target, ADAPTER.describe(source).specs)
    assert prepared.allocated == 2 * 4 * (12 + 4 + 8 + 2) + 4 * 4
    assert len(target.optimizer.state) == 4
    ADAPTER.abandon(target)
    assert not target.optimizer.state
    assert target.optimizer.state_dict() == before
    ADAPTER.abandon(target)
    step(target)


def test_stale_states_are_dropped_and_put_back() -> None:
    """The source never touched a parameter that the target did."""
    source, target = adamw(mlp()), adamw(mlp(1))
    source.model[0].requires_grad_(False)
    step(source)
    step(target)
    bias = target.model[0].bias
    stale = target.optimizer.state[bias]["exp_avg"]
    prepared = ADAPTER.prepare(target, ADAPTER.describe(source).specs)
    assert bias not in target.optimizer.state
    assert prepared.allocated == 0
    assert presences(prepared, "0.bias")["exp_avg"] == "none"
    ADAPTER.abandon(target)
    assert target.optimizer.state[bias]["exp_avg"] is stale


def test_absence_where_the_optimizer_cannot_say_it() -> None:
    """Adagrad steps only on states it made when built; what the source lacks is as new."""
    source, target = (
        TrainState(m, torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.5))
        for m in (mlp(), mlp(1))
    )
    del source.optimizer.state[source.model[0].bias]
    step(target)
    ADAPTER.prepare(target, ADAPTER.describe(source).specs)
    fresh = target.optimizer.state[target.model[0].bias]
    assert fresh["step"] == 0
    assert torch.equal(fresh["sum"], torch.full((4,), 0.5))


def test_states_of_another_shape_are_left_to_the_match() -> None:
    """What one side lacks is neither made up nor refused here: the keys of both sides say it."""
    plain, more = adamw(mlp()), adamw(mlp(), amsgrad=True)
    step(plain)
    step(more)
    slots = {spec.key.slot for spec in ADAPTER.prepare(adamw(mlp()), _specs(more)).specs}
    assert slots == {"param", "exp_avg", "exp_avg_sq"}
    slots = {s.key.slot for s in ADAPTER.prepare(adamw(mlp(), amsgrad=True), _specs(plain)).specs}
    assert slots == {"param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    half = mlp()
    partial = TrainState(half, torch.optim.AdamW(half[0].parameters()))
    held = {spec.key for spec in ADAPTER.prepare(partial, _specs(plain)).specs}
    assert ("2.bias", "exp_avg") not in held
    assert ("0.bias", "exp_avg") in held


def _specs(state: TrainState) -> tuple[KeySpec, ...]:
    return ADAPTER.describe(state).specs


def test_what_the_source_cannot_fill_of_a_ghost_is_told() -> None:
    plain = adamw(mlp())
    with torch.device("meta"):
        ghost = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(2))
    assert ADAPTER.describe(TrainState(ghost)).specs
    found = refusal(ADAPTER.prepare, TrainState(ghost), ADAPTER.describe(plain).specs)
    assert {reason for reason, _ in found} == {"not-materialised"}
    buffers = {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert {name for _, name in found} == buffers
    assert ghost[0].weight.is_meta


class Mine(torch.optim.Optimizer):
    """An optimizer nobody knows, with an integer step and a factored state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                row = state.setdefault("row", torch.zeros(parameter.shape[:1]))
                row.add_(parameter.grad.reshape(len(row), -1).square().mean(1))
                scale = (1 + row.sqrt() * state["step"]).view(-1, *[1] * (parameter.ndim - 1))
                parameter.sub_(parameter.grad / scale, alpha=group["lr"])


def test_unknown_optimizers_move_but_are_not_made() -> None:
    source, target = (TrainState(m, Mine(m.parameters())) for m in (mlp(), mlp(1)))
    step(source, 3)
    specs = ADAPTER.describe(source).specs
    found = refusal(ADAPTER.prepare, target, specs)
    assert {reason for reason, _ in found} == {"unknown-optimizer"}
    step(target)
    migrate(source, target)
    assert target.optimizer.state[target.model[0].bias]["step"] == 3
    step(source)
    step(target)
    assert torch.equal(source.model[0].weight, target.model[0].weight)


def test_ties_have_to_be_the_same_on_both_sides() -> None:
    def model(tied: bool) -> nn.ModuleDict:
        made = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        if tied:
            made["head"].weight = made["embed"].weight
        return made

    import dynadapt

    for source, target in ((True, False), (False, True)):
        with pytest.raises(dynadapt.MigrationAborted) as caught:
            dynadapt.migrate(adamw(model(source)), adamw(model(target)))
        assert caught.value.reason == "tie"
        there = model(target)
        here = model(source)
        dynadapt.migrate(adamw(here), adamw(there), allow={"tie"})
        assert torch.equal(there["embed"].weight, here["embed"].weight)
        assert torch.equal(there["head"].weight, there["embed"].weight)
    dynadapt.migrate(adamw(model(True)), adamw(model(True)))


# --- finish -----------------------------------------------------------------------------------


def test_steps_of_every_kind() -> None:
    """int, (1,) and (): one logical step, in the kind that the target keeps."""
    source, target = adamw(mlp()), adamw(mlp(1))
    step(source, 2)
    kinds = [5, torch.tensor([5.0]), torch.tensor(5.0, dtype=torch.float64), 5.0]
    for parameter, kind in zip(source.model.parameters(), kinds, strict=True):
        source.optimizer.state[parameter]["step"] = kind
    step(target)
    held = dict(
        zip(target.model.parameters(), [1, *map(torch.zeros_like, kinds[1:3]), 1.0], strict=True)
    )
    for parameter, kind in held.items():
        target.optimizer.state[parameter]["step"] = kind
    told = ADAPTER.describe(source)
    assert {tuple(entry.items()) for entry in told.scalars.values()} == {(("step", 5),)}
    migrate(source, target)
    for parameter, kind in held.items():
        now = target.optimizer.state[parameter]["step"]
        assert type(now) is type(kind)
        assert now == 5


def test_a_state_without_a_step_is_named() -> None:
    source, target = adamw(mlp()), adamw(mlp(1))
    step(source)
    del source.optimizer.state[source.model[0].bias]["step"]
    assert refusal(migrate, source, target) == {("missing-key", "0.bias/step")}


def test_groups_schedule_scaler_counts_and_user_objects() -> None:
    def make(seed: int) -> TrainState:
        model = mlp(seed)
        groups = [
            {"params": [model[0].weight, model[2].weight], "weight_decay": 0.3, "lr": 0.2},
            {"params": [], "weight_decay": 0.7},
            {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.1 * (1 + seed))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0**seed, growth_interval=2)
        user = {"data": nn.BatchNorm1d(1)} if seed > 8 else {}
        return TrainState(
            model, optimizer, scheduler, scaler, user=user, counters={"global_steps": seed}
        )

    source, target = make(3), make(0)
    for _ in range(3):
        loss = source.model(torch.ones(2, 3)).square().sum()
        source.scaler.scale(loss).backward()
        source.scaler.step(source.optimizer)
        source.scaler.update()
        source.scheduler.step()
        source.optimizer.zero_grad()
    kinds = migrate(source, target)
    groups = [dict(g, params=0) for g in source.optimizer.param_groups]
    assert [dict(g, params=0) for g in target.optimizer.param_groups] == groups
    assert target.scheduler.state_dict() == source.scheduler.state_dict()
    assert target.scaler.state_dict() == source.scaler.state_dict()
    assert target.counters == {"global_steps": 3}
    assert {kinds[k] for k in ("scheduler", "scaler", "counters", "param_groups[1]")} == {"exact"}


def test_what_the_target_does_not_do_is_told() -> None:
    from dynadapt.protocols import AuxItem

    source = {"framework": "deepspeed", "gradient_clipping": 1.0, "loss_scaling": "dynamic",
              "gradient_accumulation_steps": 1, "precision": "float32"}  # fmt: skip
    aux = {
        "behaviour": AuxItem("behaviour", source),
        "data": AuxItem("data", {"samples": 64}),
        "scaler": AuxItem("scaler", {"class": "LossScaler", "scale": 8.0, "state": {}}),
    }
    outcomes = ADAPTER.finish(TrainState(mlp(), samples=0), (), {}, aux, lambda: None)
    assert {(o.path, o.kind) for o in outcomes} == {
        ("behaviour/gradient_clipping", "dropped"),
        ("behaviour/loss_scaling", "dropped"),
        ("data", "exact"),
        ("scaler", "dropped"),
    }


def test_zero_states_are_made_anew() -> None:
    """The source's owner keeps them, and their value is zero: nothing is sent, none is stale."""
    source, target = adamw(mlp()), adamw(mlp(1))
    step(source)
    step(target)
    stale = target.optimizer.state[target.model[0].bias]["exp_avg"]
    specs = tuple(
        replace(s, presence="zero") if s.key.name == "0.bias" and s.kind == "state" else s
        for s in ADAPTER.describe(source).specs
    )
    prepared = ADAPTER.prepare(target, specs)
    state = target.optimizer.state[target.model[0].bias]
    assert not state["exp_avg"].any()
    assert not state["exp_avg_sq"].any()
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
    assert prepared.allocated == 2 * 4 * 4
    ADAPTER.abandon(target)
    assert target.optimizer.state[target.model[0].bias]["exp_avg"] is stale
