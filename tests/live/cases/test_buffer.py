"""BUFFER B14, B17, B19, B20 (B16: test_repl): state of its own dtype, whether checkpoints hold it or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from dynadapt.testing.seats import run_seats
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool


class Rotary(nn.Module):
    """Running statistics, a count of them, and frequencies that no checkpoint holds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(4, 4)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("seen", torch.tensor(100 + seed))
        self.register_buffer("used", torch.rand(4) > 0.5)
        steps = torch.arange(4) + seed
        self.register_buffer("frequencies", 1.0 / 10000 ** (steps / 7), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return (self.body(x) * self.frequencies + self.mean).square().mean()


BUFFERS = ("mean", "seen", "used", "frequencies")


def state(model: nn.Module) -> dynadapt.TrainState:
    """A job."""
    return dynadapt.TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def test_a_table_that_no_checkpoint_holds() -> None:
    """B17: a model that was built on the meta device gets its frequencies, not what its memory held."""
    source = state(Rotary(1))
    with torch.device("meta"):
        target = state(Rotary(2))
    dynadapt.migrate(source, target)
    for name in BUFFERS:
        assert torch.equal(getattr(target.model, name), getattr(source.model, name))
    x = torch.ones(1, 4)
    assert torch.equal(source.model(x), target.model(x))


def test_a_table_that_nobody_has_is_not_left_raw() -> None:
    """B17: the source's model has none, and the target's has no memory: refused by name."""
    model = Rotary(1)
    del model._buffers["frequencies"]
    with torch.device("meta"):
        target = state(Rotary(2))
    for allow in ((), {"missing"}):
        with pytest.raises(dynadapt.MigrationAborted, match="frequencies") as caught:
            dynadapt.migrate(state(model), target, allow=allow)
        assert caught.value.reason in {"missing-key", "not-materialised"}
    assert target.model.frequencies.is_meta


def test_two_dtypes_of_one_buffer_stop_all_ranks() -> None:
    """B19: a cast on some ranks only; nothing is read as what it is not."""
    sources, targets = [Rotary(1), Rotary(1)], [Rotary(2), Rotary(2)]
    sources[1].mean = sources[1].mean.bfloat16()
    before = [model.mean.clone() for model in targets]

    def call(session: Any) -> tuple[str, str]:
        at = session.seat
        try:
            dynadapt.migrate(sources[at], targets[at], session=session, timeout=20)
        except dynadapt.MigrationAborted as error:
            return error.reason, str(error)
        return "moved", ""

    for reason, text in run_seats(2, call):
        assert reason == "ranks-disagree"
        assert "mean/buffer" in text
        assert "bfloat16" in text
    assert all(torch.equal(m.mean, old) for m, old in zip(targets, before, strict=True))


@pytest.mark.parametrize("name", ["mean", "frequencies"])
def test_a_buffer_that_would_be_rounded(name: str) -> None:
    """B20: `model.to(bfloat16)` takes the buffers along; what cannot come back is not thrown away."""
    source, target = Rotary(1), Rotary(2)
    setattr(target, name, getattr(target, name).bfloat16())
    with pytest.raises(dynadapt.MigrationAborted) as caught:
        dynadapt.migrate(source, target)
    assert caught.value.reason == "narrowing"
    assert caught.value.findings[0].where.startswith(f"{name}/buffer")
    dynadapt.migrate(source, target, narrow="allow")
    assert torch.equal(getattr(target, name), getattr(source, name).bfloat16())
    assert (int(target.seen), target.used.tolist()) == (101, source.used.tolist())


def _through_an_engine(rank: int, world: int) -> dict[str, Any]:
    model, plain = Rotary(1), Rotary(3)
    exact = {name: getattr(model, name).clone() for name in BUFFERS}
    answers = {}
    for kind in ("zero1-bf16", "zero3-bf16", "zero2-fp32"):
        inner = Rotary(2)
        engine = jobs.deepspeed_engine(kind, inner, state(inner).optimizer)
        dynadapt.migrate(state(model), engine, timeout=30)
        inside = [getattr(engine.module, name) for name in BUFFERS]
        dynadapt.migrate(engine, state(plain), timeout=30)
        answers[kind] = {
            "dtypes": [each.dtype for each in inside],
            "same": [torch.equal(getattr(plain, name), exact[name]) for name in BUFFERS],
        }
        nn.init.zeros_(plain.mean)
    return answers


def test_buffers_of_engines_in_half_precision(ranks2: Pool) -> None:
    """B14: they keep their own dtypes and every bit, whatever the weights are kept in."""
    for answers in ranks2.run(_through_an_engine, timeout=100):
        for answer in answers.values():
            assert answer["dtypes"] == [torch.float32, torch.int64, torch.bool, torch.float32]
            assert answer["same"] == [True] * len(BUFFERS)
