"""Every kind to and from every other: bit for bit, minimal, certified, and trained on as plain torch does.

A walk (`_walk`) goes from kind to kind and is judged at every hop. The suite takes every kind from plain and
back and a sample of other pairs; `make matrix` takes all pairs, and writes their page.
"""

from __future__ import annotations

import json
import os
import re
from fnmatch import fnmatch
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from tests.declared import _worlds
from tests.live import _page, _pairs, _walk
from tests.live.kinds import KINDS

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = sorted({re.match(r"[a-z]+\d?", name).group() for name in KINDS})  # type: ignore[union-attr]


def _walked(world: int, kinds: tuple[str, ...], recipe: str = "adamw") -> None:
    answers = _worlds.run(world, _walk.walk, kinds, recipe, timeout=500)
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


def _sample_walks() -> list[tuple[str, tuple[str, ...]]]:
    return [
        (recipe, walk)
        for one_group, recipe in ((False, "adamw"), (True, "even"))
        for walk in _pairs.cut(_pairs.trails(_sample(one_group)), 10)
    ]


@pytest.mark.parametrize(("recipe", "walk"), _sample_walks())
def test_a_sample_of_pairs(recipe: str, walk: tuple[str, ...]) -> None:
    """Kinds of different frameworks, without plain between them."""
    _walked(4, walk, recipe)


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


#: Pairs that cannot be, as (source, target) patterns: the finding's reason and, where a framework is at
#: fault, the test that shows it.
REFUSED: dict[tuple[str, str], tuple[str, str]] = {}


def _expected(pair: _pairs.Pair) -> tuple[str, str] | None:
    both = "{} {}".format
    return next((why for at, why in REFUSED.items() if fnmatch(both(*pair), both(*at))), None)


def _pieces() -> list[tuple[str, tuple[str, ...]]]:
    """All pairs, or those that docs/matrix.json does not have, as walks that a test makes each.

    Short ones: groups end with a walk, and each of gloo's has threads that wake a hundred times a second.
    """
    todo = set(_page.pairs())
    if os.environ.get("PAIRS") == "missing":
        todo -= _page.load().keys()
    found = []
    for recipe in ("adamw", "even"):
        mine = [pair for pair in _page.pairs() if pair in todo and _recipe(pair) == recipe]
        found += [(recipe, piece) for piece in _pairs.cut(_pairs.trails(mine), 8)]
    return found


def _recipe(pair: _pairs.Pair) -> str:
    return "even" if any(KINDS[name].one_group for name in pair) else "adamw"


@pytest.mark.nightly
@pytest.mark.parametrize(("recipe", "piece"), _pieces())
def test_all_pairs(recipe: str, piece: tuple[str, ...]) -> None:
    """Every ordered pair, a kind with itself as well. With MATRIX=docs, kept for the page."""
    marks: dict[_pairs.Pair, str | None] = dict.fromkeys(pairwise(piece))
    keep = os.environ.get("MATRIX") == "docs"
    if keep:
        _page.keep(marks)
    left = piece
    while len(left) > 1:
        # A walk begins in plain, so the first hop brings it to the first source.
        answers = _worlds.run(4, _walk.walk, left, recipe, False, timeout=500)
        assert not _walk.all_wrong(answers)
        assert len(answers[0]) > 1, f"{left[0]} is not reached: {answers[0][0]}"
        for answer in answers[0][1:]:
            pair = (answer["hop"][0], answer["hop"][1])
            marks[pair] = _mark(pair, answer.get("refused"))
        left = left[len(answers[0]) - 1 :]
    if keep:
        _page.keep(marks)


def _mark(pair: _pairs.Pair, refused: list[dict[str, str]] | None) -> str:
    why = _expected(pair)
    if refused is None:
        assert why is None, f"{pair} is expected to be refused"
        return _page.ONE_GROUP if KINDS[pair[1]].one_group else _page.WORKS
    finding = refused[0]
    assert why is not None, f"{pair} is refused: {finding}"
    assert finding["reason"] == why[0], f"{pair} is refused for another reason: {finding}"
    told = {name: finding[name] for name in ("reason", "cause", "fix")}
    return json.dumps({**told, "test": why[1]})


def test_the_page_has_these_kinds() -> None:
    """`make matrix PAIRS=missing` walks the pairs of kinds that were added since, and writes it."""
    held = json.loads(_page.JSON.read_text())
    assert held["kinds"] == list(dict.fromkeys(one for one, _ in _page.pairs()))
    assert _page.PAGE.read_text() == _page.page(held)


def test_the_page_keeps_what_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal has a letter of its own; what failed since is not known any more."""
    for name in ("JSON", "PAGE"):
        monkeypatch.setattr(_page, name, tmp_path / name)
    pairs = _page.pairs()
    why = {"reason": "no-state", "cause": "it has none", "fix": "take a step", "test": ""}
    _page.keep({**dict.fromkeys(pairs, _page.WORKS), pairs[1]: json.dumps(why)})
    _page.keep({pairs[2]: None})
    assert json.loads(_page.JSON.read_text())["rows"][0].startswith(f"oa{_page.UNKNOWN}o")
    assert _page.load().keys() == set(pairs) - {pairs[2]}
    assert json.loads(_page.load()[pairs[1]]) == why
    assert (
        "`a` refused by name: `no-state`: it has none; take a step (1 pairs)"
        in _page.PAGE.read_text()
    )
