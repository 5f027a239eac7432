"""One checkpoint on disk, opened: who holds what, in which file; its sums, its problems."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding, Refused
from dynadapt.registry import adapter_for
from dynadapt.transport.certificate import fingerprint
from dynadapt.transport.stream import key_sums
from dynadapt.vps import cover
from dynadapt.vps.layout import RowLayout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dynadapt.files import FileBuffer
    from dynadapt.protocols import AuxItem, Described
    from dynadapt.vps.keys import Key

__all__ = ["Checkpoint", "layout_of", "open_checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read: its layout over files, per-parameter scalars, and the rest by path."""

    path: str
    format: str
    own: Described
    layout: RowLayout

    @property
    def buffers(self) -> Mapping[str, FileBuffer]:
        """Buffer id -> stretch of a file."""
        return self.own.buffers  # type: ignore[return-value]

    @property
    def scalars(self) -> Mapping[str, Mapping[str, int | float]]:
        """Parameter name -> {"step": n}."""
        return self.own.scalars

    @property
    def aux(self) -> dict[str, AuxItem]:
        """Hyperparameters, scheduler, counters and the rest, by path."""
        return {item.path: item for item in self.own.aux}

    @cached_property
    def files(self) -> dict[int, str]:
        """Endpoint -> the file's path inside the checkpoint."""
        found = {}
        for endpoint, rows in self.own.files.items():
            for row in rows[:1]:
                found[endpoint] = row.buffer.partition("#")[0]
        return found

    def problems(self) -> tuple[Finding, ...]:
        """What is missing of it: elements that no file holds."""
        return cover.prove(self.layout)

    def sums(self, *, threads: int = 2) -> tuple[dict[Key, int], tuple[Finding, ...]]:
        """Sums by key, and replicas that differ, by file. Reads everything."""
        return key_sums(self.layout, self.buffers, threads=threads, names=self.files)

    def fingerprint(self, *, threads: int = 2) -> str:
        """The layout-free fingerprint of the state; raises `Refused` (`uncovered`, `replicas-differ`)."""
        sums, drifted = self.sums(threads=threads)
        findings = [*self.problems(), *drifted]
        if findings:
            raise Refused(findings)
        return fingerprint(self.layout.keys, sums)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read what a checkpoint holds; no tensor's bytes are read.

    Raises `DynadaptError` (`no-adapter`) for a format nobody knows, `Refused` with what is wrong.
    """
    at = str(path)
    adapter = adapter_for(at)
    own = adapter.describe(at)
    return Checkpoint(at, adapter.name, own, layout_of(own))


def layout_of(own: Described) -> RowLayout:
    """The layout of what files hold. Raises `Refused`."""
    parts: dict[int, tuple[Any, Any]] = {e: ((), rows) for e, rows in own.files.items()}
    if parts:
        first = min(parts)
        parts[first] = (own.specs, parts[first][1])
    return RowLayout.of_seats(parts)
