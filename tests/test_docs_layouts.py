"""The page about layouts: every text in it is read, every output in it is made again."""

from __future__ import annotations

import doctest
import json
import re
import shlex

import pytest
import typer
from typer.testing import CliRunner

from dynadapt.adapters.model_shapes import from_listing
from dynadapt.cli._show import show
from dynadapt.errors import Refused
from dynadapt.report.sample import sample_model
from dynadapt.report.traffic import MAX_WORLD
from dynadapt.vps.declare import declare
from dynadapt.vps.spec import AXES, KINDS, OPTIONS, LayoutSpec
from dynadapt.vps.tp_rules import STYLES, TpRules, read_rules
from tests._ranks import ROOT

PAGE = ROOT / "docs" / "layouts.md"
TEXT = PAGE.read_text()
_SPEC = re.compile(rf"(?:\w+/)?(?:{'|'.join([*KINDS, 'zero4'])}):[a-z_0-9]+=[\w=,\-]+")
_REFUSED = re.findall(r"^\| `([^`]+:[^`]+)` \| (.+) \|$", TEXT, re.MULTILINE)
_BAD = {spec for spec, _ in _REFUSED}


def _section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_layout_in_the_page_is_read() -> None:
    found = set(_SPEC.findall(TEXT)) - _BAD
    assert len(found) > 20
    for spec in found:
        assert str(LayoutSpec.parse(str(LayoutSpec.parse(spec)))) == str(LayoutSpec.parse(spec))
    assert {LayoutSpec.parse(spec).kind for spec in found} == set(KINDS)
    assert {n for s in found for n in LayoutSpec.parse(s).options} == {
        name for names in OPTIONS.values() for name in names
    }


@pytest.mark.parametrize(("spec", "cause"), _REFUSED)
def test_what_the_page_says_is_refused_is_refused(spec: str, cause: str) -> None:
    with pytest.raises(Refused, match=re.escape(cause)) as error:
        declare(spec, *sample_model())
    assert error.value.reason == "bad-spec"


def test_tables_name_all_there_is() -> None:
    assert len(_REFUSED) == 8
    for title, names in (("Kinds", KINDS), ("Axes", AXES)):
        told = {n for n in re.findall(r"`(\w+)`", _section(title)) if n in names}
        assert told == set(names)
    for kind, options in OPTIONS.items():
        for option in options:
            row = re.search(rf"^\| `{option}` \| ([^|]+) \|", _section("Options"), re.MULTILINE)
            assert row is not None, option
            assert row[1] == "all" or kind in row[1].split(", "), (option, kind)
    styles = {
        s for s in re.findall(r"`([\w+]+)`", _section("What `tp` and `ep` cut")) if s in STYLES
    }
    assert styles >= {"colwise", "rowwise", "packed_colwise", "vocab", "grouped_gemm", "replicate"}
    assert f"up to {MAX_WORLD} ranks" in TEXT


def test_ranks_are_where_the_page_says() -> None:
    model, rules = sample_model()
    name = "model.layers.0.mlp.down_proj.weight"

    def columns(spec: str, rank: int) -> str:
        rows = declare(spec, model, rules).rows(rank)
        (box,) = [str(r.box) for r in rows if r.key == (name, "param")]
        return box

    assert columns("ddp:dp=2,tp=2", 0) != columns("ddp:dp=2,tp=2", 1)
    assert columns("ddp:dp=2,tp=2,order=tp-dp", 0) == columns("ddp:dp=2,tp=2,order=tp-dp", 1)
    assert columns("ddp:dp=2,tp=2,order=tp-dp", 0) != columns("ddp:dp=2,tp=2,order=tp-dp", 2)


@pytest.mark.parametrize("command", re.findall(r"^\$ dynadapt show (.+)$", TEXT, re.MULTILINE))
def test_shown_outputs_are_made_again(command: str) -> None:
    shown = TEXT.split(f"$ dynadapt show {command}\n")[1].split("\n```")[0]
    app = typer.Typer()
    app.command()(show)
    ran = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert [line.rstrip() for line in ran.output.splitlines()] == shown.splitlines()


def test_python_examples_run() -> None:
    assert doctest.testfile(str(PAGE), module_relative=False).failed == 0


def test_json_examples_are_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    rules, listing = (
        json.loads(each) for each in re.findall(r"```json\n(.+?)```", TEXT, re.DOTALL)
    )
    folder = tmp_path_factory.mktemp("page")
    (folder / "rules.json").write_text(json.dumps(rules))
    assert read_rules(folder / "rules.json") == TpRules(rules)
    (folder / "model.json").write_text(json.dumps(listing))
    model = from_listing(folder / "model.json")
    assert model.families[0].aliases == ("head.weight",)
    assert model.numel == 1000 * 64 + 64 * 64


@pytest.mark.parametrize(
    ("spec", "rules"),
    [
        ("zero1:dp=2,tp=3", None),
        ("zero3:dp=2,tp=2", {"layers.*.mlp.up_proj": "packed_colwise"}),
        ("fsdp2:dp=2,tp=2", {"layers.*.mlp.up_proj": "packed_colwise"}),
    ],
)
def test_what_does_not_fit_a_model_is_refused(spec: str, rules: dict[str, str] | None) -> None:
    model, own = sample_model()
    with pytest.raises(Refused) as error:
        declare(spec, model, own if rules is None else TpRules(rules))
    assert error.value.reason == "not-declarable"
