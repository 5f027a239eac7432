"""What FSDP1 holds in the flat parameter of each of its units, learnt from real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynadapt.vps.probe import markers, probe
from tests.declared._models import ODD, Tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import nn

    from dynadapt.vps.layout import Row


@dataclass(frozen=True)
class Fsdp1:
    """How to wrap a model. `units`: modules wrapped before the root, inner ones first."""

    tensors: Tensors = ODD
    strategy: str = "FULL_SHARD"
    orig_params: bool = True
    units: tuple[str, ...] = ("layers.0", "layers.1", "layers")
    forward_dtype: str = "float32"
    replicas: int = 1

    def unit_of(self, name: str) -> str:
        """The innermost unit that a tensor belongs to; the root is ''."""
        inside = [unit for unit in self.units if name.startswith(f"{unit}.")]
        return max(inside, key=len, default="")

    def names(self) -> dict[str, list[str]]:
        """The tensors of each unit, in the order in which FSDP1 finds them: parents first."""
        found: dict[str, list[str]] = {}
        for name in self.tensors.shapes:
            found.setdefault(self.unit_of(name), []).append(name)
        return found


def wrapped(case: Fsdp1, model: nn.Module) -> Any:
    """A real FSDP1 model; nothing is trained."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[case.strategy],
        "use_orig_params": case.orig_params,
        "device_id": torch.device("cpu"),
        "mixed_precision": MixedPrecision(param_dtype=getattr(torch, case.forward_dtype)),
    }
    if "HYBRID" in case.strategy:
        shape = (case.replicas, dist.get_world_size() // case.replicas)
        options["device_mesh"] = init_device_mesh(
            "cpu", shape, mesh_dim_names=("replicate", "shard")
        )
    for unit in case.units:
        path, _, leaf = unit.rpartition(".")
        inner = FullyShardedDataParallel(model.get_submodule(unit), **options)
        model.get_submodule(path).register_module(leaf, inner)
    return FullyShardedDataParallel(model, **options)


def observe_fsdp1(
    rank: int, world: int, case: Fsdp1
) -> tuple[tuple[Row, ...], tuple[tuple[Any, Any], ...]]:
    """This rank's rows, a buffer being named after the unit, and (key, box) that the adapter says."""
    from dynadapt.adapters.live.fsdp1 import Fsdp1Adapter
    from dynadapt.protocols import TrainState

    models: list[Any] = []

    def load(values: Mapping[str, NDArray[Any]]) -> Any:
        models.append(wrapped(case, case.tensors.module(values)))
        return models[-1]

    rows = probe(markers(case.tensors.shapes), load, read_units)
    adapter, state = Fsdp1Adapter(), TrainState(models[-1])
    adapter.quiesce(state)
    described = adapter.describe(state).rows
    return rows, tuple((row.key, row.box) for row in described)


def read_units(model: Any) -> dict[str, NDArray[Any]]:
    """The local flat parameter of each unit, by the unit's name."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from dynadapt.vps.keys import canonical_name

    found = {}
    for raw, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flat = module._handle.flat_param
            name = canonical_name(f"{raw}.").removesuffix(".")
            found[name] = flat.detach().numpy()
    return found
