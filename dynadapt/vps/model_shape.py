"""The tensors of a model, without the model: names, shapes and order, families of like ones together.

A model of a hundred thousand tensors has a few dozen *families*: one weight of every layer, of every
expert. A family names its members by a pattern and an index table, so that a layout of a huge model
costs its families, not its tensors.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np

from dynadapt.errors import Finding, Refused
from dynadapt.vps.box import MAX_DIMS
from dynadapt.vps.keys import Key, KeySpec, itemsize

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from dynadapt.vps.keys import Kind

__all__ = ["ADAMW", "Family", "FamilySpecs", "ModelShape", "Named", "State"]

_NUMBER = re.compile(r"(?:(?<=\.)|^)(?:0|[1-9][0-9]{0,8})(?=\.|$)")
"""A number that is written in one way only, so that a family gives its members' names back."""

MAX_BYTES = 1 << 61
"""All state of a model has to be counted in 64 bits."""


@dataclass(frozen=True, slots=True)
class State:
    """One slot that every trainable parameter has; `dtype` None means the parameter's own."""

    slot: str
    dtype: str | None = None

    @property
    def kind(self) -> Kind:
        """`param` is a parameter, anything else an optimizer's state."""
        return "parameter" if self.slot == "param" else "state"


#: Mixed-precision AdamW: fp32 masters and both moments, 12 bytes a parameter.
ADAMW = (State("param", "float32"), State("exp_avg", "float32"), State("exp_avg_sq", "float32"))


class Named(NamedTuple):
    """One tensor of a model as `named_parameters()` gives it; `shape` is logical and unpadded."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Family:
    """Tensors of one shape and dtype whose names differ in numbers only.

    `index` is (members, numbers) int64, a row the numbers in one member's name; `orders` (members,)
    the members' places in `named_parameters()`.
    """

    pattern: str
    index: NDArray[np.int64]
    orders: NDArray[np.int64]
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    aliases: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.orders)

    def name(self, member: int) -> str:
        """The full name of one member."""
        return self.pattern.format(*self.index[member].tolist())

    @cached_property
    def digest(self) -> str:
        """Equal for the same tensors in the same order."""
        head = (self.pattern, self.shape, self.dtype, self.trainable, self.aliases)
        state = hashlib.sha256(repr(head).encode())
        for column in (self.index, self.orders):
            state.update(np.ascontiguousarray(column, "<i8").tobytes())
        return state.hexdigest()

    @property
    def numel(self) -> int:
        """Elements of one member."""
        return int(np.prod(self.shape, dtype=np.int64))

    def states(self, states: Sequence[State]) -> tuple[FamilySpecs, ...]:
        """The specs of each state; a frozen family has its `param` only, in its own dtype."""
        if not self.trainable:
            return (FamilySpecs(self, State("param")),)
        return tuple(FamilySpecs(self, state) for state in states)


@dataclass(frozen=True, eq=False)
class FamilySpecs(Sequence[KeySpec]):
    """The `KeySpec` of every member of a family for one state, made when asked for."""

    family: Family
    state: State

    @property
    def orders(self) -> NDArray[np.int64]:
        """The members' places in `named_parameters()`."""
        return self.family.orders

    @property
    def dtype(self) -> str:
        """The dtype of this state."""
        return self.state.dtype or self.family.dtype

    def __len__(self) -> int:
        return len(self.family)

    def digest(self) -> str:
        """Equal for the same specs."""
        return f"{self.family.digest}|{self.state}"

    @overload
    def __getitem__(self, at: int) -> KeySpec: ...
    @overload
    def __getitem__(self, at: slice) -> list[KeySpec]: ...
    def __getitem__(self, at: int | slice) -> KeySpec | list[KeySpec]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        family = self.family
        return KeySpec(
            Key(family.name(at), self.state.slot),
            family.shape,
            self.dtype,
            kind=self.state.kind,
            trainable=family.trainable,
            order=int(family.orders[at]),
            group=0 if family.trainable else -1,
            aliases=family.aliases,
        )


@dataclass(frozen=True, eq=False)
class ModelShape:
    """All families of a model, by their first member's place in `named_parameters()`.

    >>> model = ModelShape.of([Named(f"layers.{i}.w", (4, 4)) for i in range(3)] + [Named("norm", (4,))])
    >>> [(family.pattern, len(family)) for family in model.families]
    [('layers.{}.w', 3), ('norm', 1)]
    """

    families: tuple[Family, ...]
    heads: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Iterable[Named], heads: dict[str, int] | None = None) -> ModelShape:
        """Group tensors, given in the order of `named_parameters()`, into families.

        `heads`: glob of names -> elements of dim 0 that must stay together under tensor parallelism
        (the size of an attention head).

        Raises `Refused` with every name that is given twice (reason `duplicate-name`), and where
        the tensors are too many dims or bytes to count (`too-large`).
        """
        tensors = list(tensors)
        times = Counter(tensor.name for tensor in tensors)
        twice = [name for name, count in times.items() if count > 1]
        if twice:
            cause = "it names two tensors"
            raise Refused(Finding("duplicate-name", n, cause, "name each once") for n in twice)
        wide = [t for t in tensors if len(t.shape) > MAX_DIMS]
        if wide or 16 * sum(prod(t.shape) for t in tensors) > MAX_BYTES:
            where = wide[0].name if wide else max(tensors, key=lambda t: prod(t.shape)).name
            cause = f"its shape has over {MAX_DIMS} dims, or the model over {MAX_BYTES:,} bytes"
            raise Refused([Finding("too-large", where, cause, "check the shapes")])
        found: dict[tuple[str, Named], tuple[list[list[int]], list[int]]] = {}
        for order, tensor in enumerate(tensors):
            numbers = _NUMBER.findall(tensor.name)
            text = tensor.name.replace("{", "{{").replace("}", "}}")
            pattern = _NUMBER.sub("{}", text)
            index, orders = found.setdefault((pattern, tensor._replace(name="")), ([], []))
            index.append([int(number) for number in numbers])
            orders.append(order)
        families = [
            Family(
                pattern,
                np.array(index, np.int64).reshape(len(orders), -1),
                np.array(orders, np.int64),
                alike.shape,
                alike.dtype,
                alike.trainable,
                alike.aliases,
            )
            for (pattern, alike), (index, orders) in found.items()
        ]
        return cls(tuple(families), dict(heads or {}))

    def __len__(self) -> int:
        return sum(len(family) for family in self.families)

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(family.numel * len(family) for family in self.families)

    def nbytes(self, states: Sequence[State] = ADAMW) -> int:
        """Bytes of all states of all tensors, each once."""
        total = 0
        for family in self.families:
            each = sum(itemsize(specs.dtype) for specs in family.states(states))
            total += each * family.numel * len(family)
        return total

    def digest(self) -> str:
        """Equal for models of the same tensors in the same order."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        parts = (sorted(self.heads.items()), [family.digest for family in self.families])
        return hashlib.sha256(repr(parts).encode()).hexdigest()
