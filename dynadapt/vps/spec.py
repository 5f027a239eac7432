"""The text form of a layout: `KIND:axis=n,...`, for files `FORMAT/KIND:axis=n,...`.

KIND says how the data axis is used. Axes are `pp`, `rep`, `dp`, `ep`, `tp`; ranks fill the mesh in this
order, `tp` fastest, whatever the order in the text; `order=` changes it. What is not an axis is an
option of the kind.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from dynadapt.errors import Finding, Refused
from dynadapt.vps.keys import ITEMSIZE, SHORT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["AXES", "KINDS", "OPTIONS", "LayoutSpec"]

#: Mesh axes, the slowest first: pipeline stages, replicas, data, experts, tensor parallelism.
AXES = ("pp", "rep", "dp", "ep", "tp")

#: How a kind uses its data axis.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "ddp": "every data rank holds all",
        "zero0": "DeepSpeed without ZeRO: every data rank holds all",
        "zero1": "DeepSpeed stage 1: masters and moments of a group in one flat, cut evenly",
        "zero2": "DeepSpeed stage 2: where the state lies is as in stage 1",
        "zero3": "DeepSpeed stage 3: every parameter flattened, padded and cut by itself",
        "fsdp1": "FullyShardedDataParallel: a flat parameter per wrapped unit, cut evenly",
        "fsdp2": "fully_shard: dim 0 of every parameter cut",
        "hsdp": "fully_shard over `dp`, replicated over `rep`",
    }
)

MAX_WORLD = 1 << 24
"""Ranks of the largest world: a layout holds a number for each."""

_ALL = frozenset({"order", "dtype", "stages", "pad_vocab"})

#: The options that each kind takes, beside those that all take.
OPTIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "ddp": _ALL,
        "zero0": _ALL | {"fused"},
        "zero1": _ALL | {"groups", "round_robin"},
        "zero2": _ALL | {"groups", "round_robin"},
        "zero3": _ALL | {"groups", "sub_group_size"},
        "fsdp1": _ALL | {"units", "orig", "compute"},
        "fsdp2": _ALL,
        "hsdp": _ALL,
    }
)


@dataclass(frozen=True)
class LayoutSpec:
    """A layout as text says it; `axes` holds every axis of more than one place, the slowest first.

    Raises `Refused` (reason `bad-spec`) with everything that is wrong with the text.

    >>> spec = LayoutSpec.parse("zero1:tp=4,dp=2,round_robin=true")
    >>> str(spec), dict(spec.axes), spec.world
    ('zero1:dp=2,tp=4,round_robin=true', {'dp': 2, 'tp': 4}, 8)
    """

    kind: str
    axes: Mapping[str, int]
    options: Mapping[str, str] = field(default_factory=dict)
    format: str | None = None

    @classmethod
    def parse(cls, text: str) -> LayoutSpec:
        """Read the text form."""
        format_, slash, rest = text.strip().rpartition("/")
        kind, _, settings = rest.partition(":")
        axes: dict[str, int] = {}
        options: dict[str, str] = {}
        findings: list[Finding] = []
        if kind not in KINDS:
            findings.append(_bad(text, f"kind {kind!r} is unknown{_near(kind, KINDS)}"))
        if slash and not format_:
            findings.append(_bad(text, "the format before the slash is missing"))
        elif slash and not re.fullmatch(r"[a-z][a-z0-9_-]*", format_):
            findings.append(_bad(text, f"{format_!r} is no name of a format"))
        for setting in settings.split(",") if settings else ():
            name, equals, value = setting.partition("=")
            if not equals or not value:
                findings.append(_bad(text, f"{setting!r} is not NAME=VALUE"))
            elif name in axes or name in options:
                findings.append(_bad(text, f"{name!r} is given twice"))
            elif name in AXES:
                if _is_number(value):
                    axes[name] = int(value)
                else:
                    findings.append(_bad(text, f"{name}={value} is not a number of places"))
            else:
                options[name] = value
        order, wrong = _order(options.get("order"))
        findings += [_bad(text, cause) for cause in wrong]
        findings += [_bad(text, cause) for cause in _unfit(kind, axes, options)]
        if findings:
            raise Refused(findings)
        mesh = {axis: axes[axis] for axis in order if axes.get(axis, 1) > 1}
        return cls(kind, mesh, options, format_ or None)

    @property
    def world(self) -> int:
        """Number of places."""
        return prod(self.axes.values())

    def size(self, axis: str) -> int:
        """Places along an axis; 1 for one that is not there."""
        return self.axes.get(axis, 1)

    def flag(self, name: str, default: bool = False) -> bool:
        """Whether an option is `true`; raises `Refused` for anything but true and false."""
        value = self.options.get(name, str(default).lower())
        if value not in {"true", "false"}:
            raise Refused([_bad(str(self), f"{name}={value} is neither true nor false")])
        return value == "true"

    def dtype(self, name: str, default: str = "") -> str:
        """An option that is a dtype's name, as torch has it without the prefix."""
        value = self.options.get(name, default)
        value = SHORT_DTYPES.get(value, value)
        if value and value not in ITEMSIZE:
            raise Refused([_bad(str(self), f"{name}={value} is no dtype{_near(value, ITEMSIZE)}")])
        return value

    def number(self, name: str, default: int = 1) -> int:
        """An option that is a number of at least 1."""
        value = self.options.get(name)
        if value is None:
            return default
        if not _is_number(value):
            raise Refused([_bad(str(self), f"{name}={value} is not a number of at least 1")])
        return int(value)

    def __str__(self) -> str:
        front = f"{self.format}/" if self.format else ""
        always = {"rep"} if self.kind == "hsdp" else {"dp"} if not self.axes else set()
        axes = {axis: self.size(axis) for axis in AXES if axis in self.axes or axis in always}
        settings = [f"{name}={value}" for name, value in (*axes.items(), *self.options.items())]
        return f"{front}{self.kind}:{','.join(settings)}"


def _is_number(value: str) -> bool:
    """Whether a text is a number from 1 on, of at most 15 digits."""
    return value.isascii() and value.isdecimal() and len(value) < 16 and int(value) > 0


def _order(text: str | None) -> tuple[tuple[str, ...], list[str]]:
    """The axes, the slowest first; what is not named comes before, in the usual order."""
    if text is None:
        return AXES, []
    named = tuple(text.split("-"))
    wrong = [f"order={text}: {axis!r} is no axis" for axis in named if axis not in AXES]
    if len(set(named)) < len(named):
        wrong.append(f"order={text} names an axis twice")
    return (*(axis for axis in AXES if axis not in named), *named), wrong


def _unfit(kind: str, axes: Mapping[str, int], options: Mapping[str, str]) -> Iterator[str]:
    if prod(axes.values()) > MAX_WORLD:
        yield f"{prod(axes.values()):,} ranks are more than {MAX_WORLD:,}"
    if kind == "hsdp" and "rep" not in axes:
        yield "hsdp needs rep=N, the number of replicas, beside dp=N"
    if kind in {"ddp", "zero0"} and axes.get("rep", 1) > 1:
        yield f"{kind} has no rep: its data axis replicates already"
    known = OPTIONS.get(kind, frozenset())
    for name in options:
        if kind in KINDS and name not in known:
            yield f"{kind} takes no {name!r}{_near(name, (*AXES, *known))}"


def _near(name: str, known: object) -> str:
    choices = sorted(str(each) for each in known)  # type: ignore[attr-defined]
    near = difflib.get_close_matches(name, choices, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(choices)}"


def _bad(text: str, cause: str) -> Finding:
    return Finding(
        "bad-spec", text, cause, "write KIND:axis=n,..., e.g. zero3:dp=8 or ddp:dp=2,tp=4"
    )
