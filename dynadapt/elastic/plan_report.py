"""A plan over all seats, for people and programs: per tensor with the reason, priced for a link."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynadapt.elastic.outcome import human, printed
from dynadapt.transport.cost import LINKS, price

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dynadapt.errors import Finding
    from dynadapt.transport.plan import Match, Pair, SeatPlan

__all__ = ["PlanReport", "TensorPlan"]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What happens to one key: bytes over the wire, bytes that stay, and why."""

    key: str
    shape: tuple[int, ...]
    source_dtype: str
    target_dtype: str
    moved: int
    resident: int
    pieces: int
    why: str


@dataclass(frozen=True)
class PlanReport:
    """The union of all seats' plans; equal on every seat. `minimum` is what must cross, in bytes.

    `memory` is what each seat would hold beyond what it holds now, at its worst moment (`peak`, and
    `host` where its state lies on another device), and what that is made of; `warnings` what a
    migration would warn of.
    """

    seats: Mapping[int, SeatPlan]
    tensors: tuple[TensorPlan, ...]
    memory: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    warnings: tuple[Finding, ...] = ()

    @classmethod
    def of(
        cls,
        matched: Match,
        seats: Mapping[int, SeatPlan],
        memory: Mapping[int, Mapping[str, int]] | None = None,
        warnings: Iterable[Finding] = (),
    ) -> PlanReport:
        """Collect per tensor what the seats' plans say."""
        counts: dict[Any, list[int]] = {}
        for seat_plan in seats.values():
            for move in (*seat_plan.receives, *seat_plan.local):
                entry = counts.setdefault(move.key, [0, 0, 0])
                entry[0 if move.over_wire else 1] += move.nbytes
                entry[2] += 1
        tensors = []
        for pair in matched.pairs:
            moved, resident, pieces = counts.get(pair.target.key, [0, 0, 0])
            tensors.append(
                TensorPlan(
                    str(pair.target.key),
                    pair.target.shape,
                    pair.source.dtype,
                    pair.target.dtype,
                    moved,
                    resident,
                    pieces,
                    _why(pair, moved, resident),
                )
            )
        told = tuple(dict.fromkeys(warnings))
        return cls(dict(sorted(seats.items())), tuple(tensors), dict(memory or {}), told)

    @property
    def bytes_moved(self) -> int:
        """Bytes that cross between seats."""
        return sum(plan.bytes_in for plan in self.seats.values())

    @property
    def bytes_minimum(self) -> int:
        """Bytes that have to."""
        return sum(plan.minimum for plan in self.seats.values())

    @property
    def peak_extra_bytes(self) -> int:
        """The most that one seat would hold beyond what it holds now."""
        return max((max(m["peak"], m["host"]) for m in self.memory.values()), default=0)

    def seconds(self, link: str) -> float:
        """Seconds on a named link of `dynadapt.transport.cost.LINKS`."""
        return price(self.seats, link)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values, every move included."""
        return {
            "bytes_moved": self.bytes_moved,
            "bytes_minimum": self.bytes_minimum,
            "peak_extra_bytes": self.peak_extra_bytes,
            "memory": {str(seat): dict(figures) for seat, figures in self.memory.items()},
            "warnings": [finding.to_json() for finding in self.warnings],
            "seconds": {link: self.seconds(link) for link in LINKS},
            "tensors": [
                {
                    "key": t.key,
                    "shape": list(t.shape),
                    "source_dtype": t.source_dtype,
                    "target_dtype": t.target_dtype,
                    "moved": t.moved,
                    "resident": t.resident,
                    "pieces": t.pieces,
                    "why": t.why,
                }
                for t in self.tensors
            ],
            "seats": [plan.to_json() for plan in self.seats.values()],
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        tensors = Table(title="plan, by tensor")
        for column in ("key", "shape", "dtype", "moved", "stays", "pieces", "why"):
            tensors.add_column(column)
        for t in self.tensors[:40]:
            cast = t.source_dtype == t.target_dtype
            dtype = t.target_dtype if cast else f"{t.source_dtype} -> {t.target_dtype}"
            shape = "x".join(map(str, t.shape)) or "scalar"
            row = (t.key, shape, dtype, human(t.moved), human(t.resident), str(t.pieces), t.why)
            tensors.add_row(*row)
        if len(self.tensors) > 40:
            tensors.add_row(f"... {len(self.tensors) - 40} more", *[""] * 6)
        seats = Table(title="plan, by seat")
        for column in ("seat", "in", "out", "messages", "peak extra"):
            seats.add_column(column)
        for seat, plan in self.seats.items():
            pieces = len(plan.receives) + len(plan.sends)
            peak = self.memory.get(seat, {}).get("peak")
            extra = "" if peak is None else human(peak)
            figures = (human(plan.bytes_in), human(plan.bytes_out), str(pieces), extra)
            seats.add_row(str(seat), *figures)
        links = Table(title="seconds of transfer, by link")
        for link in LINKS:
            links.add_column(link)
        links.add_row(*(f"{self.seconds(link):.4f}" for link in LINKS))
        return Group(tensors, seats, links)

    def __str__(self) -> str:
        return printed(self)


def _why(pair: Pair, moved: int, resident: int) -> str:
    if pair.fill:
        return "never made in the source: zeros"
    if not moved:
        return "every seat holds what it needs"
    if not resident:
        return "no seat holds any of what it needs"
    return "partly held where it is needed"
