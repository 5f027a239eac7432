"""Memory of a conversion: within what was asked for at any size, and refused when that is too little."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from dynadapt import offline
from dynadapt.elastic.budget import Budget, thread_bytes
from dynadapt.errors import Refused
from dynadapt.transport.sources import PIECE

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20

#: Converts once to warm up (imports), then measures: prints the growth of RssAnon, sampled, and the report.
MEASURE = """
import json, sys, threading, time
from dynadapt import offline
from dynadapt.elastic.budget import anonymous_bytes

small, source, target, to, most = sys.argv[1:]
offline.convert(small, target + "-small", to)
before = most_seen = anonymous_bytes()
done = threading.Event()

def sample():
    global most_seen
    while not done.is_set():
        most_seen = max(most_seen, anonymous_bytes())
        time.sleep(0.001)

watch = threading.Thread(target=sample)
watch.start()
report = offline.convert(source, target, to, max_memory=int(most) or None, threads=8)
done.set()
watch.join()
print(json.dumps([most_seen - before, report.verified]))
"""


def _source(folder: Path, mib: int) -> Path:
    """Half of it one flat tensor, which is the worst for the sums."""
    folder.mkdir()
    values = np.random.default_rng(0).standard_normal(mib * MIB // 8).astype("<f4")
    save_file({"flat": values, "wide": values.reshape(8, -1)}, folder / "model.safetensors")
    return folder


def _growth(root: Path, mib: int, to: str, most: int) -> int:
    source = _source(root / f"{mib}", mib)
    if not (root / "small").exists():
        _source(root / "small", 1)
    words = [root / "small", source, root / f"{mib}-{most}-to", to, most]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, words)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    growth, verified = json.loads(done.stdout)
    assert verified
    return int(growth)


@pytest.mark.parametrize("to", ["safetensors", "universal"])
def test_no_more_than_asked_at_any_size(tmp_path: Path, to: str) -> None:
    """MEMTIME B133, B136, B139: one pass over both, in pieces, whatever the checkpoint's size."""
    most = 24 * MIB
    small, large = _growth(tmp_path, 32, to, most), _growth(tmp_path, 160, to, most)
    assert max(small, large) <= most
    assert abs(large - small) <= 8 * MIB  # not in proportion to what is five times as large


def test_what_is_asked_decides_threads_and_pieces() -> None:
    assert Budget.of(None).effort(7).threads == 7
    wide = Budget(1 << 40).effort(7)
    assert (wide.threads, wide.piece) == (7, PIECE)
    before = 0
    for mib in (4, 8, 16, 32, 64, 128, 256):
        found = Budget.of(mib * MIB).effort(8)
        assert found.threads * thread_bytes(found.piece) <= mib * MIB
        assert found.threads * found.piece >= before
        before = found.threads * found.piece
    assert found.threads == 8


def test_too_little_is_refused_with_what_would_do(tmp_path: Path) -> None:
    source = _source(tmp_path / "a", 1)
    with pytest.raises(Refused) as caught:
        offline.convert(source, tmp_path / "b", "safetensors", max_memory=MIB)
    assert caught.value.reason == "max-memory"
    assert "allow at least" in str(caught.value)
    assert not list(tmp_path.glob("*b*"))
