"""Conversions that ended before their end: what stays behind and is said, and when it is continued."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import pytest

from dynadapt import cli, offline
from dynadapt.elastic.checkpoint import layout_of, open_checkpoint
from dynadapt.elastic.place import Place
from dynadapt.errors import Refused
from dynadapt.vps.keys import Key
from tests.offline._killing import act_at, contents, die, in_fork, source_in

if TYPE_CHECKING:
    from pathlib import Path


def _left(root: Path, point: int = 50) -> tuple[Path, Path]:
    """A conversion that was killed as it streamed."""
    source, target = source_in(root / "a"), root / "b"

    def killed() -> None:
        act_at(point, die)
        offline.convert(source, target, "universal", threads=1)

    assert in_fork(killed) == -signal.SIGKILL
    journal = Place(target).aside / "journal-0"
    assert len(journal.read_text().splitlines()) > 2
    return source, target


def test_what_has_changed_is_not_continued(tmp_path: Path) -> None:
    source, target = _left(tmp_path)
    left = contents(Place(target).aside)
    for word, options in (
        ("target", {"to": "safetensors"}),
        ("options", {"to": "universal", "include": ["layers.*"]}),
    ):
        with pytest.raises(Refused, match=word) as caught:
            offline.convert(source, target, resume=True, **options)  # type: ignore[arg-type]
        assert caught.value.reason == "resume-differs"
    path = source / "model.safetensors"
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    with pytest.raises(Refused, match=r"model\.safetensors") as caught:
        offline.convert(source, target, "universal", resume=True)
    assert caught.value.reason == "resume-differs"
    assert contents(Place(target).aside) == left
    report = offline.convert(source, target, "universal")  # begins anew, and says so
    assert [w.reason for w in report.warnings] == ["left-over"]
    assert report.bytes_kept == 0


def test_what_lies_beside_the_tensors_may_change(tmp_path: Path) -> None:
    """A log that a job goes on to write, and small files, which come along as they are at the end."""
    source, target = _left(tmp_path)
    (source / "train.log").write_text("step 3\n")
    (source / "config.json").write_text('{"model_type": "odd"}')
    report = offline.convert(source, target, "universal", resume=True)
    assert report.bytes_kept > 0
    assert not report.warnings
    assert (target / "config.json").read_text() == '{"model_type": "odd"}'
    assert report.fingerprint == offline.open(source).fingerprint()


def test_tensors_that_lie_otherwise_are_not_continued(tmp_path: Path) -> None:
    """As if an index led elsewhere, in files that are as they were."""
    source, target = _left(tmp_path)
    found = open_checkpoint(source)
    one, two = (found.layout.by_name[Key(f"layers.{i}.weight", "param")].key for i in (0, 1))
    other = {one: two, two: one}
    rows = {
        endpoint: tuple(replace(row, key=other.get(row.key, row.key)) for row in each)
        for endpoint, each in found.own.files.items()
    }
    own = replace(found.own, files=rows)
    swapped = replace(found, own=own, layout=layout_of(own))
    with pytest.raises(Refused, match="of other tensors") as caught:
        offline.convert(swapped, target, "universal", resume=True)
    assert caught.value.reason == "resume-differs"
    assert offline.convert(found, target, "universal", resume=True).bytes_kept


def test_what_is_damaged_is_written_anew(tmp_path: Path) -> None:
    """A finished buffer whose bytes have changed, a file that is shorter, a journal garbled and cut off."""
    source, target = _left(tmp_path, 60)
    aside = Place(target).aside
    masters = sorted((aside / "data").rglob("fp32.pt"))
    with masters[0].open("r+b") as file:
        file.seek(300)
        file.write(b"\xff" * 8)
    os.truncate(masters[1], 100)
    with (aside / "journal-0").open("a") as journal:
        journal.write("\0\0\0\n[1]\n" + '["dynadapt/zero/lay')
    report = offline.convert(source, target, "universal", resume=True)
    assert 0 < report.bytes_kept < report.bytes_written
    offline.convert(source, tmp_path / "c", "universal")
    assert contents(target) == contents(tmp_path / "c")


def _interrupted(words: list[str], told: Path, point: int, number: signal.Signals) -> int:
    """A command that gets a signal at that point: how it ends, and in a file what it says."""

    def command() -> None:
        os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stderr, sys.argv = os.fdopen(2, "w", closefd=False), words
        act_at(point, lambda: os.kill(os.getpid(), number))
        cli.main()

    return in_fork(command)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("point", [3, 30])
def test_interrupted(tmp_path: Path, number: signal.Signals, point: int) -> None:
    """By Ctrl-C or SIGTERM: the folder stays, and the command says how to go on."""
    source, target = source_in(tmp_path / "a"), tmp_path / "b"
    words = ["dynadapt", "convert", str(source), str(target), "--to", "universal"]
    told = tmp_path / "told"
    assert _interrupted(words, told, point, number) == 128 + number
    assert "interrupted" in told.read_text()
    if point > 3:
        assert "--resume" in told.read_text()
        assert Place(target).data.is_dir()
    assert not target.exists()
    sys.argv, before = [*words, "--resume"], sys.argv
    with pytest.raises(SystemExit) as ended:
        cli.main()
    sys.argv = before
    assert not ended.value.code
    assert offline.open(target).fingerprint() == offline.open(source).fingerprint()


def test_what_an_interrupt_says_is_so(tmp_path: Path) -> None:
    """At every point, over another checkpoint: which of the two is there now, and what beside."""
    source, target, told = source_in(tmp_path / "a", layers=1), tmp_path / "b", tmp_path / "told"
    offline.convert(source, tmp_path / "c", "safetensors")
    whole = contents(tmp_path / "c")
    words = ["dynadapt", "convert", str(source), str(target), "--to", "safetensors", "--force"]
    place, said = Place(target), set()
    for point in count(1, 1):
        if not target.exists():
            shutil.copytree(tmp_path / "c", target)
            (target / "old").write_text("old")
        code = _interrupted(words, told, point, signal.SIGINT)
        if code == 0:
            break
        assert code == 130
        text = " ".join(told.read_text().split())
        new = f"{target} is whole" in text
        assert new or f"{target} is as it was" in text
        assert contents(target) == (whole if new else {**whole, "old": b"old"})
        assert ("--resume" in text) == place.data.exists()
        assert (f"{place.old}, which it replaced" in text) == place.old.exists()
        said.add((new, "--resume" in text, place.old.exists()))
        if new:
            shutil.rmtree(target)
    untouched, begun, left, done = [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 0, 0)]
    assert said == {untouched, begun, left, done}
    assert contents(target) == whole


def test_an_error_leaves_nothing_to_continue(tmp_path: Path) -> None:
    source = source_in(tmp_path / "a")

    def fail(done: int, total: int) -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError):
        offline.convert(source, tmp_path / "b", "safetensors", on_bytes=fail)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
