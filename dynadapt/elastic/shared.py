"""A checkpoint that all seats write together: the first lays it out and seals it, each writes its part."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dynadapt.elastic.arrangement import arranged
from dynadapt.elastic.companions import write_said
from dynadapt.elastic.conversion_layout import called
from dynadapt.elastic.place import Place, write_manifest
from dynadapt.errors import Finding, Refused
from dynadapt.files import FileBuffer, forget, unwritable
from dynadapt.protocols import Described, FileTarget, Outcome, alone
from dynadapt.registry import adapter_for
from dynadapt.transport.into_files import crcs_of
from dynadapt.vps import wire

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.protocols import Adapter, Agree, AuxItem
    from dynadapt.transport.control import Control
    from dynadapt.vps.keys import Key, KeySpec

__all__ = ["SharedFiles"]


class SharedFiles:
    """A format's adapter as an adapter of all seats, for one call; every seat makes the same calls.

    The files are made in a hidden folder beside their place, by the first seat; the others open them.
    """

    aux: Mapping[str, AuxItem]
    """What the source says beside tensors; to be set before `prepare`, which needs its param groups."""

    beside: Mapping[str, str] = MappingProxyType({})
    """Small files that the job's model tells, by name; to be set likewise."""

    called: tuple[str, ...] = ()
    """What the job calls tied parameters; to be set likewise."""

    def __init__(self, x: FileTarget, control: Control, *, force: bool) -> None:
        self.format: Adapter = adapter_for(x)
        self.name = self.format.name
        self.aux = {}
        self._control = control
        self._first = control.seat == control.seats[0]
        self._place = Place(Path(x.path), force)
        self._work: FileTarget | None = None
        self._made: Described | None = None
        self._sealed = False

    def quiesce(self, x: FileTarget, agree: Agree = alone) -> None:
        """Files are at rest."""
        agree()

    def describe(self, x: FileTarget) -> Described:
        """Nothing before it is made; once it is sealed, what anybody would read."""
        if not self._sealed:
            return Described((), (), {})
        folder = str(self._place.data)
        return adapter_for(folder).describe(folder)

    def prepare(self, x: FileTarget, keys: tuple[KeySpec, ...]) -> Described:
        """The first seat makes the files in full size and tells the others.

        Tensors that differ from rank to rank on purpose are left out: a checkpoint has one value of each.
        """
        told: dict[str, Any] = {"to": [x.format, str(x.layout or ""), self._place.path.name]}
        if self._first:
            kept = tuple(spec for spec in keys if not spec.local)
            own = Described(kept, (), {}, aux=tuple(self.aux.values()))
            own, target = arranged(own, called(x, self.called), "the job")
            self.aux = {item.path: item for item in own.aux}
            self._work = replace(target, path=str(self._place.begin()), crcs={}, made=None)
            self._made = self.format.prepare(self._work, own.specs)
            told |= _lower(self._made, self._place.data)
        every = self._control.gather_values("made", told)
        first = every[self._control.seats[0]]
        other = [seat for seat, report in every.items() if report["to"] != first["to"]]
        if other:
            cause = f"seat {other[0]} writes {every[other[0]]['to']}, and others {first['to']}"
            raise Refused([Finding("ranks-disagree", str(x.path), cause, "pass equal arguments")])
        if self._made is None:
            self._made = _raised(first, self._place.data)
        return self._made

    def finish(
        self,
        x: FileTarget,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Check sums of what was written, by all; what is not tensors' bytes, by the first."""
        assert self._made is not None
        buffers: Any = self._made.buffers
        crcs = crcs_of(buffers, self._control.seat, self._control.seats)
        every = self._control.gather_values("crcs", crcs)
        sealed: list[list[str]] = []
        if self._work is not None:
            for own in every.values():
                self._work.crcs.update(own)
            outcomes = [*self.format.finish(self._work, keys, scalars, self.aux)]
            folder, dtype = Path(self._work.path), self._work.options.get("dtype")
            outcomes += write_said(self.beside, folder, self._made.specs, dtype)
            sealed = [[o.path, o.kind, o.note] for o in outcomes]
        told = self._control.gather_values("sealed", sealed)
        self._sealed = True
        return tuple(Outcome(*outcome) for outcome in told[self._control.seats[0]])

    def sign(self, prints: str, sums: Mapping[Key, int]) -> None:
        """When it was proved: write down what it is."""
        if self._work is not None:
            write_manifest(Path(self._work.path), self._work, prints, sums)

    def settle(self) -> None:
        """Give it its name: the last thing that can fail, and may still be undone."""
        if self._work is not None:
            try:
                self._place.settle()
            except OSError as error:
                raise Refused([unwritable(self._place.path, error)]) from error

    def close(self) -> None:
        """After the commit: remove what was replaced, and let go of the maps that it was read by."""
        forget(self._place.aside)
        if self._first:
            self._place.close()

    def abandon(self, x: FileTarget) -> None:
        """Leave nothing behind. Any seat can: the first may be gone. A map would keep the disk's room."""
        self._made = None
        forget(self._place.aside)
        if self._first:
            self._place.undo()
        else:
            self._place.sweep()


def _lower(own: Described, folder: Path) -> dict[str, Any]:
    """A description of files for other hosts, where the folder may have another path."""
    files: Mapping[str, FileBuffer] = own.buffers  # type: ignore[assignment]
    buffers = {
        name: [os.path.relpath(each.path, str(folder)), each.dtype, each.offset, each.numel]
        for name, each in files.items()
    }
    return {
        "specs": wire.encode_specs(own.specs),
        "files": {endpoint: wire.encode_rows(rows) for endpoint, rows in own.files.items()},
        "buffers": buffers,
        "flat_step": own.flat_step,
    }


def _raised(told: Mapping[str, Any], folder: Path) -> Described:
    buffers = {
        name: FileBuffer(str(folder / path), dtype, offset, numel)
        for name, (path, dtype, offset, numel) in told["buffers"].items()
    }
    return Described(
        wire.decode_specs(told["specs"]),
        (),
        buffers,
        files={endpoint: wire.decode_rows(rows) for endpoint, rows in told["files"].items()},
        flat_step=told["flat_step"],
    )
