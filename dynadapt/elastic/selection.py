"""Which part of a checkpoint is meant, under which names and dtypes: a description made smaller."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from dynadapt.errors import Finding, Refused
from dynadapt.vps.keys import Key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
        bare = ((n.removeprefix(self.add_prefix), n) for n in names)
        each = ((self.strip_prefix + short, short, n) for short, n in bare)
        return tuple(dict.fromkeys(name for own in each for name in own))

    def of(self, own: Described) -> Described:
        """The description of what is meant, over the same buffers.

        Raises `Refused`: `no-match`, `duplicate-name` for two tensors that would get one name, and
        `bad-argument` for one that would have none.
        """
        if self == Selection() and not any(spec.aliases for spec in own.specs):
            return own
        specs: list[KeySpec] = []
        renamed: dict[Key, Key] = {}
        now: dict[str, str] = {}
        taken: dict[Key, KeySpec] = {}
        findings: list[Finding] = []
        ties = {spec.key.name: spec.aliases for spec in own.specs if spec.aliases}
        for spec in own.specs:
            every = (spec.key.name, *ties.get(spec.key.name, ()))
            # A tied tensor stays under those of its names that are meant, the smallest first, as in layouts.
            names = sorted(name for name in map(self.name, every) if name is not None)
            if not names or (self.weights_only and spec.kind == "state"):
                continue
            now |= dict.fromkeys(every, names[0])
            renamed[spec.key] = Key(names[0], spec.key.slot)
            specs.append(replace(spec, key=renamed[spec.key], aliases=tuple(names[1:])))
            for key in (Key(name, spec.key.slot) for name in names):
                if taken.setdefault(key, spec) is not spec:
                    cause = f"both {taken[key].key} and {spec.key} would be called so"
                    fix = "take off another prefix, or leave one out by --exclude (exclude=)"
                    findings.append(Finding("duplicate-name", str(key), cause, fix))
        known = {name for spec in own.specs for name in (spec.key.name, *spec.aliases)}
        findings += [
            Finding("no-match", glob, "matches no tensor")
            for glob in (*self.include, *self.exclude)
            if not any(fnmatchcase(name, glob) for name in known)
        ]
        if self.strip_prefix and not any(n.startswith(self.strip_prefix) for n in known):
            findings.append(Finding("no-match", self.strip_prefix, "is the prefix of no tensor"))
        if self.strip_prefix in known and self.name(self.strip_prefix) == "":
            cause, fix = "would have no name left", "take off a shorter prefix"
            findings.append(Finding("bad-argument", self.strip_prefix, cause, fix))
        if own.specs and not specs and not findings:
            cause, fix = "nothing of the source is left", "exclude less"
            findings.append(Finding("no-match", "the selection", cause, fix))
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
            if not self.weights_only and (name := now.get(old)) is not None
        }
        aux = () if self.weights_only else tuple(_item(item, now) for item in own.aux)
        return replace(own, specs=tuple(specs), files=files, scalars=scalars, aux=aux)


def _item(item: AuxItem, now: Mapping[str, str]) -> AuxItem:
    """Groups with the names that their members have now."""
    if item.path != "param_groups":
        return item
    value = [
        {**group, "names": [now[n] for n in group["names"] if n in now]} for group in item.value
    ]
    return replace(item, value=value)
