"""Plans against a planner that looks at every element by itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynadapt.testing import strategies as more
from dynadapt.testing.layouts import random_layout
from dynadapt.transport.match import match
from dynadapt.transport.plan import Options
from dynadapt.transport.planner import REMEMBERED, plan_for, remembered_plan
from dynadapt.vps.box import Box, row_major_strides
from dynadapt.vps.keys import Key, KeySpec, itemsize
from dynadapt.vps.layout import Holder, Row, RowLayout
from tests.transport._movers import Planned

if TYPE_CHECKING:
    from collections.abc import Sequence

W = KeySpec(Key("w", "param"), (8, 6), "float32")


def window(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.lo, box.hi))


def mask(layout: RowLayout, key: Key, endpoint: int) -> np.ndarray:
    found = np.zeros(layout.by_name[key].shape, bool)
    for row in layout.rows_of(key, endpoint):
        found[window(row.box)] = True
    return found


def whole_on(seats: Sequence[int], spec: KeySpec = W, parts: int = 1) -> dict[int, list[Row]]:
    """Every seat holds all of it, in `parts` rows."""
    step = spec.shape[0] // parts
    strides = row_major_strides(spec.shape)
    boxes = [Box((i * step, 0), ((i + 1) * step, spec.shape[1])) for i in range(parts)]
    return {s: [Row(spec.key, b, "x", b.lo[0] * strides[0], strides) for b in boxes] for s in seats}


@st.composite
def moves(draw: st.DrawFn) -> Planned:
    specs = draw(more.key_sets(max_tensors=3, max_volume=400))
    source, target = (draw(more.layouts(specs, draw(more.endpoints(6, 7)))) for _ in range(2))
    hosts = {seat: f"host{seat // 3}" for seat in range(7)} if draw(st.booleans()) else {}
    return Planned(source, target, Options(budget=1 << 16, hosts=hosts))


@settings(max_examples=60)
@given(moves())
def test_every_needed_element_comes_once_from_a_seat_that_holds_it(planned: Planned) -> None:
    source, target = planned.source, planned.target
    for pair in planned.matched.pairs:
        if pair.fill:
            continue
        key, shape = pair.target.key, pair.target.shape
        for endpoint in target.endpoints:
            served = np.zeros(shape, np.int64)
            minimum = mask(target, key, endpoint) & ~mask(source, pair.source.key, endpoint)
            crossing = 0
            for move in planned.plans[endpoint].moves:
                if move.key != key or move.target != endpoint:
                    continue
                served[window(move.box)] += 1
                assert mask(source, pair.source.key, move.source)[window(move.box)].all()
                crossing += move.box.volume if move.over_wire else 0
            assert (served == mask(target, key, endpoint)).all()
            assert crossing == minimum.sum()


@settings(max_examples=60)
@given(moves())
def test_bytes_are_the_minimum_and_both_ends_agree(planned: Planned) -> None:
    plans = planned.plans
    for seat, plan in plans.items():
        assert plan.findings == ()
        expected = 0
        for pair in planned.matched.pairs:
            if not pair.fill:
                needs = mask(planned.target, pair.target.key, seat)
                has = mask(planned.source, pair.source.key, seat)
                expected += int((needs & ~has).sum()) * itemsize(pair.wire)
        assert plan.bytes_in == plan.minimum == expected
        digests = plan.pair_digests()
        for name, digest in digests.items():
            peer, way = int(name[:-1]), name[-1]
            back = f"{seat}{'<' if way == '>' else '>'}"
            assert plans[peer].pair_digests()[back] == digest
    assert sum(p.bytes_in for p in plans.values()) == sum(p.bytes_out for p in plans.values())


@settings(max_examples=60)
@given(moves())
def test_moves_are_in_canonical_order(planned: Planned) -> None:
    for plan in planned.plans.values():
        order = [(move.key, move.box.lo) for move in plan.moves]
        assert order == sorted(order)


@settings(max_examples=60)
@given(moves())
def test_a_replica_on_the_same_host_is_preferred(planned: Planned) -> None:
    hosts = planned.options.hosts
    for plan in planned.plans.values():
        for move in plan.receives:
            pair = planned.matched.by_target[move.key]
            near = {
                h.endpoint
                for h in planned.source.holders(pair.source.key, move.box)
                if h.box.contains(move.box) and hosts.get(h.endpoint) == hosts.get(move.target)
            }
            if hosts and near:
                assert move.source in near


@pytest.mark.parametrize(("holders", "wanting"), [(4, 4), (2, 6), (3, 7), (5, 2)])
@pytest.mark.parametrize("parts", [1, 4])
def test_replicas_share_the_work(holders: int, wanting: int, parts: int) -> None:
    source = RowLayout([W], whole_on(range(holders)))
    target = RowLayout([W], whole_on(range(100, 100 + wanting), parts=parts))
    sent = Counter(dict.fromkeys(range(holders), 0))
    for seat in range(holders):
        sent[seat] += len(Planned(source, target).plans[seat].sends)
    assert sum(sent.values()) == wanting * parts
    assert max(sent.values()) - min(sent.values()) <= parts


def test_what_a_seat_has_never_crosses() -> None:
    source = RowLayout([W], whole_on(range(4)))
    planned = Planned(source, RowLayout([W], whole_on((2, 3), parts=2)))
    assert all(not plan.sends and not plan.receives for plan in planned.plans.values())
    assert len(planned.plans[2].local) == 2


def test_only_the_first_holder_counts_where_replicas_drifted() -> None:
    source = RowLayout([W], whole_on((1, 2, 3)))
    target = RowLayout([W], whole_on((2, 3, 4)))
    planned = Planned(source, target, Options(first_only=frozenset([W.key])))
    for plan in planned.plans.values():
        assert {move.source for move in plan.moves} <= {1}
        assert plan.bytes_in == plan.minimum == (W.nbytes if plan.seat > 1 else 0)


def test_local_tensors_stay_where_they_are() -> None:
    spec = replace(W, local=True)
    source = RowLayout([spec], whole_on((0, 1)))
    planned = Planned(source, RowLayout([spec], whole_on((0, 1), parts=2)))
    assert all(not plan.receives and not plan.findings for plan in planned.plans.values())
    lost = plan_for(
        2,
        source,
        target := RowLayout([spec], whole_on((2,))),
        match([spec], [spec], Options()),
        Options(),
    )
    assert [finding.reason for finding in lost.findings] == ["uncovered"]
    assert target.endpoints == (2,)


def test_a_source_tensor_serves_names_that_the_target_does_not_tie() -> None:
    tied = replace(W, key=Key("a", "param"), aliases=("b",))
    apart = [replace(W, key=Key(name, "param")) for name in "ab"]
    rows = whole_on((1,), apart[0])[1] + [
        replace(row, buffer="y") for row in whole_on((1,), apart[1])[1]
    ]
    source, target = RowLayout([tied], whole_on((0,), tied)), RowLayout(apart, {1: rows})
    planned = Planned(source, target, Options(allow=frozenset({"tie"})))
    assert planned.plans[1].bytes_in == planned.plans[0].bytes_out == 2 * W.nbytes


def test_a_partial_source_is_reported_for_every_row_that_it_fails() -> None:
    half = RowLayout([W], {0: [Row(W.key, Box((0, 0), (4, 6)), "x", 0, (6, 1))]})
    target = RowLayout([W], whole_on((1,), parts=4))
    plan = plan_for(1, half, target, match([W], [W], Options()), Options())
    assert [finding.where for finding in plan.findings] == [
        "w/param [4:6,0:6]",
        "w/param [6:8,0:6]",
    ]


def test_absent_state_becomes_zeros_in_place() -> None:
    state = replace(W, key=Key("w", "exp_avg"), kind="state", presence="none")
    source = RowLayout([W, state], whole_on((0,)))
    present = replace(state, presence="present")
    rows = [replace(row, buffer="y") for row in whole_on((1,), present)[1]]
    planned = Planned(source, RowLayout([W, present], {1: whole_on((1,))[1] + rows}))
    assert planned.plans[1].fills == ((1, present.key, Box.whole(W.shape)),)
    assert planned.plans[1].minimum == W.nbytes


class Spy:
    """A layout that notes whose rows were asked for."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout, self.asked = layout, set[int]()
        self.keys, self.endpoints = layout.keys, layout.endpoints

    def rows(self, endpoint: int) -> tuple[Row, ...]:
        self.asked.add(endpoint)
        return self._layout.rows(endpoint)

    def holders(self, key: Key, box: Box) -> tuple[Holder, ...]:
        return self._layout.holders(key, box)

    def digest(self) -> str:
        return self._layout.digest()


def test_a_seat_plans_from_its_own_rows() -> None:
    specs = [replace(W, key=Key(f"w{i}", "param")) for i in range(4)]
    source, target = (Spy(random_layout(i, specs, range(6), ["flat", "grid"])) for i in range(2))
    plan_for(3, source, target, match(specs, specs, Options()), Options())
    assert source.asked == target.asked == {3}


def test_a_plan_is_remembered_by_what_it_depends_on() -> None:
    source, target = (RowLayout([W], whole_on(seats)) for seats in ((0, 1), (1, 2)))
    matched = match([W], [W], Options())
    first = remembered_plan(2, source, target, matched, Options())
    again = RowLayout([W], whole_on((0, 1)))
    assert remembered_plan(2, again, target, matched, Options()) is first
    assert first == plan_for(2, source, target, matched, Options())
    assert remembered_plan(1, source, target, matched, Options()) != first
    other = Options(hosts={1: "a", 2: "a"})
    assert remembered_plan(2, source, target, matched, other).receives[0].source == 1
    for budget in range(REMEMBERED):  # the oldest are forgotten
        remembered_plan(2, source, target, matched, Options(budget=1000 + budget))
    assert remembered_plan(2, source, target, matched, Options()) is not first
