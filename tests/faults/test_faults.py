"""Forty faults of the list that `make faults` runs whole: nothing is lost, nothing hangs."""

from __future__ import annotations

from tests.faults._fault import every_fault, some_faults
from tests.faults._run import run_faults


def test_the_list_has_enough_of_everything() -> None:
    faults = every_fault()
    assert len(faults) == len(set(faults)) >= 300
    assert sum(fault.kind == "kill" for fault in faults) >= 60
    assert faults == every_fault()
    chosen = some_faults()
    assert len(chosen) == 40
    assert {fault.kind for fault in chosen} == {fault.kind for fault in faults}


def test_forty_faults() -> None:
    verdicts = run_faults(some_faults())
    bad = [f"{v.fault}\n{complaint}" for v in verdicts for complaint in v.complaints]
    assert not bad, "\n\n".join(bad)
