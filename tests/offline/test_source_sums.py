"""What a file says of itself is compared with what is read of it, whatever it becomes."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from dynadapt import offline
from dynadapt.errors import Refused
from dynadapt.files import FileBuffer
from dynadapt.transport.source_sums import Taken, damaged

if TYPE_CHECKING:
    from pathlib import Path


def _largest(folder: Path) -> FileBuffer:
    buffers: list[FileBuffer] = list(offline.open(folder).buffers.values())
    return max((b for b in buffers if b.crc), key=lambda b: (b.nbytes, b.path))


@pytest.mark.parametrize(
    ("source", "to", "more"),
    [
        ("", "universal", {}),
        ("", "zero2:dp=3", {}),
        ("", "safetensors", {"dtype": "bfloat16"}),
        ("universal", "dcp/fsdp2:dp=3", {}),
        ("dcp/fsdp2:dp=3", "torch", {}),
        ("torch", "zero3:dp=4", {}),
    ],
)
def test_a_flipped_bit_of_the_source_is_told(
    saved: Path, tmp_path: Path, source: str, to: str, more: dict[str, Any]
) -> None:
    folder, target = tmp_path / "a", tmp_path / "b"
    shutil.copytree(saved, folder) if not source else offline.convert(saved, folder, source)
    hurt = _largest(folder)
    with open(hurt.path, "r+b") as file:
        file.seek(hurt.offset + hurt.nbytes // 3)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(Refused, match="written beside") as caught:
        offline.convert(folder, target, to, **more)
    assert caught.value.reason == "certificate"
    assert hurt.path in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    assert not offline.convert(folder, target, to, verify=False, **more).verified


def test_check_sums_are_put_together(tmp_path: Path) -> None:
    """Of pieces read in any order, also twice; what is between them is read; of few nothing is said."""
    from zlib import crc32

    data = bytes(range(256)) * 4
    (tmp_path / "x").write_bytes(b"head" + data)
    path = str(tmp_path / "x")
    right = FileBuffer(path, "uint8", 4, 1024, crc32(data))
    wrong = FileBuffer(path, "uint8", 4, 1024, crc32(data) ^ 1)

    def told(*ends: tuple[int, int]) -> list[Taken]:
        return [Taken("b", a, b - a, crc32(data[a:b])) for a, b in ends]

    for parts in (
        told((0, 1024)),
        told((500, 1024), (0, 500)),
        told((10, 300), (300, 900)),
        told((0, 600), (0, 600), (500, 1024)),
    ):
        assert damaged(parts, {"b": right}) == ()
        (finding,) = damaged(parts, {"b": wrong})
        assert finding.reason == "certificate"
    assert damaged(told((0, 100), (700, 800)), {"b": wrong}) == ()
    changed = [Taken("b", 0, 700, crc32(data[:700]) ^ 4)]
    assert damaged(changed, {"b": right})
