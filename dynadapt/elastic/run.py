"""What one seat knows during one migration; attributes come to life phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dynadapt.elastic.state import control_of, storage_of
from dynadapt.transport.certificate import fingerprint
from dynadapt.transport.executor import Moved

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from dynadapt.elastic.naming import Own
    from dynadapt.elastic.parked import Parked, Woken
    from dynadapt.elastic.peak import Meter
    from dynadapt.elastic.release import Release
    from dynadapt.elastic.settings import Settings
    from dynadapt.elastic.shared import SharedFiles
    from dynadapt.elastic.side import Side
    from dynadapt.elastic.worlds import Session
    from dynadapt.errors import Finding
    from dynadapt.protocols import Adapter, Buffer, Channel, Described, Outcome
    from dynadapt.transport.executor import Storage
    from dynadapt.transport.plan import Match, Options, SeatPlan
    from dynadapt.transport.schedule import Chunk

__all__ = ["PHASES", "OnPhase", "Run"]

PHASES = (
    "quiesce",
    "describe",
    "prepare",
    "plan",
    "agree",
    "move",
    "finish",
    "certify",
    "commit",
)
OnPhase = Callable[[str], None]


class Run:
    """One seat's run. `before`, `migration` and `after` have the phases, `undo` takes it back."""

    source: Side
    target: Side
    saving: SharedFiles | None
    wanted: Own
    hosts: dict[int, str]
    matched: Match
    options: Options
    seat_plan: SeatPlan
    chunk_list: tuple[Chunk, ...]
    source_sums: tuple[int, ...]
    wire_device: str

    def __init__(
        self,
        session: Session,
        source: Any,
        target: Any,
        settings: Settings,
        on_phase: OnPhase | None = None,
        *,
        dry: bool = False,
    ) -> None:
        self.dry = dry
        self.session, self.settings, self.on_phase = session, settings, on_phase
        self.x_source, self.x_target = source, target
        self.number, self.control = control_of(session, settings)
        self.seconds: dict[str, float] = {}
        self.source_adapter: Adapter | None = None
        self.target_adapter: Adapter | None = None
        self.saving = None
        self.own_source: Described | None = None
        self.own_target: Described | None = None
        self.preparing = False
        self.lacking: list[Finding] = []
        self.committed = False
        self.parked: Parked | None = None
        self.woken: Woken | None = None
        self.parking = (0, 0, 0)
        self.deferred: dict[str, tuple[torch.UntypedStorage, int]] = {}
        self.release: Release | None = None
        self.promises: dict[int, dict[str, int]] = {}
        self.meter: Meter | None = None
        self.channel: Channel | None = None
        self.outcomes: list[Outcome] = []
        self.warnings: list[Finding] = []
        self.moved = Moved()

    @contextmanager
    def phase(self, name: str, *, last: bool = False) -> Iterator[None]:
        """Time a phase, tell the listener, vote."""
        began = time.perf_counter()
        with self.control.phase(name, last=last):
            try:
                if self.on_phase is not None:
                    self.on_phase(name)
                yield
            except BaseException:
                if self.channel is not None:
                    self.channel.abort()  # peers that wait for this seat need not wait for the vote
                raise
        self.seconds[name] = time.perf_counter() - began

    def device(self) -> str:
        """Where this seat's state lies: "cpu" or its CUDA device."""
        buffers: list[Buffer] = []
        for own in (self.own_source, self.own_target):
            if own is not None:
                buffers += own.buffers.values()
        kinds = {buffer.device for buffer in buffers}
        cuda = sorted(kind for kind in kinds if kind.startswith("cuda"))
        return cuda[0] if cuda else "cpu"

    def source_storage(self) -> Storage:
        """What this seat can read of the source, from the parked copies if there are any."""
        buffers = self.parked.buffers if self.parked else None
        return storage_of(self.session, self.source, self.own_source, buffers)

    def target_storage(self, own: Described | None = None) -> Storage:
        """What this seat can write of the target, as it was described before, or as `own` says."""
        return storage_of(self.session, self.target, own or self.own_target)

    def told(self, findings: Iterable[Finding]) -> list[Finding]:
        """Findings placed by common names, with the names that the user knows."""
        namings = [side.naming for side in (self.source, self.target) if side.naming is not None]
        found = list(findings)
        for naming in namings:
            found = [naming.told(finding) for finding in found]
        return found

    def workers(self) -> tuple[int, ...]:
        """The seats that read and write files for others."""
        readers = [set(side.readers) for side in (self.source, self.target) if side.readers]
        return tuple(sorted(set.intersection(*readers))) if readers else self.control.seats

    def expected(self) -> list[int]:
        """The sums the target must have, by pair: the source's, and zero where zeros were filled in."""
        moving = iter(self.source_sums)
        return [0 if pair.fill else next(moving) for pair in self.matched.pairs]

    def print_of(self, sums: Sequence[int]) -> str:
        """The fingerprint of a state with these sums by pair, under the target's names and dtypes."""
        pairs = zip(self.matched.pairs, sums, strict=True)
        values = {pair.target.key: value for pair, value in pairs}
        return fingerprint(self.target.layout.keys, values)
