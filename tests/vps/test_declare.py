"""Declared layouts against what each kind's own words say, cut by hand with numpy."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynadapt.errors import Refused
from dynadapt.vps import cover
from dynadapt.vps.box import Box
from dynadapt.vps.declare import declare
from dynadapt.vps.keys import Key
from dynadapt.vps.model_shape import ModelShape, Named, State
from dynadapt.vps.tp_rules import TpRules

if TYPE_CHECKING:
    from dynadapt.vps.mesh_layout import MeshLayout

ONE = (State("param"),)

RULES = TpRules(
    {
        "embed": "vocab",
        "head": "vocab",
        "layers.*.q": "colwise",
        "layers.*.k": "heads",
        "layers.*.o": "rowwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "layers.*.gate_up": "packed_colwise",
        "experts.*.up": "colwise",
        "experts.*.down": "rowwise",
        "layers.*.stack": "packed_colwise+grouped_gemm",
    }
)


def model(layers: int = 3, width: int = 8, vocab: int = 21, experts: int = 0) -> ModelShape:
    found = [Named("embed.weight", (vocab, width))]
    for i in range(layers):
        found += [
            Named(f"layers.{i}.q.weight", (width, width)),
            Named(f"layers.{i}.q.bias", (width,)),
            Named(f"layers.{i}.k.weight", (4, width)),
            Named(f"layers.{i}.o.weight", (width, width)),
            Named(f"layers.{i}.o.bias", (width,)),
            Named(f"layers.{i}.norm", (width,)),
        ]
        for e in range(experts):
            found.append(Named(f"layers.{i}.experts.{e}.up.weight", (12, width)))
            found.append(Named(f"layers.{i}.experts.{e}.down.weight", (width, 12)))
    return ModelShape.of([*found, Named("norm", (width,)), Named("head.weight", (vocab, width))])


def values(layout: MeshLayout, seat: int, name: str, slot: str = "param") -> np.ndarray:
    """Row-major numbers of the elements that a seat holds of a tensor, in the order of its rows."""
    spec = next(spec for spec in layout.keys if spec.key == Key(name, slot))
    every = np.arange(spec.numel).reshape(spec.shape)
    parts = [
        every[tuple(map(slice, row.box.lo, row.box.hi))].reshape(-1)
        for row in layout.rows(seat)
        if row.key == spec.key
    ]
    return np.concatenate([*parts, np.zeros(0, np.int64)]).astype(np.int64)


def test_zero1_is_one_flat_of_all_tensors() -> None:
    shape = model()
    layout = declare("zero1:dp=3", shape, states=ONE)
    names = [f"{n}" for n in _names(shape)]
    sizes = [layout_numel(layout, name) for name in names]
    total = -(-sum(sizes) // 6) * 6  # padded to twice the ranks
    flat = np.full(total, -1)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    for start, size in zip(starts, sizes, strict=False):
        flat[start : start + size] = np.arange(size)
    for rank, piece in enumerate(np.split(flat, 3)):
        own = [values(layout, rank, name) for name in names]
        assert np.concatenate(own).tolist() == piece[piece >= 0].tolist()


def _names(shape: ModelShape) -> list[str]:
    every = [
        (int(family.orders[i]), family.name(i))
        for family in shape.families
        for i in range(len(family))
    ]
    return [name for _, name in sorted(every)]


def layout_numel(layout: MeshLayout, name: str) -> int:
    return next(spec.numel for spec in layout.keys if spec.key.name == name)


def test_zero3_cuts_every_tensor_by_itself() -> None:
    layout = declare("zero3:dp=5", model(), states=ONE)
    for name, numel in (("layers.0.q.weight", 64), ("layers.1.k.weight", 32), ("norm", 8)):
        part = -(-numel // 5)
        for rank in range(5):
            wanted = np.arange(numel)[rank * part : (rank + 1) * part]
            assert values(layout, rank, name).tolist() == wanted.tolist()


def test_tensor_parallelism_by_rules() -> None:
    layout = declare("ddp:dp=2,tp=4", model(), RULES, states=ONE)
    whole = np.arange(64).reshape(8, 8)
    for seat in range(8):
        tp = seat % 4
        assert (
            values(layout, seat, "layers.1.q.weight").tolist()
            == whole[2 * tp : 2 * tp + 2].ravel().tolist()
        )
        assert (
            values(layout, seat, "layers.1.o.weight").tolist()
            == whole[:, 2 * tp : 2 * tp + 2].ravel().tolist()
        )
        assert values(layout, seat, "layers.1.q.bias").tolist() == [2 * tp, 2 * tp + 1]
        assert values(layout, seat, "layers.1.o.bias").tolist() == list(range(8))
        embed = np.arange(21 * 8).reshape(21, 8)[6 * tp : 6 * tp + 6]
        assert values(layout, seat, "embed.weight").tolist() == embed.ravel().tolist()


def test_fewer_heads_than_places_are_shared_by_neighbours() -> None:
    shape = ModelShape(model().families, {"*.k.weight": 2})  # two heads of two rows
    layout = declare("ddp:tp=4", shape, RULES, states=ONE)
    rows = [
        sorted({v // 8 for v in values(layout, seat, "layers.0.k.weight").tolist()})
        for seat in range(4)
    ]
    assert rows == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_padded_vocabulary_ends_in_the_last_parts() -> None:
    layout = declare("zero1:tp=2,dp=2,pad_vocab=8", model(), RULES, states=ONE)
    held = [len(values(layout, seat, "embed.weight")) for seat in range(4)]
    # 21 rows padded to 32: 16 rows on tp 0, 5 on tp 1; each then lies first in its flat
    assert held[0] + held[2] == 16 * 8
    assert held[1] + held[3] == 5 * 8
    offsets = {row.box.lo for row in layout.rows(0) if row.key.name == "embed.weight"}
    assert offsets == {(0, 0)}
    # the padding takes room in the flat: both tp ranks cut the tensors after it at the same places
    for name in ("layers.0.q.bias", "layers.2.o.bias", "norm"):
        sizes = [len(values(layout, seat, name)) for seat in range(4)]
        assert sizes[0] == sizes[1]
        assert sizes[2] == sizes[3]


def test_stages_take_layers_in_runs_and_the_ends_go_with_them() -> None:
    layout = declare("ddp:pp=2,dp=2", model(), states=ONE)
    held = [{row.key.name for row in layout.rows(seat)} for seat in range(4)]
    assert held[0] == held[1]
    assert held[2] == held[3]
    first = set(held[0])
    assert {n.split(".")[1] for n in first if n.startswith("layers")} == {"0", "1"}
    assert "embed.weight" in first
    assert {n for n in held[2] if not n.startswith("layers.2")} == {"norm", "head.weight"}
    other = declare("ddp:pp=2,stages=1-2", model(), states=ONE)
    assert {r.key.name.split(".")[1] for r in other.rows(0) if "layers" in r.key.name} == {"0"}


def test_a_tie_across_stages_is_on_both() -> None:
    tensors = [Named("embed.weight", (6, 4), aliases=("head.weight",))]
    tensors += [Named(f"layers.{i}.w", (4, 4)) for i in range(4)]
    layout = declare("ddp:pp=4,dp=2", ModelShape.of(tensors), states=ONE)
    holders = [s for s in range(8) if any(r.key.name == "embed.weight" for r in layout.rows(s))]
    assert holders == [0, 1, 6, 7]
    with pytest.raises(Refused, match="tied across stages"):
        declare("zero1:pp=4,dp=2", ModelShape.of(tensors), states=ONE)


def test_listed_experts_live_on_their_places_and_share_the_data_axis() -> None:
    shape = model(layers=2, experts=4)
    layout = declare("zero1:dp=2,ep=2", shape, states=ONE)
    for expert in range(4):
        name = f"layers.0.experts.{expert}.up.weight"
        sizes = [len(values(layout, seat, name)) for seat in range(4)]  # seat = 2 dp + ep
        owner = expert // 2
        assert sizes[1 - owner] == sizes[3 - owner] == 0
        assert sizes[owner] + sizes[2 + owner] == 96
    dense = [len(values(layout, seat, "embed.weight")) for seat in range(4)]
    assert sum(dense) == 21 * 8  # every element once: dense tensors use both axes


def test_stacked_experts_are_cut_by_expert_and_by_block() -> None:
    shape = ModelShape.of([Named("layers.0.stack", (4, 8, 3))])
    layout = declare("ddp:ep=2,tp=2", shape, RULES, states=ONE)
    whole = np.arange(96).reshape(4, 2, 4, 3)  # experts, gate and up, rows, columns
    for seat in range(4):
        ep, tp = divmod(seat, 2)
        wanted = whole[2 * ep : 2 * ep + 2, :, 2 * tp : 2 * tp + 2].ravel()
        assert sorted(values(layout, seat, "layers.0.stack").tolist()) == sorted(wanted.tolist())


def test_fsdp1_units_are_flats_of_their_own() -> None:
    shape = ModelShape.of([Named("a.w", (5,)), Named("a.b", (3,)), Named("r", (4,))])
    layout = declare("fsdp1:dp=2", shape, states=ONE, units=("a",))
    # unit a: w at 0, b at 8 (16 bytes), 11 elements, so six on the first rank
    assert values(layout, 0, "a.w").tolist() == [0, 1, 2, 3, 4]
    assert values(layout, 1, "a.b").tolist() == [0, 1, 2]
    assert values(layout, 0, "r").tolist() == [0, 1]
    plain = declare("fsdp1:dp=2,orig=false,units=a+b.*", shape, states=ONE)
    assert values(plain, 0, "a.w").tolist() == [0, 1, 2, 3]
    assert values(plain, 1, "a.w").tolist() == [4]


def test_units_are_found_segment_by_segment() -> None:
    """`layers.*` is each layer, not every module inside one."""
    names = ["layers.0.attn.q.weight", "layers.0.attn.k.weight"]
    shape = ModelShape.of([Named(name, (3,)) for name in names])
    layout = declare("fsdp1:dp=2,orig=false,units=layers.*", shape, states=ONE)
    assert values(layout, 0, names[0]).tolist() == [0, 1, 2]
    assert values(layout, 1, names[1]).tolist() == [0, 1, 2]


def test_a_tie_between_layers_is_on_both_stages_and_numbers_may_start_anywhere() -> None:
    tensors = [Named(f"layers.{i}.w", (4,)) for i in range(5, 9)]
    tensors[0] = tensors[0]._replace(aliases=("layers.8.x",))
    layout = declare("ddp:pp=2", ModelShape.of(tensors), states=ONE)
    held = [sorted(row.key.name for row in layout.rows(seat)) for seat in range(2)]
    assert held == [["layers.5.w", "layers.6.w"], ["layers.5.w", "layers.7.w", "layers.8.w"]]


def test_whole_heads_are_dealt() -> None:
    shape = ModelShape.of([Named("layers.0.k.weight", (24, 2))], {"*.k.*": 4})  # six heads
    layout = declare("ddp:tp=4", shape, RULES, states=ONE)
    rows = [len(values(layout, seat, "layers.0.k.weight")) // 2 for seat in range(4)]
    assert rows == [8, 8, 8, 0]
    other = ModelShape.of([Named("layers.0.k.weight", (8, 2))], {"*.k.*": 4})
    with pytest.raises(Refused, match="2 heads cannot be dealt to 3 places"):
        declare("ddp:tp=3", other, RULES)


def test_names_come_back_as_they_were() -> None:
    names = ["layers.00.w", "layers.0.w", "layers.٣.w", "a{}.1.w", "l.99999999999999999999.w"]
    shape = ModelShape.of([Named(name, (2,)) for name in names])
    assert _names(shape) == names


def test_sizes_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(Refused, match="too-large"):
        ModelShape.of([Named("w", (2**40, 2**30))])


def test_frozen_tensors_have_no_state_and_no_place_in_the_optimizers_flat() -> None:
    shape = ModelShape.of([Named("a", (6,), trainable=False), Named("b", (6,))])
    layout = declare("zero2:dp=2", shape)
    assert [str(spec.key) for spec in layout.keys] == [
        "a/param",
        "b/exp_avg",
        "b/exp_avg_sq",
        "b/param",
    ]
    assert values(layout, 0, "a").tolist() == values(layout, 1, "a").tolist() == list(range(6))
    assert values(layout, 1, "b").tolist() == [4, 5]  # padded to 8


@pytest.mark.parametrize(
    ("spec", "rules", "cause"),
    [
        ("zero1:dp=2,tp=4", {"w": "colwise"}, "cuts it unevenly"),
        ("zero1:dp=2,tp=2", {"w": "packed_colwise"}, "several blocks"),
        ("fsdp2:dp=2,tp=2", {"w": "packed_colwise"}, "dim 0 has blocks"),
        ("ddp:tp=2", {"x": "packed_colwise"}, "is not 2 equal blocks"),
        ("zero1:dp=2,groups=three", {}, "neither 1 nor decay"),
        ("fsdp1:dp=2,orig=x,compute=half", {}, "compute=half is no dtype(.|\n)*orig=x is neither"),
        ("ddp:dp=2,dtype=half,pad_vocab=0", {}, "dtype=half is no dtype(.|\n)*pad_vocab=0"),
        ("zero3:dp=2,sub_group_size=x", {}, "sub_group_size=x"),
        ("ddp:tp=2", {"layers.0.y": "colwise"}, "differ among its like tensors"),
        ("ddp:pp=2,stages=2-1", {}, "stages=2-1"),
        ("ddp:pp=3", {}, "2 numbered layers for 3 stages"),
        ("ddp:tp=2", {"w": "colwise+rowwise"}, "cuts dim 1 or axis tp twice"),
        ("ddp:ep=2,tp=2", {"w": "grouped_gemm+packed_colwise"}, "cuts dim 0 or axis tp twice"),
        ("ddp:dp=2,stages=banana", {}, "stages=banana"),
    ],
)
def test_what_cannot_be_declared_is_named(spec: str, rules: dict[str, str], cause: str) -> None:
    shape = ModelShape.of(
        [
            Named("w", (6, 4)),
            Named("x", (3, 4)),
            Named("layers.0.y", (2,)),
            Named("layers.1.y", (2,)),
        ]
    )
    with pytest.raises(Refused, match=cause):
        declare(spec, shape, TpRules(rules))


def test_states_are_at_least_one() -> None:
    """No slot at all holds nothing, which nobody means; a frozen tensor has its own, always."""
    tensors = [Named("a", (5,))]
    with pytest.raises(Refused, match="states is empty") as caught:
        declare("zero3:dp=4", ModelShape.of(tensors), states=())
    assert [finding.reason for finding in caught.value.findings] == ["not-declarable"]
    frozen = ModelShape.of([Named("a", (5,), trainable=False)])
    assert [len(declare("zero3:dp=4", frozen, states=()).rows(seat)) for seat in range(4)] == [
        1,
        1,
        1,
        0,
    ]


def test_a_name_is_of_one_tensor() -> None:
    with pytest.raises(Refused, match="duplicate-name"):
        ModelShape.of([Named("w", (2,)), Named("x", (2,)), Named("w", (2,))])


def test_a_scalar_cannot_be_fully_sharded() -> None:
    with pytest.raises(Refused, match="without dims"):
        declare("fsdp2:dp=2", ModelShape.of([Named("scale", ())]))
    assert len(declare("zero3:dp=2", ModelShape.of([Named("scale", ())])).rows(0)) == 3


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "hsdp"]),
    st.tuples(*[st.sampled_from([1, 1, 2, 3])] * 5),
    st.booleans(),
)
def test_every_kind_holds_every_element_and_no_place_twice(
    kind: str, sizes: tuple[int, ...], listed: bool
) -> None:
    pp, rep, dp, ep, tp = sizes
    tp = 2 if tp == 3 else tp  # flat buffers want even cuts
    rep = max(rep, 2) if kind == "hsdp" else 1 if kind == "ddp" else rep
    shape = model(layers=3, vocab=24, experts=2 if listed else 0)
    layout = declare(f"{kind}:pp={pp},rep={rep},dp={dp},ep={ep},tp={tp}", shape, RULES, states=ONE)
    assert cover.prove(layout) == ()
    explicit = layout.explicit()  # checks that no row overlaps another
    assert layout.holders(*_probe(layout)) == explicit.holders(*_probe(layout))
    for spec in layout.keys:
        boxes: dict[Box, int] = {}
        for seat in layout.endpoints:
            for row in explicit.rows_of(spec.key, seat):
                boxes[row.box] = boxes.get(row.box, 0) + 1
        assert len(set(boxes.values())) == 1, spec  # all pieces have as many replicas
        assert sum(box.volume for box in boxes) == spec.numel


def _probe(layout: MeshLayout) -> tuple[Key, Box]:
    spec = layout.keys[len(layout.keys) // 2]
    return spec.key, Box.whole(spec.shape)


def test_families_put_tensors_of_a_pattern_together() -> None:
    shape = model(layers=4, experts=3)
    patterns = {family.pattern: len(family) for family in shape.families}
    assert patterns["layers.{}.experts.{}.up.weight"] == 12
    assert len(shape) == sum(patterns.values())
    family = next(f for f in shape.families if f.pattern.startswith("layers.{}.experts"))
    assert all(a < b for a, b in pairwise(family.orders.tolist()))
    assert model().digest() == model().digest() != model(layers=4).digest()
