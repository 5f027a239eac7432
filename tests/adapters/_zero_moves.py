"""What a DeepSpeed engine describes, and a move from one to another by logical coordinates alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.adapters import _zero_engines as zero

if TYPE_CHECKING:
    from tests.adapters._zero_engines import Setup


def check_described(setup: Setup, steps: int = 2) -> list[str]:
    """What a trained engine describes, after an eval forward, against DeepSpeed's own gathers."""
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    adapter, engine = DeepSpeedZeroAdapter(), zero.engine_of(setup)
    zero.train(engine, 0, steps)
    zero.evaluate(engine)
    state = TrainState(engine, local=("blocks.1.scale",))
    adapter.quiesce(state)
    described = adapter.describe(state)
    full = zero.full_state(described)
    expected = zero.gathered(engine)
    assert sorted(full) == sorted(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(full[key], value, str(key))
    _check_specs(setup, described)
    return sorted({slot for _, slot in full})


def _check_specs(setup: Setup, described: Any) -> None:
    specs = {str(spec.key): spec for spec in described.specs}
    assert len(specs) == len(described.specs)
    flat = setup.zero.get("stage", 3) > 0 or setup.fused
    assert described.flat_step == flat
    embed = specs["embed.weight/param"]
    assert embed.aliases == (("head.weight",) if setup.tied else ())
    assert embed.shape == (zero.VOCABULARY, setup.hidden)
    assert embed.group == (1 if setup.groups == "reversed" else 0)
    assert specs["blocks.0.up.weight/param"].trainable is not setup.frozen
    assert specs["count/buffer"].kind == "buffer"
    assert specs["mask/buffer"].kind == "transient"
    assert specs["blocks.1.scale/param"].local
    assert not specs["blocks.0.scale/param"].local
    for spec in described.specs:
        assert spec.derived == (spec.key.slot == "compute"), spec.key
        assert (spec.kind == "state") == (spec.key.slot not in {"param", "compute", "buffer"})


def move(
    setup: Setup, other: Setup, stepped: int = 0, same: bool = False
) -> tuple[list[float], list[float]]:
    """Train, move by logical coordinates into another engine, train both on: both losses."""
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    adapter = DeepSpeedZeroAdapter()
    source, target = zero.engine_of(setup), zero.engine_of(other)
    first = 3 * setup.accumulate
    zero.train(source, 0, first, same)
    if stepped:
        zero.train(target, 100, stepped, same)
    # After these, both keep gathered weights that would hide what is written to their pieces.
    zero.evaluate(source)
    zero.evaluate(target)
    states = TrainState(source), TrainState(target)
    for state in states:
        adapter.quiesce(state)
    described = adapter.describe(states[0])
    full = zero.full_state(described)
    before = {tuple(s.key) for s in adapter.describe(states[1]).specs if s.presence == "present"}
    prepared = adapter.prepare(states[1], described.specs)
    assert bool(prepared.allocated) == any(
        s.kind == "state" and s.presence == "present" and tuple(s.key) not in before
        for s in prepared.specs
    )
    zero.write_rows(prepared, full)
    aux = {item.path: item for item in described.aux}
    voted: list[None] = []
    outcomes = adapter.finish(
        states[1], described.specs, described.scalars, aux, lambda: voted.append(None)
    )
    assert {outcome.kind for outcome in outcomes} == {"exact"}, outcomes
    gathers = target.zero_optimization_stage() in {1, 2}
    assert len(voted) == gathers  # where nothing is communicated, nothing has to be agreed on
    _check_equal_state(adapter.describe(states[1]), described, full)
    if target.zero_optimization_stage() == 3:
        _check_copies(target)
    for group in target.optimizer.param_groups:
        # Offloaded masters keep their last gradient, and are stepped with it where there is no new one.
        assert not any(param.grad.any() for param in group["params"] if param.grad is not None)
    return _goes_on(source, first, same), _goes_on(target, first, same)


def _goes_on(engine: Any, first: int, same: bool) -> list[float]:
    return [zero.evaluate(engine), *zero.train(engine, first, first, same)]


def _check_copies(engine: Any) -> None:
    """No parameter is whole, so the next forward gathers all; padding and old gradients are zero."""
    import torch
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    from dynadapt.adapters.live._deepspeed_zero3 import Zero3

    view = Zero3(engine)
    for share in view.shares:
        param: Any = share.named.tensor
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        padded = [share.partition]
        if share.unit >= 0:
            padded = [view.masters[share.unit], *view.slots(share.unit).values()]
        assert not any(torch.any(share.padding(flat)) for flat in padded)
    assert not torch.any(view.optimizer.grad_partitions_flat_buffer)


def _check_equal_state(written: Any, described: Any, full: Any) -> None:
    """The target says what the source said: tensors, scalars, hyperparameters."""
    moved = {tuple(spec.key) for spec in described.specs if spec.kind != "transient"}
    found = zero.full_state(written)
    for key in moved & found.keys():
        np.testing.assert_array_equal(found[key], full[key], str(key))
    assert written.scalars == described.scalars
    groups = [
        {name: group["hyper"] for group in one.value for name in group["names"]}
        for each in (written, described)
        for one in each.aux
        if one.path == "param_groups"
    ]
    assert groups[0] == groups[1]
    for path in ("counters", "scheduler", "scaler"):
        items = [
            [_ungrouped(i.value) for i in each.aux if i.path == path]
            for each in (written, described)
        ]
        assert items[0] == items[1]


def _ungrouped(value: Any) -> Any:
    """A scheduler's rates without the order of the param groups, which differs between the sides."""
    if isinstance(value, dict):
        return {key: _ungrouped(part) for key, part in value.items()}
    return sorted(value) if isinstance(value, list) else value


def moves(
    rank: int, world_size: int, cases: dict[str, tuple[Setup, Setup]], stepped: int
) -> dict[str, tuple[list[float], list[float]]]:
    """`move` of every case, by its name."""
    return {name: move(source, target, stepped) for name, (source, target) in cases.items()}
