"""Keys of the Virtual Parameter Space: which tensor, which state of it, and what is known of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from dynadapt.errors import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "ITEMSIZE",
    "SHORT_DTYPES",
    "Key",
    "KeySpec",
    "alias_groups",
    "canonical_name",
    "itemsize",
    "merge_specs",
    "wire_dtype",
]

Kind = Literal["parameter", "buffer", "transient", "state"]
Presence = Literal["present", "zero", "none"]

#: Bytes of one element, by dtype name (torch's names without the prefix).
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""What people call dtypes, where they may write one."""

ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
    r"|_forward_module)\."
)


class Key(NamedTuple):
    """A logical tensor name and the state of it that is meant.

    Slots: `param` is the authoritative copy, `compute` a lower-precision copy, `buffer` a buffer,
    `extra:<label>` a user's own copy (an EMA), anything else the optimizer's own name.

    >>> str(Key("layers.0.weight", "exp_avg"))
    'layers.0.weight/exp_avg'
    """

    name: str
    slot: str

    def __str__(self) -> str:
        return f"{self.name}/{self.slot}"


@dataclass(frozen=True, slots=True)
class KeySpec:
    """What every seat knows of one key. `shape` is logical and unpadded; `dtype` a torch dtype name.

    `kind`: a `transient` is a buffer that no checkpoint holds (moved, not fingerprinted).
    `derived`: the target rebuilds it, so it is never moved. `presence`: `none` means the owner keeps
    no such tensor (its value, were it needed, is zero). `order` is the index of the parameter in the
    whole model's `named_parameters()`, `group` its optimizer group or -1, `aliases` the other names of
    a tied tensor. `local` marks a tensor that differs from rank to rank on purpose.

    >>> KeySpec(Key("w", "param"), (2, 3), "float32").nbytes
    24
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "parameter"
    trainable: bool = True
    derived: bool = False
    presence: Presence = "present"
    order: int = 0
    group: int = -1
    aliases: tuple[str, ...] = field(default=())
    local: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"{self.key}: unknown dtype {self.dtype!r}")
        if len(self.shape) > 8 or any(size < 0 for size in self.shape):
            raise ValueError(f"{self.key}: shape {self.shape} needs 0 to 8 dims of size >= 0")

    @property
    def numel(self) -> int:
        """Number of logical elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Logical size in bytes."""
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def moves(self) -> bool:
        """Whether this key is moved at all: not derived, not absent, not empty."""
        return not self.derived and self.presence == "present" and self.numel > 0


def itemsize(dtype: str) -> int:
    """Bytes of one element of a dtype name.

    >>> itemsize("bfloat16")
    2
    """
    return ITEMSIZE[dtype]


def wire_dtype(source: str, target: str) -> str:
    """The dtype that crosses the wire: the smaller of both, the target's on a tie.

    >>> wire_dtype("float32", "bfloat16")
    'bfloat16'
    """
    return source if ITEMSIZE[source] < ITEMSIZE[target] else target


def canonical_name(name: str) -> str:
    """A module path without wrapper segments, wherever they stand and in whatever order.

    >>> canonical_name("module._orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return _WRAPPERS.sub("", name)


def merge_specs(
    seats: Mapping[int, Iterable[KeySpec]],
) -> tuple[tuple[KeySpec, ...], tuple[Finding, ...]]:
    """Unite what the seats of one side know into one sorted tuple, with every disagreement found.

    A seat may know fewer keys (a pipeline stage); alias groups are united, the smallest name of a
    group is canonical, and of two presences the stronger one holds (`present` over `zero` over `none`).

    >>> a = KeySpec(Key("w", "param"), (2,), "float32")
    >>> merge_specs({0: [a], 1: [a]})[0] == (a,)
    True
    """
    rank = {"present": 0, "zero": 1, "none": 2}
    groups = alias_groups(spec for specs in seats.values() for spec in specs)
    merged: dict[Key, tuple[int, KeySpec]] = {}
    findings: list[Finding] = []
    for seat, specs in sorted(seats.items()):
        for raw in specs:
            spec = raw
            if names := groups.get(raw.key.name):
                spec = replace(raw, key=Key(names[0], raw.key.slot), aliases=names[1:])
            if spec.key not in merged:
                merged[spec.key] = (seat, spec)
                continue
            first_seat, known = merged[spec.key]
            if rank[spec.presence] < rank[known.presence]:
                merged[spec.key] = (first_seat, known := replace(known, presence=spec.presence))
            if spec == known:
                continue
            # A stage's groups may have other numbers; who is in which is compared by names.
            same = replace(spec, presence=known.presence, order=known.order, group=known.group)
            if same != known:
                names_of = ("shape", "dtype", "kind", "trainable", "derived", "local")
                differing = [n for n in names_of if getattr(same, n) != getattr(known, n)]
                detail = ", ".join(
                    f"{n} {getattr(known, n)!r} on seat {first_seat} and {getattr(same, n)!r} on seat {seat}"
                    for n in differing
                )
                findings.append(
                    Finding(
                        "ranks-disagree",
                        str(spec.key),
                        f"ranks describe it differently: {detail}",
                        "build the same model and optimizer on every rank",
                    )
                )
    return tuple(spec for _, (_, spec) in sorted(merged.items())), tuple(findings)


def alias_groups(specs: Iterable[KeySpec]) -> dict[str, tuple[str, ...]]:
    """Each name of a tied tensor -> all names of its group, sorted; groups that touch are united.

    >>> spec = KeySpec(Key("b", "param"), (1,), "float32", aliases=("a",))
    >>> alias_groups([spec])["b"]
    ('a', 'b')
    """
    groups: dict[str, set[str]] = {}
    for spec in specs:
        if not spec.aliases:
            continue
        union = {spec.key.name, *spec.aliases}
        for name in tuple(union):
            union |= groups.get(name, set())
        for name in union:
            groups[name] = union
    return {name: tuple(sorted(union)) for name, union in groups.items()}
