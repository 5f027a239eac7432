"""Conversions that end badly: the source is as it was, and nothing half-made has the target's name."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dynadapt import files
from dynadapt.elastic import conversion
from dynadapt.elastic.checkpoint import open_checkpoint
from dynadapt.elastic.conversion import convert
from dynadapt.elastic.place import MANIFEST, Place, read_manifest
from dynadapt.elastic.selection import Selection
from dynadapt.elastic.verification import verified
from dynadapt.errors import DynadaptError, Refused
from dynadapt.protocols import FileTarget
from dynadapt.transport import filling


def _source(folder: Path, rows: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(rows, 4) for i in range(11)}
    tensors |= {"norm.bias": torch.randn(3).bfloat16(), "count": torch.tensor(7)}
    tensors["empty"] = torch.zeros(0, 4)
    folder.mkdir()
    save_file(tensors, str(folder / "model.safetensors"))
    return tensors


def _target(folder: Path, **options: Any) -> FileTarget:
    return FileTarget(str(folder), "safetensors", options=options)


def _loaded(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def test_shards_as_transformers_writes_them(tmp_path: Path) -> None:
    tensors = _source(tmp_path / "a")
    source = open_checkpoint(tmp_path / "a")
    report = convert(source, _target(tmp_path / "b", max_shard_size=200))
    found = _loaded(tmp_path / "b")
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in tensors.items()}
    assert all(torch.equal(found[n], tensors[n]) for n in tensors)
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(tensors)
    manifest = json.loads((tmp_path / "b" / MANIFEST).read_text())
    again = open_checkpoint(tmp_path / "b").fingerprint()
    assert report.fingerprint == manifest["fingerprint"] == again == source.fingerprint()
    (tmp_path / "b" / MANIFEST).write_text(json.dumps(manifest | {"version": 1}))
    assert read_manifest(tmp_path / "b") is None  # its sums are of another kind


def test_a_part_under_other_names(tmp_path: Path) -> None:
    tensors = _source(tmp_path / "a")
    chosen = Selection(
        include=("layers.*",), exclude=("layers.1?.*",), strip_prefix="layers.", add_prefix="h."
    )
    convert(open_checkpoint(tmp_path / "a"), _target(tmp_path / "b"), selection=chosen)
    found = _loaded(tmp_path / "b")
    assert sorted(found) == sorted(f"h.{i}.weight" for i in range(10))
    assert torch.equal(found["h.3.weight"], tensors["layers.3.weight"])
    wrong = Selection(include=("nothing*",))
    with pytest.raises(Refused) as caught:
        convert(open_checkpoint(tmp_path / "a"), _target(tmp_path / "c"), selection=wrong)
    assert caught.value.reason == "no-match"
    assert not (tmp_path / "c").exists()


def test_an_existing_target_is_kept(tmp_path: Path) -> None:
    _source(tmp_path / "a")
    _source(tmp_path / "b", rows=3)
    (tmp_path / "b" / "mine").write_text("precious")
    source = open_checkpoint(tmp_path / "a")
    with pytest.raises(Refused) as caught:
        convert(source, _target(tmp_path / "b"))
    assert caught.value.reason == "target-exists"
    assert "force=True" in caught.value.findings[0].fix
    assert (tmp_path / "b" / "mine").read_text() == "precious"
    convert(source, _target(tmp_path / "b"), force=True)
    assert not (tmp_path / "b" / "mine").exists()
    with pytest.raises(Refused, match="the source itself"):
        convert(source, _target(tmp_path / "a"), force=True)
    with pytest.raises(Refused, match="the source itself"):
        convert(
            open_checkpoint(tmp_path / "a" / "model.safetensors"),
            _target(tmp_path / "a"),
            force=True,
        )


@pytest.mark.parametrize(("home", "where"), [(conversion, "_verify"), (Place, "settle")])
def test_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Any, where: str
) -> None:
    _source(tmp_path / "a")
    before = (tmp_path / "a" / "model.safetensors").read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(home, where, fail)
    with pytest.raises(RuntimeError):
        convert(open_checkpoint(tmp_path / "a"), _target(tmp_path / "b"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == before


def test_a_flipped_bit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is read back as anybody would read it."""
    _source(tmp_path / "a")
    true = filling._write

    def flips(fd: int, data: memoryview, at: int) -> None:
        wrong = np.frombuffer(data, np.uint8).copy()
        wrong[0] ^= 1
        true(fd, wrong.data, at)

    monkeypatch.setattr(filling, "_write", flips)
    with pytest.raises(Refused) as caught:
        convert(open_checkpoint(tmp_path / "a"), _target(tmp_path / "b"))
    assert caught.value.reason == "certificate"
    assert not (tmp_path / "b").exists()


def test_another_dtype_of_the_same_bits_is_seen(tmp_path: Path) -> None:
    """By `verify`, and as it is written: sums are of bits alone."""
    save_file({"w": torch.ones(4, 4).half()}, str(tmp_path / "a.safetensors"))
    convert(open_checkpoint(tmp_path / "a.safetensors"), _target(tmp_path / "b"))
    path = tmp_path / "b" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F16"', b'"I16"'))
    (found,) = verified(open_checkpoint(tmp_path / "b")).problems
    assert found.reason == "certificate"
    assert "fingerprint" in found.cause


def test_a_file_that_came_later_is_no_part_of_the_folder(tmp_path: Path) -> None:
    _source(tmp_path / "a")
    convert(open_checkpoint(tmp_path / "a"), _target(tmp_path / "b"))
    save_file({"other": torch.ones(3)}, str(tmp_path / "b" / "lora.safetensors"))
    (tmp_path / "b" / "broken.pt").write_bytes(b"PK\x03\x04")
    assert verified(open_checkpoint(tmp_path / "b" / "lora.safetensors")).problems == ()


def test_what_the_disk_does_not_take_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written and read back it may be, and still not be on the disk."""
    _source(tmp_path / "a")

    monkeypatch.setattr(files, "_failed", lambda _: errno.EIO)
    with pytest.raises(Refused) as caught:
        convert(open_checkpoint(tmp_path / "a"), _target(tmp_path / "b"))
    assert caught.value.reason == "unwritable-file"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_companions_that_cannot_be_read_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _source(tmp_path / "a")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "a" / name).write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "tokenizer.json")
    report = convert(open_checkpoint(tmp_path / "a"), _target(tmp_path / "b"))
    assert [(o.path, o.kind) for o in report.outcomes] == [("tokenizer.json", "dropped")]
    assert (tmp_path / "b" / "config.json").exists()


def test_a_full_disk_is_told_before_the_first_byte(tmp_path: Path) -> None:
    """With a limit on file sizes in place of a disk that fills up."""
    _source(tmp_path / "a", rows=40_000)
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from dynadapt.elastic.checkpoint import open_checkpoint\n"
        "from dynadapt.elastic.conversion import convert\n"
        "from dynadapt.protocols import FileTarget\n"
        "convert(open_checkpoint('a'), FileTarget('b', 'safetensors'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"unwritable-file" in done.stderr or b"disk-full" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_killed_half_way_nothing_is_taken_for_whole(tmp_path: Path) -> None:
    _source(tmp_path / "a", rows=100_000)
    code = (
        "import time\n"
        "from dynadapt.elastic.checkpoint import open_checkpoint\n"
        "from dynadapt.elastic.conversion import convert\n"
        "from dynadapt.protocols import FileTarget\n"
        "def slow(done, total):\n"
        "    print(done, flush=True)\n"
        "    time.sleep(0.2)\n"
        "convert(open_checkpoint('a'), FileTarget('b', 'safetensors'), on_bytes=slow)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    assert not (tmp_path / "b").exists()
    convert(open_checkpoint(tmp_path / "a"), _target(tmp_path / "b"))
    assert (
        open_checkpoint(tmp_path / "b").fingerprint()
        == open_checkpoint(tmp_path / "a").fingerprint()
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "bad-file"),
        (b"\xff" * 64, "bad-file"),
        ((2).to_bytes(8, "little") + b"{}", None),
        ((7).to_bytes(8, "little") + b'{"a":1}', "bad-file"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "bad-file"),
    ],
)
def test_odd_safetensors(tmp_path: Path, data: bytes, reason: str | None) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    if reason is None:
        assert open_checkpoint(tmp_path).layout.keys == ()
        return
    with pytest.raises(Refused) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.reason == reason


def test_an_index_may_not_leave_its_folder(tmp_path: Path) -> None:
    _source(tmp_path / "a")
    index = {"weight_map": {"x": "../a/model.safetensors"}}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Refused) as caught:
        open_checkpoint(tmp_path / "b")
    assert caught.value.reason == "path-traversal"


def test_an_unknown_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(DynadaptError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.reason == "no-adapter"
    with pytest.raises(DynadaptError, match="no such file"):
        open_checkpoint(tmp_path / "none")
