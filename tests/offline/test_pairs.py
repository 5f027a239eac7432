"""Every reader and every writer: a state goes from each form to each other, and stays the same."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dynadapt import offline
from tests import _ranks
from tests.offline import _made

if TYPE_CHECKING:
    from pathlib import Path

FORMS = (
    "zero0:dp=1",
    "zero1:dp=3",
    "zero2:dp=2,round_robin=true",
    "zero3:dp=4",
    "universal",
    "dcp",
    "dcp/fsdp2:dp=3",
    "torch",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a real job: bf16, two groups, a tie, a frozen weight, buffers."""
    folder = tmp_path_factory.mktemp("pairs") / "zero2"
    _ranks.pool(2).run(_made.save_deepspeed, "zero2-bf16", str(folder), 2, {}, timeout=200)
    return folder


@pytest.mark.parametrize("first", FORMS)
def test_from_each_form_to_every_other(saved: Path, tmp_path: Path, first: str) -> None:
    """The fingerprint is the source's after every step, and a plan says what is then done."""
    whole = offline.open(saved).fingerprint()
    start = tmp_path / "start"
    assert offline.convert(saved, start, first).fingerprint == whole
    for number, form in enumerate(FORMS):
        there = tmp_path / str(number)
        before = sorted(os.listdir(tmp_path))
        planned = offline.plan(start, form)
        assert sorted(os.listdir(tmp_path)) == before
        report = offline.convert(start, there, form)
        assert report.verified
        assert report.fingerprint == whole, form
        assert offline.open(there).fingerprint() == whole, form
        assert (planned.bytes_read, planned.bytes_written) == (
            report.bytes_read,
            report.bytes_written,
        )
        assert offline.diff(saved, there).same, form


@pytest.mark.parametrize("form", [*FORMS, "universal/zero2", "universal/zero3"])
def test_like_is_the_form_itself(saved: Path, tmp_path: Path, form: str) -> None:
    """What a reader says of a checkpoint asks for the same again."""
    offline.convert(saved, tmp_path / "a", form)
    offline.convert(saved, tmp_path / "b", like=tmp_path / "a")
    a, b = offline.open(tmp_path / "a"), offline.open(tmp_path / "b")
    assert a.own.written == b.own.written
    assert (a.format, a.layout.digest()) == (b.format, b.layout.digest())
