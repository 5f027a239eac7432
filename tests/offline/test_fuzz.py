"""Damaged checkpoints of every format: a state or a `DynadaptError`, in bounded time and memory."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dynadapt.adapters.checkpoints._pickle import read_pickle
from dynadapt.elastic.checkpoint import open_checkpoint
from dynadapt.errors import Refused
from dynadapt.registry import format_names
from tests.offline._mutants import KINDS, _laughs
from tests.offline._seeds import FORMATS, PARALLEL, make_seeds
from tests.offline.fuzz import Verdict, fuzzed, judged

if TYPE_CHECKING:
    from pathlib import Path

SLOW = frozenset({"accelerate", "fsdp", "megatron", "trainer"})
"""Formats of which most are damaged by night: a mutant takes longer, or is one of others' files."""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_seeds(tmp_path_factory.mktemp("seeds"))


def _complaints(verdicts: list[Verdict]) -> list[str]:
    return [f"{v.format}: {v.mutant}: {v.outcome}\n{v.complaint}" for v in verdicts if v.complaint]


def test_every_format_is_damaged() -> None:
    missing = set(format_names()) - set(FORMATS.values())
    assert not missing, "a format that is read has a seed in tests/offline/_seeds.py"


def test_a_hundred_of_each(seeds: dict[str, Path], tmp_path: Path) -> None:
    assert all(judged(path) == ("read", "") for path in seeds.values())
    quick = {n: path for n, path in seeds.items() if FORMATS[n] not in SLOW and n not in PARALLEL}
    slow = {name: path for name, path in seeds.items() if name not in quick}
    verdicts = [*fuzzed(quick, tmp_path, 100), *fuzzed(slow, tmp_path, 15)]
    assert not _complaints(verdicts), "\n\n".join(_complaints(verdicts))
    counts = Counter((v.format, v.outcome) for v in verdicts)
    for name in seeds:  # damage that is never found, or never survived, would be none
        assert counts[name, "refused"] > (20 if name in quick else 4)
        assert counts[name, "read"] > 5 or name in slow
    assert sum(counts[name, "read"] for name in slow) > 2 * len(slow)
    assert {v.mutant.kind for v in verdicts} == set(KINDS)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_each(seeds: dict[str, Path], tmp_path: Path, seed: int) -> None:
    verdicts = list(fuzzed(seeds, tmp_path, 2000, seed + 100))
    assert not _complaints(verdicts), "\n\n".join(_complaints(verdicts))


def _cycle(through: Any) -> Any:
    value: list[Any] = [1]
    value.append(through(value))
    return value


class _Holder:
    """A class that readers do not know."""

    def __init__(self, value: Any) -> None:
        self.value = value


def test_names_that_nobody_can_write_down_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "b\ud800": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(Refused, match="a name that is no text") as caught:
        open_checkpoint(tmp_path / "model.pt")
    assert caught.value.reason == "malformed"


def test_values_without_end_are_refused() -> None:
    """Lists of lists of lists, shared or holding themselves; what nobody walks into may."""
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for value in (_laughs(), {"a": _laughs()}, _cycle(lambda v: {"again": v}), deep):
        with pytest.raises(Refused) as caught:
            read_pickle(pickle.dumps(value, 2), "x")
        assert caught.value.reason == "bad-pickle"
    with pytest.raises(Refused):
        read_pickle(pickle.dumps([_Holder(_laughs())], 2), "x")
    found = read_pickle(pickle.dumps(_cycle(_Holder), 2), "x")
    assert found[1].get("value") is found
    shared = [["some text", 1.5]] * 50
    assert read_pickle(pickle.dumps([shared] * 3, 2), "x") == [shared] * 3
