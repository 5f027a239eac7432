"""What a conversion did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding
from dynadapt.protocols import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ConversionReport"]


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did. `seconds` are by phase; bytes are of tensors.

    Of the `bytes_written`, `bytes_kept` were there already from a conversion that this one continued.
    """

    source: str
    target: str
    format: str
    bytes_read: int
    bytes_written: int
    fingerprint: str
    verified: bool
    seconds: dict[str, float]
    bytes_kept: int = 0
    outcomes: tuple[Outcome, ...] = ()
    warnings: tuple[Finding, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "source": self.source,
            "target": self.target,
            "format": self.format,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "bytes_kept": self.bytes_kept,
            "fingerprint": self.fingerprint,
            "verified": self.verified,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
            "outcomes": [{"path": o.path, "kind": o.kind, "note": o.note} for o in self.outcomes],
            "warnings": [finding.to_json() for finding in self.warnings],
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> ConversionReport:
        """The report that another rank has told."""
        outcomes = tuple(Outcome(o["path"], o["kind"], o["note"]) for o in told["outcomes"])
        warnings = tuple(Finding(**finding) for finding in told["warnings"])
        return cls(**{**told, "outcomes": outcomes, "warnings": warnings})
