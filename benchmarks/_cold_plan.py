"""One case of the planner at scale, in a process of its own: `python -m benchmarks._cold_plan CASE`.

Prints JSON: the seconds of each sampled seat (declaring both layouts, then its whole plan), and how much
memory the process took beyond an interpreter with numpy.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks._models import RULES, model_shape
from dynadapt.transport.factored import factored_plan
from dynadapt.transport.plan import EvenHosts, Options
from dynadapt.vps.declare import declare

__all__ = ["CASES", "SEATS", "peak_bytes"]

#: Name -> model, layout before, layout after, bar in seconds.
CASES = {
    "Llama-3-70B, ZeRO-3 -> TP8 x DP16, 128 ranks": (
        "llama-3-70b",
        "zero3:dp=128",
        "ddp:dp=16,tp=8",
        0.1,
    ),
    "Qwen3-235B, ZeRO-1 x TP4 x PP4 x EP8 on 512 -> TP8 x PP2 x EP16 on 1,024": (
        "qwen3-235b-a22b",
        "zero1:dp=4,tp=4,pp=4,ep=8",
        "ddp:dp=4,tp=8,pp=2,ep=16",
        0.2,
    ),
    "the same on 98,304 ranks": (
        "qwen3-235b-a22b",
        "zero1:dp=768,tp=4,pp=4,ep=8",
        "ddp:dp=384,tp=8,pp=2,ep=16",
        0.3,
    ),
    "Qwen3-235B, ZeRO-3 -> TP8 x PP2 x EP16, 98,304 ranks": (
        "qwen3-235b-a22b",
        "zero3:dp=98304",
        "ddp:dp=384,tp=8,pp=2,ep=16",
        0.8,
    ),
}
SEATS = 8


def main() -> None:
    """Plan for the sampled seats of one case."""
    name, _, source, target, _ = _case(int(sys.argv[1]))
    bare = int(sys.argv[2])
    shape = model_shape(name)
    took = []
    last: dict[str, int] = {}
    world = max(declare(spec, shape, RULES).order[-1] for spec in (source, target)) + 1
    for seat in np.linspace(0, world - 1, SEATS).astype(int).tolist():
        began = time.perf_counter()
        before, after = declare(source, shape, RULES), declare(target, shape, RULES)
        plan = factored_plan(seat, before, after, Options(hosts=EvenHosts(8, int(world))))
        moved = plan.bytes_in, plan.bytes_out, plan.minimum
        took.append(time.perf_counter() - began)
        assert moved[0] == moved[2], "more moves than has to"
        assert not plan.findings
        last = {"moves": max(plan.num_moves, last.get("moves", 0))}
        del plan, before, after  # one plan at a time
    print(json.dumps({"seconds": took, "extra_bytes": peak_bytes() - bare, **last}))


def peak_bytes() -> int:
    """The most memory this process held. Not `ru_maxrss`: a child inherits its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def _case(number: int) -> tuple[str, str, str, str, float]:
    name, case = list(CASES.items())[number]
    model, source, target, bar = case
    return model, name, source, target, bar


if __name__ == "__main__":
    main()
