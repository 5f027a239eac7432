"""Pipeline stages, alone and under data parallelism, hold what is declared."""

from __future__ import annotations

import itertools

import pytest

from dynadapt.vps.declare import declare
from dynadapt.vps.model_shape import ModelShape, Named
from tests.declared import _worlds
from tests.declared._declared import PARAM, assert_same
from tests.declared._stages import (
    Pipe,
    deep_shapes,
    observe_pipe,
    observe_traced,
    pipe_shapes,
)

BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}

#: A DeepSpeed pipeline, and ranks; where nothing else is said the first stages are the longer ones.
PIPES = [
    (Pipe(2), 2),
    (Pipe(2), 4),
    (Pipe(3), 3),
    (Pipe(2, dtype="bfloat16"), 4),
    (Pipe(2, method="parameters"), 4),
    (Pipe(4), 8),
    (Pipe(2, zero=0), 4),
    (Pipe(2, dtype="bfloat16", config=BF16_OPTIMIZER), 4),
]
MORE_PIPES = [
    (Pipe(1), 3),
    (Pipe(5), 5),
    (Pipe(2), 6),
    (Pipe(3, "parameters", "bfloat16"), 6),
    (Pipe(2), 8),
]

#: Layers that torch's tracer begins a stage at, ranks, `fully_shard` or not, and the layout that this is.
TRACED = [
    ((2,), 2, False, "ddp:pp=2"),
    ((1, 3), 3, False, "ddp:pp=3,stages=1-2-1"),
    ((2,), 4, False, "ddp:pp=2,dp=2"),
    ((3,), 4, True, "fsdp2:pp=2,dp=2,stages=3-1"),
]


def check(case: Pipe, world: int) -> None:
    observed = _worlds.run(world, observe_pipe, case)
    spec = f"zero{case.zero}:pp={case.stages},dp={world // case.stages}"
    if case.method != "uniform":
        runs = [b - a for a, b in itertools.pairwise(observed[0][0])]
        spec += f",stages={'-'.join(map(str, runs))}"
    model = ModelShape.of(Named(name, shape) for name, shape in pipe_shapes().items())
    assert_same(declare(spec, model, states=PARAM), [rows for _, rows in observed])


@pytest.mark.parametrize(("case", "world"), PIPES)
def test_stages_of_deepspeed(case: Pipe, world: int) -> None:
    check(case, world)


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "world"), MORE_PIPES)
def test_stages_of_deepspeed_on_other_numbers_of_ranks(case: Pipe, world: int) -> None:
    check(case, world)


@pytest.mark.parametrize(("cuts", "world", "fully", "spec"), TRACED)
def test_stages_that_torch_traces(
    cuts: tuple[int, ...], world: int, fully: bool, spec: str
) -> None:
    observed = _worlds.run(world, observe_traced, cuts, fully)
    model = ModelShape.of(Named(name, shape) for name, shape in deep_shapes().items())
    assert_same(declare(spec, model, states=PARAM), observed)
