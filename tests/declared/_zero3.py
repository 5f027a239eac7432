"""What DeepSpeed's ZeRO-3 holds: learnt from marks, and as the adapter describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynadapt.vps.probe import markers, probe
from tests.declared._zero import Zero, engine_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from dynadapt.vps.layout import Row


@dataclass(frozen=True)
class Zero3(Zero):
    """`sub_group_size` is DeepSpeed's, in elements of one rank."""

    stage: int = 3
    sub_group_size: int | None = None

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        found["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        if self.sub_group_size is not None:
            found["zero_optimization"]["sub_group_size"] = self.sub_group_size
        return found


def observe_zero3(
    rank: int, world: int, case: Zero3
) -> tuple[list[list[str]], tuple[Row, ...], tuple[Row, ...]]:
    """Names of each sub-group, rows learnt from marks, and rows that the adapter describes."""
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    engines: list[Any] = []

    def load(values: Mapping[str, NDArray[Any]]) -> Any:
        engines.append(engine_of(case, case.tensors.module(values)))
        return engines[-1]

    rows = probe(markers(case.tensors.shapes, case.dtype), load, read_sub_groups)
    engine = engines[-1]
    names = {id(param): name for name, param in engine.module.named_parameters()}
    groups = [[names[id(p)] for p in group] for group in engine.optimizer.fp16_groups]
    adapter = DeepSpeedZeroAdapter()
    state = TrainState(engine)
    adapter.quiesce(state)
    described = adapter.describe(state)
    return groups, rows, tuple(row for row in described.rows if row.key.slot == "param")


def read_sub_groups(engine: Any) -> dict[str, NDArray[Any]]:
    """The flat masters of the sub-groups, and the pieces of what no optimizer has."""
    optimizer = engine.optimizer
    optimized = {id(param) for group in optimizer.fp16_groups for param in group}
    found = {
        str(number): flat.detach().numpy()
        for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat)
    }
    for name, param in engine.module.named_parameters():
        if id(param) not in optimized:
            found[name] = param.ds_tensor.detach().float().numpy()
    return found
