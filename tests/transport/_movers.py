"""Plans for all seats at once, and their execution on threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynadapt.testing.seats import run_threads
from dynadapt.testing.states import MemoryState
from dynadapt.transport.channels.memory import MemoryChannel, MemoryHub
from dynadapt.transport.executor import Moved, Storage, execute, staging_bytes
from dynadapt.transport.match import match
from dynadapt.transport.plan import Match, Options, SeatPlan
from dynadapt.transport.planner import plan_for
from dynadapt.transport.schedule import Chunk, chunks, finer, load, slicing

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import RowLayout


@dataclass
class Planned:
    """The plans of all seats of one move, and their chunks."""

    source: RowLayout
    target: RowLayout
    options: Options = field(default_factory=Options)
    matched: Match = field(init=False)
    plans: dict[int, SeatPlan] = field(init=False)
    chunks: dict[int, list[Chunk]] = field(init=False)

    def __post_init__(self) -> None:
        self.matched = match(self.source.keys, self.target.keys, self.options)
        assert not self.matched.findings, self.matched.findings
        seats = sorted({*self.source.endpoints, *self.target.endpoints})
        self.plans = {
            seat: plan_for(seat, self.source, self.target, self.matched, self.options)
            for seat in seats
        }
        cut = slicing(map(load, self.plans.values()), self.options.budget)
        for _ in range(12):
            self.chunks = {seat: [*chunks(plan, cut)] for seat, plan in self.plans.items()}
            staging = max(map(staging_bytes, self.chunks.values()))
            if staging <= self.options.budget:
                break
            cut = finer(cut, staging, self.options.budget)

    def run(
        self,
        values: Mapping[Key, torch.Tensor],
        narrow: str = "if-exact",
        timeout: float = 10.0,
    ) -> tuple[dict[int, MemoryState], dict[int, Moved]]:
        """Execute on a thread a seat; the filled targets and what each seat did."""
        hub = MemoryHub()
        states: dict[int, MemoryState] = {}
        moved: dict[int, Moved] = {}

        def seat(me: int) -> None:
            source = MemoryState(self.source, me, values)
            target = states[me] = MemoryState(self.target, me)
            channel = MemoryChannel(hub, me)
            try:
                moved[me] = execute(
                    self.plans[me],
                    self.chunks[me],
                    self.matched,
                    Storage({me: source.rows}, source.buffers),
                    Storage({me: target.rows}, target.buffers),
                    channel,
                    narrow=narrow,
                    timeout=timeout,
                )
            except BaseException:
                channel.abort()
                raise

        run_threads([lambda me=me: seat(me) for me in self.plans])
        return states, moved
