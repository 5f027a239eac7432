"""Conversions that are killed at any point, their forks too: nothing is half there, and it goes on."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from typing import TYPE_CHECKING

import pytest

from dynadapt import offline
from dynadapt.elastic import budget
from dynadapt.elastic.verification import verified
from dynadapt.errors import Finding, Refused
from dynadapt.transport import filling, sums
from tests.offline._killing import act_at, contents, die, in_fork, source_in

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked processes do the work, however little it is, and though torch is loaded."""
    monkeypatch.setattr(budget, "FORK", 0)
    monkeypatch.setattr(budget, "may_fork", lambda: True)


@pytest.mark.parametrize(
    ("to", "every"),
    [
        ("safetensors", 2),
        ("universal", 11),
        ("dcp/fsdp2:dp=3", 11),
        pytest.param("universal", 1, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_killed_at_any_point(tmp_path: Path, to: str, every: int, force: bool) -> None:
    """Nothing half-made has the name, the source is as it was, and the same call with resume ends it."""
    source, target = source_in(tmp_path / "a"), tmp_path / "b"
    before, prints = contents(source), offline.open(source).fingerprint()
    offline.convert(source, tmp_path / "c", to)
    whole, resumed = contents(tmp_path / "c"), 0

    def killed(point: int) -> None:
        act_at(point, die)
        offline.convert(source, target, to, force=force, threads=2)

    for point in count(1, every):
        if force:
            shutil.copytree(tmp_path / "c", target)
            (target / "old").write_text("old")
        code = in_fork(lambda point=point: killed(point))
        if target.exists() and not (target / "old").exists():
            assert contents(target) == whole
        if code == 0:
            break
        assert code == -signal.SIGKILL
        report = offline.convert(source, target, to, force=True, resume=True)
        resumed += report.bytes_kept > 0
        assert report.fingerprint == prints
        assert contents(target) == whole
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]
        shutil.rmtree(target)
    assert point > 20
    assert resumed
    assert contents(source) == before


@pytest.mark.usefixtures("forks")
def test_forks_and_their_parent_killed_at_any_point(tmp_path: Path) -> None:
    """A killed fork is told, and can be continued; without a parent forks end, and hold no lock."""
    source, target = source_in(tmp_path / "a"), tmp_path / "b"
    offline.convert(source, tmp_path / "c", "universal", threads=1)
    whole, codes = contents(tmp_path / "c"), []

    def killed(point: int) -> None:
        act_at(point, die)
        try:
            offline.convert(source, target, "universal", threads=2)
        except Refused as error:
            sys.exit(3 if error.reason == "worker-lost" else 4)

    for point in count(1, 5):
        codes.append(in_fork(lambda point=point: killed(point)))
        if codes[-1] == 0:
            break
        offline.convert(source, target, "universal", resume=True, force=True)
        assert contents(target) == whole
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]
        shutil.rmtree(target)
    assert set(codes) == {0, 3, -signal.SIGKILL}
    assert contents(target) == whole


@pytest.mark.usefixtures("forks")
def test_forks_that_sum_what_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one thread does, and what is amiss is told, too; one that is killed is."""
    source = source_in(tmp_path / "a", 300, 30)
    found, alone = offline.open(source), os.getpid()
    assert found.fingerprint() == found.fingerprint(threads=1)

    def refuse(*_: object) -> int:
        assert os.getpid() != alone
        raise Refused([Finding("truncated-file", "x", "is short")])

    monkeypatch.setattr(sums, "weighted_sum", refuse)
    with pytest.raises(Refused, match="is short"):
        found.fingerprint()
    monkeypatch.setattr(sums, "weighted_sum", lambda *_: alone == os.getpid() or die())
    with pytest.raises(Refused) as caught:
        found.fingerprint()
    assert caught.value.reason == "worker-lost"


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("layers", [7, 900])
def test_an_interrupt_ends_the_forks(tmp_path: Path, layers: int) -> None:
    """Also those that have more to tell than a pipe holds."""
    source, target = source_in(tmp_path / "a", 20_000 // layers, layers), tmp_path / "b"
    told = count(1)

    def interrupt(_done: int, _total: int) -> None:
        if next(told) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        offline.convert(source, target, "safetensors", on_bytes=interrupt)
    assert not target.exists()
    assert not multiprocessing.active_children()
    assert offline.convert(source, target, "safetensors", resume=True).bytes_kept
    assert offline.open(target).fingerprint() == offline.open(source).fingerprint()


def test_where_the_end_of_children_is_ignored(tmp_path: Path) -> None:
    """As some that start programs leave it: nobody can wait for a fork, so threads do the work."""
    source = source_in(tmp_path / "a", rows=200)
    code = (
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from dynadapt import offline; from dynadapt.elastic import budget\n"
        "from dynadapt.transport import forks\n"
        "budget.FORK = 0; assert not forks.may_fork()\n"
        f"print(offline.convert({str(source)!r}, {str(tmp_path / 'b')!r}, 'dcp').verified)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_killed_again_and_again(tmp_path: Path) -> None:
    """Every continuation is killed too, and still it ends."""
    source, target = source_in(tmp_path / "a", rows=3000), tmp_path / "b"

    def killed() -> None:
        act_at(20 + len(codes), die)
        offline.convert(source, target, "safetensors", resume=True, threads=1)

    codes: list[int] = []
    while not target.exists():
        codes.append(in_fork(killed))
        assert len(codes) < 40
    assert codes.count(-signal.SIGKILL) >= 4
    assert verified(offline.open(target))[0] == ()
    assert offline.open(target).fingerprint() == offline.open(source).fingerprint()


@pytest.mark.usefixtures("forks")
def test_a_source_that_is_cut_short_meanwhile(tmp_path: Path) -> None:
    """Its map ends whoever reads it: it is told why."""
    source, target = source_in(tmp_path / "a", rows=4_000), tmp_path / "b"
    write = filling._write

    def cut(fd: int, data: memoryview, at: int) -> None:
        os.truncate(source / "model.safetensors", 4096)
        write(fd, data, at)

    def converted() -> None:
        filling._write = cut
        with pytest.raises(Refused, match="source-changed"):
            offline.convert(source, target, "torch")

    try:
        assert in_fork(converted) == 0
    finally:
        filling._write = write
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
