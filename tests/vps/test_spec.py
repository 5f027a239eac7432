"""The text form of layouts: what it says, and what is wrong with it, all at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynadapt.errors import Refused
from dynadapt.vps.spec import AXES, KINDS, LayoutSpec


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("zero3:dp=8", {"dp": 8}),
        ("ddp:dp=2,tp=2", {"dp": 2, "tp": 2}),
        ("zero1:dp=4,tp=4,pp=4,ep=8", {"pp": 4, "dp": 4, "ep": 8, "tp": 4}),
        ("hsdp:dp=4,rep=2", {"rep": 2, "dp": 4}),
        ("ddp:dp=1", {}),
        ("ddp:", {}),
        ("ddp", {}),
        ("dcp/fsdp2:dp=2", {"dp": 2}),
        ("ddp:dp=2,tp=4,order=dp-pp-tp", {"dp": 2, "tp": 4}),
        ("ddp:dp=2,tp=4,order=tp-dp", {"tp": 4, "dp": 2}),
    ],
)
def test_axes_are_those_of_more_than_one_place_in_rank_order(
    text: str, axes: dict[str, int]
) -> None:
    spec = LayoutSpec.parse(text)
    assert list(spec.axes.items()) == list(axes.items())
    assert spec.format == ("dcp" if "/" in text else None)


@given(
    st.sampled_from(sorted(KINDS)),
    st.dictionaries(st.sampled_from(AXES), st.integers(1, 16)),
    st.booleans(),
)
def test_text_and_back(kind: str, axes: dict[str, int], dtype: bool) -> None:
    if kind in {"ddp", "zero0"}:
        axes.pop("rep", None)
    if kind == "hsdp":
        axes.setdefault("rep", 1)
    text = f"{kind}:{','.join(f'{axis}={size}' for axis, size in axes.items())}"
    if dtype:
        text += f"{',' if axes else ''}dtype=bfloat16"
    spec = LayoutSpec.parse(text)
    again = LayoutSpec.parse(str(spec))
    assert (again.kind, dict(again.axes), dict(again.options)) == (
        kind,
        {axis: size for axis, size in axes.items() if size > 1},
        {"dtype": "bfloat16"} if dtype else {},
    )
    assert str(again) == str(spec)


@pytest.mark.parametrize(
    ("text", "causes"),
    [
        ("zero4:dp=2", ["kind 'zero4' is unknown; did you mean 'zero"]),
        ("", ["kind '' is unknown"]),
        ("/ddp:dp=2", ["format before the slash is missing"]),
        ("ddp:dp=0", ["dp=0 is not a number of places"]),
        ("ddp:dp=-1,tp=x", ["dp=-1", "tp=x"]),
        ("ddp:dp=2,dp=4", ["'dp' is given twice"]),
        ("ddp:dp", ["'dp' is not NAME=VALUE"]),
        ("ddp:rep=2", ["ddp has no rep"]),
        ("hsdp:dp=2", ["hsdp needs rep=N"]),
        ("zero1:dp=2,round_robbin=true", ["takes no 'round_robbin'; did you mean 'round_robin'"]),
        ("fsdp2:dp=2,groups=decay", ["fsdp2 takes no 'groups'"]),
        ("ddp:dp=2,order=dp-dq", ["'dq' is no axis"]),
        ("ddp:dp=2,order=dp-dp", ["names an axis twice"]),
        ("ddp:dp=99999999999,tp=2", ["199,999,999,998 ranks are more than"]),
        ("!! /ddp:dp=2", ["no name of a format"]),
        ("ddp:dp=٣", ["is not a number of places"]),
        (f"ddp:dp={'9' * 5000}", ["is not a number of places"]),
        ("zero9:dp=0,xp=2,dp=3", ["kind 'zero9'", "dp=0"]),
    ],
)
def test_everything_that_is_wrong_is_said(text: str, causes: list[str]) -> None:
    with pytest.raises(Refused) as caught:
        LayoutSpec.parse(text)
    told = str(caught.value)
    assert all(cause in told for cause in causes), told
    assert {finding.reason for finding in caught.value.findings} == {"bad-spec"}


def test_options_of_a_kind() -> None:
    spec = LayoutSpec.parse("zero1:dp=2,round_robin=true,pad_vocab=128")
    assert spec.flag("round_robin") is True
    assert spec.number("pad_vocab", 1) == 128
    assert spec.number("absent", 7) == 7
    for text in ("zero1:dp=2,round_robin=yes", "zero1:dp=2,pad_vocab=0"):
        bad = LayoutSpec.parse(text)
        with pytest.raises(Refused, match="bad-spec"):
            bad.flag("round_robin") if "yes" in text else bad.number("pad_vocab", 1)
