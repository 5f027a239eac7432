"""The commands on a checkpoint that real DeepSpeed wrote: what they say, what they return."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import dynadapt
from dynadapt import cli
from tests import _ranks
from tests.live import jobs

if TYPE_CHECKING:
    from pathlib import Path


def _run(*words: str | Path, code: int = 0, **env: str) -> str:
    """One command, in this process: what it prints, when it ends as it should."""
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        mock.patch.dict(os.environ, {"COLUMNS": "160", "NO_COLOR": "1", **env}),
        mock.patch.object(sys, "argv", ["dynadapt", *map(str, words)]),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    assert (ended.value.code or 0) == code, out.getvalue()
    return out.getvalue()


def _fingerprints(rank: int, world: int, where: str) -> tuple[str, str]:
    """Of the live job that wrote a checkpoint, and of one that has loaded it."""
    engine = jobs.zero3(jobs.net())
    for number in range(2):
        jobs.step(engine, number)
    live = dynadapt.fingerprint(engine)
    other = jobs.zero3(jobs.net(seed=3))
    other.load_checkpoint(where)
    return live, dynadapt.fingerprint(other)


def test_one_fingerprint_for_all(saved: Path, tmp_path: Path) -> None:
    """The live job, its checkpoint, and every conversion of it."""
    live, loaded = _ranks.pool(2).run(_fingerprints, str(saved), timeout=200)[0]
    told = {_run("fingerprint", saved).strip()}
    for number, spec in enumerate(["zero1:dp=3", "universal", "deepspeed/zero3:dp=4"]):
        _run("convert", saved, tmp_path / str(number), "--to", spec)
        told.add(_run("fingerprint", tmp_path / str(number)).strip())
        shown = _run("verify", tmp_path / str(number))
        assert shown.rstrip().endswith("whole")
        assert "warning" not in shown
    assert told == {live} == {loaded}


def test_inspect(saved: Path) -> None:
    facts = json.loads(_run("inspect", saved, "--json"))
    assert facts["made_by"] == f"DeepSpeed {version('deepspeed')}"
    assert facts["written"] == f"deepspeed/{facts['layout']}"
    assert (facts["format"], facts["zero_stage"], facts["files"]) == ("deepspeed", 3, 4)
    assert facts["parameters"] == sum(p.numel() for p in set(jobs.net().parameters()))
    assert (facts["steps"], facts["counters"]["global_steps"]) == ([2], 2)
    assert [g["weight_decay"] for g in facts["groups"]] == [0.1, 0.0]
    shown = _run("inspect", saved, "--shards", "--filter", "embed*")
    assert "embed.weight = head.weight\n" in shown
    assert "down.weight" not in shown
    assert "embed.weight = head.weight\n" in _run("inspect", saved, "--filter", "head*")
    assert "zero_pp_rank_1_mp_rank_00_model_states.pt" in shown


def test_weights_for_everyone(saved: Path, tmp_path: Path) -> None:
    """Rounded where asked; what has no place in the format is said."""
    words = ["--to", "safetensors", "--dtype", "bfloat16", "--keep-dtype", "norm*"]
    _run("convert", saved, tmp_path / "out", *words)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["up.weight"].dtype == torch.bfloat16
    assert found["norm.weight"].dtype == torch.float32
    assert {"frozen.weight", "scale", "embed.weight"} <= set(found)
    assert not any("exp_avg" in name for name in found)


def test_diff(saved: Path, tmp_path: Path) -> None:
    _run("convert", saved, tmp_path / "two", "--to", "zero2:dp=3")
    assert "same" in _run("diff", saved, tmp_path / "two")
    _run("convert", saved, tmp_path / "w", "--to", "safetensors")
    shown = _run("diff", saved, tmp_path / "w", code=1)
    steps = len(dynadapt.open(saved).scalars)
    assert f"step of {steps} parameters, " in shown  # a line, not one for each
    assert "same" in _run("diff", saved, tmp_path / "w", "--ignore-missing")
    _run("convert", saved, tmp_path / "low", "--to", "safetensors", "--dtype", "bfloat16")
    told: dict[str, Any] = json.loads(
        _run("diff", tmp_path / "w", tmp_path / "low", "--json", code=1)
    )
    rounded = {t["key"]: t for t in told["tensors"]}["up.weight/param"]
    assert rounded["dtypes"] == ["float32", "bfloat16"]
    assert rounded["verdict"] == "rounding"
    assert rounded["places"][1].startswith("model.safetensors at byte ")
    assert "same" in _run("diff", tmp_path / "w", tmp_path / "low", "--rtol", "0.01")


def test_damage_is_named(saved: Path, tmp_path: Path) -> None:
    """A rank's file that is missing or cut, a flipped byte: the file, and what it costs."""
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    lost = next((copy / "step2").glob("*rank_0*_optim_states.pt"))
    whole = lost.read_bytes()
    lost.unlink()
    assert "missing-file" in _run("inspect", copy, code=2)
    lost.write_bytes(whole[: len(whole) // 2])
    assert lost.name in _run("convert", copy, tmp_path / "x", "--to", "zero3:dp=2", code=2).replace(
        "\n", ""
    )
    _run("convert", saved, tmp_path / "ours", "--to", "zero2:dp=2")
    part = next((tmp_path / "ours" / "dynadapt").glob("*rank_1*_optim_states.pt"))
    data = bytearray(part.read_bytes())
    data[200] ^= 4  # inside the first master
    part.write_bytes(bytes(data))
    assert "certificate" in _run("verify", tmp_path / "ours", code=1)


def test_wrong_words_are_one_message(saved: Path, tmp_path: Path) -> None:
    for spec, word in (
        ("zero9:dp=2", "did you mean"),
        ("universl", "did you mean"),
        ("ddp:dp=2", "needs a format"),
        ("nothing/zero3:dp=2", "no format"),
        ("deepspeed/zero3:dp=2,tp=2", "cannot be written"),
    ):
        told = _run("convert", saved, tmp_path / "x", "--to", spec, code=2).replace("\n", " ")
        assert word in told, told
        assert not (tmp_path / "x").exists()
    assert "no such file" in _run("inspect", tmp_path / "none", code=2).replace("\n", " ")
    assert "no-match" in _run("diff", saved, saved, "--include", "nothing*", code=2)
    assert "no-match" in _run("inspect", saved, "--filter", "nothing*", code=2)


def test_every_finding_says_its_reason_once(saved: Path, tmp_path: Path) -> None:
    order = tmp_path / "order.txt"
    order.write_text("up.weight\n")
    told = _run("convert", saved, tmp_path / "x", "--to", "zero3:dp=2", "--order", order, code=2)
    lines = told.rstrip().splitlines()
    assert len(lines) > 1
    assert all(line.startswith("error [no-order] ") for line in lines)
    assert all(line.count("no-order") == 1 for line in lines)


def test_a_plan_of_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    """What would be read, written and held; and wrong words are one message."""
    facts = json.loads(_run("plan", saved, "--to", "zero3:dp=3", "--json"))
    assert facts["bytes_written"] >= facts["bytes_state"] > 0
    assert facts["layout"] == "zero3:dp=3,sub_group_size=100"  # as the job has it
    assert "peak memory" in _run("plan", saved, "--to", "safetensors")
    assert "nothing says" in _run("plan", saved, code=2).replace("\n", " ")
    assert "its own layout" in _run("plan", saved, "--from", "ddp:dp=2", code=2).replace("\n", " ")
    assert "--links" in _run("plan", saved, "--to", "dcp", "--links", "a800", code=2)
    assert "max-memory" in _run("plan", saved, "--to", "dcp", "--max-memory", "1KB", code=2)
    assert "no-match" in _run("plan", saved, "--to", "dcp", "--include", "none*", code=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("--to", "safetensors", "--dtype", "bf16", "--keep-dtype", "*.bias"),
        ("--to", "safetensors", "--max-shard-size", "1KB", "--add-prefix", "model."),
        ("--to", "dcp/fsdp2:dp=3", "--exclude", "*.bias"),
        ("--to", "torch", "--weights-only"),
    ],
    ids=lambda words: " ".join(words[1:]),
)
def test_a_plan_is_of_the_same_conversion(
    saved: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """With every option that changes what is written: bytes, files, and what is left out."""
    plan = json.loads(_run("plan", saved, *words, "--json"))
    told = json.loads(_run("convert", saved, tmp_path / "x", *words, "--json"))
    assert [plan[name] for name in ("bytes_read", "bytes_written", "format")] == [
        told[name] for name in ("bytes_read", "bytes_written", "format")
    ]
    notes = {"the target has no place for it", "weights alone are written"}
    left = [o["path"] for o in told["outcomes"] if o["note"] in notes]
    assert ("optimizer" in left) == ("safetensors" in words or "--weights-only" in words)
    assert plan["dropped"] == left
    whole = json.loads(_run("plan", saved, "--to", words[1], "--json"))
    assert {n: v for n, v in plan.items() if n != "seconds"} != {
        n: v for n, v in whole.items() if n != "seconds"
    }


def test_a_layout_like_anothers_and_an_order_from_a_file(saved: Path, tmp_path: Path) -> None:
    weights, order = tmp_path / "weights", tmp_path / "order"
    _run("convert", saved, weights, "--to", "safetensors")
    named = [
        t["key"].removesuffix("/param")
        for t in json.loads(_run("inspect", saved, "--json"))["tensors"]
        if t["key"].endswith("/param")
    ]
    order.write_text("\n".join(named))
    assert "no-order" in _run("convert", weights, tmp_path / "x", "--to", "zero3:dp=2", code=2)
    _run("convert", weights, tmp_path / "x", "--to", "zero3:dp=2", "--order", order)
    _run("convert", weights, tmp_path / "y", "--like", tmp_path / "x")
    assert _run("fingerprint", tmp_path / "x") == _run("fingerprint", tmp_path / "y")
    _run("diff", tmp_path / "x", tmp_path / "y")


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"WORLD_SIZE": "8"}, 0),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0),
        ({"RANK": "8", "WORLD_SIZE": "8"}, 2),
        ({"RANK": "", "WORLD_SIZE": "two"}, 2),
    ],
)
def test_what_a_launcher_says_and_does_not(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, str], code: int
) -> None:
    """A shell inside a job has some of it: one process is alone unless it is told its number, too."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    said = _run("convert", saved, tmp_path / "x", "--to", "safetensors", code=code)
    assert ("bad-argument" in said) == (code == 2)


def test_json_is_what_any_reader_takes(tmp_path: Path) -> None:
    """JSON has no infinity and no NaN."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=float("inf"))
    for name, value in (("a", float("nan")), ("b", 1.0)):
        told = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": value}
        torch.save(told, tmp_path / f"{name}.pt")

    def refuse(word: str) -> None:
        raise ValueError(word)

    shown = _run("inspect", tmp_path / "a.pt", "--json")
    assert json.loads(shown, parse_constant=refuse)["groups"][0]["lr"] == "inf"
    shown = _run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json", code=1)
    assert "nan" in str(json.loads(shown, parse_constant=refuse)["aux"])


def test_a_page_of_differences(saved: Path, tmp_path: Path) -> None:
    """Whatever is in a name stands there as text."""
    torch.save({"<b>&w": torch.ones(2), "v": torch.ones(3)}, tmp_path / "a.pt")
    torch.save({"<b>&w": torch.zeros(2), "v": torch.ones(3)}, tmp_path / "b.pt")
    page = tmp_path / "page.html"
    _run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--html", page, code=1)
    text = page.read_text()
    assert "&lt;b&gt;&amp;w" in text
    assert "<b>&w" not in text
    assert "2 of 2" in text
    _run("diff", saved, saved, "--html", tmp_path / "no" / "page.html", code=2)


@pytest.mark.parametrize("columns", ["40", "80"])
def test_names_and_paths_are_whole_at_any_width(saved: Path, tmp_path: Path, columns: str) -> None:
    """They are for copying, and to search for: each is in one line, all of it."""
    prefix = "base_model.model.model.layers.10.self_attn.q_proj."
    target = (
        tmp_path / "a_folder_of_somebody's_with_a_name_that_takes_more_than_a_line_of_a_terminal"
    )
    width = {"COLUMNS": columns}
    words = ["convert", saved, target, "--to", "zero2:dp=2", "--add-prefix", prefix]
    assert f"{saved} -> {target}\n" in _run(*words, **width)
    shown = _run("inspect", target, "--shards", **width)
    assert f"{target}\n" in shown
    assert f"\n{prefix}embed.weight = {prefix}head.weight\n" in shown
    assert shown.count(f"\n{prefix}up.weight\n  compute ") == 1
    assert "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt\n" in shown
    told = _run("diff", saved, target, code=1, **width)
    assert "embed.weight/param = head.weight/param: only-in-a\n" in told
    low = tmp_path / "low"
    _run("convert", target, low, "--to", "safetensors", "--dtype", "bf16", **width)
    told = _run("diff", target, low, code=1, **width)
    assert f"\n{prefix}up.weight/param: rounding\n  float32, bfloat16\n" in told
    assert "\n  A: bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt at byte " in told
    assert "\n  B: model.safetensors at byte " in told
    (target / "dynadapt" / "mp_rank_00_model_states.pt").unlink()
    assert f"{target}/dynadapt: " in _run("inspect", target, code=2, **width)
