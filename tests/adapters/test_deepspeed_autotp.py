"""AutoTP under ZeRO as source and target: even, uneven and fused cuts, and what cannot be told.

The gathers of DeepSpeed's own layers are the judge, and twins that are never migrated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.declared import _worlds

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Setup:
    """How to build an engine: a tiny model of transformers (`tests.declared._hf`), or `fused`.

    `tp` 0: without tensor parallelism. `fused` has one matrix of three unequal parts, cut part by part.
    """

    model: str = "llama"
    tp: int = 2
    stage: int = 1
    dtype: str = "bf16"
    seed: int = 0
    clip: float = 0.0
    plan: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


FUSED: Mapping[str, Any] = {
    "layer_specs": [
        {
            "patterns": [r"^qkv\.weight$"],
            "partition_type": "column",
            "shape": [[8, 4, 4], -1],
            "partition_dim": 0,
        },
        {"patterns": [r"^out\.weight$"], "partition_type": "row"},
    ]
}


def model_of(setup: Setup) -> Any:
    """A model with the weights of a seed."""
    import torch
    from torch import nn

    from tests.declared._hf import model_of as hf

    class Fused(nn.Module):
        """Attention without softmax: what counts is which rows are whose."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.qkv = nn.Linear(6, 16)
            self.out = nn.Linear(8, 6)
            self.head = nn.Linear(6, 11, bias=False)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            fused = self.qkv(self.embed(input_ids))
            width = fused.shape[-1] // 4
            q, k, v = fused.split([2 * width, width, width], dim=-1)
            x = self.out(q * torch.cat([k, v], dim=-1).tanh())
            loss = nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())
            return {"loss": loss}

    torch.manual_seed(setup.seed)
    return Fused() if setup.model == "fused" else hf(setup.model)


def engine_of(setup: Setup) -> Any:
    """A real engine, built beside whatever there is."""
    import deepspeed
    import torch

    from dynadapt.adapters.live.deepspeed_zero import beside
    from tests import _ranks
    from tests.adapters._pipe_engines import PRECISIONS

    if setup.dtype == "fp16":
        _ranks.allow_fp16()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": setup.clip,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": setup.stage,
            "reduce_bucket_size": 1000,
            "allgather_bucket_size": 1000,
            "stage3_param_persistence_threshold": 0,
        },
        **PRECISIONS[setup.dtype],
        **setup.config,
    }
    if setup.tp:
        cut: dict[str, Any] = {"autotp_size": setup.tp}
        if setup.plan is not None:
            cut["partition_config"] = setup.plan
        config["tensor_parallel"] = cut
    model = model_of(setup)
    with beside():
        return deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
            config=config,
        )[0]


def train(engine: Any, step: int) -> float:
    """One step; ranks that share tensors get the same batch."""
    import torch
    from deepspeed import comm

    from dynadapt.adapters.live.deepspeed_zero import put_in_force

    put_in_force(engine)
    place = comm.get_rank(group=engine.data_parallel_group)
    generator = torch.Generator().manual_seed(1000 * step + place)
    tokens = torch.randint(11, (2, 5), generator=generator)
    loss = engine(input_ids=tokens, labels=tokens)["loss"]
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def tensors(engine: Any) -> dict[tuple[str, str], Any]:
    """Everything whole, on every rank, by DeepSpeed's gathers."""
    from tests._deepspeed_gathers import gathered_below_3, joined_tensors

    return joined_tensors(engine, gathered_below_3(engine, engine.data_parallel_group))


WHOLE = Setup(tp=0)

CASES: Mapping[str, tuple[Setup, list[Setup]]] = {
    "zero1, through ZeRO-3 and other widths": (
        Setup("llama odd", clip=0.5),
        [replace(WHOLE, model="llama odd", stage=3), Setup("llama odd", tp=4, stage=2)],
    ),
    "zero2, tied head by vocabulary, through ZeRO-3 over it": (
        Setup("llama tied", stage=2),
        [Setup("llama tied", tp=4), Setup("llama tied", stage=3)],
    ),
    "fused parts, fp32": (
        Setup("fused", dtype="fp32", plan=FUSED),
        [
            replace(WHOLE, model="fused", dtype="fp32"),
            Setup("fused", dtype="fp32", plan=FUSED, tp=4),
        ],
    ),
}
MORE: Mapping[str, tuple[Setup, list[Setup]]] = {
    "uneven, four ranks share": (Setup("llama odd", tp=4), [Setup("llama odd", tp=2, stage=0)]),
    "without ZeRO, bf16": (Setup(stage=0), [Setup(stage=2)]),
    "without ZeRO, fp32": (
        Setup("llama odd", tp=4, stage=0, dtype="fp32"),
        [Setup("llama odd", dtype="fp32")],
    ),
    "BF16_Optimizer": (
        Setup("llama tied", config={"data_types": {"grad_accum_dtype": "fp32"}}),
        [Setup("llama tied", stage=2)],
    ),
    "fp16": (Setup(dtype="fp16", stage=2), [replace(WHOLE, dtype="fp16", stage=1)]),
}


def _there_and_back(rank: int, world: int, cases: Mapping[str, Any]) -> list[dict[str, Any]]:
    import dynadapt
    from tests.adapters._pipe_engines import differing

    found = []
    for name, (setup, between) in cases.items():
        job, twin = engine_of(setup), engine_of(setup)
        for step in range(2):
            assert train(job, step) == train(twin, step), name
        expected, wrong, reports = tensors(twin), [], []
        for hop in (*between, setup):
            target = engine_of(replace(hop, seed=5))
            reports.append(dynadapt.migrate(job, target, timeout=60))
            job = target
            if hop.stage < 3:
                now = tensors(job)
                wrong += differing(
                    {key: full for key, full in now.items() if key[1] != "compute"},
                    {key: full for key, full in expected.items() if key[1] != "compute"},
                )
        losses = [(train(job, step), train(twin, step)) for step in (2, 3)]
        found.append(
            {
                "name": name,
                "moved": [(each.bytes_moved, each.bytes_minimum) for each in reports],
                "equal": [e.fingerprint_source == e.fingerprint_target for e in reports],
                "coordinate": reports[0].source["coordinates"][str(rank)],
                "losses": losses,
                "differing": [*wrong, *differing(tensors(job), tensors(twin))],
            }
        )
    return found


def _check(answers: list[list[dict[str, Any]]]) -> None:
    for answer in (answer for rank in answers for answer in rank):
        name = answer["name"]
        assert all(moved == minimum for moved, minimum in answer["moved"]), answer
        assert all(answer["equal"]), name
        assert answer["differing"] == [], (name, answer["differing"])
        assert all(one == two for one, two in answer["losses"]), (name, answer["losses"])


def test_there_and_back() -> None:
    answers = _worlds.run(4, _there_and_back, CASES)
    _check(answers)
    assert [answer[0]["coordinate"] for answer in answers] == [
        {"dp": 0, "tp": 0},
        {"dp": 0, "tp": 1},
        {"dp": 1, "tp": 0},
        {"dp": 1, "tp": 1},
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(MORE))
def test_there_and_back_in_other_settings(name: str) -> None:
    _check(_worlds.run(4, _there_and_back, {name: MORE[name]}))


def _refusals(rank: int, world: int) -> list[tuple[str, str, str]]:
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    from dynadapt import TrainState
    from dynadapt.adapters.live.deepspeed_zero import DeepSpeedZeroAdapter
    from dynadapt.errors import Refused

    engine = engine_of(Setup())
    layer = engine.module.model.layers[0]
    for param in (layer.self_attn.q_proj.weight, layer.mlp.down_proj.weight):
        note = getattr(param, DS_AUTOTP_UC_META)
        note["conversion"] = {"unsupported_reason": "its rows are shuffled"}
    try:
        DeepSpeedZeroAdapter().describe(TrainState(engine))
    except Refused as refused:
        return [(f.reason, f.where, f.cause) for f in refused.findings]
    return []


def test_cuts_that_autotp_cannot_describe_are_refused_by_name() -> None:
    cause = "AutoTP cuts it in a way that is not known: its rows are shuffled"
    names = ("self_attn.q_proj", "mlp.down_proj")
    expected = [("unsupported-parallel", f"model.layers.0.{n}.weight", cause) for n in names]
    assert _worlds.run(4, _refusals) == [expected] * 4


def _beside(rank: int, world: int) -> list[str]:
    """DeepSpeed takes the groups of the engine before, and then fails; `beside` makes room."""
    import deepspeed
    import torch
    from torch import nn

    from dynadapt.adapters.live.deepspeed_zero import beside, put_in_force

    def build() -> Any:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        config = {"train_micro_batch_size_per_gpu": 2}
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    engine = engine_of(Setup())
    put_in_force(engine)
    error = _worlds.error_of(rank, world, lambda *_: build())
    with beside():
        plain = build()
    return [error.partition(":")[0], str(plain.dp_world_size), str(engine.dp_world_size)]


def test_an_engine_of_another_layout_is_built_beside() -> None:
    assert _worlds.run(4, _beside) == [["AttributeError", "4", "2"]] * 4
