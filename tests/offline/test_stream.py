"""From files to files, against numpy and torch: any boxes to any boxes, any float to any float."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynadapt.errors import Refused
from dynadapt.files import FileBuffer
from dynadapt.transport import sources
from dynadapt.transport import sums as sums_module
from dynadapt.transport.casts import cast
from dynadapt.transport.forks import may_fork
from dynadapt.transport.match import match
from dynadapt.transport.plan import Options
from dynadapt.transport.progress import Stopped
from dynadapt.transport.read_back import crc_of, found_again, row_in_file
from dynadapt.transport.sources import boxes_of
from dynadapt.transport.stream import stream
from dynadapt.transport.sums import key_sums
from dynadapt.vps.box import Box, Span, row_major_strides
from dynadapt.vps.keys import Key, KeySpec, itemsize
from dynadapt.vps.layout import Row, RowLayout

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {"a": (7, 5), "b": (13,), "c": (3, 4, 5), "d": (), "e": (2, 64)}


def _files(
    root: Path, name: str, ways: int, flat: bool, dtype: str, values: dict[str, Any] | None
) -> tuple[RowLayout, dict[str, FileBuffer]]:
    """Every tensor in `ways` parts, spans or rows; filled from `values`, else zeros."""
    specs = [KeySpec(Key(n, "param"), shape, dtype) for n, shape in SHAPES.items()]
    rows: dict[int, list[Row]] = {}
    buffers = {}
    for part in range(ways):
        path, at = root / f"{name}{part}", 0
        data = bytearray()
        for spec in specs:
            if flat:
                total = spec.numel
                span = Span(total * part // ways, total * (part + 1) // ways)
                boxes = span.boxes(spec.shape)
            else:
                whole = Box.whole(spec.shape)
                first = spec.shape[0] if spec.shape else 1
                low, high = first * part // ways, first * (part + 1) // ways
                cut = Box((low, *whole.lo[1:]), (high, *whole.hi[1:])) if spec.shape else whole
                boxes = (cut,) if cut.volume else ()
            buffer, inside = f"{name}{part}#{spec.key.name}", 0
            for box in boxes:
                strides = row_major_strides(box.shape)
                rows.setdefault(-1 - part, []).append(Row(spec.key, box, buffer, inside, strides))
                inside += box.volume
                if values is not None:
                    index = tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))
                    data += np.ascontiguousarray(values[spec.key.name][index]).tobytes()
            buffers[buffer] = FileBuffer(str(path), dtype, at, inside)
            at += inside * itemsize(dtype)
        path.write_bytes(bytes(data) if values is not None else bytes(at))
    return RowLayout(specs, rows), buffers


def _values() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {n: rng.standard_normal(shape).astype("<f4") for n, shape in SHAPES.items()}


@given(
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 5, sources.FEW]),
    st.sampled_from([False, False, True]),
)
@settings(max_examples=60)
def test_any_parts_to_any_parts(
    tmp_path_factory: pytest.TempPathFactory,
    ways: int,
    flat: bool,
    to: int,
    to_flat: bool,
    threads: int,
    few: int,
    fork: bool,
) -> None:
    """Put together, or cut where the source's rows end; by threads or forks; read back as written."""
    root = tmp_path_factory.mktemp("x")
    values = _values()
    source, buffers = _files(root, "s", ways, flat, "float32", values)
    target, targets = _files(root, "t", to, to_flat, "float32", None)
    matched = match(source.keys, target.keys, Options())
    with mock.patch.object(sources, "FEW", few):
        done = stream(matched, source, buffers, target, targets, threads=threads, fork=fork)
    assert done.sums == key_sums(target, targets)[0] == key_sums(source, buffers)[0]
    with found_again(done.stretches, threads=threads, fork=fork) as answer:
        known = answer()
    places = {
        row_in_file(row, targets[row.buffer]) for e in target.endpoints for row in target.rows(e)
    }
    assert known.keys() == places
    with mock.patch.object(sums_module, "weighted_sum", None):  # nothing is summed again
        assert key_sums(target, targets, known=known)[0] == done.sums
    for endpoint in target.endpoints:
        for row in target.rows(endpoint):
            index = tuple(slice(a, b) for a, b in zip(row.box.lo, row.box.hi, strict=True))
            held = targets[row.buffer].array()[row.offset : row.offset + row.box.volume]
            want = values[row.key.name][index].reshape(-1)
            assert np.array_equal(held.view(np.uint32), want.view(np.uint32))


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(1, 30))
def test_a_box_in_pieces_is_the_box_in_order(shape: list[int], most: int) -> None:
    box = Box(tuple(range(len(shape))), tuple(i + n for i, n in enumerate(shape)))
    whole = np.arange(200_000).reshape(-1)[: int(np.prod([b + 1 for b in box.hi] or [1]))]
    whole = whole.reshape([b + 1 for b in box.hi])

    def elements(one: Box) -> list[int]:
        index = tuple(slice(a, b) for a, b in zip(one.lo, one.hi, strict=True))
        return [int(v) for v in whole[index].reshape(-1)]

    parts = list(boxes_of(box, most))
    assert [v for part in parts for v in elements(part)] == elements(box)
    assert all(part.volume <= most for part in parts)


FLOATS = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_casts_are_torchs(source: str, target: str) -> None:
    words = torch.randint(-(2**31), 2**31, (20_000,), dtype=torch.int64).to(torch.int32)
    wide = torch.randn(200_000, dtype=torch.float64)  # of these some are rounded twice
    values = torch.cat([words.view(torch.float32), wide, torch.tensor([0.0, -0.0])])
    values = values.to(getattr(torch, source))
    raw = values.view({2: torch.uint16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    kind = (
        "<u2" if source == "bfloat16" else {"float16": "<f2", "float32": "<f4"}.get(source, "<f8")
    )
    found = cast(raw.numpy().view(kind), source, target)
    want = values.to(getattr(torch, target))
    size = want.element_size()
    whole = want.view({2: torch.uint16, 4: torch.int32, 8: torch.int64}[size]).numpy()
    odd = want.isnan().numpy()
    assert np.array_equal(found.view(f"u{size}")[~odd], whole.view(f"u{size}")[~odd])
    back = torch.from_numpy(np.ascontiguousarray(found).view(whole.dtype)).view(want.dtype)
    assert bool(back[want.isnan()].isnan().all())


def test_more_files_than_descriptors(tmp_path: Path) -> None:
    """Each file that is mapped holds one."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        "from pathlib import Path\n"
        "from dynadapt.files import FileBuffer\n"
        "from dynadapt.transport.sums import key_sums\n"
        "from dynadapt.vps.box import Box\n"
        "from dynadapt.vps.keys import Key, KeySpec\n"
        "from dynadapt.vps.layout import Row, RowLayout\n"
        "specs, rows, buffers = [], {}, {}\n"
        "for i in range(400):\n"
        "    path = Path(f'{i:03}'); path.write_bytes(bytes(32))\n"
        "    specs.append(KeySpec(Key(f'w{i:03}', 'param'), (8,), 'float32'))\n"
        "    rows[-1 - i] = [Row(specs[-1].key, Box((0,), (8,)), f'{i}#0', 0, (1,))]\n"
        "    buffers[f'{i}#0'] = FileBuffer(str(path), 'float32', 0, 8)\n"
        "print(len(key_sums(RowLayout(specs, rows), buffers)[0]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "400\n", done.stderr[-500:]


def test_an_interrupt_ends_what_reads_back(tmp_path: Path) -> None:
    values = _values()
    source, buffers = _files(tmp_path, "s", 2, True, "float32", values)
    target, targets = _files(tmp_path, "t", 2, False, "float32", None)
    done = stream(match(source.keys, target.keys, Options()), source, buffers, target, targets)
    for fork in (False, True):
        with pytest.raises(KeyboardInterrupt), found_again(done.stretches, fork=fork):
            raise KeyboardInterrupt
    with pytest.raises(Stopped):
        crc_of(targets["t0#a"], lambda: True)


def test_bytes_that_changed_are_summed_again(tmp_path: Path) -> None:
    values = _values()
    source, buffers = _files(tmp_path, "s", 2, True, "float32", values)
    target, targets = _files(tmp_path, "t", 2, False, "float32", None)
    done = stream(match(source.keys, target.keys, Options()), source, buffers, target, targets)
    hurt = targets["t1#b"]
    data = bytearray((tmp_path / "t1").read_bytes())
    data[hurt.offset] ^= 1
    (tmp_path / "t1").write_bytes(data)
    with found_again(done.stretches) as answer:
        known = answer()
    assert {place.key.name for place in known if place.path == hurt.path} == {"a", "c", "d", "e"}
    found = key_sums(target, targets, known=known)[0]
    assert {key.name for key in found if found[key] != done.sums[key]} == {"b"}


def test_where_no_process_can_be_forked() -> None:
    """Neither with torch loaded, nor at the limit of processes."""
    assert not may_fork()
    code = (
        "import os, sys\nfrom dynadapt.transport import forks\n"
        "print(forks.may_fork())\n"
        "def no(): raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "os.fork = no\nprint(forks.may_fork())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.split() == [b"True", b"False"]


def test_narrowing_only_where_it_is_exact(tmp_path: Path) -> None:
    values = _values()
    source, buffers = _files(tmp_path, "s", 2, True, "float32", values)
    target, targets = _files(tmp_path, "t", 3, False, "bfloat16", None)
    matched = match(source.keys, target.keys, Options())
    with pytest.raises(Refused) as caught:
        stream(matched, source, buffers, target, targets)
    assert caught.value.reason == "narrowing"
    done = stream(matched, source, buffers, target, targets, narrow="allow")
    assert done.sums == key_sums(target, targets)[0]
    round_ = {n: (v.view("<u4") & 0xFFFF0000).astype("<u4").view("<f4") for n, v in values.items()}
    exact, exact_buffers = _files(tmp_path, "r", 2, True, "float32", round_)
    stream(matched, exact, exact_buffers, target, targets)


def test_a_hole_in_the_source_is_named(tmp_path: Path) -> None:
    source, buffers = _files(tmp_path, "s", 3, True, "float32", _values())
    part = {e: source.rows(e) for e in source.endpoints if e != -2}
    target, targets = _files(tmp_path, "t", 2, False, "float32", None)
    partial = RowLayout(source.keys, part)
    with pytest.raises(Refused) as caught:
        stream(match(partial.keys, target.keys, Options()), partial, buffers, target, targets)
    assert caught.value.reason == "uncovered"


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    source, buffers = _files(tmp_path, "s", 2, True, "float32", _values())
    (tmp_path / "s1").write_bytes((tmp_path / "s1").read_bytes()[:-8])
    target, targets = _files(tmp_path, "t", 2, True, "float32", None)
    with pytest.raises(Refused) as caught:
        stream(match(source.keys, target.keys, Options()), source, buffers, target, targets)
    assert caught.value.reason == "truncated-file"
    assert "s1" in str(caught.value)


def test_replicas_that_differ_are_told(tmp_path: Path) -> None:
    spec = KeySpec(Key("w", "param"), (4,), "float32")
    row = {-1: [Row(spec.key, Box((0,), (4,)), "x", 0, (1,))]}
    row[-2] = [Row(spec.key, Box((0,), (4,)), "y", 0, (1,))]
    for name, value in (("x", 0.0), ("y", 1.0)):
        (tmp_path / name).write_bytes(np.full(4, value, "<f4").tobytes())
    buffers = {n: FileBuffer(str(tmp_path / n), "float32", 0, 4) for n in "xy"}
    _, findings = key_sums(RowLayout([spec], row), buffers, names={-1: "x.pt", -2: "y.pt"})
    assert [f.reason for f in findings] == ["replicas-differ"]
    assert "x.pt" in findings[0].cause
    assert "y.pt" in findings[0].cause
