"""What the adapters of all formats share: files are at rest, and what is being made is nobody's yet."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding, Refused
from dynadapt.protocols import Described, FileSource, FileTarget, Outcome, alone

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dynadapt.protocols import Agree, AuxItem
    from dynadapt.vps.keys import KeySpec

__all__ = ["Format", "ReadOnly", "homeless", "in_order", "named_folder"]

_MALFORMED = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""What reading a value of another type or size than it should have ends in. Readers look for what is
likely to be wrong and name its place; this is for the rest."""


class Format:
    """An adapter whose endpoints are files, without its own `holds`, `read`, `prepare` and `finish`."""

    name: str

    @classmethod
    def accepts(cls, x: Any) -> bool:
        """A target of this format, or a path to a checkpoint that is of it."""
        if isinstance(x, FileTarget):
            return x.format == cls.name
        return isinstance(x, str | Path | FileSource) and cls.holds(Path(x))

    @staticmethod
    def holds(path: Path) -> bool:
        """Whether what is at a path is of this format, by names alone: each format's own."""
        raise NotImplementedError

    def quiesce(self, x: Any, agree: Agree = alone) -> None:
        """Files are at rest."""
        agree()

    def describe(self, x: Any) -> Described:
        """Who holds what: every file is an endpoint. Raises `Refused` with all that is wrong."""
        if isinstance(x, FileTarget):
            return Described((), (), {})
        said = x if isinstance(x, FileSource) else FileSource(str(x))
        try:
            own = self.read(Path(x), said)
            findings = [*_amiss(own)]
        except _MALFORMED as error:
            cause = f"its content is not what the format has: {type(error).__name__}: {error}"[:300]
            fix = "it may be damaged: copy it again"
            raise Refused([Finding("malformed", str(x), cause, fix)]) from error
        if findings:
            raise Refused(findings)
        own = _by_first_name(own)
        return in_order(own, said.order) if said.order else own

    def read(self, path: Path, said: FileSource) -> Described:
        """The same of a checkpoint that is there, with what the user says of it: each format's own."""
        raise NotImplementedError

    def abandon(self, x: Any) -> None:
        """Whoever made the folder removes it."""


class ReadOnly(Format):
    """A format that is read, not written: `instead` says `what` is not written and the way out."""

    instead: tuple[str, str]

    def prepare(self, x: FileTarget, keys: tuple[KeySpec, ...]) -> Described:
        """Raises `Refused`."""
        what, fix = self.instead
        cause = f"{what} are read, not written"
        raise Refused([Finding("unsupported-format", self.name, cause, fix)])

    def finish(
        self,
        x: FileTarget,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Never reached: `prepare` refuses."""
        agree()
        return ()


def homeless(item: AuxItem, what: str) -> Outcome:
    """What becomes of an item that a format has no place for; `what` names the format.

    What a job did beside its state is told in words: it is no state, and who goes on may set it.
    """
    if item.path != "behaviour" or not isinstance(item.value, dict):
        return Outcome(item.path, "dropped", f"{what} has no place for it")
    if item.value.get("framework") == "torch" and item.value.keys() <= {"framework", "precision"}:
        return Outcome(item.path, "derived", "framework and precision, which the files tell again")
    said = ", ".join(sorted(map(str, item.value)))
    note = f"no state, but what the source says of its job ({said}): {what} has no place for it"
    return Outcome(item.path, "dropped", note)


def _by_first_name(own: Described) -> Described:
    """With steps and groups under the smallest of a tied tensor's names, as layouts call it."""
    first = {s.key.name: min(s.key.name, *s.aliases) for s in own.specs if s.aliases}
    first |= {alias: min(s.key.name, *s.aliases) for s in own.specs for alias in s.aliases}
    if not first:
        return own
    scalars = {first.get(name, name): values for name, values in own.scalars.items()}
    aux = tuple(
        replace(x, value=[{**g, "names": [first.get(n, n) for n in g["names"]]} for g in x.value])
        if x.path == "param_groups"
        else x
        for x in own.aux
    )
    return replace(own, scalars=scalars, aux=aux)


def in_order(own: Described, order: Sequence[str]) -> Described:
    """With the parameters in the user's order, if it has all of them."""
    place = {name: i for i, name in reversed(list(enumerate(order)))}
    at = [
        min((place[n] for n in (s.key.name, *s.aliases) if n in place), default=None)
        for s in own.specs
    ]
    if any(n is None and s.kind == "parameter" for n, s in zip(at, own.specs, strict=True)):
        return own
    pairs = zip(at, own.specs, strict=True)
    specs = tuple(spec if n is None else replace(spec, order=n) for n, spec in pairs)
    return replace(own, specs=specs, ordered=True)


def _amiss(own: Described) -> Iterator[Finding]:
    """Names that are no text, and tensors that leave their storage: nobody after this looks again."""
    fix = "it may be damaged: copy it again"
    for spec in own.specs:
        if not all(map(_is_text, (*spec.key, *spec.aliases))):
            yield Finding("malformed", str(spec.key)[:80], "a name that is no text", fix)
    for rows in own.files.values():
        for row in rows:
            if row.box.volume and row.last >= own.buffers[row.buffer].numel:
                cause = f"its elements {row.box} lie outside of their storage"
                yield Finding("malformed", str(row.key)[:80], cause, fix)


def _is_text(name: Any) -> bool:
    """Whether a name can be written down: half of a pair of surrogates cannot."""
    if not isinstance(name, str):
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def named_folder(path: Path, pointer: str) -> Path | None:
    """The folder inside `path` that a file such as `latest` names; None if it names none in there."""
    try:
        tag = (path / pointer).read_text(errors="replace").strip()
    except OSError:
        return None
    if not tag or Path(tag).name != tag or tag in {".", ".."} or "\0" in tag:
        return None
    return path / tag if os.path.isdir(path / tag) else None  # False for a name that is too long
