"""The fsdp1 adapter on real ranks, with FSDP1's own gathers and an untouched twin as judges."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest

from tests.adapters import _fsdp1_worlds as worlds
from tests.adapters._fsdp1_worlds import Case
from tests.declared import _worlds

if TYPE_CHECKING:
    from tests._ranks import Pool

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

#: Case and ranks.
MOST = [
    (Case(between="fsdp2"), 3),
    (Case(orig_params=False, bf16=True, between="plain"), 3),
    (Case(bf16=True), 4),
    (Case("SHARD_GRAD_OP", bf16=True, between="zero3"), 4),
    (Case("SHARD_GRAD_OP", orig_params=False, between="zero3"), 4),
    (Case("NO_SHARD", bf16=True), 4),
    (Case("NO_SHARD", orig_params=False), 4),
    (Case("HYBRID_SHARD"), 4),
    (Case("_HYBRID_SHARD_ZERO2", orig_params=False, between="fsdp2"), 4),
]
REST = [
    (case, world)
    for world in (1, 2, 3, 4)
    for case in (
        Case(*each)
        for each in product(STRATEGIES, (True, False), (False, True), ("ddp", "fsdp2", "zero3"))
    )
    if (case, world) not in MOST and ("HYBRID" not in case.strategy or world in {2, 4})
]


def _name(value: object) -> str:
    if not isinstance(value, Case):
        return str(value)
    kind = "orig" if value.orig_params else "flat"
    return f"{value.strategy}-{kind}{'-bf16' if value.bf16 else ''}-{value.between}"


@pytest.mark.parametrize(("case", "world"), MOST, ids=_name)
def test_out_and_back_goes_on_like_an_untouched_twin(case: Case, world: int) -> None:
    _worlds.run(world, worlds.goes_on_like_its_twin, case)


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "world"), REST, ids=_name)
def test_every_other_way_out_and_back(case: Case, world: int) -> None:
    _worlds.run(world, worlds.goes_on_like_its_twin, case)


def test_the_middle_of_a_step_is_refused(ranks4: Pool) -> None:
    ranks4.run(worlds.mid_steps)


def test_nothing_is_sent_before_finish(ranks4: Pool) -> None:
    assert ranks4.run(worlds.one_rank_alone)[1] > 0


def test_a_flat_parameter_has_one_step_and_one_set_of_hyperparameters(ranks4: Pool) -> None:
    (hyper, hyper_text), (step, _) = ranks4.run(worlds.one_set_for_a_flat)[0]
    assert (hyper, step) == ("hyper-conflict", "step")
    assert "use_orig_params=True" in hyper_text


def test_odd_tensors_and_copies_beside_them(ranks4: Pool) -> None:
    ranks4.run(worlds.odd_models)


def test_strange_mixtures_are_refused_by_name(ranks4: Pool) -> None:
    ranks4.run(worlds.strange_mixtures)
