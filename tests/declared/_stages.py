"""What pipeline stages hold: DeepSpeed's `PipelineModule` under ZeRO-1, and torch's pipelining."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dynadapt.vps.probe import markers, probe
from tests.declared._torch import read_locals
from tests.declared._zero import read_flats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from dynadapt.vps.layout import Row

#: Widths between the layers of a pipeline; layer `i` is a linear from width `i` to the next.
WIDTHS = (3, 5, 4, 7, 6, 2)


@dataclass(frozen=True)
class Pipe:
    """`stages` of a DeepSpeed pipeline; the rest of the world is data parallel. `zero` is its stage."""

    stages: int
    method: str = "uniform"
    dtype: str = "float32"
    zero: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)


def pipe_shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of all layers, named as `PipelineModule` names them: by the layer's number."""
    found: dict[str, tuple[int, ...]] = {}
    for number, (wide, out) in enumerate(itertools.pairwise(WIDTHS)):
        found |= {f"{number}.weight": (out, wide), f"{number}.bias": (out,)}
    return found


def observe_pipe(rank: int, world: int, case: Pipe) -> tuple[list[int], tuple[Row, ...]]:
    """Where the stages begin, and this rank's masters."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    parts: list[list[int]] = []

    def load(values: Mapping[str, NDArray[Any]]) -> Any:
        deepspeed.init_distributed("gloo")
        layers = [LayerSpec(nn.Linear, wide, out) for wide, out in itertools.pairwise(WIDTHS)]
        model = PipelineModule(
            layers, num_stages=case.stages, loss_fn=nn.MSELoss(), partition_method=case.method
        )
        parts.append([int(part) for part in model.parts])
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(torch.from_numpy(values[name]))
        precision = {"bf16": {"enabled": True}} if case.dtype == "bfloat16" else {}
        return deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {
                    "stage": case.zero,
                    "reduce_bucket_size": 1000,
                    "allgather_bucket_size": 1000,
                },
                **precision,
                **case.config,
            },
            dist_init_required=False,
        )[0]

    def read(engine: Any) -> dict[str, NDArray[Any]]:
        if case.zero:
            return {"param": read_flats(engine.optimizer)["param 0"]}
        return read_locals(engine.module)

    rows = probe(markers(pipe_shapes(), case.dtype), load, read)
    return parts[0], rows


class Deep(nn.Module):
    """An embedding, layers, a norm and a head: what torch's tracer cuts before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=number % 2 == 0) for number in range(4))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def deep_shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of a `Deep` by name."""
    return {name: tuple(param.shape) for name, param in Deep().named_parameters()}


def observe_traced(rank: int, world: int, cuts: tuple[int, ...], fully: bool) -> tuple[Row, ...]:
    """What torch's `pipeline` gives a stage that begins at each of `cuts`, then data parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import SplitPoint, pipeline

    stages = len(cuts) + 1
    mesh = init_device_mesh("cpu", (stages, world // stages), mesh_dim_names=("pp", "dp"))

    def load(values: Mapping[str, NDArray[Any]]) -> nn.Module:
        model = Deep()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(torch.from_numpy(values[name]))
        spec = {f"layers.{number}": SplitPoint.BEGINNING for number in cuts}
        example = (torch.zeros(2, 3, dtype=torch.int64),)
        pipe = pipeline(model, mb_args=example, split_spec=spec)
        stage: nn.Module = pipe.get_stage_module(mesh.get_local_rank("pp"))
        return fully_shard(stage, mesh=mesh["dp"]) if fully else stage

    return probe(markers(deep_shapes()), load, read_locals)
