"""Every kind to and from every other: bit for bit, minimal, certified, and trained on as plain torch does.

A walk (`_walk`) goes from kind to kind and is judged at every hop. The suite takes every kind from plain and
back and a sample of other pairs.
"""

from __future__ import annotations

import re

import pytest

from tests.declared import _worlds
from tests.live import _pairs, _walk
from tests.live.kinds import KINDS

FAMILIES = sorted({re.match(r"[a-z]+\d?", name).group() for name in KINDS})  # type: ignore[union-attr]


def _walked(world: int, kinds: tuple[str, ...], recipe: str = "adamw") -> None:
    answers = _worlds.run(world, _walk.walk, kinds, recipe)
    assert not _walk.all_wrong(answers)
    assert [answer["hop"][1] for answer in answers[0]] == list(kinds)
    refused = [answer for answer in answers[0] if "refused" in answer]
    assert not refused


@pytest.mark.parametrize("world", [4, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_from_plain_and_back(family: str, world: int) -> None:
    """No hop loses a bit, moves a byte too many, or leaves something behind that a step would see."""
    for one_group, recipe in ((False, "adamw"), (True, "even")):
        kinds = [
            kind.name
            for kind in KINDS.values()
            if re.match(rf"{family}(?!\d)", kind.name)
            and kind.one_group is one_group
            and world in kind.worlds
        ]
        if kinds:
            _walked(world, tuple(name for kind in kinds for name in (kind, "plain")), recipe)


def _sample(one_group: bool) -> list[_pairs.Pair]:
    """Pairs in which each kind is twice a source and twice a target; kinds of a framework lie together."""
    kinds = [kind.name for kind in KINDS.values() if 4 in kind.worlds and kind.name != "plain"]
    flat = [name for name in kinds if KINDS[name].one_group]
    rest = [name for name in kinds if not KINDS[name].one_group]
    if not one_group:
        return _pairs.rings(rest, [len(rest) // 3, len(rest) // 2 + 1])
    among = rest[:: max(1, len(rest) // len(flat))]
    return _pairs.rings([name for two in zip(flat, among, strict=False) for name in two], [1, 3])


@pytest.mark.parametrize("one_group", [False, True])
def test_a_sample_of_pairs(one_group: bool) -> None:
    """Kinds of different frameworks, without plain between them."""
    for walk in _pairs.cut(_pairs.trails(_sample(one_group)), 30):
        _walked(4, walk, "even" if one_group else "adamw")


def test_the_sample_covers_every_kind() -> None:
    pairs = [*_sample(False), *_sample(True)]
    assert len(set(pairs)) >= 60
    kinds = {kind.name for kind in KINDS.values() if 4 in kind.worlds and kind.name != "plain"}
    for end in (0, 1):
        assert {pair[end] for pair in pairs} >= kinds


@pytest.mark.parametrize(
    ("recipe", "kinds"),
    [
        ("adam", ("zero3-bf16", "fsdp2", "zero3-bf16")),
        ("sgd", ("zero3-bf16", "tpdp", "fsdp1-FULL_SHARD", "zero1-bf16")),
    ],
)
def test_other_optimizers(recipe: str, kinds: tuple[str, ...]) -> None:
    """Adam, and SGD with momentum."""
    _walked(4, kinds, recipe)
