"""torch files read and written without torch: torch itself is the judge, and nothing is ever executed."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dynadapt.adapters.checkpoints._pickle import Global, Opaque, StoredTensor, read_pickle
from dynadapt.adapters.checkpoints._repickle import tensor, write_pickle
from dynadapt.adapters.checkpoints._torch_file import read_torch
from dynadapt.adapters.checkpoints._torch_write import lay_out
from dynadapt.errors import Refused

if TYPE_CHECKING:
    from pathlib import Path


class Custom:
    """A class of the user's, in a checkpoint."""

    def __init__(self) -> None:
        self.value = 3


def _tree() -> dict[str, Any]:
    base = torch.arange(12.0).reshape(3, 4)
    return {
        "strided": base.t(),
        "view": base[1:],
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "wide": torch.arange(3).to(torch.uint16),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "size": torch.Size([1, 2]),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "custom": Custom(),
        "plain": [None, True, 2**70, -1, 2.5, "text", b"bytes", (1, [2, {3}]), {"a": {}}],
        "ordered": OrderedDict(x=1),
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        raw = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b) if t.numel()]
        return a.shape == b.shape and a.dtype == b.dtype and (not raw or torch.equal(*raw))
    if isinstance(a, Custom):
        return isinstance(b, Custom) and a.value == b.value
    return bool(a == b)


def test_what_torch_saves_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "x.pt")
    tree = _tree()
    torch.save(tree, path)
    file = read_torch(path)
    for name, value in tree.items():
        if not isinstance(value, torch.Tensor):
            continue
        found = file.tree[name]
        whole = file.buffer(found).tensor()
        assert _same(value.detach(), whole.as_strided(found.shape, found.strides, found.offset))
    assert file.tree["strided"].storage == file.tree["view"].storage
    assert file.tree["plain"] == tree["plain"]
    assert isinstance(file.tree["custom"], Opaque)
    assert file.tree["custom"].get("value") == 3


@pytest.mark.parametrize("mmap", [False, True])
def test_what_is_written_torch_loads(tmp_path: Path, mmap: bool) -> None:
    """Half of the storages laid out ahead and filled, half given at the end."""
    first, second = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    tree = _tree()
    torch.save(tree, first)
    file = read_torch(first)
    raw = (tmp_path / "a.pt").read_bytes()
    data = {name: raw[at : at + n] for name, (at, n) in file.storages.items()}
    ahead = sorted(data)[::2]
    frame = lay_out({name: len(data[name]) for name in ahead})
    rest = {name: value for name, value in data.items() if name not in ahead}
    crcs = {name: zlib.crc32(data[name]) for name in ahead}
    with open(second, "wb") as out:
        for name, (at, _) in frame.places.items():
            out.seek(at)
            out.write(data[name])
        for at, part in frame.seal(file.tree, crcs, rest):
            out.seek(at)
            out.write(part)
    assert zipfile.ZipFile(second).testzip() is None
    found = torch.load(second, weights_only=False, mmap=mmap)
    assert found.keys() == tree.keys()
    assert [name for name in tree if not _same(tree[name], found[name])] == []
    assert (
        found["strided"].untyped_storage().data_ptr() == found["view"].untyped_storage().data_ptr()
    )
    assert isinstance(found["parameter"], torch.nn.Parameter)


def test_a_zip_inside_another_file_is_read(tmp_path: Path) -> None:
    """As distributed checkpoints have them: one file, many zips."""
    out = io.BytesIO()
    torch.save(torch.arange(5.0), out)
    body = out.getvalue()
    path = tmp_path / "x.distcp"
    path.write_bytes(b"before" + body + b"after")
    file = read_torch(str(path), 6, len(body))
    assert file.buffer(file.tree).array().tolist() == [0, 1, 2, 3, 4]


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": _Evil(), "w": torch.ones(2)}, "x.pt")
    file = read_torch(str(tmp_path / "x.pt"))
    assert file.tree["x"].made_by == Global(os.system.__module__, "system")
    assert not (tmp_path / "ran").exists()


BOMBS = {
    "memo index": b"\x80\x02" + b"r" + struct.pack("<I", 0x7FFFFFFF) + b".",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "long": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"\x01.",
    "digits": b"I" + b"9" * 10000 + b"\n.",
    "extension": b"\x80\x02\x82\x01.",
    "instance": b"(S'x'\nios\nsystem\n.",
    "object": b"(cos\nsystem\nS'x'\no.",
    "call of a value": b"\x80\x02K\x01)R.",
    "bad storage": pickle.dumps({"a": 1}, 2)[:-1] + b"Q.",
    "empty": b"",
    "cut": pickle.dumps(list(range(1000)))[:-50],
    "deep": b"\x80\x02" + b"]" * 200000 + b"a" * 199999 + b".",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_or_harmless(name: str) -> None:
    if name == "memo index":  # a dict for a memo: nothing explodes
        read_pickle(b"\x80\x02N" + BOMBS[name][2:], "x")
        return
    with pytest.raises(Refused) as caught:
        read_pickle(BOMBS[name], "x")
    assert caught.value.reason == "bad-pickle"


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Any byte changed, any length cut: an answer or `Refused`, never another error."""
    path = tmp_path / "x.pt"
    torch.save(_tree(), path)
    whole = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for number in range(400):
        data = bytearray(whole)
        if number % 4 == 0:
            data = data[: rng.randrange(len(data))]
        else:
            for _ in range(rng.choice([1, 1, 4, 30])):
                data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))
        try:
            file = read_torch(str(path))
            for value in file.tree.values() if isinstance(file.tree, dict) else ():
                if isinstance(value, StoredTensor):
                    file.buffer(value).array()
        except Refused:
            refused += 1
    assert refused > 100


def test_compressed_and_old_files_say_so(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("archive/data.pkl", pickle.dumps({}))
    with pytest.raises(Refused, match="compressed"):
        read_torch(str(path))
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(Refused) as caught:
        read_torch(str(path))
    assert caught.value.reason == "legacy-file"
    with pytest.raises(Refused) as caught:
        read_torch(str(tmp_path / "none.pt"))
    assert caught.value.reason == "unreadable-file"


def test_shared_trees_are_written_once() -> None:
    storage = tensor("0", "float32", (2,))
    data = write_pickle({"a": storage, "b": storage, "c": [storage] * 3})
    assert data.count(b"_rebuild_tensor_v2") == data.count(b"FloatStorage") == 1
    found = read_pickle(data, "x")
    assert found["a"] == found["b"] == found["c"][2] == storage
