"""OPTSTATE B50: DeepSpeed's Muon, whose momentum lies by whole matrices in stages 1 and 2; and torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from tests import _ranks
from tests.live import jobs
from tests.live.kinds import RECIPES, EngineJob, TorchJob
from tests.live.kinds.deepspeed_parallel import PLAN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests._ranks import Pool

#: `torch_adam`, as FusedAdam takes minutes to compile; the orthogonalisation in bf16, as torch's.
CONFIG = {"lr": 1e-2, "weight_decay": 0.1, "ns_method": "standard", "torch_adam": True}

CHAINS = [
    ("zero1-fp32", "zero1-fp32"),
    ("zero1-fp32", "zero2-fp32"),
    ("zero2-bf16", "zero1rr-bf16"),
    ("zero1-fp32", "zero3-fp32"),
    ("zero3-bf16", "zero2-bf16"),
    ("zero2off-bf16", "zero1acc-bf16"),
    ("zero2-fp32", "zero0-fp32"),
    ("zero1acc-bf16", "zero0-bf16"),
]

#: Each takes three engines.
NIGHTLY = {0, 1, 5, 6, 7}


def _job(kind: str, seed: int, *, matrices: bool = False, **config: Any) -> EngineJob:
    """An engine with Muon over matrices and AdamW over the rest, or nothing but `matrices`."""
    import deepspeed

    torch.compiler.set_stance("force_eager")
    _ranks.at_reset(lambda: torch.compiler.set_stance("default"))
    name, _, dtype = kind.partition("-")
    if dtype == "fp16":
        _ranks.allow_fp16()
    stage, options, more = jobs.ENGINES[name]
    model = jobs.net(seed)
    if matrices:
        _only_matrices(model)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 1000, **options}
    if stage == 3:
        zero["reduce_scatter"] = False  # DeepSpeed refuses Muon with it
    engine = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": zero,
            "gradient_clipping": 0.0,  # by default 1.0, in ZeRO of the orthogonal steps
            "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "Muon", "params": CONFIG},
            "steps_per_print": 10**9,
            **jobs.PRECISIONS[dtype],
            **more,
            **config,
        },
        dist_init_required=False,
    )[0]
    return EngineJob(engine, RECIPES["adamw"])


def _only_matrices(model: jobs.Net) -> list[torch.nn.Parameter]:
    """What both Muons step: DeepSpeed's leaves embeddings to Adam, torch's takes no vectors."""
    for name, parameter in model.named_parameters():
        taken = parameter.ndim == 2 and not name.startswith(("embed", "frozen"))
        parameter.requires_grad_(requires_grad=taken)
    return [p for p in model.parameters() if p.requires_grad]


def _torch_job(seed: int) -> TorchJob:
    model = jobs.net(seed)
    optimizer = torch.optim.Muon(_only_matrices(model), lr=1e-2, weight_decay=0.1)
    return TorchJob(model, optimizer, RECIPES["adamw"])


def _weights(engine: Any) -> jobs.Tensors:
    """Every trained parameter whole, by DeepSpeed's gathers."""
    from deepspeed.utils import safe_get_full_fp32_param

    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    if engine.zero_optimization_stage():
        return {name: safe_get_full_fp32_param(p).clone() for name, p in named}
    return {name: p.detach().float().clone() for name, p in named}


def _there_and_back(rank: int, world: int, kind: str, other: str) -> dict[str, Any]:
    source, twin = _job(kind, 0), _job(kind, 0)
    for number in range(3):
        for job in (source, twin):
            job.step(number)
    there, back = _job(other, 1), _job(kind, 2)
    reports = []
    for a, b in ((source, there), (there, back)):
        reports.append(dynadapt.migrate(a.state, b.state, narrow="if-exact", timeout=30))
    losses = [[job.step(number) for number in (3, 4)] for job in (twin, back, there)]
    ours, theirs = _weights(back.engine), _weights(twin.engine)
    at_other = _weights(there.engine) if "rr" not in other else theirs
    return {
        "losses": losses[0] == losses[1],
        "differing": [name for name in theirs if not torch.equal(ours[name], theirs[name])],
        "gap": max(float((at_other[n] - theirs[n]).abs().max()) for n in theirs),
        "waste": sum(report.bytes_moved - report.bytes_minimum for report in reports),
    }


def _check(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer.pop("gap") < 0.05  # Muon rounds to bf16, its steps are of 1e-2
        assert answer == {"losses": True, "differing": [], "waste": 0}


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        pytest.param(*pair, marks=[pytest.mark.nightly] if number in NIGHTLY else [])
        for number, pair in enumerate(CHAINS)
    ],
)
def test_there_and_back_on_two_ranks(ranks2: Pool, kind: str, other: str) -> None:
    """The next steps of what came back are bit for bit those of an engine that never moved."""
    _check(ranks2.run(_there_and_back, kind, other, timeout=200))


@pytest.mark.parametrize(("kind", "other"), CHAINS[1:2])
def test_matrices_over_two_ranks(ranks4: Pool, kind: str, other: str) -> None:
    """Of four ranks two hold the momentum of each matrix, and padding lies at the end."""
    _check(ranks4.run(_there_and_back, kind, other, timeout=200))


def _torchs(rank: int, world: int, kind: str) -> dict[str, Any]:
    source, twin = _torch_job(0), _torch_job(0)
    for number in range(2):
        for job in (source, twin):
            job.step(number)
    engine, back = _job(kind, 1, matrices=True), _torch_job(2)
    report = dynadapt.migrate(source.state, engine.state, timeout=30)
    own, arrived = jobs.torch_tensors(source.model, source.optimizer, ()), _weights(engine.engine)
    engine.step(2)
    twin.step(2)
    moved, after = _weights(engine.engine), jobs.torch_tensors(twin.model, twin.optimizer, ())
    dynadapt.migrate(engine.state, back.state, timeout=30)
    ours, theirs = (
        jobs.torch_tensors(job.model, job.optimizer, ("momentum_buffer",)) for job in (back, twin)
    )
    return {
        "arrived": [n for n in arrived if not torch.equal(arrived[n], own[f"{n}/param"])],
        "back": [n for n in moved if not torch.equal(moved[n], ours[f"{n}/param"])],
        "waste": report.bytes_moved - report.bytes_minimum,
        "momentum": {
            key: float((ours[key] - theirs[key]).abs().max()) for key in theirs if "momentum" in key
        },
        "step": {
            n: float((moved[n] - after[f"{n}/param"]).norm() / (moved[n] - arrived[n]).norm())
            for n in moved
        },
    }


@pytest.mark.parametrize("kind", ["zero2-fp32", "zero3-fp32", "zero0-fp32"])
def test_torchs_muon_and_deepspeeds_mean_the_same(ranks2: Pool, kind: str) -> None:
    """One momentum, one rule: after a step of each the momenta are equal, and the weights but for bf16.

    Both make the step orthogonal in bf16, and add up in another order: what is near zero in the
    momentum's spectrum becomes large, noise included.
    """
    for answer in ranks2.run(_torchs, kind, timeout=100):
        assert answer["arrived"] == []
        assert answer["back"] == []
        assert answer["waste"] == 0
        assert sorted(answer["momentum"]) == [f"{n}.weight/momentum_buffer" for n in ("down", "up")]
        assert max(answer["momentum"].values()) < 1e-6
        assert max(answer["step"].values()) < 0.15


def _refused(rank: int, world: int, kind: str, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    job = _job(kind, 0, **config)
    with pytest.raises(dynadapt.MigrationAborted) as error:
        dynadapt.describe(job.state)
    return [(finding.reason, finding.cause) for finding in error.value.findings]


@pytest.mark.parametrize(
    ("kind", "config", "says"),
    [
        ("zero1-fp16", {}, "loss scale"),
        ("zero1-bf16", {"tensor_parallel": {"autotp_size": 2, "partition_config": PLAN}}, "AutoTP"),
    ],
)
def test_momentum_that_means_something_else_is_refused(
    ranks2: Pool, kind: str, config: dict[str, Any], says: str
) -> None:
    """In fp16 it is of gradients times the loss scale; under AutoTP each part is orthogonal by itself."""
    for findings in ranks2.run(_refused, kind, config, timeout=100):
        assert [reason for reason, _ in findings] == ["unsupported-optimizer"]
        assert says in findings[0][1]
