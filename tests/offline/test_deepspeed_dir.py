"""DeepSpeed checkpoints of one layout written as another: DeepSpeed's own loader and steps judge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from dynadapt.elastic.checkpoint import open_checkpoint
from dynadapt.elastic.conversion import convert
from dynadapt.elastic.targets import target_of
from dynadapt.protocols import FileTarget
from dynadapt.vps.spec import LayoutSpec
from tests import _ranks
from tests.live import jobs
from tests.offline import _made

if TYPE_CHECKING:
    from pathlib import Path

    from tests._ranks import Pool

CASES = [
    ("zero3-bf16", 2, "zero3:dp=4", "zero3-bf16", 4),
    ("zero3-bf16", 4, "zero2:dp=2", "zero2-bf16", 2),
    ("zero2-bf16", 4, "zero3:dp=2,sub_group_size=100", "zero3-bf16", 2),
    ("zero1rr-fp32", 4, "zero1:dp=2,round_robin=false", "zero1-fp32", 2),
    ("zero1rr-fp32", 2, "zero1:dp=4", "zero1rr-fp32", 4),
    ("zero2-bf16", 2, "zero2:dp=2,round_robin=true", "zero2rr-bf16", 2),
    ("zero1acc-bf16", 2, "zero3:dp=4,sub_group_size=100", "zero3-bf16", 4),
    ("zero2-fp16", 2, "zero3:dp=2,sub_group_size=100", "zero3-fp16", 2),
    ("zero0-bf16", 2, "zero1:dp=4", "zero1-bf16", 4),
    ("zero0-fp16", 2, "zero0:dp=2,fused=true", "zero0fused-fp16", 2),
    ("zero0fused-bf16", 2, "zero3:dp=2,sub_group_size=100", "zero3-bf16", 2),
    ("zero3-bf16", 2, "zero0:dp=4,fused=true", "zero0fused-bf16", 4),
    ("zero0-fp32", 2, "zero0:dp=4", "zero0-fp32", 4),
    ("zero2-fp32", 4, "zero0:dp=2", "zero0-fp32", 2),
    ("zero2-fp16", 2, "zero0:dp=2", "zero0-fp16", 2),
    ("zero0fused-fp16", 2, "zero2:dp=2", "zero2-fp16", 2),
]

MORE = {
    "zero3": ",sub_group_size=100",
    "zero1rr": ",round_robin=true",
    "zero2": ",round_robin=false",  # what lies between had it in its config
    "zero0fused": ",fused=true",
}


@pytest.mark.parametrize(("kind", "ranks", "spec", "to", "to_ranks"), CASES)
def test_the_next_job_goes_on(
    tmp_path: Path, kind: str, ranks: int, spec: str, to: str, to_ranks: int
) -> None:
    """Every bit, every hyperparameter and count arrives in an engine on another number of ranks."""
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    held = _ranks.pool(ranks).run(_made.save_deepspeed, kind, old, 2, {}, timeout=200)[0]
    source = open_checkpoint(old)
    report = convert(source, FileTarget(new, "deepspeed", LayoutSpec.parse(spec)))
    assert report.fingerprint == source.fingerprint() == open_checkpoint(new).fingerprint()
    answers: list[dict[str, Any]] = _ranks.pool(to_ranks).run(
        _made.load_deepspeed, to, new, 2, {}, timeout=200
    )
    for answer in answers:
        assert answer["loaded"]
        assert jobs.differing(held, answer["tensors"]) == []
        assert answer["counters"][0] == 2
        assert [g["weight_decay"] for g in answer["hyper"]] == [0.1, 0.0]
    back = str(tmp_path / "back")
    again = f"{kind[:5]}:dp={ranks}{MORE.get(kind.partition('-')[0], '')}"
    convert(open_checkpoint(new), FileTarget(back, "deepspeed", LayoutSpec.parse(again)))
    untouched = _ranks.pool(ranks).run(_made.load_deepspeed, kind, old, 2, {}, timeout=200)
    returned = _ranks.pool(ranks).run(_made.load_deepspeed, kind, back, 2, {}, timeout=200)
    for one, two in zip(untouched, returned, strict=True):
        assert one["losses"] == two["losses"]
        assert jobs.differing(one["after"], two["after"]) == []


@pytest.mark.parametrize("kind", ["zero1-bf16", "zero3-bf16"])
def test_frozen_weights_that_were_left_out_are_not_asked_for(
    ranks2: Pool, tmp_path: Path, kind: str
) -> None:
    """`exclude_frozen_parameters`, of which one is tied, as with PEFT: DeepSpeed loads such a one again."""
    src, to = str(tmp_path / "src"), tmp_path / "to"
    stayed = ranks2.run(_made.without_frozen, kind, src)
    source = open_checkpoint(src)
    assert source.problems() == ()
    assert not any(not spec.trainable for spec in source.keys if spec.kind == "parameter")
    stage = kind.partition("-")[0]
    for other in ("zero2:dp=3", "torch", f"{stage}:dp=2,dtype=bfloat16{MORE.get(stage, '')}"):
        convert(source, target_of(to / other, other))
        source = open_checkpoint(to / other)
    gone = ranks2.run(_made.without_frozen, kind, src, source.path)
    for one, two in zip(stayed, gone, strict=True):
        assert jobs.differing(one["held"], two["held"]) == []
        assert one["losses"] == two["losses"]
        assert jobs.differing(one["after"], two["after"]) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_engine_computes_in_the_dtype_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """Where nothing else says it, most of them decide: a bf16 engine loads no fp32 one's files."""
    shapes = {"norm.weight": torch.float32, "up.weight": dtype, "down.weight": dtype}
    tensors = {name: torch.ones(4, 3, dtype=kind) for name, kind in shapes.items()}
    torch.save(tensors, tmp_path / "model.pt")
    dynadapt.convert(tmp_path / "model.pt", tmp_path / "a", "zero2:dp=2", order=list(tensors))
    found = dynadapt.open(tmp_path / "a")
    kinds = {spec.dtype for spec in found.keys if spec.key.slot == "compute"}
    assert kinds == {str(dtype).removeprefix("torch.")}
    names = [path.name for path in (tmp_path / "a").rglob("*optim_states.pt")]
    assert all(n.startswith("bf16_zero") for n in names) == (dtype == torch.bfloat16)
