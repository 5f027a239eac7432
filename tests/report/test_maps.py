"""Maps, traffic and bytes held, against every row of the layouts and every move of the planner."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dynadapt.elastic.plan_report import PlanReport
from dynadapt.errors import Refused
from dynadapt.report import maps, traffic
from dynadapt.report.build import picture_of, picture_of_plan
from dynadapt.report.maps import DrawnTensor, ranks_text, tensor_maps
from dynadapt.report.sample import sample_model
from dynadapt.report.traffic import (
    MAX_WORLD,
    Traffic,
    held_bytes,
    memory_of,
    traffic_of,
    traffic_of_plan,
)
from dynadapt.transport.match import match
from dynadapt.transport.plan import Options
from dynadapt.transport.planner import plan_for
from dynadapt.vps.declare import declare
from dynadapt.vps.keys import Key
from dynadapt.vps.model_shape import ModelShape, Named
from dynadapt.vps.tp_rules import TpRules

if TYPE_CHECKING:
    from dynadapt.vps.mesh_layout import MeshLayout

MODEL, RULES = sample_model()
SPECS = [
    "ddp:dp=2,tp=2",
    "zero3:dp=3",
    "zero1:dp=4,tp=2",
    "fsdp2:dp=3,tp=4",
    "hsdp:rep=2,dp=3",
    "ddp:pp=2,tp=2",
    "fsdp1:dp=5",
]
CUBE = ModelShape.of([Named("layers.0.cube", (4, 6, 5))])


def _brute(layout: MeshLayout, name: str) -> dict[tuple[int, ...], set[int]]:
    """Who holds each element, from the rows of every rank."""
    found: dict[tuple[int, ...], set[int]] = {}
    for rank in layout.endpoints:
        for row in layout.rows(rank):
            if row.key == Key(name, "param"):
                for at in np.ndindex(row.box.shape):
                    whole = tuple(int(a) + b for a, b in zip(at, row.box.lo, strict=True))
                    found.setdefault(whole, set()).add(rank)
    return found


def _full(own: DrawnTensor) -> np.ndarray:
    """The map as a grid of single elements."""
    cells = own.cells(*own.size)
    grid = np.full(own.size, -1)
    for row in range(len(cells.row_edges) - 1):
        for column in range(len(cells.col_edges) - 1):
            rows = slice(*cells.row_edges[row : row + 2].tolist())
            grid[rows, slice(*cells.col_edges[column : column + 2].tolist())] = cells.sets[
                row, column
            ]
    assert cells.exact
    return grid


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.norm.weight",
    ],
)
def test_a_map_says_who_holds_every_element(spec: str, name: str) -> None:
    layout = declare(spec, MODEL, RULES)
    (own,) = tensor_maps([layout], name)
    grid, brute = _full(own), _brute(layout, name)
    assert grid.size == prod(own.shape) == len(brute)
    for at, ranks in brute.items():
        row = at if len(at) == 2 else (0, *at)
        assert set(own.sets[grid[row]]) == ranks


@pytest.mark.parametrize("spec", ["zero3:dp=7", "fsdp2:dp=3", "ddp:dp=2"])
@pytest.mark.parametrize("most", [maps.MAX_REGIONS, 3])
def test_a_tensor_of_three_dims_is_folded(
    spec: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the last dim are rows; of too many pieces the first ones are shown, and that is said."""
    monkeypatch.setattr(maps, "MAX_REGIONS", most)
    layout = declare(spec, CUBE)
    (own,) = tensor_maps([layout], "layers.0.cube")
    grid, brute = _full(own), _brute(layout, "layers.0.cube")
    if spec == "zero3:dp=7":
        assert own.labels == (("dims 0-1", "dim 2") if most > 3 else ("dim 1", "dim 2"))
        assert own.note == ("" if most > 3 else "index 0 of dim 0")
        rows = {(a, b): a * 6 + b for a in range(4 if most > 3 else 1) for b in range(6)}
        for (a, b), row in rows.items():
            assert [set(own.sets[at]) for at in grid[row]] == [brute[a, b, c] for c in range(5)]
    else:
        assert own.note.endswith("is whole everywhere")


def test_the_two_dims_that_are_cut_are_shown() -> None:
    rules = TpRules({"cube": "packed_colwise+grouped_gemm"})
    layout = declare("ddp:ep=2,tp=3", CUBE, rules)
    (own,) = tensor_maps([layout], "layers.0.cube")
    assert (own.labels, own.size, own.note) == (
        ("dim 0", "dim 1"),
        (4, 6),
        "dim 2 is whole everywhere",
    )
    assert _full(own)[0].tolist() == [0, 1, 2, 0, 1, 2]  # both blocks of three
    assert own.sets == ((0,), (1,), (2,), (3,), (4,), (5,))
    one = declare("ddp:dp=3", ModelShape.of([Named("scale", ())]))
    (scalar,) = tensor_maps([one], "scale")
    assert (scalar.size, scalar.holders) == ((1, 1), ((0, 1, 2),))


def test_maps_that_are_compared_share_plane_and_colours() -> None:
    before, after = (declare(s, MODEL, RULES) for s in ("zero3:dp=4", "ddp:tp=2,dp=2"))
    maps_ = tensor_maps([before, after], "model.layers.0.mlp.down_proj.weight")
    assert [own.size for own in maps_] == [(64, 160)] * 2
    assert [own.sets for own in maps_] == [((0,), (1,), (2,), (3,)), ((0, 2), (1, 3))]
    assert [own.tones for own in maps_] == [(0, 1, 2, 3), (0, 1)]


def test_a_grid_of_few_cells_shows_middles() -> None:
    (own,) = tensor_maps([declare("fsdp2:dp=8", MODEL, RULES)], "lm_head.weight")
    cells = own.cells(4, 4)
    assert not cells.exact
    assert [own.sets[at] for at in cells.sets[:, 0]] == [(0,), (2,), (4,), (6,)]
    assert len(cells.col_edges) == 2


def test_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(Refused) as error:
        tensor_maps([declare("ddp:dp=2", MODEL, RULES)], "no.such")
    assert error.value.reason == "no-tensor"


@pytest.mark.parametrize("source", SPECS[:4])
@pytest.mark.parametrize("target", SPECS[3:])
def test_traffic_is_what_the_planner_moves(source: str, target: str) -> None:
    """Seat by seat, and as a report's JSON tells it."""
    before, after = declare(source, MODEL, RULES), declare(target, MODEL, RULES)
    found = traffic_of(before, after)
    matched = match(before.keys, after.keys, Options())
    seats = sorted({*before.endpoints, *after.endpoints})
    plans = {s: plan_for(s, before, after, matched, Options()) for s in seats}
    assert found.labels == tuple(map(str, seats))
    assert found.matrix.sum(axis=0).tolist() == [plan.bytes_in for plan in plans.values()]
    assert found.matrix.sum(axis=1).tolist() == [plan.bytes_out for plan in plans.values()]
    assert np.diagonal(found.matrix).tolist() == [0] * len(seats)
    told = traffic_of_plan(PlanReport.of(matched, plans).to_json())
    assert told.labels == found.labels
    assert (told.matrix == found.matrix).all()
    assert (told.stays == found.stays).all()


def test_seats_are_grouped_without_losing_a_byte() -> None:
    matrix = np.arange(49).reshape(7, 7)
    own = Traffic(tuple("0123456"), matrix, np.arange(7))
    small = own.grouped(3)
    assert (small.labels, small.per) == (("0-2", "3-5", "6"), 3)
    assert small.matrix[0, 1] == matrix[:3, 3:6].sum()
    assert small.moved == own.moved
    assert small.stays.tolist() == [3, 12, 6]
    assert own.grouped(7) is own


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_held_are_those_of_the_rows(spec: str) -> None:
    layout = declare(spec, MODEL, RULES)
    expected = {
        rank: sum(4 * row.box.volume for row in layout.rows(rank)) for rank in layout.endpoints
    }
    assert held_bytes(layout) == expected


def test_seats_without_a_place_hold_nothing() -> None:
    layouts = [declare(spec, MODEL, RULES) for spec in ("ddp:dp=1", "ddp:dp=3")]
    memory = memory_of(layouts, ("a", "b"))
    whole = 3 * 4 * MODEL.numel
    assert memory.seats == (0, 1, 2)
    assert [column.tolist() for column in memory.columns] == [[whole, 0, 0], [whole] * 3]


def test_what_a_picture_cannot_show_is_refused() -> None:
    one = declare("ddp:dp=2", MODEL, RULES)
    with pytest.raises(Refused, match="not of one model"):
        traffic_of(one, declare("ddp:dp=2", CUBE))
    with pytest.raises(Refused) as error:
        picture_of([f"zero3:dp={MAX_WORLD + 1}"])
    assert error.value.reason == "too-large"
    with pytest.raises(Refused) as error:
        picture_of_plan({"seats": [{"seat": 0}]}, "my.json")
    assert (error.value.reason, "my.json" in str(error.value)) == ("bad-plan", True)
    assert traffic.MAX_WORLD == MAX_WORLD


def test_a_picture_says_what_it_leaves_out() -> None:
    picture = picture_of(["zero3:dp=4", "fsdp2:dp=2,tp=2"], CUBE)
    assert [own[0].name for own in picture.maps] == ["layers.0.cube"]
    assert "no rule says what tp cuts of this model: everything is whole along it" in picture.notes
    many = picture_of(["ddp:dp=2"], tensor="model.layers.*.weight")
    assert len(many.maps) == 6
    assert "12 more tensors fit model.layers.*.weight" in many.notes
    with pytest.raises(Refused, match=r"did you mean 'model\.norm\.weight'"):
        picture_of(["ddp:dp=2"], tensor="model.nrm.weight")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "3"),
        ((0, 2, 4, 6), "0, 2, 4, 6"),
        (range(5, 12), "5-11"),
        ((0, 1, 4, 5, 8), "0, 1, ... 8 (5 ranks)"),
    ],
)
def test_sets_of_ranks_in_few_letters(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(ranks) == text
