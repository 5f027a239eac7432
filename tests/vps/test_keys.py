"""Names, key specs, and what several seats know of one state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynadapt.vps.keys import Key, KeySpec, alias_groups, canonical_name, merge_specs, wire_dtype

W = KeySpec(Key("w", "param"), (2, 3), "float32")


@pytest.mark.parametrize(
    ("raw", "canonical"),
    [
        # a wrapper on an inner block only
        ("layers.0._checkpoint_wrapped_module.weight", "layers.0.weight"),
        # two wrappers, in both orders
        ("layers.0._checkpoint_wrapped_module._orig_mod.weight", "layers.0.weight"),
        ("layers.0._orig_mod._checkpoint_wrapped_module.weight", "layers.0.weight"),
        ("module.module._fsdp_wrapped_module.layers.0.weight", "layers.0.weight"),
        ("_orig_mod.module.layers.0.weight", "layers.0.weight"),
        # segments that only look like wrappers
        ("submodule.weight", "submodule.weight"),
        ("my_module.weight", "my_module.weight"),
        ("x.module", "x.module"),
        ("_orig_mod_scale", "_orig_mod_scale"),
    ],
)
def test_canonical_names_do_not_depend_on_wrappers(raw: str, canonical: str) -> None:
    assert canonical_name(raw) == canonical


def test_alias_groups_are_united_over_names() -> None:
    a = replace(W, key=Key("b", "param"), aliases=("a",))
    b = replace(W, key=Key("c", "param"), aliases=("b", "d"))
    groups = alias_groups([a, b])
    assert groups == dict.fromkeys("abcd", ("a", "b", "c", "d"))


def test_seats_that_know_different_aliases_agree_on_one_key() -> None:
    first = replace(W, key=Key("embed", "param"), aliases=("head",))
    last = replace(W, key=Key("head", "param"), aliases=("out",))
    merged, findings = merge_specs({0: [first], 3: [last]})
    assert not findings
    assert [(s.key.name, s.aliases) for s in merged] == [("embed", ("head", "out"))]


def test_the_stronger_presence_holds() -> None:
    states = [replace(W, key=Key("w", "exp_avg"), presence=p) for p in ("none", "present", "zero")]
    merged, findings = merge_specs({seat: [state] for seat, state in enumerate(states)})
    assert not findings
    assert [spec.presence for spec in merged] == ["present"]


def test_every_disagreement_is_found_with_its_seats() -> None:
    other = replace(W, shape=(3, 2), dtype="bfloat16")
    third = replace(W, trainable=False)
    _, findings = merge_specs({0: [W], 4: [other], 5: [third]})
    text = "\n".join(map(str, findings))
    assert "shape (2, 3) on seat 0 and (3, 2) on seat 4" in text
    assert "dtype 'float32' on seat 0 and 'bfloat16' on seat 4" in text
    assert "trainable True on seat 0 and False on seat 5" in text
    assert {finding.reason for finding in findings} == {"ranks-disagree"}


def test_a_seat_may_know_fewer_keys() -> None:
    b = replace(W, key=Key("b", "param"))
    merged, findings = merge_specs({0: [W], 1: [b], 2: []})
    assert [spec.key.name for spec in merged] == ["b", "w"]
    assert not findings


def test_what_moves() -> None:
    assert W.moves
    assert not replace(W, derived=True).moves
    assert not replace(W, presence="none").moves
    assert not replace(W, shape=(2, 0)).moves


@pytest.mark.parametrize("change", [{"dtype": "float7"}, {"shape": (1,) * 9}, {"shape": (-1,)}])
def test_bad_specs_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="w/param"):
        replace(W, **change)


def test_the_wire_carries_the_smaller_dtype() -> None:
    assert wire_dtype("float32", "bfloat16") == wire_dtype("bfloat16", "float32") == "bfloat16"
    assert wire_dtype("float16", "bfloat16") == "bfloat16"
