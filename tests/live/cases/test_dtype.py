"""DTYPE B67, B70, B72, B73, OPTSTATE B51, B53, B54: bytes that are values, and bytes that are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from tests.live import jobs
from tests.live.kinds import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests._ranks import Pool


class Params4bit(nn.Parameter):
    """As bitsandbytes has it: packed bytes in a parameter, and what they mean in an attribute."""

    def __new__(cls, data: torch.Tensor) -> Params4bit:
        """Quantised when made."""
        made: Params4bit = torch.Tensor._make_subclass(cls, data, require_grad=False)
        made.quant_state = {"absmax": torch.ones(2)}
        return made


class Scaled(torch.Tensor):
    """A wrapper of two tensors without storage of its own, as torchao's are."""

    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Scaled:
        """Looks like fp32."""
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        return made

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """The two."""
        return ["data_", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Only what a model does with it at rest."""
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale)
        raise NotImplementedError(str(func))


class EightBit(torch.optim.AdamW):
    """AdamW whose states are blocks of bytes with a scale a block, as bitsandbytes' AdamW8bit names them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Only the state matters here."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": 1,
                    "state1": torch.zeros_like(parameter, dtype=torch.uint8),
                    "qmap1": torch.zeros(256),
                    "absmax1": torch.zeros(1 + parameter.numel() // 256),
                }


def _packed() -> Any:
    model = nn.Linear(4, 4)
    model.weight = Params4bit(torch.zeros(8, 1, dtype=torch.uint8))
    return model


def _wrapped() -> Any:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(Scaled(torch.zeros(4, 4), torch.ones(1)), requires_grad=False)
    return model


def _own_kind() -> Any:
    model = nn.Linear(4, 4)
    model.register_buffer("odd", torch.zeros(3).as_subclass(type("Mine", (torch.Tensor,), {})))
    return model


def _quantised() -> Any:
    model = nn.Linear(4, 4)
    model.register_buffer("q", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    return model


def _eight_bit() -> Any:
    model = nn.Linear(4, 4)
    optimizer = EightBit(model.parameters())
    optimizer.step()
    return dynadapt.TrainState(model, optimizer)


ODD: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "Params4bit": (_packed, "unsupported-quantized", "weight", "test_dtype.Params4bit"),
    "wrapper": (_wrapped, "unsupported-tensor", "weight", "test_dtype.Scaled"),
    "subclass": (_own_kind, "unsupported-tensor", "odd", "Mine"),
    "qint8": (_quantised, "unsupported-quantized", "q", "torch.qint8"),
    "8-bit state": (_eight_bit, "unsupported-quantized", "weight/state1", "8-bit blocks"),
}


@pytest.mark.filterwarnings(
    "ignore:.*quantiz.*:UserWarning", "ignore:.*quantiz.*:DeprecationWarning"
)
@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("name", ODD)
def test_bytes_that_are_not_values_are_refused_by_name(name: str, side: str) -> None:
    """B51, B53, B54, B72, B73: quantised weights and states, and every tensor class of one's own."""
    build, reason, where, kind = ODD[name]
    odd, plain = build(), nn.Linear(4, 4)
    if name == "8-bit state":
        plain = dynadapt.TrainState(plain, EightBit(plain.parameters()))
    pair = (odd, plain) if side == "source" else (plain, odd)
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(*pair)
    first = caught.value.findings[0]
    assert (caught.value.reason, first.where) == (reason, where)
    assert kind in first.cause
    assert first.fix


def test_float8_weights_are_bytes_like_any_other() -> None:
    """B72: torch's own float8 dtypes need no scale to be moved."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Linear(3, 4)
        for number, dtype in enumerate(
            (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
        ):
            values = torch.randn(5, 3).to(dtype)
            model.register_parameter(f"f{number}", nn.Parameter(values, requires_grad=False))
        models.append(model)
    report = dynadapt.migrate(*models)
    assert report.fingerprint_source == report.fingerprint_target
    for name, value in models[0].named_parameters():
        assert torch.equal(value.view(torch.uint8), models[1].get_parameter(name).view(torch.uint8))


def _bf16(model: nn.Module) -> tuple[nn.Module, Any]:
    model.to(torch.bfloat16)
    return model, torch.optim.AdamW(jobs.groups(model), lr=1e-2)


def _states_of_bf16(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model, optimizer = _bf16(jobs.net(0))
    source = dynadapt.TrainState(model, optimizer)
    model(jobs.tokens(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    other = jobs.net(1).to(torch.bfloat16)
    fully_shard(other)
    target = dynadapt.TrainState(other, torch.optim.AdamW(jobs.groups(other), lr=1e-2))
    report = dynadapt.migrate(source, target)
    dtypes = {s.dtype for s in dynadapt.describe(target).layout.keys if s.key.slot == "exp_avg"}
    answer = {
        "equal": report.fingerprint_source == report.fingerprint_target,
        "dtypes": dtypes,
        "differing": jobs.differing(
            jobs.torch_tensors(model, optimizer), jobs.torch_tensors(other, target.optimizer)
        ),
    }
    masters = jobs.zero3(jobs.net(2))
    for number in range(2):
        jobs.step(masters, number)
    try:
        dynadapt.migrate(masters, source)
    except dynadapt.MigrationAborted as error:
        answer["masters"] = error.reason
    return answer


def test_states_in_bf16_and_masters_that_would_be_rounded(ranks2: Pool) -> None:
    """B67, B69: states keep their dtype; masters do not become bf16 without being told."""
    for answer in ranks2.run(_states_of_bf16, timeout=120):
        assert answer == {
            "equal": True,
            "dtypes": {"bfloat16"},
            "differing": [],
            "masters": "narrowing",
        }


def test_every_tensor_that_would_lose_bits_is_named() -> None:
    """B67: all at once, and none that would not."""
    torch.manual_seed(0)
    source, target = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2))
    with torch.no_grad():
        source[0].bias.zero_()
    target.to(torch.bfloat16)
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(source, target)
    assert caught.value.reason == "narrowing"
    where = {finding.where.split("/")[0] for finding in caught.value.findings}
    assert where == {"0.weight", "1.weight", "1.bias"}


WITHOUT_ZERO = ("zero0-bf16", "zero0fused-bf16", "zero1acc-bf16")


def _no_zero(rank: int, world: int) -> list[dict[str, Any]]:
    """States of an engine that is bf16 and has no ZeRO, into and out of one that has some of its own."""
    answers = []
    for kind in WITHOUT_ZERO:
        source, target, back = (build(kind, seed=seed) for seed in range(3))
        for number in range(2):
            source.step(number)
        target.step(5)
        before = source.tensors()
        for a, b in ((source, target), (target, back)):
            dynadapt.migrate(a.state, b.state, timeout=30)
        held = [dynadapt.describe(job.state) for job in (source, back)]
        answers.append(
            {
                "moments": sum("/exp_avg" in name for name in before) > 0,
                "differing": jobs.differing(before, back.tensors()),
                "steps": [{s["step"] for s in each.scalars.values()} for each in held],
                "losses": [job.step(2) for job in (source, back)],
            }
        )
    return answers


def test_half_precision_without_zero_has_its_states(ranks2: Pool) -> None:
    """B70: DeepSpeed's own files lack them there; moments, steps and masters, there and back."""
    for answers in ranks2.run(_no_zero, timeout=120):
        for answer in answers:
            assert (answer["moments"], answer["differing"]) == (True, [])
            assert answer["steps"][0] == answer["steps"][1]
            assert min(answer["steps"][0]) >= 2
            assert answer["losses"][0] == answer["losses"][1]


def test_no_state_is_not_taken_for_a_state() -> None:
    """B70: a source without moments leaves none of the target's behind, and says what it did not have."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 2) for _ in range(2)]
    fresh, stepped = (
        dynadapt.TrainState(model, torch.optim.AdamW(model.parameters())) for model in models
    )
    models[1](torch.ones(1, 3)).sum().backward()
    stepped.optimizer.step()
    stepped.optimizer.zero_grad()
    dynadapt.migrate(fresh, stepped)
    assert not stepped.optimizer.state
    weights = dynadapt.TrainState(nn.Linear(3, 2))
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(weights, fresh)
    assert caught.value.reason == "missing-key"
