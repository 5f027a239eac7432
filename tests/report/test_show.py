"""`dynadapt show`: every way to call it, and every way to call it wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

from dynadapt.cli._show import show
from dynadapt.elastic.plan_report import PlanReport
from dynadapt.errors import DynadaptError
from dynadapt.report.sample import sample_model
from dynadapt.transport.match import match
from dynadapt.transport.plan import Options
from dynadapt.transport.planner import plan_for
from dynadapt.vps.declare import declare
from tests._ranks import ROOT

if TYPE_CHECKING:
    from pathlib import Path

CHANGE = ("zero3:dp=4", "--to", "ddp:dp=2,tp=2")


def _show(*words: str) -> str:
    app = typer.Typer()
    app.command()(show)
    ran = CliRunner().invoke(app, list(words))
    if ran.exception is not None:
        raise ran.exception
    return ran.output


def _json(*words: str) -> Any:
    return json.loads(_show(*words, "--json"))


def test_it_works_at_once() -> None:
    text = _show(*CHANGE)
    assert "zero3:dp=4 -> ddp:dp=2,tp=2" in text
    assert "bytes from rank (row) to rank (column); 2.1 MiB in all" in text


def test_nothing_but_numpy_is_needed() -> None:
    """Neither torch nor transformers nor matplotlib, for the model of its own."""
    script = (
        "import sys\n"
        "hidden = ['torch', 'transformers', 'deepspeed', 'safetensors', 'matplotlib']\n"
        "sys.modules.update(dict.fromkeys(hidden))\n"
        "import typer\n"
        "from dynadapt.cli._show import show\n"
        f"sys.argv = ['show', *{CHANGE!r}]\n"
        "typer.run(show)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2.1 MiB in all" in done.stdout


def test_json_has_all_that_is_shown() -> None:
    told = _json(*CHANGE, "--tensor", "lm_head.weight", "--links", "h100")
    assert told["layouts"] == ["zero3:dp=4", "ddp:dp=2,tp=2"]
    (tensor,) = told["tensors"]
    assert (tensor["name"], tensor["shape"]) == ("lm_head.weight", [256, 64])
    assert tensor["maps"][1]["regions"] == [
        {"lo": [0, 0], "hi": [128, 64], "ranks": [0, 2]},
        {"lo": [128, 0], "hi": [256, 64], "ranks": [1, 3]},
    ]
    traffic = told["traffic"]
    assert traffic["moved"] == sum(map(sum, traffic["bytes"])) == 2_149_632
    assert [column["title"] for column in told["memory"]["columns"]] == told["layouts"]
    assert told["timeline"]["chunks"] >= len(told["timeline"]["ends"]) > 0
    assert set(_json("zero3:dp=4")) == {"layouts", "notes", "tensors", "memory"}


def test_a_model_by_listing_and_by_config(tmp_path: Path) -> None:
    listing, rules, config = (tmp_path / name for name in ("l.json", "r.json", "config.json"))
    listing.write_text(json.dumps([{"name": "a.w", "shape": [8, 6]}]))
    rules.write_text(json.dumps({"a": "rowwise"}))
    whole = _json("ddp:tp=2", "--model", str(listing))
    assert whole["tensors"][0]["maps"][0]["regions"][0]["ranks"] == [0, 1]
    assert any("no rule says what tp cuts" in note for note in whole["notes"])
    cut = _json("ddp:tp=2", "--model", str(listing), "--tp-plan", str(rules))
    assert cut["tensors"][0]["maps"][0]["regions"][1] == {"lo": [0, 3], "hi": [8, 6], "ranks": [1]}
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
    config.write_text(json.dumps({"model_type": "llama", "intermediate_size": 24, **small}))
    own = _json("ddp:tp=2", "--model", str(tmp_path), "--tensor", "*.down_proj.weight")
    assert [each["ranks"] for each in own["tensors"][0]["maps"][0]["regions"]] == [[0], [1]]


def test_a_plan_of_a_file(tmp_path: Path) -> None:
    model, rules = sample_model()
    before, after = (declare(spec, model, rules) for spec in (CHANGE[0], CHANGE[2]))
    matched = match(before.keys, after.keys, Options())
    plans = {seat: plan_for(seat, before, after, matched, Options()) for seat in range(4)}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PlanReport.of(matched, plans).to_json()))
    assert _json(str(path))["traffic"] == _json(*CHANGE)["traffic"]
    text = _show(str(path))
    assert "bytes moved by each rank" in text
    assert "2.1 MiB cross between ranks; at least 2.1 MiB had to" in text
    _show(str(path), "--out", str(tmp_path / "plan.svg"))
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")


def test_a_figure(tmp_path: Path) -> None:
    out = tmp_path / "change.png"
    assert _show(*CHANGE, "--out", str(out)).strip() == f"wrote {out}"
    assert out.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("zero4:dp=4",), "bad-spec"),
        (("zero3:dp=4", "--to", "ddp"), ""),
        (("zero3:dp=4", "--tensor", "nothing*"), "no-tensor"),
        (("zero3:dp=4", "--links", "h100"), "bad-argument"),
        ((*CHANGE, "--links", "carrier-pigeon"), "unknown-cluster"),
        (("zero3:dp=4", "--model", "no/such"), "no-file"),
        (("zero3:dp=4", "--out", "picture.jpg"), "bad-argument"),
        (("no-such-plan.json",), "bad-plan"),
        (("plan.json", "--to", "ddp:dp=2"), "bad-argument"),
    ],
)
def test_what_is_wrong_is_said(words: tuple[str, ...], reason: str) -> None:
    if not reason:
        assert "ddp:dp=1" in _show(*words)
        return
    with pytest.raises(DynadaptError) as error:
        _show(*words)
    assert error.value.reason == reason


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_file_that_is_no_plan(content: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(DynadaptError, match="plan") as error:
        _show(str(path))
    assert error.value.reason == "bad-plan"
