"""Pictures in the terminal: small ones word for word, large ones within their columns."""

from __future__ import annotations

from io import StringIO
from textwrap import dedent

import numpy as np
import pytest
from rich.console import Console

from dynadapt.report.build import picture_of
from dynadapt.report.maps import Picture
from dynadapt.report.terminal import WIDTH, rendered
from dynadapt.report.traffic import Timeline


def _text(picture: Picture, *, color: bool = False) -> str:
    told = StringIO()
    console = Console(file=told, width=WIDTH, force_terminal=color, color_system="truecolor")
    if not color:
        console = Console(file=told, width=WIDTH, force_terminal=False, highlight=False)
    console.print(rendered(picture))
    return "\n".join(line.rstrip() for line in told.getvalue().splitlines())


def test_a_change_word_for_word() -> None:
    picture = picture_of(["zero3:dp=2", "ddp:tp=2"], tensor="model.layers.0.mlp.down_proj.weight")
    assert _text(picture) == dedent("""\
        zero3:dp=2 -> ddp:tp=2

        model.layers.0.mlp.down_proj.weight  [64, 160]
        columns: dim 1, rows: dim 0; a cell names its rank
        zero3:dp=2    ddp:tp=2
            0:           0:  80:
         0: 0         0:  0   1
        32: 1

        bytes held by each rank
        rank zero3:dp=2                         ddp:tp=2
        0-1  #######################  697.9 KiB #######################  699.8 KiB

        bytes from rank (row) to rank (column); 171.8 KiB in all
                    0       1   sends
        0           .   86 Ki   86 Ki
        1       86 Ki       .   86 Ki
        gets    86 Ki   86 Ki
        stays  614 Ki  614 Ki

        model: 21 tensors, 119,104 elements, 1.4 MiB with AdamW's moments""")


@pytest.mark.parametrize(
    "specs",
    [
        ["fsdp2:dp=16,tp=4", "hsdp:rep=8,dp=8"],
        ["zero1:dp=128", "ddp:dp=32,tp=2,pp=2"],
        ["zero3:dp=1", "zero3:dp=96"],
    ],
)
def test_large_worlds_keep_to_80_columns(specs: list[str]) -> None:
    picture = picture_of(specs, links="h100")
    text = _text(picture)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "schedule on h100" in text


def test_replicas_are_named_and_pieces_that_are_too_fine_are_told() -> None:
    text = _text(picture_of(["ddp:dp=8,tp=2"], tensor="lm_head.weight"))
    assert "0 x8: ranks 0-14 by 2" in text
    assert "sampled" not in text
    fine = _text(picture_of(["zero3:dp=40"], tensor="lm_head.weight"))
    assert "sampled: pieces are finer" in fine


def test_colours_are_only_an_addition() -> None:
    picture = picture_of(["zero3:dp=4", "ddp:dp=2,tp=2"])
    with_colour = _text(picture, color=True)
    assert "\x1b[" in with_colour
    assert "\x1b[" not in _text(picture)


def test_a_schedule_in_lines() -> None:
    starts, ends = np.array([0.0, 0.001]), np.array([0.001, 0.002])
    text = _text(Picture(("a", "b"), timeline=Timeline(starts, ends, 5, 0.005, 0.0045)))
    lines = text.splitlines()
    assert lines[2] == "schedule: 5 ms, the first 2 of 5 chunks, the busiest link needs 4.5 ms"
    assert lines[3].startswith("    0 ####")
    assert lines[3].endswith(" 1 ms")
    assert lines[4].split("#")[0].strip() == "1"
    nothing = Timeline(np.zeros(0), np.zeros(0), 0, 0.0)
    assert "0 chunks" in _text(Picture(("a",), timeline=nothing))
