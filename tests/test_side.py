"""What seats describe is united once: the same reports give the same layout, others do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.distributed import HashStore

from dynadapt.elastic import side
from dynadapt.elastic.side import unite
from dynadapt.protocols import AuxItem, Described
from dynadapt.transport.control import Control
from dynadapt.vps.box import Box
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import Row, RowLayout

NAMES = ("a", "b")


def described(
    *, shape: tuple[int, ...] = (4, 2), offset: int = 0, rates: Any = (1, 1)
) -> Described:
    specs = [
        KeySpec(Key(name, "param"), shape, "float32", order=i, group=i)
        for i, name in enumerate(NAMES)
    ]
    rows = [Row(spec.key, Box.whole(shape), spec.key.name, offset, (2, 1)) for spec in specs]
    groups = [{"names": [n], "hyper": {"lr": r}} for n, r in zip(NAMES, rates, strict=True)]
    aux = (AuxItem("param_groups", groups, "by-part"),)
    return Described(tuple(specs), tuple(rows), {}, {n: {"step": 3} for n in NAMES}, aux)


def united(number: int, own: Described) -> Any:
    control = Control(HashStore(), 0, (0,))
    try:
        with control.phase("describe"):
            return unite(f"side {number}", control, own)
    finally:
        control.close()


def test_equal_reports_are_united_once() -> None:
    side._layouts.clear()
    first = united(0, described())
    again = united(1, described(rates=(0.5, 0.5)))
    assert again.layout is first.layout
    assert again.aux["param_groups"].value[0]["hyper"] == {"lr": 0.5}


def test_what_differs_in_a_shape_or_a_place_is_another_layout() -> None:
    side._layouts.clear()
    base = described()
    fewer = replace(base, rows=base.rows[:1])
    others = [base, described(shape=(2, 2)), described(offset=1), fewer]
    layouts = [united(i, own).layout for i, own in enumerate(others)]
    assert len({layout.digest() for layout in layouts}) == len(others)
    for own, layout in zip(others, layouts, strict=True):
        assert layout.digest() == RowLayout.of_seats({0: (own.specs, own.rows)}).digest()


def test_few_layouts_are_kept(monkeypatch: Any) -> None:
    side._layouts.clear()
    monkeypatch.setattr(side, "REMEMBERED", 5)  # rows: two layouts
    for offset in range(4):
        united(offset, described(offset=offset))
    assert len(side._layouts) == 2
