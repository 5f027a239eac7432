"""Every error dynadapt raises, and the finding they are made of.

An error names the place, the cause and the way out, carries a stable `reason` word that programs may
test, and reports everything that was found, not the first thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ChannelError",
    "DynadaptError",
    "Finding",
    "MigrationAborted",
    "Refused",
    "join_findings",
    "lines_of",
]


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One thing that is wrong: a stable reason, a place, a cause and a way out.

    >>> print(Finding("missing-key", "layers.0.weight", "the source does not hold it", "add it"))
    layers.0.weight: the source does not hold it; add it [missing-key]
    """

    reason: str
    where: str
    cause: str
    fix: str = ""

    @property
    def text(self) -> str:
        """Place, cause and way out, without the reason."""
        tail = f"; {self.fix}" if self.fix else ""
        return f"{self.where}: {self.cause}{tail}"

    def __str__(self) -> str:
        return f"{self.text} [{self.reason}]"

    def to_json(self) -> dict[str, str]:
        """The finding as a flat JSON object of four strings."""
        return {"reason": self.reason, "where": self.where, "cause": self.cause, "fix": self.fix}


def join_findings(findings: Iterable[Finding], limit: int = 20) -> str:
    """Print findings one a line, the first `limit` of them, duplicates once.

    >>> print(join_findings([Finding("a", "x", "y"), Finding("a", "x", "y")]))
    x: y [a]
    """
    return "\n".join(_few([str(finding) for finding in dict.fromkeys(findings)], limit))


def lines_of(error: DynadaptError, limit: int = 20) -> list[str]:
    """An error for people, a line each finding, with its reason before it and nowhere else.

    >>> lines_of(Refused([Finding("a", "x", "y"), Finding("b", "x", "z", "do w")]))
    ['[a] x: y', '[b] x: z; do w']
    >>> lines_of(DynadaptError("no such thing", reason="unknown"))
    ['[unknown] no such thing']
    """
    if isinstance(error, Refused):
        return _few([f"[{each.reason}] {each.text}" for each in error.findings], limit)
    return [f"[{error.reason}] {error}"]


def _few(lines: list[str], limit: int) -> list[str]:
    rest = len(lines) - limit
    return lines[:limit] + ([f"... and {rest} more"] if rest > 0 else [])


class DynadaptError(Exception):
    """The root of all errors of this package; `reason` is stable between versions.

    >>> DynadaptError("no such thing", reason="unknown").reason
    'unknown'
    """

    def __init__(self, message: str, *, reason: str = "error") -> None:
        super().__init__(message)
        self.reason = reason


class Refused(DynadaptError):
    """The input cannot be worked on; nothing was changed. Holds every finding.

    >>> Refused([Finding("missing-key", "w", "is absent")]).reason
    'missing-key'
    """

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(dict.fromkeys(findings))
        if not self.findings:
            raise ValueError("Refused needs at least one finding")
        super().__init__(join_findings(self.findings), reason=self.findings[0].reason)


class ChannelError(DynadaptError):
    """A data channel failed; names the peer. Usually the echo of another seat's failure."""

    def __init__(self, message: str, *, peer: int | None = None) -> None:
        super().__init__(message, reason="channel")
        self.peer = peer


class MigrationAborted(DynadaptError):
    """A migration stopped and every seat of it raises this same error.

    `seat` is the seat that failed first in the sense of the vote (the lowest seat with a cause of its
    own), `phase` where, `cause` the text, `findings` all that was found on all seats. The source state
    is intact: training may go on with it.

    >>> print(MigrationAborted(3, "move", "disk full"))
    migration aborted in phase 'move' by seat 3: disk full
    """

    def __init__(
        self,
        seat: int,
        phase: str,
        cause: str,
        *,
        findings: Iterable[Finding] = (),
        reason: str | None = None,
    ) -> None:
        self.seat = seat
        self.phase = phase
        self.cause = cause
        self.findings = tuple(dict.fromkeys(findings))
        first = self.findings[0].reason if self.findings else "failed"
        super().__init__(
            f"migration aborted in phase {phase!r} by seat {seat}: {cause}", reason=reason or first
        )
