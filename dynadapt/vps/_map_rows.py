"""What one rule of a tensor map does to keys and rows."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dynadapt.errors import Finding
from dynadapt.vps.box import Box
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dynadapt.vps.tensor_map import Rule

__all__ = ["Step", "compile_pattern"]


@dataclass(frozen=True)
class _Piece:
    """Where part of an unfused tensor lies in the fused one.

    Elements `[start, stop)` of the part's dim lie from `at` on in the whole's dim.
    """

    key: Key
    start: int
    stop: int
    at: int


class Step:
    """One rule over one set of keys."""

    def __init__(self, rule: Rule, specs: Sequence[KeySpec]) -> None:
        self.rule, self.specs = rule, specs
        self.findings: list[Finding] = []
        self.pieces: dict[Key, list[_Piece]] = {}
        self.made: list[KeySpec] = []
        self.used: set[Key] = set()
        self.pairs: dict[Key, tuple[KeySpec, bool]] = {}
        self._shapes = {spec.key.name: spec.shape for spec in specs if spec.key.slot == "param"}

    def changes(self) -> tuple[list[KeySpec], Callable[[Row], Iterable[Row]]]:
        """The keys after the rule, and the function from one row to its rows after it."""
        one_to_one = self.rule.kind in {"rename", "transpose"}
        if one_to_one:
            self.pairs = pairs = self._renamed()
        elif self.rule.back:
            self._split()
        else:
            self._fuse()
        if self.rule.required and not (self.used or self.findings):
            self.findings.append(self._nothing())
        kept = [spec for spec in self.specs if spec.key not in self.used]
        new = {spec.key for spec in self.made}
        for spec in kept:
            if spec.key in new:
                self._finding("map-clash", spec.key, "a tensor of this name is there already")
        if len(new) < len(self.made):
            self._finding("map-clash", self.made[0].key, "two tensors would get one name")
        if self.findings:
            return [], lambda row: [row]
        if one_to_one:
            order = self._order()
            return [*kept, *self.made], lambda row: [_turned(row, pairs, order)]
        return [*kept, *self.made], self._split_row if self.rule.back else self._fused_rows

    def becomes(self, key: Key) -> tuple[Key, ...]:
        """The keys that a key's elements are in after the rule."""
        if key in self.pairs:
            return (self.pairs[key][0].key,)
        return tuple(dict.fromkeys(piece.key for piece in self.pieces.get(key, ()))) or (key,)

    def _in_shape(self, spec: KeySpec) -> bool:
        """Whether a tensor has its parameter's dims, so that a rule about dims can be kept for it."""
        own = spec.shape == self._shapes.get(spec.key.name, spec.shape)
        if not own:
            cause = f"its shape {list(spec.shape)} is not its parameter's, only renaming keeps it"
            self._finding("map-shape", spec.key, cause)
        return own

    # --- one to one -----------------------------------------------------------------------

    def _order(self) -> tuple[int, ...]:
        dims = self.rule.dims
        return tuple(dims.index(i) for i in range(len(dims))) if self.rule.back else dims

    def _renamed(self) -> dict[Key, tuple[KeySpec, bool]]:
        rule = self.rule
        old, new = rule.parts[0], rule.whole
        if rule.back and old.startswith("re:"):
            self._finding("map-one-way", Key(new, "*"), "a regular expression has no way back")
            return {}
        if rule.back:
            old, new = new, old
        pattern, order = compile_pattern(old), self._order()
        found: dict[Key, tuple[KeySpec, bool]] = {}
        for spec in self.specs:
            names = (spec.key.name, *spec.aliases)
            if not any(pattern.fullmatch(name) for name in names):
                continue
            name, *aliases = sorted({_renamed_to(pattern, new, n) for n in names})
            turned = rule.kind == "transpose"
            shape = spec.shape
            if turned and not self._in_shape(spec):
                continue
            if turned and len(shape) != len(order):
                self._finding(
                    "map-shape", spec.key, f"shape {list(shape)} has not {len(order)} dims"
                )
                continue
            if turned:
                shape = tuple(shape[dim] for dim in order)
            key = Key(name, spec.key.slot)
            made = replace(spec, key=key, shape=shape, aliases=tuple(aliases))
            found[spec.key] = (made, turned)
            self.used.add(spec.key)
        self.made = [spec for spec, _ in found.values()]
        return found

    # --- many to one ----------------------------------------------------------------------

    def _groups(self) -> dict[tuple[Key, ...], list[KeySpec]]:
        """Fused key -> its parts, in order; incomplete groups are findings."""
        found: dict[Key, dict[int, KeySpec]] = {}
        for spec in self.specs:
            for number, part in enumerate(self.rule.parts):
                match = compile_pattern(part).fullmatch(spec.key.name)
                if match is None or not self._in_shape(spec):
                    continue
                place = int(match["n"]) if self.rule.kind == "stack" else number
                free = [g for g, name in _groups_of(match) if name != "n"]
                key = Key(_filled(self.rule.whole, free), spec.key.slot)
                if place in found.setdefault(key, {}):
                    self._finding("map-clash", spec.key, f"another tensor is part {place} as well")
                found[key][place] = spec
        groups: dict[tuple[Key, ...], list[KeySpec]] = {}
        for key, members in found.items():
            wanted = range(max(members) + 1 if self.rule.kind == "stack" else len(self.rule.parts))
            if len(members) < len(wanted):
                absent = next(i for i in wanted if i not in members)
                cause = (
                    f"{len(wanted) - len(members)} of its parts are missing, first part {absent}"
                )
                self._finding("map-incomplete", key, cause)
            else:
                groups[(key,)] = [members[i] for i in wanted]
        return groups

    def _fuse(self) -> None:
        for (key,), members in self._groups().items():
            first, dim = members[0], self.rule.dim
            stacked = self.rule.kind == "stack"
            if dim > len(first.shape) - (0 if stacked else 1):
                self._finding("map-shape", key, f"its parts have no dim {dim}")
                continue
            alike = [_frame(spec, None if stacked else dim) for spec in members]
            unlike = [name for name in alike[0] if len({frame[name] for frame in alike}) > 1]
            if unlike or any(spec.aliases for spec in members):
                cause = f"its parts differ in {', '.join(unlike)}" if unlike else "a part is tied"
                self._finding("map-parts", key, cause)
                continue
            sizes = [1] * len(members) if stacked else [spec.shape[dim] for spec in members]
            self._place(key, [spec.key for spec in members], sizes)
            shape = list(first.shape)
            if stacked:
                shape.insert(dim, len(members))
            else:
                shape[dim] = sum(sizes)
            order = min(spec.order for spec in members)
            self.made.append(replace(first, key=key, shape=tuple(shape), order=order))
            self.used.update(spec.key for spec in members)

    def _split(self) -> None:
        pattern, dim = compile_pattern(self.rule.whole), self.rule.dim
        for spec in self.specs:
            match = pattern.fullmatch(spec.key.name)
            if match is None or not self._in_shape(spec):
                continue
            if dim >= len(spec.shape) or spec.aliases:
                self._finding("map-shape", spec.key, f"it has no dim {dim}, or is tied")
                continue
            free = [group for group, _ in _groups_of(match)]
            stacked = self.rule.kind == "stack"
            total, num = spec.shape[dim], len(self.rule.parts)
            names = [_filled(p, free) for p in self.rule.parts]
            sizes = list(self.rule.sizes or [total // num] * num)
            if stacked:
                names = [_filled(self.rule.parts[0], free, i) for i in range(total)]
                sizes = [1] * total
            elif sum(sizes) != total:
                self._finding("map-sizes", spec.key, f"sizes {sizes} do not add up to {total}")
                continue
            keys = [Key(name, spec.key.slot) for name in names]
            self._place(spec.key, keys, sizes)
            for key, size in zip(keys, sizes, strict=True):
                inner = () if stacked else (size,)
                shape = (*spec.shape[:dim], *inner, *spec.shape[dim + 1 :])
                self.made.append(replace(spec, key=key, shape=shape))
            self.used.add(spec.key)

    def _place(self, whole: Key, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        """Note where each part's elements lie along the fused dim."""
        blocks = self.rule.blocks
        if any(size % blocks for size in sizes):
            self._finding(
                "map-sizes", whole, f"sizes {list(sizes)} are not multiples of {blocks} blocks"
            )
            return
        at = 0
        for block in range(blocks):
            for key, size in zip(keys, sizes, strict=True):
                part = size // blocks
                start = block * part
                from_key, to_key = (whole, key) if self.rule.back else (key, whole)
                piece = _Piece(to_key, start, start + part, at)
                self.pieces.setdefault(from_key, []).append(piece)
                at += part

    def _fused_rows(self, row: Row) -> Iterator[Row]:
        if row.key not in self.pieces:
            yield row
            return
        dim = self.rule.dim
        for piece in self.pieces[row.key]:
            if self.rule.kind == "stack":
                lo = (*row.box.lo[:dim], piece.at, *row.box.lo[dim:])
                hi = (*row.box.hi[:dim], piece.at + 1, *row.box.hi[dim:])
                strides = (*row.strides[:dim], 0, *row.strides[dim:])
                yield Row(piece.key, Box(lo, hi), row.buffer, row.offset, strides)
            else:
                yield from _moved(row, dim, piece.start, piece.stop, piece.at, piece.key)

    def _split_row(self, row: Row) -> Iterator[Row]:
        if row.key not in self.pieces:
            yield row
            return
        dim = self.rule.dim
        for piece in self.pieces[row.key]:
            stop = piece.at + piece.stop - piece.start
            for part in _moved(row, dim, piece.at, stop, piece.start, piece.key):
                if self.rule.kind == "stack":
                    lo = part.box.lo[:dim] + part.box.lo[dim + 1 :]
                    hi = part.box.hi[:dim] + part.box.hi[dim + 1 :]
                    strides = part.strides[:dim] + part.strides[dim + 1 :]
                    yield Row(part.key, Box(lo, hi), part.buffer, part.offset, strides)
                else:
                    yield part

    # --- findings -------------------------------------------------------------------------

    def _finding(self, reason: str, key: Key, cause: str) -> None:
        self.findings.append(Finding(reason, str(key), cause, "mend the map, or the model"))

    def _nothing(self) -> Finding:
        sought = (self.rule.whole,) if self.rule.back else self.rule.parts
        names = sorted({spec.key.name for spec in self.specs})
        near = difflib.get_close_matches(sought[0], names, 3, 0.4)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        cause = f"matches no name{hint}"
        return Finding(
            "map-unmatched", ", ".join(sought), cause, "mend the pattern, or drop the rule"
        )


def _moved(row: Row, dim: int, start: int, stop: int, at: int, key: Key) -> Iterator[Row]:
    """The part of a row with `[start, stop)` in a dim, renamed, with `start` shifted to `at`."""
    low, high = max(row.box.lo[dim], start), min(row.box.hi[dim], stop)
    if low >= high:
        return
    lo, hi = list(row.box.lo), list(row.box.hi)
    lo[dim], hi[dim] = low + at - start, high + at - start
    offset = row.offset + (low - row.box.lo[dim]) * row.strides[dim]
    yield Row(key, Box(tuple(lo), tuple(hi)), row.buffer, offset, row.strides)


def _turned(row: Row, pairs: dict[Key, tuple[KeySpec, bool]], order: Sequence[int]) -> Row:
    if row.key not in pairs:
        return row
    spec, turned = pairs[row.key]
    if not turned:
        return replace(row, key=spec.key)
    lo, hi, strides = (
        tuple(values[dim] for dim in order) for values in (row.box.lo, row.box.hi, row.strides)
    )
    return Row(spec.key, Box(lo, hi), row.buffer, row.offset, strides)


def _frame(spec: KeySpec, dim: int | None) -> dict[str, object]:
    """What the parts of one tensor must have in common."""
    shape = spec.shape if dim is None else (*spec.shape[:dim], *spec.shape[dim + 1 :])
    same = ("dtype", "kind", "trainable", "derived", "presence", "local")
    return {"shape": shape, "dims": len(spec.shape), **{n: getattr(spec, n) for n in same}}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    if pattern.startswith("re:"):
        return re.compile(pattern[3:])
    text = re.escape(pattern).replace(r"\{\}", r"([^.]+)").replace(r"\{\#\}", r"(?P<n>\d+)")
    return re.compile(text)


def _groups_of(match: re.Match[str]) -> list[tuple[str, str]]:
    names = {number: name for name, number in match.re.groupindex.items()}
    return [(group, names.get(i, "")) for i, group in enumerate(match.groups(), 1)]


def _filled(template: str, groups: Iterable[str], number: int | None = None) -> str:
    text = template if number is None else template.replace("{#}", str(number))
    for group in groups:
        text = text.replace("{}", group, 1)
    return text


def _renamed_to(pattern: re.Pattern[str], to: str, name: str) -> str:
    match = pattern.fullmatch(name)
    if match is None:
        return name
    if to.startswith("re:"):
        return match.expand(to[3:])
    return match.expand(to) if "\\" in to else _filled(to, match.groups())
