"""DeepSpeed's process-wide notion of its groups: which engine's they are, and room for another engine.

An engine with a pipeline or with tensor parallelism writes its groups into globals of DeepSpeed. The
next engine that is built takes them for its own, and a pipeline looks up its neighbours there at every
batch. So while two engines live side by side, as they do in a migration, the globals have to be
those of the one that is built or run.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deepspeed.module_inject import layers
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.tensor_parallel import AUTOTP_MODE, init_utils
from deepspeed.utils import groups

from dynadapt.adapters.live._deepspeed_pipe import is_pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["beside", "known_globals", "put_in_force", "set_globals"]

_BLANK: dict[tuple[Any, str], Any] = {
    (groups, "mpu"): None,
    (groups, "mesh_device"): None,
    (groups, "_TENSOR_MODEL_PARALLEL_GROUP"): None,
    (groups, "_MODEL_PARALLEL_GROUP"): None,
    (groups, "_DATA_PARALLEL_GROUP"): None,
    (groups, "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE"): None,
    (groups, "_MPU_TENSOR_MODEL_PARALLEL_RANK"): None,
    (p2p, "_grid"): None,
    (p2p, "_groups"): None,
    (layers, "DEEPSPEED_AUTOTP_MODE"): AUTOTP_MODE.INFERENCE,
    (init_utils, "_TP_MODEL_INIT_ARGS"): None,
}
"""The globals as they are before the first engine is built."""


def known_globals() -> Mapping[tuple[Any, str], Any]:
    """The globals as they are."""
    return {(module, name): getattr(module, name) for module, name in _BLANK}


def set_globals(values: Mapping[tuple[Any, str], Any]) -> None:
    """Make the globals what `known_globals` told."""
    for (module, name), value in values.items():
        setattr(module, name, value)


@contextmanager
def beside() -> Iterator[None]:
    """Build a DeepSpeed engine of another layout next to one that trains.

    Inside, DeepSpeed knows of no groups, as before its first engine; afterwards those that it knew before
    are in force again. All ranks that build the engine enter it; nothing is communicated.

    >>> with beside():  # doctest: +SKIP
    ...     target = deepspeed.initialize(model=model, config=config)[0]
    """
    before = known_globals()
    set_globals(_BLANK)
    try:
        yield
    finally:
        set_globals(before)


def put_in_force(engine: Any) -> None:
    """Make DeepSpeed's globals those of an engine that is about to run. No communication.

    A migration does it for its target; call it to go on with one of several engines of different layouts.

    >>> put_in_force(engine)  # doctest: +SKIP
    >>> loss = engine.train_batch(batches)  # doctest: +SKIP
    """
    set_globals({**_BLANK, **dict(_own(engine))})


def _own(engine: Any) -> Iterator[tuple[tuple[Any, str], Any]]:
    yield (groups, "mpu"), engine.mpu
    yield (groups, "mesh_device"), engine.mesh_device
    if engine.mpu is groups:  # AutoTP
        shared = next(m.mp_group for m in engine.module.modules() if hasattr(m, "tp_world_size"))
        yield (groups, "_TENSOR_MODEL_PARALLEL_GROUP"), shared
        yield (groups, "_MODEL_PARALLEL_GROUP"), shared
        yield (groups, "_DATA_PARALLEL_GROUP"), engine.data_parallel_group
        yield (layers, "DEEPSPEED_AUTOTP_MODE"), AUTOTP_MODE.TRAINING
    if is_pipeline(engine):
        yield (p2p, "_grid"), engine.module.mpu()
