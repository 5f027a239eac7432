"""The public functions on checkpoints: `open`, `convert`, `diff`, without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dynadapt
from dynadapt.elastic.checkpoint import layout_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live import jobs


def test_an_opened_checkpoint_says_what_it_is(saved: Path) -> None:
    found = dynadapt.open(saved)
    assert isinstance(found, dynadapt.Checkpoint)
    assert found.format == "deepspeed"
    assert found.problems() == ()
    assert {spec.key.slot for spec in found.keys} == {"param", "exp_avg", "exp_avg_sq", "buffer"}
    facts = found.summary("embed*")
    assert (facts["zero_stage"], facts["files"], facts["steps"]) == (3, 4, [2])
    assert {told["key"] for told in facts["tensors"]} == {
        "embed.weight/param",
        "embed.weight/exp_avg",
        "embed.weight/exp_avg_sq",
    }
    assert "deepspeed" in str(found)
    assert len(found.fingerprint()) == 32


def test_tensors_are_read_by_key(saved: Path, held: jobs.Tensors) -> None:
    """Every tensor as DeepSpeed gathers it, by its key, and a tied one by both names."""
    tensors = dynadapt.open(saved).tensors
    assert set(held) <= set(tensors)
    for name, wanted in held.items():
        assert tensors[name].tobytes() == wanted.numpy().tobytes(), name
    assert np.array_equal(tensors["head.weight"], tensors["embed.weight/param"])
    assert "head.weight/exp_avg" in tensors
    assert "nothing" not in tensors
    assert len(tensors) == len(list(tensors))
    with pytest.raises(ValueError, match="read-only"):
        tensors["up.bias"][0] = 1
    with pytest.raises(KeyError, match=r"nearest: up\.weight"):
        tensors["upp.weight"]


def test_bfloat16_comes_as_float32(tmp_path: Path) -> None:
    values = torch.randn(5, 3).to(torch.bfloat16)
    save_file({"w": values}, tmp_path / "model.safetensors")
    array = dynadapt.open(tmp_path).tensors["w"]
    assert array.dtype == np.float32
    assert np.array_equal(array, values.float().numpy())


def test_a_hole_is_an_error_and_not_noise(saved: Path, tmp_path: Path) -> None:
    found = dynadapt.open(saved)
    rank = next(e for e, name in found.files.items() if "rank_1_mp_rank_00_optim" in name)
    files = {e: () if e == rank else rows for e, rows in found.own.files.items()}
    own = replace(found.own, files=files)
    cut = replace(found, own=own, layout=layout_of(own))
    with pytest.raises(dynadapt.Refused) as caught:
        cut.tensors["up.weight"]
    assert caught.value.reason == "uncovered"


def test_convert_and_diff(saved: Path, tmp_path: Path) -> None:
    report = dynadapt.convert(saved, tmp_path / "four", "zero3:dp=4")
    assert report.fingerprint == dynadapt.open(saved).fingerprint()
    found = dynadapt.diff(saved, tmp_path / "four")
    assert found.same
    assert found.bytes_read > 0
    half = dynadapt.convert(
        saved, tmp_path / "half", "safetensors", dtype="bfloat16", include=["up.*"]
    )
    assert half.verified
    shown = dynadapt.diff(saved, tmp_path / "half", weights_only=True, ignore_missing=True)
    assert {d.verdict for d in shown.tensors} == {"rounding"}
    assert not shown.same
    assert dynadapt.diff(
        saved, dynadapt.open(tmp_path / "half"), weights_only=True, ignore_missing=True, ulp=1
    ).same
    with pytest.raises(dynadapt.Refused) as caught:
        dynadapt.convert(saved, tmp_path / "odd", "safetensors", dtype="float33")
    assert caught.value.reason == "bad-argument"
    with pytest.raises(dynadapt.DynadaptError) as unknown:
        dynadapt.open(tmp_path)
    assert unknown.value.reason == "no-adapter"


def test_no_torch_is_imported(saved: Path, tmp_path: Path) -> None:
    """All of it, where torch cannot be imported."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import dynadapt\n"
        "a, b = sys.argv[1:]\n"
        "found = dynadapt.open(a)\n"
        "assert found.tensors['up.weight'].shape == (20, 8)\n"
        "report = dynadapt.convert(found, b, 'zero3:dp=3')\n"
        "assert dynadapt.diff(a, b).same and report.fingerprint == found.fingerprint()\n"
    )
    words = [sys.executable, "-c", script, str(saved), str(tmp_path / "three")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sizes_are_bytes_or_texts(tmp_path: Path) -> None:
    """As the options take them; what is no size is an error of dynadapt's own, of a live job's `save` too."""
    save_file({name: torch.ones(4096) for name in "abc"}, tmp_path / "x.safetensors")
    source = tmp_path / "x.safetensors"
    for number, size in enumerate((20_000, "20KB", "0.02 mb")):
        at = tmp_path / f"y{number}"
        dynadapt.convert(source, at, "safetensors", max_shard_size=size, max_memory="64MiB")
        assert len(list(at.glob("*.safetensors"))) == 3
    for given in ({"max_shard_size": "much"}, {"max_memory": "-1GB"}, {"max_shard_size": True}):
        for refused in (
            lambda given=given: dynadapt.convert(source, tmp_path / "z", "safetensors", **given),
            lambda given=given: dynadapt.offline.plan(source, "safetensors", **given),
        ):
            with pytest.raises(dynadapt.DynadaptError, match="is not a size") as caught:
                refused()
            assert caught.value.reason == "bad-argument"
    with pytest.raises(dynadapt.MigrationAborted, match="is not a size") as caught:
        dynadapt.save(
            torch.nn.Linear(2, 2), tmp_path / "z", "safetensors", max_shard_size="5 sheep"
        )
    assert caught.value.reason == "bad-argument"
    assert not (tmp_path / "z").exists()
