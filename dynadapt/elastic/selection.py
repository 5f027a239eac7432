"""Which part of a checkpoint is meant, under which names and dtypes: a description made smaller."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from dynadapt.errors import Finding, Refused
from dynadapt.vps.keys import Key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynadapt.protocols import AuxItem, Described
    from dynadapt.vps.keys import KeySpec

__all__ = ["Selection"]


@dataclass(frozen=True)
class Selection:
    """Globs over names, a prefix to take off or put on, and whether only weights are meant.

    >>> Selection(include=("layers.*",), strip_prefix="layers.").name("layers.0.w")
    '0.w'
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip_prefix: str = ""
    add_prefix: str = ""
    weights_only: bool = False

    def name(self, name: str) -> str | None:
        """The new name, or None for what is left out."""
        if self.include and not any(fnmatchcase(name, glob) for glob in self.include):
            return None
        if any(fnmatchcase(name, glob) for glob in self.exclude):
            return None
        return self.add_prefix + name.removeprefix(self.strip_prefix)

    def before(self, names: Iterable[str]) -> tuple[str, ...]:
        """Names that these may have had before: more than there are, and in their order.

        >>> Selection(strip_prefix="model.").before(["w"])
        ('model.w', 'w')
        """
        pairs = ((self.strip_prefix + n.removeprefix(self.add_prefix), n) for n in names)
        return tuple(dict.fromkeys(name for pair in pairs for name in pair))

    def keeps(self, spec: KeySpec) -> bool:
        """Whether a key is meant."""
        if self.weights_only and spec.kind == "state":
            return False
        return self.name(spec.key.name) is not None

    def of(self, own: Described) -> Described:
        """The description of what is meant, over the same buffers; raises `Refused` (`no-match`)."""
        specs, renamed = [], {}
        for spec in own.specs:
            name = self.name(spec.key.name)
            if name is None or not self.keeps(spec):
                continue
            aliases = tuple(a for a in map(self.name, spec.aliases) if a is not None)
            renamed[spec.key] = Key(name, spec.key.slot)
            specs.append(replace(spec, key=renamed[spec.key], aliases=aliases))
        findings = [
            Finding("no-match", glob, "matches no tensor")
            for glob in (*self.include, *self.exclude)
            if not any(fnmatchcase(spec.key.name, glob) for spec in own.specs)
        ]
        if findings:
            raise Refused(findings)
        files = {
            endpoint: tuple(
                replace(row, key=renamed[row.key]) for row in rows if row.key in renamed
            )
            for endpoint, rows in own.files.items()
        }
        scalars = {
            name: values
            for old, values in own.scalars.items()
            if not self.weights_only and (name := self.name(old)) is not None
        }
        aux = () if self.weights_only else tuple(map(self._item, own.aux))
        return replace(own, specs=tuple(specs), files=files, scalars=scalars, aux=aux)

    def _item(self, item: AuxItem) -> AuxItem:
        if item.path != "param_groups":
            return item
        value = [
            {**group, "names": [n for n in map(self.name, group["names"]) if n is not None]}
            for group in item.value
        ]
        return replace(item, value=value)
