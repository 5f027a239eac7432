"""DeepSpeed checkpoints of pipelines and of AutoTP: read as the whole model, and written as any format.

The live job's fingerprint and DeepSpeed's own gathers are the judges of what is read. What is written is
loaded by DeepSpeed, and goes on as the same state does that was moved live.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from dynadapt.errors import Refused
from tests import _ranks
from tests.adapters import test_deepspeed_autotp as autotp
from tests.adapters._pipe_engines import differing
from tests.offline import _parallel
from tests.offline import _pipe_and_tensor as both

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("pipe zero1", "tp zero2, tied", "tp zero1, uneven", "tp fused, fp32")
GO_ON = {"pipe zero1": 1, "tp zero2, tied": 2}
MORE = tuple(kind for kind in (*_parallel.PIPES, *_parallel.TENSORS) if kind not in KINDS)


def _saved(folder: Path, kinds: tuple[str, ...], then: dict[str, int]) -> dict[str, Any]:
    told = _ranks.pool(4).run(_parallel.saved, kinds, str(folder), then, timeout=400)
    return dict(zip(kinds, told[0], strict=True))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where they were saved, and what each held and did then."""
    folder = tmp_path_factory.mktemp("parallel")
    return folder, _saved(folder, KINDS, GO_ON)


def _loaded(kind: str, stage: int, path: Path, *, universal: bool = False) -> dict[str, Any]:
    told = _ranks.pool(4).run(_parallel.loaded, kind, stage, str(path), universal, timeout=200)
    answer: dict[str, Any] = told[0]
    return answer


def _states(held: dict[Any, Any]) -> dict[Any, Any]:
    return {key: full for key, full in held.items() if key[1] != "compute"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_the_live_job_held(jobs: Any, kind: str) -> None:
    folder, told = jobs
    found = dynadapt.open(folder / kind)
    assert not found.problems()
    assert found.fingerprint() == told[kind]["fingerprint"]
    for (name, slot), full in _states(told[kind]["held"]).items():
        spec = next(
            s for s in found.keys if name in (s.key.name, *s.aliases) and s.key.slot == slot
        )
        array = found.tensors[str(spec.key)]
        assert torch.equal(torch.from_numpy(array.copy()), full.to(torch.float32)), (name, slot)


@pytest.mark.parametrize("kind", list(GO_ON))
def test_deepspeed_goes_on_with_the_whole_model(jobs: Any, tmp_path: Path, kind: str) -> None:
    """RESIZE B98, TPPP B107: stages and cuts, with moments, become another number of ranks' flats."""
    folder, told = jobs
    stage = GO_ON[kind]
    report = dynadapt.convert(folder / kind, tmp_path / "a", f"zero{stage}:dp=4")
    assert report.fingerprint == told[kind]["fingerprint"]
    answer = _loaded(kind, stage, tmp_path / "a")
    assert answer["fingerprint"] == told[kind]["fingerprint"]
    assert differing(_states(answer["held"]), _states(told[kind]["held"])) == []
    assert answer["on"]["losses"] == told[kind]["on"]["losses"]
    assert differing(answer["on"]["held"], told[kind]["on"]["held"]) == []


def test_deepspeed_goes_on_from_a_universal_checkpoint(jobs: Any, tmp_path: Path) -> None:
    folder, told = jobs
    kind = "tp zero2, tied"
    dynadapt.convert(folder / kind, tmp_path / "a", "universal")
    answer = _loaded(kind, 2, tmp_path / "a", universal=True)
    assert answer["on"]["losses"] == told[kind]["on"]["losses"]
    assert differing(answer["on"]["held"], told[kind]["on"]["held"]) == []


def test_a_tied_tensor_keeps_its_step(jobs: Any, tmp_path: Path) -> None:
    """The model calls it first by the greater of its names, as Hugging Face models do."""
    folder, _ = jobs
    source = dynadapt.open(folder / "tp zero2, tied")
    for form in ("dcp", "torch"):
        dynadapt.convert(source, tmp_path / form, form)
        found = dynadapt.open(tmp_path / form)
        assert dynadapt.diff(source, found, include=["*.weight"]).same, form
        assert found.scalars["lm_head.weight"]["step"] == _parallel.STEPS


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MORE)
def test_other_settings(tmp_path: Path, kind: str) -> None:
    stage = 1 if kind in _parallel.PIPES else 2
    told = _saved(tmp_path, (kind,), {kind: stage})[kind]
    # Of "tp zero3" no file has a copy in the dtype that the job computes in; the config says it.
    report = dynadapt.convert(tmp_path / kind, tmp_path / "a", f"zero{stage}:dp=4")
    assert report.fingerprint == told["fingerprint"]
    answer = _loaded(kind, stage, tmp_path / "a")
    assert answer["on"]["losses"] == told["on"]["losses"]
    assert differing(answer["on"]["held"], told["on"]["held"]) == []


@pytest.mark.parametrize(
    ("kind", "said", "spec"),
    [
        ("pipe in fp32", True, "zero0:dp=4"),
        pytest.param("pipe in fp32, four stages", False, "zero1:dp=4", marks=pytest.mark.nightly),
        pytest.param("pipe in fp16, named", False, "zero0:dp=4", marks=pytest.mark.nightly),
        pytest.param(
            "pipe in fp16, fused", True, "zero0:dp=4,fused=true", marks=pytest.mark.nightly
        ),
    ],
)
def test_pipelines_without_zero(tmp_path: Path, kind: str, said: bool, spec: str) -> None:
    """Whose an entry of a stage's optimizer is: by names, or by the one cut of layers that has its shapes.

    The key of a layer that stages share is nowhere, unless the optimizer has names.
    """
    stage = int(spec[4])
    told = _saved(tmp_path, (kind,), {kind: stage})[kind]
    names = _parallel.names_of(kind) if said else {}
    if said:
        for some in ({}, {"order": names["order"][1:]}, {"order": [*names["order"], "a.b"]}):
            with pytest.raises(Refused) as caught:
                dynadapt.open(tmp_path / kind, **some)
            assert {f.reason for f in caught.value.findings} <= {"no-order", "missing-file"}
    found = dynadapt.open(tmp_path / kind, **names)
    assert not found.problems()
    assert found.fingerprint() == told["fingerprint"]
    dynadapt.convert(tmp_path / kind, tmp_path / "a", spec, **names)
    answer = _loaded(kind, stage, tmp_path / "a")
    assert answer["fingerprint"] == told["fingerprint"]
    assert answer["on"]["losses"] == told["on"]["losses"]
    assert differing(answer["on"]["held"], told["on"]["held"]) == []


def test_a_layer_of_a_plain_pipeline_that_is_gone(tmp_path: Path) -> None:
    """No cut of what is left has the optimizers' shapes."""
    kind = "pipe in fp32, four stages"
    _saved(tmp_path, (kind,), {})
    (tmp_path / kind / "t" / "layer_02-model_states.pt").unlink()
    with pytest.raises(Refused) as caught:
        dynadapt.open(tmp_path / kind)
    assert caught.value.reason == "no-order"
    with pytest.raises(Refused) as caught:
        dynadapt.open(tmp_path / kind, order=_parallel.names_of(kind)["order"])
    assert {f.reason for f in caught.value.findings} == {"missing-file"}


@pytest.mark.parametrize(
    ("stage", "dtype"), [(1, "bf16"), pytest.param(0, "fp32", marks=pytest.mark.nightly)]
)
def test_pipeline_and_tensor_parallel(tmp_path: Path, stage: int, dtype: str) -> None:
    """Stages of parts: DeepSpeed's gathers have the same bits, and its own converter makes the same of it."""
    told = _ranks.pool(4).run(both.saved, str(tmp_path / "a"), stage, dtype, timeout=200)[0]
    said = {"order": both.NAMES} if not stage else {}
    found = dynadapt.open(tmp_path / "a", **said)
    assert not found.problems()
    for (name, slot), full in _states(told).items():
        array = found.tensors[f"{name}/{slot}"]
        assert torch.equal(torch.from_numpy(array.copy()), full.to(torch.float32)), (name, slot)
    dynadapt.convert(found, tmp_path / "b", f"zero{stage}:dp=4")
    ours = _ranks.pool(4).run(both.loaded, str(tmp_path / "b"), stage, dtype, False, timeout=200)[0]
    if stage:
        _universal(tmp_path / "a" / "t", tmp_path / "c" / "t")
        (tmp_path / "c" / "latest_universal").write_text("t")
        theirs = _ranks.pool(4).run(both.loaded, str(tmp_path / "c"), stage, dtype, True)[0]
        peer = dynadapt.diff(found, tmp_path / "c", ignore_missing=True)
        assert {d.key for d in peer.tensors if d.verdict == "identical"} >= {
            f"{name}/{slot}" for name, slot in _states(told)
        }
        assert dynadapt.open(tmp_path / "c").scalars == found.scalars
    else:
        dynadapt.convert(found, tmp_path / "c", "torch")
        assert dynadapt.diff(tmp_path / "b", tmp_path / "c").same
        theirs = ours
    assert ours["losses"] == theirs["losses"]
    assert differing(ours["held"], theirs["held"]) == []


def _universal(source: Path, target: Path) -> None:
    """By DeepSpeed's own converter."""
    import argparse

    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )


def _without(folder: Path, into: Path, change: Any) -> Path:
    """A copy whose model states were changed, as an older DeepSpeed or another writer has them."""
    shutil.copytree(folder, into)
    for path in (into / "t").glob("mp_rank_*"):
        states = torch.load(path, weights_only=False)
        change(states)
        torch.save(states, path)
    return into


def test_where_nothing_says_the_cut_whole_shapes_do(jobs: Any, tmp_path: Path) -> None:
    """AutoTP before 0.18 wrote nothing of it."""
    folder, told = jobs
    kind = "tp zero1, uneven"
    old = _without(folder / kind, tmp_path / "a", lambda s: s.pop("universal_checkpoint_info"))
    with pytest.raises(Refused) as caught:
        dynadapt.open(old)
    held = [f for f in caught.value.findings if f.where == "model.layers.0.mlp.down_proj.weight"]
    assert [f.reason for f in held] == ["unsupported-parallel"]
    assert "--model" in held[0].fix
    model = autotp.model_of(autotp.Setup("llama odd"))
    assert dynadapt.open(old, model=model).fingerprint() == told[kind]["fingerprint"]
    listing = [{"name": name, "shape": list(p.shape)} for name, p in model.named_parameters()]
    (tmp_path / "model.json").write_text(json.dumps(listing))
    report = dynadapt.convert(old, tmp_path / "b", "zero3:dp=2", model=tmp_path / "model.json")
    assert report.fingerprint == told[kind]["fingerprint"]
    report = dynadapt.convert(old, tmp_path / "c", "dcp", like=tmp_path / "b")
    assert report.fingerprint == told[kind]["fingerprint"]


def test_a_fused_layer_is_not_guessed(jobs: Any, tmp_path: Path) -> None:
    """TPPP B108, B110, B111: whole shapes do not say how its parts are cut, so it is refused by name."""
    folder, _ = jobs
    kind = "tp fused, fp32"
    old = _without(folder / kind, tmp_path / "a", lambda s: s.pop("universal_checkpoint_info"))
    with pytest.raises(Refused) as caught:
        dynadapt.open(old, model=autotp.model_of(autotp.Setup("fused")))
    assert {f.where for f in caught.value.findings} == {"qkv.weight", "qkv.bias"}


@pytest.mark.parametrize("kind", ["tp zero2, tied", "tp fused, fp32"])
def test_patterns_say_the_cut_as_well_as_maps(jobs: Any, tmp_path: Path, kind: str) -> None:
    """As DeepSpeed's converter reads them where there are no maps."""
    folder, told = jobs

    def without_maps(states: dict[str, Any]) -> None:
        states["universal_checkpoint_info"].pop("affine_map")

    old = _without(folder / kind, tmp_path / "a", without_maps)
    assert dynadapt.open(old).fingerprint() == told[kind]["fingerprint"]


def test_a_part_that_is_gone_is_named(jobs: Any, tmp_path: Path) -> None:
    folder, _ = jobs
    for name, pattern in (("pipe zero1", "layer_02*"), ("tp zero2, tied", "*_1_mp_rank_01_optim*")):
        copy = tmp_path / name
        shutil.copytree(folder / name, copy)
        for path in (copy / "t").glob(pattern):
            path.unlink()
        with pytest.raises(Refused) as caught:
            dynadapt.open(copy)
        assert caught.value.reason == "missing-file"


def test_replicas_that_differ_are_told(jobs: Any, tmp_path: Path) -> None:
    """TPPP B104, REPL B129: what is not cut is on all ranks; one that drifted is not taken for the others."""
    folder, told = jobs
    shutil.copytree(folder / "tp fused, fp32", tmp_path / "a")
    path = tmp_path / "a" / "t" / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    states = torch.load(path, weights_only=False)
    flat = states["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    flat.data[3] += 1  # of the embedding, which comes first and is not cut
    torch.save(states, path)
    with pytest.raises(Refused) as caught:
        dynadapt.open(tmp_path / "a").fingerprint()
    assert caught.value.reason == "replicas-differ"
    assert "embed.weight" in caught.value.findings[0].where
    assert "convert takes the first one's" in caught.value.findings[0].fix
    report = dynadapt.convert(tmp_path / "a", tmp_path / "b", "universal")
    right = told["tp fused, fp32"]["fingerprint"]
    assert report.fingerprint == right  # the second rank's was changed
    (warned,) = report.warnings
    assert (warned.reason, "was taken" in warned.fix) == ("replicas-differ", True)
    assert "embed.weight" in warned.where
