"""What a migration did, for people and programs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynadapt.errors import Finding
    from dynadapt.protocols import Outcome

__all__ = ["MigrationReport", "human", "printed"]


def human(nbytes: int) -> str:
    """Bytes for people.

    >>> human(1536), human(12)
    ('1.5 KiB', '12 B')
    """
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def printed(value: Any) -> str:
    """A rich table as text, as wide as the terminal, or 120 columns where there is none."""
    from rich.console import Console

    width = shutil.get_terminal_size(fallback=(120, 40)).columns
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(value)
    return captured.get()


@dataclass(frozen=True)
class MigrationReport:
    """The result of one migration, equal on every seat but for its times.

    Byte counts are sums over all seats: `bytes_moved` crossed between seats, `bytes_minimum` had to,
    `bytes_rebuilt` were made in place (derived copies and zeros), `bytes_resident` were copied inside a
    seat, `bytes_read` came from files and `bytes_written` went into some. `peak_extra_bytes` is the most
    that one seat was promised to hold beyond both states as they were, `measured_extra_bytes` the most that
    one did hold (of its process; None where the system does not say), and `memory` has both by seat, with
    what the promise was made of. `seconds` are by phase, `pause_seconds` the whole, `transfer_seconds` from
    this seat's first message to its last byte placed.
    """

    bytes_moved: int
    bytes_minimum: int
    bytes_rebuilt: int
    bytes_resident: int
    peak_extra_bytes: int
    measured_extra_bytes: int | None
    staging_bytes: int
    chunks: int
    seconds: dict[str, float]
    fingerprint_source: str
    fingerprint_target: str
    outcomes: tuple[Outcome, ...] = ()
    warnings: tuple[Finding, ...] = ()
    source: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, dict[str, int | None]] = field(default_factory=dict)
    transfer_seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def pause_seconds(self) -> float:
        """How long training stood still on this seat."""
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "bytes_moved": self.bytes_moved,
            "bytes_minimum": self.bytes_minimum,
            "bytes_rebuilt": self.bytes_rebuilt,
            "bytes_resident": self.bytes_resident,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "peak_extra_bytes": self.peak_extra_bytes,
            "measured_extra_bytes": self.measured_extra_bytes,
            "memory": self.memory,
            "staging_bytes": self.staging_bytes,
            "chunks": self.chunks,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
            "pause_seconds": round(self.pause_seconds, 6),
            "transfer_seconds": round(self.transfer_seconds, 6),
            "fingerprint_source": self.fingerprint_source,
            "fingerprint_target": self.fingerprint_target,
            "outcomes": [{"path": o.path, "kind": o.kind, "note": o.note} for o in self.outcomes],
            "warnings": [finding.to_json() for finding in self.warnings],
            "source": self.source,
            "target": self.target,
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table(title="migration", show_header=False)
        for name, nbytes in (
            ("moved", self.bytes_moved),
            ("minimum", self.bytes_minimum),
            ("rebuilt", self.bytes_rebuilt),
            ("resident", self.bytes_resident),
            *((("read from files", self.bytes_read),) if self.bytes_read else ()),
            *((("written to files", self.bytes_written),) if self.bytes_written else ()),
            ("peak extra a seat, promised", self.peak_extra_bytes),
            ("peak extra a seat, measured", self.measured_extra_bytes or 0),
        ):
            table.add_row(name, human(nbytes))
        phases = ", ".join(f"{name} {value:.3f}" for name, value in self.seconds.items())
        table.add_row("seconds", f"{self.pause_seconds:.3f} ({phases})")
        table.add_row("fingerprint source", self.fingerprint_source)
        table.add_row("fingerprint target", self.fingerprint_target)
        kinds: dict[str, list[str]] = {}
        for outcome in self.outcomes:
            note = f" ({outcome.note})" if outcome.note else ""
            kinds.setdefault(outcome.kind, []).append(outcome.path + note)
        for kind, paths in sorted(kinds.items()):
            shown = "\n".join(paths[:12]) + (f"\n... {len(paths) - 12} more" if paths[12:] else "")
            table.add_row(kind, shown)
        for finding in self.warnings:
            table.add_row("warning", str(finding))
        return Group(table)

    def __str__(self) -> str:
        return printed(self)
