"""The seats agree on how fine a plan is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynadapt.errors import Finding, Refused
from dynadapt.transport.executor import staging_bytes
from dynadapt.transport.schedule import chunks, finer, load, slicing

if TYPE_CHECKING:
    from dynadapt.transport.control import Control
    from dynadapt.transport.plan import SeatPlan
    from dynadapt.transport.schedule import Chunk

__all__ = ["cut_chunks"]

CUTS = 16
"""How often chunks are cut finer before the budget is called too small."""


def cut_chunks(
    control: Control, plan: SeatPlan, budget: int, name: str = "all"
) -> tuple[Chunk, ...]:
    """The coarsest chunks of this seat's plan whose staging fits the budget of every seat.

    All seats call it and cut alike; `name` tells two calls of one control apart. Raises `Refused`
    (reason `budget`) on all of them where even the finest cut does not fit.
    """
    cut = slicing(control.gather_values(f"load/{name}", load(plan)).values(), budget)
    staging = 0
    for trial in range(CUTS):
        found = chunks(plan, cut)
        told = control.gather_values(f"staging/{name}/{trial}", staging_bytes(found))
        staging = max(told.values())
        if staging <= budget:
            return found
        cut = finer(cut, staging, budget)
    cause = f"the finest cut tried needs {staging} bytes of staging, the budget is {budget}"
    raise Refused([Finding("budget", "staging", cause, "allow a larger budget")])
