"""What a user may decide about a migration, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dynadapt.errors import Finding
from dynadapt.transport.control import Timeouts
from dynadapt.vps.tensor_map import TensorMap

__all__ = ["ALLOWANCES", "DEFAULT_BUDGET", "Settings"]

DEFAULT_BUDGET = 256 << 20
"""Staging bytes a seat may take where the user says nothing."""

ALLOWANCES = frozenset({"extra", "missing", "tie", "step"})
"""What `allow` may hold."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may decide; must be equal on every seat.

    `force`: a checkpoint that is there already is replaced. `unfit`: what is wrong with other arguments.
    """

    budget: int = DEFAULT_BUDGET
    max_extra_bytes: int | None = None
    mode: Literal["keep", "park", "release"] = "keep"
    narrow: Literal["if-exact", "allow", "refuse"] = "if-exact"
    on_drift: Literal["error", "warn", "take-first"] = "error"
    allow: frozenset[str] = frozenset()
    timeouts: Timeouts = field(default_factory=Timeouts)
    source_map: TensorMap | None = None
    target_map: TensorMap | None = None
    force: bool = False
    unfit: tuple[Finding, ...] = ()

    def to_json(self) -> dict[str, object]:
        """One plain value an argument, equal on seats that were given equal ones."""
        return {
            "budget": self.budget,
            "max_extra_bytes": self.max_extra_bytes,
            "mode": self.mode,
            "narrow": self.narrow,
            "on_drift": self.on_drift,
            "allow": sorted(self.allow),
            "timeout": self.timeouts.phase,
            "force": self.force,
            "source_map": None if self.source_map is None else self.source_map.to_json(),
            "target_map": None if self.target_map is None else self.target_map.to_json(),
        }

    def findings(self) -> list[Finding]:
        """What is wrong with them. Not raised when made: all seats are to be told, not one."""
        findings = [*self.unfit]
        if self.mode not in {"keep", "park", "release"}:
            findings.append(_bad("mode", self.mode, "'keep', 'park' or 'release'"))
        if self.narrow not in {"if-exact", "allow", "refuse"}:
            findings.append(_bad("narrow", self.narrow, "'if-exact', 'allow' or 'refuse'"))
        if self.on_drift not in {"error", "warn", "take-first"}:
            wanted = "'error', 'warn' or 'take-first'"
            findings.append(_bad("on_drift", self.on_drift, wanted))
        if self.allow - ALLOWANCES:
            findings.append(
                _bad("allow", sorted(self.allow - ALLOWANCES), f"some of {sorted(ALLOWANCES)}")
            )
        if type(self.budget) is not int or self.budget < 64 << 10:
            findings.append(_bad("budget", self.budget, "a whole number of at least 65536 bytes"))
        limit = self.max_extra_bytes
        if limit is not None and (type(limit) is not int or limit < 0):
            findings.append(_bad("max_extra_bytes", limit, "a whole number of bytes, or None"))
        if not self.timeouts.phase > 0:
            findings.append(_bad("timeout", self.timeouts.phase, "more than 0 seconds"))
        maps: dict[str, object] = {"source_map": self.source_map, "target_map": self.target_map}
        for name, each in maps.items():
            if not isinstance(each, TensorMap | None):
                findings.append(_bad(name, each, "a TensorMap"))
        return findings


def _bad(name: str, value: object, wanted: str) -> Finding:
    return Finding("bad-argument", name, f"is {value!r}, must be {wanted}")
