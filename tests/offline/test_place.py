"""Where a checkpoint is to be: full disks, closed folders, others who work there, what others made."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from dynadapt import offline
from dynadapt.elastic.place import Place
from dynadapt.elastic.verification import verified
from dynadapt.errors import Refused
from tests.offline._killing import contents, in_fork, mounted, source_in


def test_only_one_works_on_a_target(tmp_path: Path) -> None:
    source, place = source_in(tmp_path / "a"), Place(tmp_path / "b")
    place.begin()
    for resume in (False, True):
        with pytest.raises(Refused) as caught:
            offline.convert(source, tmp_path / "b", "safetensors", resume=resume)
        assert caught.value.reason == "target-busy"
    assert place.data.exists()
    place.undo()
    offline.convert(source, tmp_path / "b", "safetensors", resume=True)  # nothing to continue


def test_a_hidden_folder_that_somebody_removed(tmp_path: Path) -> None:
    source, target = source_in(tmp_path / "a"), tmp_path / "b"

    def remove(done: int, total: int) -> None:
        shutil.rmtree(tmp_path / ".b.partial", ignore_errors=True)

    with pytest.raises(Refused, match="unwritable-file"):
        offline.convert(source, target, "safetensors", on_bytes=remove)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


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
    source = source_in(tmp_path / "a")
    offline.convert(source, tmp_path / "b", "safetensors")
    before = contents(tmp_path / "b")
    _killed_as_it_replaces(tmp_path / "b", monkeypatch)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".b.old", ".b.partial", "a"]
    with pytest.raises(Refused) as caught:
        offline.convert(source, tmp_path / "b", "safetensors")
    assert caught.value.reason == "target-exists"
    assert contents(tmp_path / "b") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("name", [".b.partial", ".b.old"])
@pytest.mark.parametrize("what", ["folder", "file", "link", "lock"])
def test_what_somebody_else_made_is_not_touched(tmp_path: Path, name: str, what: str) -> None:
    """Folders and files under the names that are used here, and without the mark that is left here."""
    source, target = source_in(tmp_path / "a"), tmp_path / "b"
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


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    source = source_in(tmp_path / "a")
    file, closed, disk = (tmp_path / name for name in ("file", "closed", "disk"))
    file.write_text("")
    closed.mkdir(mode=0o555)
    with mounted(disk, "ro") as done:
        places = [file, Path("/proc/self"), *([disk] if done else [])]
        if os.geteuid():  # root may write anywhere
            places.append(closed)
        for parent in places:
            with pytest.raises(Refused) as caught:
                offline.convert(source, parent / "b", "safetensors")
            assert caught.value.reason == "unwritable-file"


@pytest.mark.parametrize("room", [0, 90, 200, 230, 240, 250])
def test_a_disk_that_is_full(tmp_path: Path, room: int) -> None:
    """On a real file system of that many KiB; the target takes some 240 with its frames."""
    disk = tmp_path / "disk"
    with mounted(disk, f"size={max(room, 4)}k") as done:
        if not done:
            pytest.skip("may not mount a file system here")
        source = source_in(tmp_path / "a", rows=200)
        before = contents(source)
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
        assert contents(source) == before


@pytest.mark.parametrize("blocks", range(0, 400, 37))
def test_no_file_may_grow(tmp_path: Path, blocks: int) -> None:
    """With a limit on the size of files, which ends a write at any place, the last ones too."""
    source, target = source_in(tmp_path / "a", rows=200), tmp_path / "b"

    def limited() -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (blocks * 512, blocks * 512))
        try:
            offline.convert(source, target, "universal")
        except Refused as refused:
            sys.exit(9 if refused.reason == "disk-full" else 8)

    assert in_fork(limited) == (0 if target.exists() else 9)
    left = [p.name for p in tmp_path.iterdir()]
    assert sorted(left) == (["a", "b"] if target.exists() else ["a"])
    if target.exists():
        assert verified(offline.open(target))[0] == ()


def test_a_source_that_is_written_to_meanwhile(tmp_path: Path) -> None:
    """What was read before and after may be of two saves: it is no checkpoint."""
    source = source_in(tmp_path / "a")

    def save(done: int, total: int) -> None:
        shutil.copy(source / "model.safetensors", tmp_path / "new")
        os.replace(tmp_path / "new", source / "model.safetensors")

    with pytest.raises(Refused, match=r"model\.safetensors: was written to, or replaced") as found:
        offline.convert(source, tmp_path / "b", "safetensors", on_bytes=save)
    assert {finding.reason for finding in found.value.findings} == {"source-changed"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
