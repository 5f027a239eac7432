"""What DeepSpeed's ZeRO-1, ZeRO-2 and BF16_Optimizer hold, learnt from real engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynadapt.vps.probe import markers, probe
from tests import _ranks
from tests.declared._models import ODD, Tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import nn

    from dynadapt.vps.layout import Row


@dataclass(frozen=True)
class Zero:
    """How to build an engine. `groups`: so many param groups deal the tensors among them.

    `decay`: two groups instead, matrices and all else.
    """

    stage: int = 1
    dtype: str = "float32"
    tensors: Tensors = ODD
    groups: int = 1
    decay: bool = False
    round_robin: bool = False
    parameter_alignment: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def names(self) -> list[list[str]]:
        """The tensors of each param group; tensors that no optimizer is given are in none."""
        trained = self.tensors.trained
        if self.decay:
            flat = [name for name in trained if len(self.tensors.shapes[name]) < 2]
            return [[name for name in trained if name not in flat], flat]
        return [trained[number :: self.groups] for number in range(self.groups)]

    def settings(self) -> dict[str, Any]:
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(self.dtype)
        return {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": 1000,  # the usual ones take gigabytes
                "allgather_bucket_size": 1000,
                "round_robin_gradients": self.round_robin,
                "parameter_alignment": self.parameter_alignment,
            },
            "zero_allow_untested_optimizer": True,
            **({precision: {"enabled": True}} if precision else {}),
            **self.config,
        }


def engine_of(case: Zero, model: nn.Module) -> Any:
    """A real engine; nothing is trained."""
    import deepspeed
    import torch

    groups: list[dict[str, Any]] = [
        # Frozen tensors are given to the optimizer too, as many scripts do.
        {"params": [model.get_parameter(name) for name in names]}
        for names in case.names()
    ]
    groups[0]["params"] += [model.get_parameter(name) for name in case.tensors.frozen]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config=case.settings(), dist_init_required=False
    )[0]


def observe_zero(rank: int, world: int, case: Zero) -> tuple[str, tuple[Row, ...], tuple[Row, ...]]:
    """The wrapper's class, this rank's rows learnt from marks, and those that the adapter describes.

    Masters are `param`, what a forward uses is `compute`.
    """
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.protocols import TrainState

    engines: list[Any] = []

    def load(values: Mapping[str, NDArray[Any]]) -> Any:
        if case.dtype == "float16":
            _ranks.allow_fp16()
        engines.append(engine_of(case, case.tensors.module(values)))
        return engines[-1]

    def read(engine: Any) -> dict[str, NDArray[Any]]:
        left = {name: engine.module.get_parameter(name) for name in case.tensors.frozen}
        alone = {name: param.detach().float().numpy() for name, param in left.items()}
        return {**read_flats(engine.optimizer), **alone}

    marks = markers(case.tensors.shapes, case.dtype)
    slots = {f"{s} {i}": s for i in range(len(case.names())) for s in ("param", "compute")}
    rows = probe(marks, load, read, slots | dict.fromkeys(case.tensors.frozen, "param"))
    described = DeepSpeedZeroAdapter().describe(TrainState(engines[-1]))
    return type(engines[-1].optimizer).__name__, rows, described.rows


def read_flats(optimizer: Any) -> dict[str, NDArray[Any]]:
    """The flat buffers of one optimizer, by slot and number of the param group."""
    if type(optimizer).__name__ == "BF16_Optimizer":
        masters, weights = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups_flat
    else:
        masters, weights = optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups_flat
    flats = {"param": masters, "compute": weights}
    return {
        f"{slot} {number}": flat.detach().float().numpy()
        for slot, found in flats.items()
        for number, flat in enumerate(found)
    }
