"""What of a source is meant, and where it goes in a target's files: all that is known before bytes move."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import TYPE_CHECKING

from dynadapt.elastic.arrangement import arranged
from dynadapt.elastic.checkpoint import layout_of
from dynadapt.elastic.collection import collected_later
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import Outcome
from dynadapt.registry import adapter_for
from dynadapt.transport.match import match
from dynadapt.transport.plan import Options, Pair
from dynadapt.vps import cover
from dynadapt.vps.keys import Key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynadapt.elastic.checkpoint import Checkpoint
    from dynadapt.elastic.selection import Selection
    from dynadapt.protocols import Adapter, Described, FileTarget
    from dynadapt.transport.plan import Match, Narrow
    from dynadapt.vps.layout import RowLayout

__all__ = ["called", "chosen_of", "copies", "laid_out", "left_out"]


def chosen_of(
    source: Checkpoint, target: FileTarget, selection: Selection | None
) -> tuple[Described, FileTarget, RowLayout]:
    """What of a whole source is meant, arranged for the target; raises `Refused` with all that is amiss."""
    problems = source.problems()
    if problems:
        raise Refused(problems)
    own = source.own if selection is None else selection.of(source.own)
    names = {name for spec in own.specs for name in (spec.key.name, *spec.aliases)}
    idle = [
        Finding("no-match", glob, "is to keep a dtype, and matches no tensor")
        for glob in target.options.get("keep_dtype", ())
        if not any(fnmatchcase(name, glob) for name in names)
    ]
    if idle:
        raise Refused(idle)
    tied = _names_of_tied(source.own)
    now = tied if selection is None else filter(None, map(selection.name, tied))
    target = called(target, now)
    own, target = arranged(own, target, source.path)
    same = own.files is source.own.files and own.specs == source.own.specs
    return own, target, source.layout if same else layout_of(own)


def called(target: FileTarget, names: Iterable[str]) -> FileTarget:
    """A target that knows what a source calls its parameters; what the user says of groups comes first."""
    return replace(target, called=(*chain(*target.groups), *names))


def _names_of_tied(own: Described) -> tuple[str, ...]:
    """The names by which a framework itself has its tied parameters: any of them is one to us."""
    by_specs = (spec.key.name for spec in own.specs if spec.aliases and spec.key.slot == "param")
    return (*own.called, *by_specs)


@collected_later()
def laid_out(
    own: Described, layout: RowLayout, work: FileTarget, narrow: Narrow
) -> tuple[Adapter, Described, RowLayout, Match]:
    """The target's files, made unless dry, and what of the source goes where in them. Raises `Refused`."""
    writer = adapter_for(work)
    made = writer.prepare(work, layout.keys)
    there = layout_of(made)
    matched = match(layout.keys, there.keys, Options(narrow=narrow, allow=frozenset({"extra"})))
    findings = [*matched.findings, *cover.prove(there)]
    if findings:
        raise Refused(findings)
    return writer, made, there, replace(matched, pairs=(*matched.pairs, *copies(layout, there)))


def copies(source: RowLayout, target: RowLayout) -> list[Pair]:
    """Derived copies of the target, each made from its master as it is written."""
    found = []
    for spec in target.keys:
        master = source.by_name.get(Key(spec.key.name, "param"))
        if spec.derived and spec.numel and master is not None:
            found.append(Pair(master, spec))
    return found


def left_out(whole: Described, source: RowLayout, matched: Match) -> tuple[Outcome, ...]:
    """What of a whole source goes nowhere: keys that were meant, and the optimizer if weights alone were."""
    serving = {pair.source.key for pair in matched.pairs}
    found = [
        Outcome(str(spec.key), "dropped", "the target has no place for it")
        for spec in source.keys
        if spec.moves and spec.key not in serving
    ]
    had, meant = (any(s.kind == "state" for s in specs) for specs in (whole.specs, source.keys))
    if had and not meant:
        found.append(Outcome("optimizer", "dropped", "weights alone are written"))
    return tuple(found)
