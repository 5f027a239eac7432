"""How one family of names and shapes becomes another: pure data, exact for any rows.

A `TensorMap` is a list of rules, applied in order, each from unfused names to fused ones; `inverse()`
goes back. In a pattern `{}` stands for one segment of a name, `{#}` for the number that a stack counts;
a rename may also be `re:` and a regular expression. A rule changes every slot of the names it matches.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from dynadapt.errors import DynadaptError, Refused
from dynadapt.vps._map_rows import Step, compile_pattern
from dynadapt.vps.layout import RowLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dynadapt.vps.keys import Key, KeySpec
    from dynadapt.vps.layout import Row

__all__ = [
    "Mapped",
    "Rule",
    "TensorMap",
    "applied",
    "concat",
    "interleave",
    "mapped",
    "rename",
    "stack",
    "transpose",
]

VERSION = 1
Kind = Literal["rename", "stack", "concat", "interleave", "transpose"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One change. Make it with `rename`, `stack`, `concat`, `interleave` or `transpose`.

    `parts` are the unfused patterns, `whole` the fused one. `sizes` are the parts' sizes along `dim`,
    needed to go back. A rule that is `required` and matches nothing is a finding.
    """

    kind: Kind
    parts: tuple[str, ...]
    whole: str
    dim: int = 0
    sizes: tuple[int, ...] = ()
    blocks: int = 1
    dims: tuple[int, ...] = ()
    back: bool = False
    required: bool = True

    def __post_init__(self) -> None:
        if self.kind not in {"rename", "stack", "concat", "interleave", "transpose"}:
            raise ValueError(f"unknown kind of rule {self.kind!r}")
        if self.kind == "stack" and "{#}" not in self.parts[0]:
            raise ValueError(f"a stack needs {{#}} in {self.parts[0]!r}")
        if self.kind == "transpose" and sorted(self.dims) != list(range(len(self.dims))):
            raise ValueError(f"{self.dims} is no order of dims")
        if self.dim < 0 or self.blocks < 1 or (self.sizes and len(self.sizes) != len(self.parts)):
            raise ValueError(f"{self.kind} {self.whole!r}: bad dim, blocks or sizes")
        for pattern in self.parts:
            try:
                compile_pattern(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no pattern: {error}") from None


def rename(pattern: str, to: str, *, required: bool = True) -> Rule:
    """`layers.{}.wq` becomes `model.{}.q_proj`."""
    return Rule("rename", (pattern,), to, required=required)


def stack(pattern: str, to: str, dim: int = 0, *, required: bool = True) -> Rule:
    """Tensors numbered by `{#}` become one with a new dim `dim`: experts in a list, experts stacked."""
    return Rule("stack", (pattern,), to, dim, required=required)


def concat(
    patterns: Sequence[str],
    to: str,
    dim: int = 0,
    sizes: Sequence[int] = (),
    *,
    required: bool = True,
) -> Rule:
    """Tensors one after another along `dim`: gate and up, or q, k and v."""
    return Rule("concat", tuple(patterns), to, dim, tuple(sizes), required=required)


def interleave(
    patterns: Sequence[str],
    to: str,
    blocks: int,
    dim: int = 0,
    sizes: Sequence[int] = (),
    *,
    required: bool = True,
) -> Rule:
    """Each tensor in `blocks` equal blocks along `dim`: block 0 of each, then block 1 of each, ..."""
    return Rule("interleave", tuple(patterns), to, dim, tuple(sizes), blocks, required=required)


def transpose(pattern: str, dims: Sequence[int], *, required: bool = True) -> Rule:
    """Dim `i` of the result is dim `dims[i]` of the tensor."""
    return Rule("transpose", (pattern,), pattern, dims=tuple(dims), required=required)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """Rules in the order they are applied.

    >>> names = TensorMap((rename("layers.{}.wq", "model.{}.q_proj"),))
    >>> TensorMap.from_json(names.inverse().to_json()).inverse() == names
    True
    """

    rules: tuple[Rule, ...]

    def inverse(self) -> TensorMap:
        """The way back."""
        return TensorMap(tuple(replace(rule, back=not rule.back) for rule in self.rules[::-1]))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; defaults are left out."""
        blank = Rule("rename", ("",), "")
        rules = []
        for rule in self.rules:
            own = asdict(rule)
            kept = {n: v for n, v in own.items() if n == "kind" or v != getattr(blank, n)}
            rules.append({n: list(v) if isinstance(v, tuple) else v for n, v in kept.items()})
        return {"version": VERSION, "rules": rules}

    @classmethod
    def from_json(cls, item: Any) -> TensorMap:
        """The inverse of `to_json`; raises `DynadaptError` (`bad-map`) for anything else."""
        try:
            if item["version"] != VERSION:
                raise ValueError(f"version {item['version']}, this package reads {VERSION}")
            rules = []
            for rule in item["rules"]:
                own: dict[str, Any] = {
                    n: tuple(v) if isinstance(v, list) else v for n, v in rule.items()
                }
                rules.append(Rule(**own))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise DynadaptError(f"not a tensor map: {error}", reason="bad-map") from error
        return cls(tuple(rules))


@dataclass(frozen=True)
class Mapped:
    """What a map makes of some keys: the keys after it, which of them each became, and rows.

    `became` has every old key; `rows(row)` gives a row's rows after the map.
    """

    keys: tuple[KeySpec, ...]
    became: Mapping[Key, tuple[Key, ...]]
    steps: tuple[Callable[[Row], Iterable[Row]], ...]

    def rows(self, row: Row) -> list[Row]:
        """The rows that say the same of the new keys."""
        found = [row]
        for step in self.steps:
            found = [new for old in found for new in step(old)]
        return found


def applied(tensor_map: TensorMap, keys: Iterable[KeySpec]) -> Mapped:
    """A map for these keys. Raises `Refused` with all that one rule cannot do.

    >>> from dynadapt.vps.keys import Key, KeySpec
    >>> spec = KeySpec(Key("0.weight", "param"), (2,), "float32")
    >>> [str(k) for k in applied(TensorMap((rename("{}.weight", "layers.{}.w"),)), [spec]).became[spec.key]]
    ['layers.0.w/param']
    """
    specs = list(keys)
    became: dict[Key, tuple[Key, ...]] = {spec.key: (spec.key,) for spec in specs}
    steps = []
    for rule in tensor_map.rules:
        step = Step(rule, specs)
        specs, changes = step.changes()
        if step.findings:
            raise Refused(step.findings)
        steps.append(changes)
        became = {
            old: tuple(dict.fromkeys(key for each in now for key in step.becomes(each)))
            for old, now in became.items()
        }
    return Mapped(tuple(specs), became, tuple(steps))


def mapped(layout: RowLayout, tensor_map: TensorMap) -> RowLayout:
    """The layout under other names and shapes, over the same buffers. Raises `Refused`.

    >>> from dynadapt.vps.box import Box
    >>> from dynadapt.vps.keys import Key, KeySpec
    >>> from dynadapt.vps.layout import Row
    >>> a, b = (KeySpec(Key(n, "param"), (2,), "float32") for n in "ab")
    >>> rows = [Row(a.key, Box((0,), (2,)), "x", 0, (1,)), Row(b.key, Box((0,), (2,)), "y", 0, (1,))]
    >>> fused = mapped(RowLayout([a, b], {0: rows}), TensorMap((concat(["a", "b"], "ab"),)))
    >>> [str(row.box) for row in fused.rows(0)], fused.keys[0].shape
    (['[0:2]', '[2:4]'], (4,))
    """
    done = applied(tensor_map, layout.keys)
    rows = {
        endpoint: [new for row in layout.rows(endpoint) for new in done.rows(row)]
        for endpoint in layout.endpoints
    }
    return RowLayout(done.keys, rows)
