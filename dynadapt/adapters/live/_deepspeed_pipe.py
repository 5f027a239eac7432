"""DeepSpeed's pipeline modules: a stage's names and order in the whole model, and its place in the grid.

A `PipelineModule` names a layer by its number in the whole pipeline, and a tied layer by its key, on
every stage that has it. So names agree between stages as they are; only the order of all parameters has
to be told, since a stage knows but its own. Layers tied over stages are replicas under one name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepspeed.pipe import PipelineModule, TiedLayerSpec

from dynadapt.adapters._common import named_buffers, named_parameters
from dynadapt.adapters.live._deepspeed_cut import tensor_place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynadapt.adapters._common import NamedTensor

__all__ = ["buffers_of", "is_pipeline", "parameters_of", "place_of"]

_PER_LAYER = 1 << 32
"""More tensors than a layer has."""


def is_pipeline(engine: Any) -> bool:
    """Whether a rank of this engine has one stage of a model."""
    return isinstance(engine.module, PipelineModule)


def parameters_of(engine: Any) -> tuple[NamedTensor, ...]:
    """This rank's parameters; `order` sorts those of all stages as one module of all layers would."""
    return tuple(_ordered(engine, named_parameters(engine.module)))


def buffers_of(engine: Any) -> tuple[NamedTensor, ...]:
    """This rank's buffers, likewise."""
    return tuple(_ordered(engine, named_buffers(engine.module)))


def _ordered(engine: Any, named: Sequence[NamedTensor]) -> Iterator[NamedTensor]:
    if not is_pipeline(engine):
        yield from named
        return
    specs = engine.module._layer_specs
    tied = list(dict.fromkeys(spec.key for spec in specs if isinstance(spec, TiedLayerSpec)))
    for each in named:
        first, _, rest = each.name.partition(".")
        place = 0  # a loss function with parameters
        if first == "tied_modules":
            place = 1 + tied.index(rest.partition(".")[0])
        elif first.isdigit():
            place = 1 + len(tied) + int(first)
        yield replace(each, order=place * _PER_LAYER + each.order)


def place_of(engine: Any, dp: int) -> dict[str, int]:
    """This rank's place by role; `dp` is its number among the ranks that the state is cut over."""
    if is_pipeline(engine):
        grid = engine.module.mpu()
        return {
            "dp": int(grid.get_data_parallel_id()),
            "tp": int(grid.get_slice_parallel_rank()),
            "pp": int(grid.get_stage_id()),
        }
    tp, size = tensor_place(engine)
    return {"dp": dp, "tp": tp} if size > 1 else {"dp": dp}
