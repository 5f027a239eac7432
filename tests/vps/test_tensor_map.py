"""Maps between unfused and fused names: exact for any rows, there and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynadapt.errors import DynadaptError, Refused
from dynadapt.testing import strategies as more
from dynadapt.testing.layouts import random_layout
from dynadapt.testing.states import MemoryState, logical_values
from dynadapt.vps import cover
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.tensor_map import (
    TensorMap,
    concat,
    interleave,
    mapped,
    rename,
    stack,
    transpose,
)

if TYPE_CHECKING:
    from dynadapt.vps.layout import RowLayout

Q, K, V = (f"layers.{{}}.{n}.weight" for n in "qkv")


def specs_of(**shapes: tuple[int, ...]) -> list[KeySpec]:
    return [
        KeySpec(Key(name.replace("__", "."), slot), shape, "float32", order=i)
        for i, (name, shape) in enumerate(shapes.items())
        for slot in ("param", "exp_avg")
    ]


def attention(kv: int) -> list[KeySpec]:
    shapes = {f"layers.{i}.{n}.weight": (8 if n == "q" else kv, 5) for i in (0, 1) for n in "qkv"}
    return [
        KeySpec(Key(name, slot), shape, "float32")
        for name, shape in shapes.items()
        for slot in ("param", "exp_avg")
    ]


def experts() -> list[KeySpec]:
    return [
        KeySpec(Key(f"layers.{i}.experts.{e}.up", "param"), (3, 4), "float32")
        for i in (0, 1)
        for e in range(11)
    ]


def _concat(v: dict[Key, torch.Tensor], i: int, slot: str) -> torch.Tensor:
    return torch.cat([v[Key(f"layers.{i}.{n}.weight", slot)] for n in "qkv"])


def _interleave(v: dict[Key, torch.Tensor], i: int, slot: str) -> torch.Tensor:
    parts = [v[Key(f"layers.{i}.{n}.weight", slot)].chunk(2) for n in "qkv"]
    return torch.cat([part[block] for block in range(2) for part in parts])


def _stack(v: dict[Key, torch.Tensor], i: int, slot: str) -> torch.Tensor:
    return torch.stack([v[Key(f"layers.{i}.experts.{e}.up", slot)] for e in range(11)], 1)


def _transpose(v: dict[Key, torch.Tensor], i: int, slot: str) -> torch.Tensor:
    return v[Key(f"layers.{i}.q.weight", slot)].T


CASES: dict[str, tuple[Any, list[KeySpec], str, Any]] = {
    "concat": (
        concat([Q, K, V], "layers.{}.qkv.weight", 0, (8, 4, 4)),
        attention(4),
        "qkv",
        _concat,
    ),
    "interleave": (
        interleave([Q, K, V], "layers.{}.qkv.weight", 2, 0, (8, 4, 4)),
        attention(4),
        "qkv",
        _interleave,
    ),
    "stack": (
        stack("layers.{}.experts.{#}.up", "layers.{}.experts.up", 1),
        experts(),
        "up",
        _stack,
    ),
    "transpose": (transpose("layers.{}.q.weight", (1, 0)), attention(4), "q", _transpose),
}


def read(layout: RowLayout, states: list[MemoryState], key: Key) -> torch.Tensor:
    """A whole tensor, put together from what all seats hold under a layout."""
    whole = torch.full(layout.by_name[key].shape, float("nan"))
    for state in states:
        for row in layout.rows_of(key, state.seat):
            flat = state.buffers[row.buffer].tensor()
            view = flat.as_strided(row.box.shape, row.strides, row.offset)
            whole[tuple(map(slice, row.box.lo, row.box.hi))] = view
    return whole


@pytest.mark.parametrize("case", CASES)
@given(seed=more.seeds, kind=st.sampled_from(["flat", "grid", "overlapping", "zero"]))
def test_fused_rows_read_what_fusing_gives_and_go_back(case: str, seed: int, kind: str) -> None:
    rule, specs, label, fuse = CASES[case]
    layout = random_layout(seed, specs, (0, 1, 2), [kind])
    values = {
        key: torch.arange(value.numel(), dtype=torch.float32).reshape(value.shape) + 1000 * i
        for i, (key, value) in enumerate(logical_values(0, specs).items())
    }
    states = [MemoryState(layout, seat, values) for seat in layout.endpoints]
    fused = mapped(layout, TensorMap((rule,)))
    assert cover.prove(fused) == ()
    for key in [key for key in fused.by_name if label in key.name.split(".")]:
        expected = fuse(values, int(key.name.split(".")[1]), key.slot)
        assert torch.equal(read(fused, states, key), expected)
    again = mapped(fused, TensorMap((rule,)).inverse())
    assert {s.key: s.shape for s in again.keys} == {s.key: s.shape for s in layout.keys}
    for key, value in values.items():
        assert torch.equal(read(again, states, key), value)


def test_rules_are_applied_in_order_and_undone_in_reverse() -> None:
    rules = (
        rename("layers.{}.q.weight", "blocks.{}.wq"),
        rename(r"re:layers\.(\d+)\.(k|v)\.weight", r"blocks.\1.w\2"),
        concat(["blocks.{}.wk", "blocks.{}.wv"], "blocks.{}.wkv", sizes=(4, 4)),
        transpose("blocks.{}.wkv", (1, 0)),
    )
    layout = random_layout(5, attention(4), (0, 1), ["grid"])
    fused = mapped(layout, TensorMap(rules))
    shapes = {spec.key.name: spec.shape for spec in fused.keys}
    assert shapes == {
        "blocks.0.wkv": (5, 8),
        "blocks.0.wq": (8, 5),
        "blocks.1.wkv": (5, 8),
        "blocks.1.wq": (8, 5),
    }
    one_way = TensorMap((*rules[:1], *rules[2:]))
    with pytest.raises(Refused, match="no way back"):
        mapped(fused, TensorMap(rules).inverse())
    with pytest.raises(Refused, match=r"blocks\.\{\}\.wk"):
        mapped(layout, one_way)


def test_renaming_takes_the_names_of_tied_tensors_along() -> None:
    spec = KeySpec(Key("embed.weight", "param"), (4,), "float32", aliases=("head.weight",))
    layout = random_layout(0, [spec], (0,), ["replicated"])
    found = mapped(layout, TensorMap((rename("{}.weight", "model.{}.w"),))).keys[0]
    assert (found.key.name, found.aliases) == ("model.embed.w", ("model.head.w",))


@pytest.mark.parametrize(
    ("rule", "reason", "text"),
    [
        (rename("layer.{}.q.weight", "x.{}"), "map-unmatched", "nearest: layers."),
        (concat([Q, "layers.{}.z.weight"], "layers.{}.o"), "map-incomplete", "part 1"),
        (concat([Q, K], "layers.{}.qk", 2), "map-shape", "no dim 2"),
        (concat([Q, K], "layers.{}.qk", 1), "map-parts", "differ"),
        (interleave([Q, K], "layers.{}.qk", 3), "map-sizes", "multiples of 3"),
        (rename("layers.{}.q.weight", "one"), "map-clash", "one name"),
        (rename("layers.{}.q.weight", "layers.{}.k.weight"), "map-clash", "there already"),
        (transpose("layers.{}.q.weight", (2, 0, 1)), "map-shape", "has not 3 dims"),
    ],
)
def test_what_does_not_fit_is_a_finding(rule: Any, reason: str, text: str) -> None:
    layout = random_layout(0, attention(4), (0,), ["replicated"])
    with pytest.raises(Refused, match=text) as caught:
        mapped(layout, TensorMap((rule,)))
    assert caught.value.reason == reason


def test_a_gap_among_experts_is_a_finding_and_costs_nothing() -> None:
    shapes = {"e.0": (2,), "e.1000000000000": (2,)}
    specs = [KeySpec(Key(n, "param"), s, "float32") for n, s in shapes.items()]
    with pytest.raises(Refused, match="first part 1") as caught:
        mapped(random_layout(0, specs, (0,), ["flat"]), TensorMap((stack("e.{#}", "e"),)))
    assert caught.value.reason == "map-incomplete"


def test_sizes_that_do_not_add_up_are_a_finding_on_the_way_back() -> None:
    layout = random_layout(0, specs_of(qk=(9, 2)), (0,), ["flat"])
    with pytest.raises(Refused, match="do not add up to 9"):
        mapped(layout, TensorMap((concat(["q", "k"], "qk", sizes=(4, 4)),)).inverse())


def test_a_rule_that_is_not_required_may_match_nothing() -> None:
    layout = random_layout(0, attention(4), (0,), ["flat"])
    rule = concat(["layers.{}.q.bias", "layers.{}.k.bias"], "layers.{}.qk.bias", required=False)
    assert mapped(layout, TensorMap((rule,))).digest() == layout.digest()


def test_the_json_form_is_plain_and_exact() -> None:
    rules = tuple(rule for rule, *_ in CASES.values())
    text = json.dumps(TensorMap(rules).to_json())
    assert TensorMap.from_json(json.loads(text)) == TensorMap(rules)


@pytest.mark.parametrize(
    "item",
    [
        None,
        {},
        {"version": 2, "rules": []},
        {"version": 1, "rules": [{"kind": "cube", "parts": ["a"], "whole": "b"}]},
        {"version": 1, "rules": [{"kind": "rename", "parts": ["a"], "whole": "b", "more": 1}]},
        {"version": 1, "rules": [{"kind": "stack", "parts": ["a"], "whole": "b"}]},
        {"version": 1, "rules": [{"kind": "rename", "parts": ["re:("], "whole": "b"}]},
        {"version": 1, "rules": [[]]},
    ],
)
def test_other_json_is_refused(item: Any) -> None:
    with pytest.raises(DynadaptError) as caught:
        TensorMap.from_json(item)
    assert caught.value.reason == "bad-map"
