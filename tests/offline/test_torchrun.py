"""Conversions by several processes: under the real torchrun, and with ranks that fail, die or never come."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dynadapt import offline
from dynadapt.elastic import ranks as together
from dynadapt.elastic.place import Place
from dynadapt.elastic.verification import verified
from dynadapt.errors import Refused
from dynadapt.transport import filling
from tests.offline._killing import contents, die, source_in

if TYPE_CHECKING:
    from collections.abc import Callable

TORCHRUN = Path(sys.executable).with_name("torchrun")
COMMAND = Path(sys.executable).with_name("dynadapt")


def _torchrun(count: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    launch = [TORCHRUN, "--standalone", f"--nproc-per-node={count}", "--no-python", COMMAND]
    return subprocess.run(
        [str(word) for word in (*launch, *words)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.parametrize(("count", "to"), [(2, "universal"), (3, "zero3:dp=2"), (2, "safetensors")])
def test_torchrun(saved: Path, tmp_path: Path, count: int, to: str) -> None:
    """The same bytes as one process writes; every rank has written some; one report."""
    before = contents(saved)
    done = _torchrun(count, "convert", saved, tmp_path / "b", "--to", to, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    offline.convert(saved, tmp_path / "c", to)
    assert contents(tmp_path / "b") == contents(tmp_path / "c")
    assert report["fingerprint"] == offline.open(tmp_path / "c").fingerprint()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "c"]
    assert contents(saved) == before


def test_an_error_under_torchrun(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    done = _torchrun(2, "convert", saved, tmp_path / "b", "--to", "universal")
    assert done.returncode
    assert "target-exists" in done.stderr
    assert not list((tmp_path / "b").iterdir())


def _ranks_of(count: int, what: Callable[[int], Any], log: Path) -> list[int]:
    """Fork them, wait for all; how each ended. What one raises is written to its log."""
    pids = []
    for rank in range(count):
        pid = os.fork()
        if not pid:
            code = 0
            try:
                what(rank)
            except Refused as refused:
                (log / f"{rank}.log").write_text(f"{refused.reason} {refused}")
                code = 9
            except BaseException as error:
                (log / f"{rank}.log").write_text(repr(error))
                code = 8
            finally:
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _writing(point: int, act: Callable[[], None]) -> None:
    """Act before the so-many-th write of tensors."""
    write, calls = filling._write, itertools.count(1)

    def counted(fd: int, data: memoryview, at: int) -> None:
        if next(calls) == point:
            act()
        write(fd, data, at)

    filling._write = counted


def _logs(log: Path) -> list[str]:
    return [path.read_text() for path in sorted(log.glob("*.log"))]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


def test_shares_are_even() -> None:
    sizes = {f"{i}": 1 << (i % 7) for i in range(100)}
    found = together.shares(sizes, 3)
    loads = [sum(sizes[n] for n in own) for own in found]
    assert max(loads) - min(loads) <= max(sizes.values())
    assert sorted(n for own in found for n in own) == sorted(sizes)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_fails_all_end(tmp_path: Path, log: Path, failing: int) -> None:
    """With what that one met; nothing is left."""
    source = source_in(tmp_path / "a", rows=400)

    def work(rank: int) -> None:
        def fail() -> None:
            raise RuntimeError("on purpose")

        if rank == failing:
            _writing(3, fail)
        offline.convert(source, tmp_path / "b", "universal", ranks=(rank, 3), timeout=20)

    began = time.monotonic()
    codes = _ranks_of(3, work, log)
    assert time.monotonic() - began < 60
    assert codes.count(8) == 1
    assert codes.count(9) == 2
    assert codes[failing] == 8
    assert all("on purpose" in text for text in _logs(log))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "log"]


@pytest.mark.parametrize("dying", [0, 1])
def test_one_dies_and_it_goes_on(tmp_path: Path, log: Path, dying: int) -> None:
    source = source_in(tmp_path / "a", rows=400)
    target = tmp_path / "b"

    def work(rank: int) -> None:
        if rank == dying:
            _writing(3, die)
        offline.convert(source, target, "universal", ranks=(rank, 2), timeout=2)

    codes = _ranks_of(2, work, log)
    assert codes[dying] == -signal.SIGKILL
    assert codes[1 - dying] == 9
    assert "rank-lost" in _logs(log)[0]
    assert not target.exists()
    assert Place(target).data.is_dir()

    def resume(rank: int) -> None:
        report = offline.convert(
            source, target, "universal", ranks=(rank, 3), resume=True, timeout=20
        )
        assert report.bytes_kept > 0

    assert _ranks_of(3, resume, log) == [0, 0, 0], _logs(log)
    assert verified(offline.open(target))[0] == ()
    offline.convert(source, tmp_path / "c", "universal")
    assert contents(target) == contents(tmp_path / "c")


def test_a_folder_that_is_written_into_as_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others say that they are there in what an ended conversion has left."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    true = shutil.rmtree

    def removes(path: Path, **how: Any) -> None:
        true(path, **how)
        path.mkdir()
        (path / "hello").write_text("1")

    monkeypatch.setattr(shutil, "rmtree", removes)
    together._anew(folder, "token")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("lacking", [0, 1])
def test_one_never_comes(tmp_path: Path, log: Path, lacking: int) -> None:
    source = source_in(tmp_path / "a")

    def work(rank: int) -> None:
        if rank != lacking:
            offline.convert(source, tmp_path / "b", "universal", ranks=(rank, 3), timeout=1)

    codes = _ranks_of(3, work, log)
    assert codes == [0 if rank == lacking else 9 for rank in range(3)]
    assert all("rank-lost" in text and "did not come" in text for text in _logs(log))
    assert not (tmp_path / "b").exists()


def test_other_arguments(tmp_path: Path, log: Path) -> None:
    source = source_in(tmp_path / "a")

    def work(rank: int) -> None:
        include = ["layers.*"] if rank else []
        offline.convert(
            source, tmp_path / "b", "universal", include=include, ranks=(rank, 2), timeout=20
        )

    assert _ranks_of(2, work, log) == [9, 9]
    assert all("ranks-differ" in text for text in _logs(log))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "log"]
