"""Figures: what is on the axes, what the files are; how they look is for eyes."""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
import pytest

from dynadapt.errors import DynadaptError
from dynadapt.report.build import picture_of
from dynadapt.report.figures import draw, write
from dynadapt.report.maps import Picture
from dynadapt.report.traffic import Timeline
from tests._ranks import ROOT

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

PICTURES = ROOT / "docs" / "pictures"
CHANGE = ["zero3:dp=4", "ddp:dp=2,tp=2"]


def _axes(picture: Picture) -> list[Any]:
    figure = draw(picture)
    figure.draw_without_rendering()
    return list(figure.axes)


def _words(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_change_has_maps_traffic_and_memory() -> None:
    picture = picture_of(CHANGE, tensor="model.layers.0.mlp.down_proj.weight")
    before, after, traffic, memory = _axes(picture)
    assert (
        before.get_title(loc="left") == "model.layers.0.mlp.down_proj.weight [64, 160]\nzero3:dp=4"
    )
    assert after.get_title(loc="left") == "\nddp:dp=2,tp=2"
    assert (before.get_xlabel(), before.get_ylabel()) == ("dim 1", "dim 0")
    assert (_words(before), _words(after)) == (["0", "1", "2", "3"], ["0, 2", "1, 3"])
    assert after.get_xticks().tolist() == [0, 80, 160]
    assert before.get_ylim() == (64, 0)
    assert traffic.get_title(loc="left") == "traffic in KiB: 2.1 MiB in all"
    assert (traffic.get_xlabel(), traffic.get_ylabel()) == ("to rank", "from rank")
    assert len(_words(traffic)) == 12
    assert memory.get_ylabel() == "held (KiB)"
    assert [text.get_text() for text in memory.get_legend().get_texts()] == CHANGE
    assert len(memory.patches) == 8


def test_one_layout_has_its_tensors_side_by_side() -> None:
    axes = _axes(picture_of(["zero1:dp=4"]))
    assert axes[-1].get_title(loc="left") == "bytes held by each rank"
    assert all("zero1:dp=4" in each.get_title(loc="left") for each in axes[:-1])


def test_large_worlds_are_grouped_and_scaled() -> None:
    picture = picture_of(["zero3:dp=96", "fsdp2:dp=24,tp=4"], tensor="lm_head.weight")
    before, _, traffic, scale, memory = _axes(picture)
    assert traffic.get_xlabel() == "to rank (groups of 3)"
    assert (len(_words(traffic)), scale.get_ylabel()) == (0, "KiB")
    assert [label.get_text() for label in traffic.get_xticklabels()][:2] == ["0", "12"]
    assert len(memory.patches) == 2
    assert _words(before) == []  # 96 bands are too thin for names


@pytest.mark.parametrize("known", [True, False])
def test_a_schedule_is_a_bar_a_chunk(known: bool) -> None:
    starts, ends = np.array([0.0, 0.0, 0.002]), np.array([0.002, 0.002, 0.003])
    each = np.array([[10.0, 20.0, 5.0], [1.0, 30.0, 5.0]]) * 2**20 if known else None
    timeline = Timeline(starts, ends, 3, 0.003, 0.0025, each)
    axes, *scale = _axes(Picture(("a", "b"), timeline=timeline))
    assert axes.get_title(loc="left") == (
        "schedule: 3 ms, 3 chunks; dashed: 2.5 ms, the least that the busiest link needs"
    )
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time (ms)", "chunk")
    assert [bar.get_ylabel() for bar in scale] == ["busiest rank (MiB)"] * known
    (bars,) = axes.collections
    corners = [path.vertices[:, 0] for path in bars.get_paths()]
    assert [(x.min(), x.max()) for x in corners] == [(0, 2), (0, 2), (2, 3)]


def test_files_are_of_their_suffix_and_the_same_each_time(tmp_path: Path) -> None:
    picture = picture_of(CHANGE, tensor="lm_head.weight")
    for suffix in ("png", "svg"):
        for name in ("a", "b"):
            write(picture, tmp_path / f"{name}.{suffix}")
        first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("a", "b"))
        assert first == second
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = (tmp_path / "a.svg").read_text()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"<dc:date>|20\d\d-\d\d-\d\d", text)


def test_what_cannot_be_drawn_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = picture_of(["ddp:dp=2"])
    for path in (tmp_path / "a.jpg", tmp_path / "no" / "a.png"):
        with pytest.raises(DynadaptError) as error:
            write(picture, path)
        assert error.value.reason == "bad-argument"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DynadaptError, match="pip install") as error:
        write(picture, tmp_path / "a.png")
    assert error.value.reason == "not-installed"


def _maker() -> ModuleType:
    found = importlib.util.spec_from_file_location("make_pictures", PICTURES / "make.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_documents_pictures_can_be_made_again(tmp_path: Path) -> None:
    _maker().main(tmp_path)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(path.name for path in PICTURES.glob("*.svg"))
    for name in made:
        assert (PICTURES / name).stat().st_size < 100_000
        ElementTree.fromstring((PICTURES / name).read_text())
