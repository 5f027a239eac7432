"""Conversions that are killed, interrupted or run out of room: what stays behind, and how it goes on."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dynadapt import cli, offline
from dynadapt.elastic import conversion
from dynadapt.elastic.place import Place
from dynadapt.elastic.verification import verified
from dynadapt.errors import Refused
from dynadapt.transport import filling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20


def _source(folder: Path, rows: int = 40, layers: int = 7) -> Path:
    rng = np.random.default_rng(0)
    names = [f"layers.{i}.weight" for i in range(layers)]
    tensors = {name: rng.standard_normal((rows, 33)).astype("f4") for name in names}
    tensors["empty"] = np.zeros((0, 4), "f4")
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _forked(what: Callable[[], Any]) -> int:
    """Run it in a fork of this process; how that ended, as `os.waitstatus_to_exitcode` has it."""
    pid = os.fork()
    if not pid:
        code = 70
        try:
            what()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _at(point: int, act: Callable[[], None]) -> None:
    """Act at the so-many-th of all that this process does to the target from now on."""
    steps = count(1)

    def step() -> None:
        if next(steps) == point:
            act()

    def hear(event: str, words: tuple[Any, ...]) -> None:
        writes = event in {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}
        if writes and any(".b." in str(word) or str(word).endswith("/b") for word in words):
            step()

    write = filling._write

    def half(fd: int, data: memoryview, at: int) -> None:
        write(fd, data[: len(data) // 2], at)
        step()
        write(fd, data[len(data) // 2 :], at + len(data) // 2)

    filling._write = half
    sys.addaudithook(hear)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _points(every: int) -> Iterator[int]:
    return count(1, every)


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
    source, target = _source(tmp_path / "a"), tmp_path / "b"
    before, prints = _bytes(source), offline.open(source).fingerprint()
    offline.convert(source, tmp_path / "c", to)
    whole, resumed = _bytes(tmp_path / "c"), 0

    def killed(point: int) -> None:
        _at(point, _die)
        offline.convert(source, target, to, force=force, threads=2)

    for point in _points(every):
        if force:
            shutil.copytree(tmp_path / "c", target)
            (target / "old").write_text("old")
        code = _forked(lambda point=point: killed(point))
        if target.exists() and not (target / "old").exists():
            assert _bytes(target) == whole
        if code == 0:
            break
        assert code == -signal.SIGKILL
        report = offline.convert(source, target, to, force=True, resume=True)
        resumed += report.bytes_kept > 0
        assert report.fingerprint == prints
        assert _bytes(target) == whole
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]
        shutil.rmtree(target)
    assert point > 20
    assert resumed
    assert _bytes(source) == before


def test_forks_and_their_parent_killed_at_any_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed fork is told, and can be continued; without a parent forks end, and hold no lock."""
    monkeypatch.setattr(conversion, "FORK", 0)
    monkeypatch.setattr(conversion, "may_fork", lambda: True)
    source, target = _source(tmp_path / "a"), tmp_path / "b"
    offline.convert(source, tmp_path / "c", "universal", threads=1)
    whole, codes = _bytes(tmp_path / "c"), []

    def killed(point: int) -> None:
        _at(point, _die)
        try:
            offline.convert(source, target, "universal", threads=2)
        except Refused as error:
            sys.exit(3 if error.reason == "worker-lost" else 4)

    for point in _points(5):
        codes.append(_forked(lambda point=point: killed(point)))
        if codes[-1] == 0:
            break
        offline.convert(source, target, "universal", resume=True, force=True)
        assert _bytes(target) == whole
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]
        shutil.rmtree(target)
    assert set(codes) == {0, 3, -signal.SIGKILL}
    assert _bytes(target) == whole


@pytest.mark.parametrize("layers", [7, 900])
def test_an_interrupt_ends_the_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """Also those that have more to tell than a pipe holds."""
    monkeypatch.setattr(conversion, "FORK", 0)
    monkeypatch.setattr(conversion, "may_fork", lambda: True)
    source, target = _source(tmp_path / "a", 20_000 // layers, layers), tmp_path / "b"
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
    source = _source(tmp_path / "a", rows=200)
    code = (
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from dynadapt import offline; from dynadapt.elastic import conversion\n"
        "from dynadapt.transport import forks\n"
        "conversion.FORK = 0; assert not forks.may_fork()\n"
        f"print(offline.convert({str(source)!r}, {str(tmp_path / 'b')!r}, 'dcp').verified)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_killed_again_and_again(tmp_path: Path) -> None:
    """Every continuation is killed too, and still it ends."""
    source, target = _source(tmp_path / "a", rows=3000), tmp_path / "b"

    def killed() -> None:
        _at(20 + len(codes), _die)
        offline.convert(source, target, "safetensors", resume=True, threads=1)

    codes: list[int] = []
    while not target.exists():
        codes.append(_forked(killed))
        assert len(codes) < 40
    assert codes.count(-signal.SIGKILL) >= 4
    assert verified(offline.open(target))[0] == ()
    assert offline.open(target).fingerprint() == offline.open(source).fingerprint()


def _left(root: Path, point: int = 50) -> tuple[Path, Path]:
    """A conversion that was killed as it streamed."""
    source, target = _source(root / "a"), root / "b"

    def killed() -> None:
        _at(point, _die)
        offline.convert(source, target, "universal", threads=1)

    assert _forked(killed) == -signal.SIGKILL
    journal = Place(target).aside / "journal-0"
    assert len(journal.read_text().splitlines()) > 2
    return source, target


def test_what_has_changed_is_not_continued(tmp_path: Path) -> None:
    source, target = _left(tmp_path)
    left = _bytes(Place(target).aside)
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
    assert _bytes(Place(target).aside) == left
    report = offline.convert(source, target, "universal")  # begins anew, and says so
    assert [w.reason for w in report.warnings] == ["left-over"]
    assert report.bytes_kept == 0


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
    assert _bytes(target) == _bytes(tmp_path / "c")


def test_only_one_works_on_a_target(tmp_path: Path) -> None:
    source, place = _source(tmp_path / "a"), Place(tmp_path / "b")
    place.begin()
    for resume in (False, True):
        with pytest.raises(Refused) as caught:
            offline.convert(source, tmp_path / "b", "safetensors", resume=resume)
        assert caught.value.reason == "target-busy"
    assert place.data.exists()
    place.undo()
    offline.convert(source, tmp_path / "b", "safetensors", resume=True)  # nothing to continue


def _interrupted(words: list[str], told: Path, point: int, number: signal.Signals) -> int:
    """A command that gets a signal at that point: how it ends, and in a file what it says."""

    def command() -> None:
        os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stderr, sys.argv = os.fdopen(2, "w", closefd=False), words
        _at(point, lambda: os.kill(os.getpid(), number))
        cli.main()

    return _forked(command)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("point", [3, 30])
def test_interrupted(tmp_path: Path, number: signal.Signals, point: int) -> None:
    """By Ctrl-C or SIGTERM: the folder stays, and the command says how to go on."""
    source, target = _source(tmp_path / "a"), tmp_path / "b"
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
    source, target, told = _source(tmp_path / "a", layers=1), tmp_path / "b", tmp_path / "told"
    offline.convert(source, tmp_path / "c", "safetensors")
    whole = _bytes(tmp_path / "c")
    words = ["dynadapt", "convert", str(source), str(target), "--to", "safetensors", "--force"]
    place, said = Place(target), set()
    for point in _points(1):
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
        assert _bytes(target) == (whole if new else {**whole, "old": b"old"})
        assert ("--resume" in text) == place.data.exists()
        assert (f"{place.old}, which it replaced" in text) == place.old.exists()
        said.add((new, "--resume" in text, place.old.exists()))
        if new:
            shutil.rmtree(target)
    untouched, begun, left, done = [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 0, 0)]
    assert said == {untouched, begun, left, done}
    assert _bytes(target) == whole


def test_an_error_leaves_nothing_to_continue(tmp_path: Path) -> None:
    source = _source(tmp_path / "a")

    def fail(done: int, total: int) -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError):
        offline.convert(source, tmp_path / "b", "safetensors", on_bytes=fail)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_a_source_that_is_written_to_meanwhile(tmp_path: Path) -> None:
    """What was read before and after may be of two saves: it is no checkpoint."""
    source = _source(tmp_path / "a")

    def save(done: int, total: int) -> None:
        shutil.copy(source / "model.safetensors", tmp_path / "new")
        os.replace(tmp_path / "new", source / "model.safetensors")

    with pytest.raises(Refused, match=r"model\.safetensors: was written to, or replaced") as found:
        offline.convert(source, tmp_path / "b", "safetensors", on_bytes=save)
    assert {finding.reason for finding in found.value.findings} == {"source-changed"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_a_source_that_is_cut_short_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its map ends whoever reads it: it is told why."""
    monkeypatch.setattr(conversion, "FORK", 0)
    monkeypatch.setattr(conversion, "may_fork", lambda: True)
    source, target = _source(tmp_path / "a", rows=4_000), tmp_path / "b"
    write = filling._write

    def cut(fd: int, data: memoryview, at: int) -> None:
        os.truncate(source / "model.safetensors", 4096)
        write(fd, data, at)

    def converted() -> None:
        filling._write = cut
        with pytest.raises(Refused, match="source-changed"):
            offline.convert(source, target, "torch")

    try:
        assert _forked(converted) == 0
    finally:
        filling._write = write
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_a_hidden_folder_that_somebody_removed(tmp_path: Path) -> None:
    source, target = _source(tmp_path / "a"), tmp_path / "b"

    def remove(done: int, total: int) -> None:
        shutil.rmtree(tmp_path / ".b.partial", ignore_errors=True)

    with pytest.raises(Refused, match="unwritable-file"):
        offline.convert(source, target, "safetensors", on_bytes=remove)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize("room", [0, 90, 200, 230, 240, 250])
def test_a_disk_that_is_full(tmp_path: Path, room: int) -> None:
    """On a real file system of that many KiB; the target takes some 240 with its frames."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={max(room, 4)}k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system here")
    try:
        source = _source(tmp_path / "a", rows=200)
        before = _bytes(source)
        reasons = []
        try:
            offline.convert(source, disk / "b", "safetensors")
        except Refused as refused:
            reasons = [refused.reason]
        if (disk / "b").exists():
            assert room > 190
            assert verified(offline.open(disk / "b"))[0] == ()
        assert reasons == [] if (disk / "b").exists() else ["disk-full"]
        assert [p.name for p in disk.iterdir()] == [] if reasons else ["b"]
        assert _bytes(source) == before
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)  # files may be mapped


@pytest.mark.parametrize("blocks", range(0, 400, 37))
def test_no_file_may_grow(tmp_path: Path, blocks: int) -> None:
    """With a limit on the size of files, which ends a write at any place, the last ones too."""
    source, target = _source(tmp_path / "a", rows=200), tmp_path / "b"

    def limited() -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (blocks * 512, blocks * 512))
        try:
            offline.convert(source, target, "universal")
        except Refused as refused:
            sys.exit(9 if refused.reason == "disk-full" else 8)

    assert _forked(limited) == (0 if target.exists() else 9)
    left = [p.name for p in tmp_path.iterdir()]
    assert sorted(left) == (["a", "b"] if target.exists() else ["a"])
    if target.exists():
        assert verified(offline.open(target))[0] == ()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    source = _source(tmp_path / "a")
    (tmp_path / "file").write_text("")
    for parent in (tmp_path / "file", Path("/proc/self")):
        with pytest.raises(Refused) as caught:
            offline.convert(source, parent / "b", "safetensors")
        assert caught.value.reason == "unwritable-file"
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    if os.geteuid():  # root may write anywhere
        with pytest.raises(Refused) as caught:
            offline.convert(source, closed / "b", "safetensors")
        assert caught.value.reason == "unwritable-file"
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)]
    if not subprocess.run(mount, capture_output=True, check=False).returncode:
        try:
            with pytest.raises(Refused) as caught:
                offline.convert(source, disk / "b", "safetensors")
            assert caught.value.reason == "unwritable-file"
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)  # files may be mapped


def _killed_as_it_replaces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies when the old checkpoint has lost its name, and the new one has none yet."""
    place, renamed, rename = Place(path, force=True), [], Path.rename

    def once(own: Path, to: Path) -> Path:
        renamed.append(own)
        if len(renamed) > 1:
            raise KeyboardInterrupt
        return rename(own, to)

    place.begin()
    monkeypatch.setattr(Path, "rename", once)
    with pytest.raises(KeyboardInterrupt):
        place.settle()
    monkeypatch.undo()
    place.leave()


def test_a_forced_target_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the two renames of a replacement: the old one has its name again."""
    source = _source(tmp_path / "a")
    offline.convert(source, tmp_path / "b", "safetensors")
    before = _bytes(tmp_path / "b")
    _killed_as_it_replaces(tmp_path / "b", monkeypatch)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".b.old", ".b.partial", "a"]
    with pytest.raises(Refused) as caught:
        offline.convert(source, tmp_path / "b", "safetensors")
    assert caught.value.reason == "target-exists"
    assert _bytes(tmp_path / "b") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("name", [".b.partial", ".b.old"])
@pytest.mark.parametrize("what", ["folder", "file", "link", "lock"])
def test_what_somebody_else_made_is_not_touched(tmp_path: Path, name: str, what: str) -> None:
    """Folders and files under the names that are used here, and without the mark that is left here."""
    source, target = _source(tmp_path / "a"), tmp_path / "b"
    offline.convert(source, target, "safetensors")
    theirs, there = tmp_path / name, tmp_path / "theirs"
    for folder in (there,) if what == "link" else (theirs,) if what != "file" else ():
        folder.mkdir()
        (folder / ("lock" if what == "lock" else "notes")).write_text("mine")
    if what == "link":
        theirs.symlink_to(there)
    elif what == "file":
        theirs.write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for resume in (False, True):
        with pytest.raises(Refused) as caught:
            offline.convert(source, target, "safetensors", force=True, resume=resume)
        assert caught.value.findings[0].where == str(theirs)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    if name == ".b.old":  # is not needed where nothing is replaced
        shutil.rmtree(target)
        offline.convert(source, target, "safetensors", force=True)
        kept = {path: data for path, data in before.items() if target not in path.parents}
        assert kept == {path: path.read_bytes() for path in kept}
