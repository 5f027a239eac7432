"""Param groups and schedulers of pipeline stages, united into those of the whole model."""

from __future__ import annotations

from dynadapt.adapters._by_part import numbered, united
from dynadapt.vps.keys import Key, KeySpec


def group(lr: float, *names: str) -> dict[str, object]:
    return {"names": list(names), "hyper": {"lr": lr}}


def test_groups_meet_by_their_hyperparameters_in_the_order_of_the_stages() -> None:
    told = {
        0: [group(1, "0.w"), group(2, "0.b")],
        1: [group(2, "1.b"), group(3, "1.g")],
        2: [group(1, "2.w"), group(3, "2.g")],
    }
    whole = united({"param_groups": told})
    assert not whole.findings
    assert [entry["names"] for entry in whole.aux["param_groups"].value] == [
        ["0.w", "2.w"],
        ["0.b", "1.b"],
        ["1.g", "2.g"],
    ]
    assert whole.groups == {0: [0, 1], 1: [1, 2], 2: [0, 2]}


def test_equal_groups_of_one_stage_stay_two() -> None:
    told = {0: [group(1, "0.w"), group(1, "0.b")], 1: [group(1, "1.w"), group(1, "1.b")]}
    value = united({"param_groups": told}).aux["param_groups"].value
    assert [entry["names"] for entry in value] == [["0.w", "1.w"], ["0.b", "1.b"]]


def test_a_replica_with_another_rate_is_found() -> None:
    whole = united({"param_groups": {0: [group(1, "tied")], 1: [group(2, "tied")]}})
    assert [(f.reason, f.cause) for f in whole.findings] == [
        ("ranks-disagree", "tied differs in lr between two seats")
    ]


def test_what_a_scheduler_keeps_by_group_follows() -> None:
    told = {0: [group(1, "0.w"), group(2, "0.b")], 1: [group(2, "1.b")]}
    rates = {
        seat: {"class": "L", "state": {"base_lrs": own, "last_epoch": 3}}
        for seat, own in ((0, [1, 2]), (1, [2]))
    }
    whole = united({"param_groups": told, "scheduler": rates})
    assert not whole.findings
    assert whole.aux["scheduler"].value["state"] == {"base_lrs": [1, 2], "last_epoch": 3}
    rates[1]["state"]["last_epoch"] = 4  # type: ignore[index]
    (finding,) = united({"param_groups": told, "scheduler": rates}).findings
    assert (finding.where, finding.cause) == (
        "scheduler/state/last_epoch",
        "is 3 on one seat and 4 on another",
    )
    del rates[1]
    (finding,) = united({"param_groups": told, "scheduler": rates}).findings
    assert finding.cause == "seat 1 has none"


def test_keys_get_the_whole_models_numbers() -> None:
    told = {0: [group(1, "0.w")], 1: [group(2, "1.w")]}
    specs = {
        seat: (
            KeySpec(Key(f"{seat}.w", "param"), (1,), "float32", order=(1 + seat) << 32, group=0),
        )
        for seat in (0, 1)
    }
    found = numbered(specs, united({"param_groups": told}))
    assert [(own[0].order, own[0].group) for own in found.values()] == [(0, 0), (1, 1)]
