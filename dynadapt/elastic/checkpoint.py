"""One checkpoint on disk, opened: who holds what, in which file; its sums, its problems."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dynadapt.elastic.budget import Budget
from dynadapt.elastic.collection import collected_later
from dynadapt.elastic.tensors import Tensors
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import FileSource
from dynadapt.registry import adapter_for
from dynadapt.transport.certificate import fingerprint
from dynadapt.transport.forks import ForkLost
from dynadapt.transport.sums import key_sums
from dynadapt.vps import cover
from dynadapt.vps.layout import RowLayout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dynadapt.files import FileBuffer
    from dynadapt.protocols import AuxItem, Described
    from dynadapt.transport.read_back import RowInFile
    from dynadapt.vps.keys import Key, KeySpec

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

    @property
    def keys(self) -> tuple[KeySpec, ...]:
        """Every tensor it knows of: name and slot, shape, dtype, kind, tied names."""
        return self.layout.keys

    @cached_property
    def tensors(self) -> Tensors:
        """The tensors as numpy arrays by key, each read when it is asked for."""
        return Tensors(self.layout, self.buffers)

    @cached_property
    def files(self) -> dict[int, str]:
        """Endpoint -> the file's path inside the checkpoint."""
        found = {}
        for endpoint, rows in self.own.files.items():
            for row in rows[:1]:
                found[endpoint] = row.buffer.partition("#")[0]
        return found

    def summary(self, glob: str = "*") -> dict[str, Any]:
        """What it is and holds, as plain JSON values, with the tensors of which a name matches `glob`."""
        layout, aux = self.layout, self.aux
        behaviour = aux["behaviour"].value if "behaviour" in aux else {}
        groups = aux["param_groups"].value if "param_groups" in aux else []
        _, _, kind = self.own.written.partition("/")
        dtypes: dict[str, set[str]] = {}
        for spec in layout.keys:
            dtypes.setdefault(spec.key.slot, set()).add(spec.dtype)
        return {
            "path": self.path,
            "format": self.format,
            "framework": behaviour.get("framework", ""),
            "made_by": self.own.made_by,
            "zero_stage": behaviour.get("zero_stage"),
            "written": self.own.written,
            "layout": kind if ":" in kind else "",  # else whose loaders it is for
            "files": len(layout.endpoints),
            "keys": len(layout.keys),
            "parameters": sum(s.numel for s in layout.keys if s.key.slot == "param"),
            "bytes": sum(s.nbytes for s in layout.keys if s.presence == "present"),
            "dtypes": {slot: sorted(found) for slot, found in sorted(dtypes.items())},
            "steps": sorted({v["step"] for v in self.scalars.values() if "step" in v}),
            "counters": aux["counters"].value if "counters" in aux else {},
            "groups": [{"parameters": len(group["names"]), **group["hyper"]} for group in groups],
            "aux": sorted(aux),
            "problems": [finding.to_json() for finding in self.problems()],
            "tensors": [
                self._told(s)
                for s in layout.keys
                if any(fnmatchcase(name, glob) for name in (s.key.name, *s.aliases))
            ],
        }

    def _told(self, spec: KeySpec) -> dict[str, Any]:
        return {
            "key": str(spec.key),
            "shape": list(spec.shape),
            "dtype": spec.dtype,
            "kind": spec.kind,
            "trainable": spec.trainable,
            "derived": spec.derived,
            "aliases": list(spec.aliases),
            "rows": len(self.layout.held(spec.key)),
        }

    def __str__(self) -> str:
        facts = self.summary()
        steps = ", ".join(f"{step:g}" for step in facts["steps"]) or "none"
        return (
            f"{self.path}: {self.format}, {facts['keys']} tensors of {facts['parameters']:,} "
            f"parameters in {facts['files']} files, step {steps}, {len(facts['problems'])} problems"
        )

    def problems(self) -> tuple[Finding, ...]:
        """What is missing of it: elements that no file holds."""
        return self._problems

    @cached_property
    def _problems(self) -> tuple[Finding, ...]:
        return cover.prove(self.layout)

    def sums(
        self, *, threads: int = 2, known: Mapping[RowInFile, int] | None = None
    ) -> tuple[dict[Key, int], tuple[Finding, ...]]:
        """Sums by key, and replicas that differ, by file. Reads all but the `known` rows.

        Raises `Refused` (`truncated-file`, `worker-lost`).
        """
        nbytes = sum(spec.nbytes for spec in self.layout.keys if spec.presence == "present")
        fork = known is None and threads > 1 and Budget().forks(nbytes)
        try:
            return key_sums(
                self.layout, self.buffers, threads=threads, names=self.files, known=known, fork=fork
            )
        except ForkLost as error:
            cause = (
                "a process that read it was killed: for want of memory, or as a file was cut short"
            )
            raise Refused(
                [Finding("worker-lost", self.path, cause, "--workers 1 (threads=1) takes less")]
            ) from error

    def fingerprint(self, *, threads: int = 2) -> str:
        """The layout-free fingerprint of the state; raises `Refused` (`uncovered`, `replicas-differ`)."""
        sums, drifted = self.sums(threads=threads)
        findings = [*self.problems(), *drifted]
        if findings:
            raise Refused(findings)
        return fingerprint(self.layout.keys, sums)


@collected_later()
def open_checkpoint(path: str | Path | FileSource) -> Checkpoint:
    """Read what a checkpoint holds; no tensor's bytes are read.

    Raises `DynadaptError` (`no-adapter`) for a format nobody knows, `Refused` with what is wrong.
    """
    at = path if isinstance(path, FileSource) else str(path)
    adapter = adapter_for(at)
    own = adapter.describe(at)
    return Checkpoint(str(path), adapter.name, own, layout_of(own))


def layout_of(own: Described) -> RowLayout:
    """The layout of what files hold. Raises `Refused`."""
    parts: dict[int, tuple[Any, Any]] = {e: ((), rows) for e, rows in own.files.items()}
    if parts:
        first = min(parts)
        parts[first] = (own.specs, parts[first][1])
    return RowLayout.of_seats(parts)
