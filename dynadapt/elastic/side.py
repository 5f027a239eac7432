"""One side of a migration as all seats know it: the united layout, scalars, aux and coordinates."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from dynadapt.adapters import _by_part as by_part
from dynadapt.elastic.seen import file_sizes, files_differ
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, in_model
from dynadapt.vps import wire
from dynadapt.vps.keys import Key
from dynadapt.vps.layout import RowLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynadapt.elastic.naming import Naming
    from dynadapt.protocols import AuxPolicy, Described
    from dynadapt.transport.control import Control
    from dynadapt.vps.keys import KeySpec
    from dynadapt.vps.layout import Row

__all__ = ["Side", "unite"]

REMEMBERED = 100_000
"""Rows of layouts kept: a job that changes layouts back and forth asks for the same ones."""

_layouts: OrderedDict[bytes, RowLayout] = OrderedDict()
_lock = Lock()
"""Seats may be threads."""

Scalars = Mapping[str, Mapping[str, int | float]]


@dataclass(frozen=True)
class Side:
    """The source or the target over all its endpoints; equal on every seat.

    `flat` has what the names of a model begin with whose parameters share one step (`""` for the only
    model). `readers` are the seats that can read and write its files, if it has any; `naming` what a
    tensor map made of the names it was described in.
    """

    layout: RowLayout
    scalars: Scalars
    aux: Mapping[str, AuxItem]
    coordinates: Mapping[int, Mapping[str, int]]
    flat: tuple[str, ...]
    readers: tuple[int, ...] = ()
    naming: Naming | None = None

    def canonical(self, rows: Iterable[Row]) -> list[Row]:
        """Rows as a seat described them, under the names and shapes of `layout`."""
        specs = self.layout.keys if self.naming is None else self.naming.keys
        names = {Key(alias, spec.key.slot): spec.key for spec in specs for alias in spec.aliases}
        found = [replace(row, key=names[row.key]) if row.key in names else row for row in rows]
        if self.naming is None:
            return found
        return [new for row in found for new in self.naming.rows(row)]


def unite(name: str, control: Control, own: Described | None) -> Side | None:
    """Gather what each seat described (None: no part in it) and unite it. All seats call it.

    None if no seat takes part. Raises `Refused`, equally on all seats, with every disagreement.
    """
    parts = _told(name, control, own)
    if not parts:
        return None
    read = _Reader()
    findings: list[Finding] = []
    scalars = _unite_scalars(parts, findings, read)
    aux = dict(_unite_aux(parts, findings, read, control.seat))
    united = {p: by_part.united(told, p) for p, told in _told_by_part(parts, read).items()}
    for part in united.values():
        findings += part.findings
        aux.update(part.aux)
    at = _digest(parts, united)
    with _lock:
        layout = _layouts.get(at)
    if layout is None:
        try:
            layout = RowLayout.of_seats(_described(parts, read, united))
        except Refused as refused:
            findings += refused.findings
    if layout is None or findings:
        raise Refused(findings)
    with _lock:
        _layouts[at] = layout  # the last asked for is the last to go
        _layouts.move_to_end(at)
        while (
            sum(len(each.endpoint) for each in _layouts.values()) > REMEMBERED and len(_layouts) > 1
        ):
            _layouts.popitem(last=False)
    return Side(
        layout,
        scalars,
        aux,
        {seat: report["coordinate"] for seat, report in parts.items() if not report["files"]},
        tuple(sorted({prefix for report in parts.values() for prefix in report["flat"]})),
        tuple(seat for seat, report in parts.items() if report["files"]),
    )


def _described(
    parts: Mapping[int, Any], read: _Reader, united: Mapping[str, by_part.United]
) -> dict[int, tuple[Sequence[KeySpec], Sequence[Row]]]:
    """The keys and rows of every endpoint, numbered as those of the whole models."""
    described: dict[int, tuple[Any, Any]] = {}
    first_specs = next(iter(parts.values()))["specs"]
    for number, (seat, report) in enumerate(parts.items()):
        # the first seat's specs once more would neither add nor contradict anything
        told = number and report["specs"] == first_specs
        specs = () if told else wire.decode_specs(wire.decode(report["specs"]))
        described[seat] = (specs, read.rows(report["rows"]))
        for endpoint, file_rows in report["files"].items():
            described[endpoint] = ((), read.rows(file_rows))
    if all(report["files"] for report in parts.values()):
        for seat in parts:  # a seat that only reads or writes files holds nothing itself
            specs, _ = described.pop(seat)
            first = min(described)
            described[first] = ((*described[first][0], *specs), described[first][1])
    for prefix, part in united.items():
        if part.groups:
            own_specs = {seat: own for seat, (own, _) in described.items()}
            whole = by_part.numbered(own_specs, part, prefix)
            described = {seat: (whole[seat], rows) for seat, (_, rows) in described.items()}
    return described


def _digest(parts: Mapping[int, Any], united: Mapping[str, by_part.United]) -> bytes:
    """Equal where `_described` makes the same."""
    numbers = [(prefix, sorted(part.groups.items())) for prefix, part in sorted(united.items())]
    own = hashlib.sha256(repr(numbers).encode())
    for seat, report in parts.items():
        files = (each for item in report["files"].items() for each in item)
        for each in (seat, report["specs"], report["rows"], *files):
            data = each if isinstance(each, bytes) else str(each).encode()
            own.update(b";%d:" % len(data))
            own.update(data)
    return own.digest()


def _told(name: str, control: Control, own: Described | None) -> dict[int, Any]:
    """What each seat tells of its part. All seats that work on files tell the same, so a digest does."""
    mine = None if own is None else _lower(own)
    sizes = {} if own is None else file_sizes(own)
    on_files = own is not None and bool(own.files)
    digest = hashlib.sha256(wire.encode([mine, sizes])).hexdigest() if on_files else mine
    reports = control.gather_values(name, digest)
    parts = {seat: report for seat, report in reports.items() if report is not None}
    if not any(isinstance(report, str) for report in parts.values()):
        return parts
    readers = [seat for seat, report in parts.items() if isinstance(report, str)]
    if len({parts[seat] for seat in readers}) > 1:
        told = control.gather_values(f"{name}/files", sizes if on_files else None)
        raise Refused(files_differ({seat: told[seat] for seat in readers}))
    if len(readers) < len(reports):  # the others are told once
        first = control.seat == readers[0]
        whole = control.gather_values(f"{name}/whole", mine if first else None)[readers[0]]
        return {seat: whole if seat in readers else parts[seat] for seat in parts}
    return dict.fromkeys(readers, mine)


class _Reader:
    """Decodes what seats told; seats mostly tell the same, and equal bytes are decoded once."""

    def __init__(self) -> None:
        self._values: dict[bytes, Any] = {}
        self._rows: dict[bytes, tuple[Row, ...]] = {}

    def value(self, data: bytes) -> Any:
        """The value of a message, shared: not to be changed."""
        if data not in self._values:
            self._values[data] = wire.decode(data)
        return self._values[data]

    def rows(self, data: bytes) -> tuple[Row, ...]:
        """The rows of a message."""
        if data not in self._rows:
            self._rows[data] = wire.decode_rows(wire.decode(data))
        return self._rows[data]


def _lower(own: Described) -> dict[str, Any]:
    """What a seat tells of its part; in parts that are messages of their own, see `_Reader`."""
    files = own.files.items()
    return {
        "specs": wire.encode(wire.encode_specs(own.specs)),
        "rows": wire.encode(wire.encode_rows(own.rows)),
        "scalars": wire.encode({name: dict(values) for name, values in own.scalars.items()}),
        "aux": [[item.path, item.policy, wire.encode(item.value)] for item in own.aux],
        "coordinate": dict(own.coordinate),
        "files": {endpoint: wire.encode(wire.encode_rows(rows)) for endpoint, rows in files},
        "flat": [f"{name}/" for name in own.flat_models] + [""] * own.flat_step,
    }


def _unite_scalars(parts: Mapping[int, Any], findings: list[Finding], read: _Reader) -> Scalars:
    found: dict[str, dict[str, int | float]] = {}
    told: dict[tuple[str, str], int] = {}
    heard: set[bytes] = set()  # seats mostly tell the same
    for seat, report in parts.items():
        if report["scalars"] in heard:
            continue
        heard.add(report["scalars"])
        for name, values in read.value(report["scalars"]).items():
            for label, value in values.items():
                known = found.setdefault(name, {}).setdefault(label, value)
                first = told.setdefault((name, label), seat)
                if wire.encode(known) != wire.encode(value):
                    findings.append(
                        Finding(
                            "ranks-disagree",
                            f"{name}/{label}",
                            f"is {known} on seat {first} and {value} on seat {seat}",
                            "all ranks must have made the same steps",
                        )
                    )
    return found


def _told_by_part(parts: Mapping[int, Any], read: _Reader) -> dict[str, dict[str, dict[int, Any]]]:
    """Of each model what seats told of their parts of it: path -> seat -> value."""
    found: dict[str, dict[str, dict[int, Any]]] = {}
    for seat, report in parts.items():
        for path, policy, data in report["aux"]:
            if policy == "by-part":
                prefix, own = in_model(path)
                found.setdefault(prefix, {}).setdefault(own, {})[seat] = read.value(data)
    return found


def _unite_aux(
    parts: Mapping[int, Any], findings: list[Finding], read: _Reader, me: int
) -> Mapping[str, AuxItem]:
    found: dict[str, tuple[int, AuxPolicy, bytes]] = {}
    for seat, report in parts.items():
        for path, policy, data in report["aux"]:
            if policy == "by-part":
                continue
            if policy == "per-rank":
                if seat == me:
                    found[path] = (seat, policy, data)
                continue
            first, _, known = found.setdefault(path, (seat, policy, data))
            if known != data:
                where = _where(read.value(known), read.value(data))
                findings.append(
                    Finding(
                        "ranks-disagree",
                        path,
                        f"differs between seat {first} and seat {seat}{where}",
                        "make it equal on all ranks",
                    )
                )
    return {
        path: AuxItem(path, wire.decode(data), policy) for path, (_, policy, data) in found.items()
    }


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
