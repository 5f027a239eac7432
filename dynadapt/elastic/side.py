"""One side of a migration as all seats know it: the united layout, scalars, aux and coordinates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem
from dynadapt.vps import wire
from dynadapt.vps.keys import Key
from dynadapt.vps.layout import RowLayout

if TYPE_CHECKING:
    from dynadapt.protocols import Described
    from dynadapt.transport.control import Control
    from dynadapt.vps.layout import Row

__all__ = ["Side", "unite"]

Scalars = Mapping[str, Mapping[str, int | float]]


@dataclass(frozen=True)
class Side:
    """The source or the target over all its endpoints; equal on every seat.

    `readers` are the seats that can read and write its files, if it has any.
    """

    layout: RowLayout
    scalars: Scalars
    aux: Mapping[str, AuxItem]
    coordinates: Mapping[int, Mapping[str, int]]
    flat_step: bool
    readers: tuple[int, ...] = ()

    def canonical(self, rows: Iterable[Row]) -> list[Row]:
        """Rows as a seat described them, under the canonical names of tied tensors."""
        names = {
            Key(alias, spec.key.slot): spec.key
            for spec in self.layout.keys
            for alias in spec.aliases
        }
        return [replace(row, key=names[row.key]) if row.key in names else row for row in rows]


def unite(name: str, control: Control, own: Described | None) -> Side | None:
    """Gather what each seat described (None: no part in it) and unite it. All seats call it.

    None if no seat takes part. Raises `Refused`, equally on all seats, with every disagreement.
    """
    reports = control.gather_values(name, None if own is None else _lower(own))
    parts = {seat: report for seat, report in reports.items() if report is not None}
    if not parts:
        return None
    described: dict[int, tuple[Any, Any]] = {}
    for seat, report in parts.items():
        rows = wire.decode_rows(report["rows"])
        described[seat] = (wire.decode_specs(report["specs"]), rows)
        for endpoint, file_rows in report["files"].items():
            described[endpoint] = ((), wire.decode_rows(file_rows))
    if all(report["files"] for report in parts.values()):
        for seat in parts:  # a seat that only reads or writes files holds nothing itself
            specs, rows = described.pop(seat)
            first = min(described)
            described[first] = ((*described[first][0], *specs), described[first][1])
    findings: list[Finding] = []
    scalars = _unite_scalars(parts, findings)
    aux = _unite_aux(parts, findings, control.seat)
    try:
        layout = RowLayout.of_seats(described)
    except Refused as refused:
        findings += refused.findings
    if findings:
        raise Refused(findings)
    return Side(
        layout,
        scalars,
        aux,
        {seat: report["coordinate"] for seat, report in parts.items()},
        any(report["flat_step"] for report in parts.values()),
        tuple(seat for seat, report in parts.items() if report["files"]),
    )


def _lower(own: Described) -> dict[str, Any]:
    return {
        "specs": wire.encode_specs(own.specs),
        "rows": wire.encode_rows(own.rows),
        "scalars": {name: dict(values) for name, values in own.scalars.items()},
        "aux": [[item.path, item.policy, item.value] for item in own.aux],
        "coordinate": dict(own.coordinate),
        "files": {endpoint: wire.encode_rows(rows) for endpoint, rows in own.files.items()},
        "flat_step": own.flat_step,
    }


def _unite_scalars(parts: Mapping[int, Any], findings: list[Finding]) -> Scalars:
    found: dict[str, dict[str, int | float]] = {}
    told: dict[tuple[str, str], int] = {}
    for seat, report in parts.items():
        for name, values in report["scalars"].items():
            for label, value in values.items():
                known = found.setdefault(name, {}).setdefault(label, value)
                first = told.setdefault((name, label), seat)
                if known != value:
                    findings.append(
                        Finding(
                            "ranks-disagree",
                            f"{name}/{label}",
                            f"is {known} on seat {first} and {value} on seat {seat}",
                            "all ranks must have made the same steps",
                        )
                    )
    return found


def _unite_aux(parts: Mapping[int, Any], findings: list[Finding], me: int) -> Mapping[str, AuxItem]:
    found: dict[str, tuple[int, AuxItem]] = {}
    for seat, report in parts.items():
        for path, policy, value in report["aux"]:
            item = AuxItem(path, value, policy)
            if policy == "per-rank":
                if seat == me:
                    found[path] = (seat, item)
                continue
            first, known = found.setdefault(path, (seat, item))
            if wire.encode(known.value) != wire.encode(value):
                findings.append(
                    Finding(
                        "ranks-disagree",
                        path,
                        f"differs between seat {first} and seat {seat}{_where(known.value, value)}",
                        "make it equal on all ranks",
                    )
                )
    return {path: item for path, (_, item) in found.items()}


def _where(a: Any, b: Any, at: str = "") -> str:
    """The first place where two plain values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            if key not in a or key not in b:
                return f": {at}.{key} is missing on one"
            if wire.encode(a[key]) != wire.encode(b[key]):
                return _where(a[key], b[key], f"{at}.{key}")
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if wire.encode(x) != wire.encode(y):
                return _where(x, y, f"{at}[{i}]")
    return f": {at.lstrip('.')} is {a!r} and {b!r}"[:200]
