"""A training state that lives in plain buffers, and the adapter for it.

`MemoryState` is one seat's part of a state in any layout, with everything that makes live frameworks
hard: absent optimizer state, derived copies, gathered weights that hide the shards, open steps.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynadapt import registry
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Described, Outcome, TrainState, alone
from dynadapt.vps.keys import ITEMSIZE, Key, KeySpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dynadapt.protocols import Agree
    from dynadapt.vps.layout import Row, RowLayout

__all__ = ["MemoryAdapter", "MemoryBuffer", "MemoryState", "bits", "logical_values"]

Scalars = dict[str, dict[str, int | float]]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as integers, so that equal means equal: NaN payloads and signed zeros included."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach())
    return flat.view(_INTEGERS[tensor.dtype.itemsize])


def logical_values(seed: int, specs: Iterable[KeySpec]) -> dict[Key, torch.Tensor]:
    """A whole tensor a key: random bits, so floats have NaNs and denormals; derived copies are cast.

    >>> spec = KeySpec(Key("w", "param"), (2, 3), "float32")
    >>> logical_values(0, [spec])[spec.key].shape
    torch.Size([2, 3])
    """
    rng = np.random.default_rng(seed)
    found: dict[Key, torch.Tensor] = {}
    for spec in sorted(specs, key=lambda s: (s.derived, s.key)):
        dtype = getattr(torch, spec.dtype)
        if spec.presence != "present":
            found[spec.key] = torch.zeros(spec.shape, dtype=dtype)
        elif spec.derived:
            found[spec.key] = found[Key(spec.key.name, "param")].to(dtype)
        else:
            most = 2 if spec.dtype == "bool" else 256
            raw = rng.integers(0, most, spec.nbytes, np.uint8)
            flat = torch.from_numpy(raw).view(dtype) if spec.numel else torch.zeros(0, dtype=dtype)
            found[spec.key] = flat.view(spec.shape)
    return found


class MemoryBuffer:
    """A buffer of its own, with a pattern in it that no test value looks like."""

    def __init__(self, dtype: str, numel: int) -> None:
        self._dtype, self._numel = dtype, numel
        self._bytes = torch.full((numel * ITEMSIZE[dtype],), 1 if dtype == "bool" else 0xA5).to(
            torch.uint8
        )

    @property
    def dtype(self) -> str:
        """See `protocols.Buffer`."""
        return self._dtype

    @property
    def numel(self) -> int:
        """See `protocols.Buffer`."""
        return self._numel

    @property
    def device(self) -> str:
        """See `protocols.Buffer`."""
        return "cpu"

    def tensor(self) -> torch.Tensor:
        """See `protocols.Buffer`."""
        return self._bytes.view(getattr(torch, self._dtype))

    def free(self) -> None:
        """See `protocols.Buffer`."""
        self._bytes.untyped_storage().resize_(0)

    def refill(self) -> None:
        """See `protocols.Buffer`."""
        self._bytes.untyped_storage().resize_(self._numel * ITEMSIZE[self._dtype])


class MemoryState:
    """What one seat holds of `layout`; `absent` keys are only made by `prepare`.

    `by_alias` makes this seat describe tied tensors under the last of their names. `gather()` keeps
    whole rows aside, as an evaluation under FSDP2 does: until `release()`, `read` sees those.
    """

    def __init__(
        self,
        layout: RowLayout,
        seat: int,
        values: Mapping[Key, torch.Tensor] | None = None,
        *,
        scalars: Scalars | None = None,
        aux: Iterable[AuxItem] = (),
        absent: Iterable[Key] = (),
        by_alias: bool = False,
        coordinate: Mapping[str, int] | None = None,
    ) -> None:
        self.layout, self.seat, self.by_alias = layout, seat, by_alias
        self.rows = tuple(layout.rows(seat))
        self.scalars: Scalars = {name: dict(own) for name, own in (scalars or {}).items()}
        self.aux = {item.path: item for item in aux}
        self.absent = set(absent)
        self.made: set[Key] = set()
        self.before: tuple[Scalars, dict[str, AuxItem]] | None = None
        self.coordinate = dict(coordinate or {})
        self.mid_step = False
        self._gathered: dict[Row, torch.Tensor] = {}
        sizes: dict[str, tuple[str, int]] = {}
        for row in self.rows:
            dtype = layout.by_name[row.key].dtype
            sizes[row.buffer] = (dtype, max(row.last + 1, sizes.get(row.buffer, (dtype, 0))[1]))
        self.buffers = {name: MemoryBuffer(*size) for name, size in sizes.items()}
        if values is not None:
            for row in self.rows:
                self.view(row).copy_(_part(values[row.key], row))

    def view(self, row: Row) -> torch.Tensor:
        """The storage of one row."""
        flat = self.buffers[row.buffer].tensor()
        return flat.as_strided(row.box.shape, row.strides, row.offset)

    def read(self, row: Row) -> torch.Tensor:
        """What training sees of a row: the gathered copy if there is one."""
        return self._gathered.get(row, self.view(row))

    def gather(self) -> None:
        """Keep copies of all rows, and read from those; once gathered, changes of the rows are not seen."""
        if not self._gathered:
            self._gathered = {row: self.view(row).clone() for row in self.rows}

    def release(self) -> None:
        """Drop the gathered copies."""
        self._gathered = {}

    def step(self) -> None:
        """One optimizer step: the same function of every element, whatever the layout."""
        self.release()
        for row in self.rows:
            if row.key in self.absent:
                self.view(row).zero_()
        self.absent = set()
        for row in self.rows:
            spec = self.layout.by_name[row.key]
            if spec.trainable and not spec.derived:
                self.view(row).mul_(0.5).add_(1.0)
        self.rebuild()
        for name in {spec.key.name for spec in self.layout.keys if spec.kind == "state"}:
            own = self.scalars.setdefault(name, {})
            own["step"] = own.get("step", 0) + 1

    def rebuild(self) -> None:
        """Cast every derived copy from the `param` rows of this seat."""
        masters = {(r.key.name, r.box): r for r in self.rows if r.key.slot == "param"}
        for row in self.rows:
            if self.layout.by_name[row.key].derived:
                self.view(row).copy_(self.view(masters[row.key.name, row.box]))

    def differing(self, values: Mapping[Key, torch.Tensor]) -> list[str]:
        """The rows that do not hold exactly these logical values (NaNs in derived copies are alike)."""
        found = []
        for row in self.rows:
            has, should = self.view(row), _part(values[row.key], row)
            if self.layout.by_name[row.key].derived:
                has, should = has.nan_to_num(7.0), should.nan_to_num(7.0)
            if row.key not in self.absent and not torch.equal(bits(has), bits(should)):
                found.append(f"seat {self.seat}: {row.key} {row.box}")
        return found

    def digest(self) -> str:
        """A hash of every byte this seat has, padding included, and of its scalars."""
        state = hashlib.sha256(repr((sorted(self.scalars.items()), sorted(self.absent))).encode())
        for name, buffer in sorted(self.buffers.items()):
            state.update(name.encode() + buffer.tensor().view(torch.uint8).numpy().tobytes())
        return state.hexdigest()

    def described(self) -> Described:
        """This seat's part, under canonical names or aliases."""
        specs, rows = [], []
        names: dict[str, str] = {}
        for spec in self.layout.keys:
            own = replace(spec, presence="none") if spec.key in self.absent else spec
            if self.by_alias and spec.aliases:
                names[spec.key.name] = spec.aliases[-1]
                others = (spec.key.name, *spec.aliases[:-1])
                own = replace(own, key=Key(spec.aliases[-1], spec.key.slot), aliases=others)
            specs.append(own)
        for row in self.rows:
            if row.key not in self.absent:
                name = names.get(row.key.name, row.key.name)
                rows.append(replace(row, key=Key(name, row.key.slot)))
        return Described(
            specs=tuple(specs),
            rows=tuple(rows),
            buffers=self.buffers,
            scalars={name: dict(own) for name, own in self.scalars.items()},
            aux=tuple(self.aux.values()),
            coordinate=self.coordinate,
            allocated=self.bytes_of(self.made),
        )

    def bytes_of(self, keys: Iterable[Key]) -> int:
        """Bytes of this seat's rows of some keys."""
        wanted = set(keys)
        return sum(
            row.box.volume * ITEMSIZE[self.layout.by_name[row.key].dtype]
            for row in self.rows
            if row.key in wanted
        )


def _part(value: torch.Tensor, row: Row) -> torch.Tensor:
    window = tuple(slice(a, b) for a, b in zip(row.box.lo, row.box.hi, strict=True))
    return value[window]


class MemoryAdapter:
    """All five methods over a `MemoryState`; registered under its name by `install`."""

    name = "memory"

    @staticmethod
    def install() -> None:
        """Make the adapter known to this process."""
        registry.register(MemoryAdapter())

    @staticmethod
    def accepts(x: Any) -> bool:
        """Whether `x` is a `MemoryState`, or a `TrainState` around one."""
        return isinstance(TrainState.of(x).model, MemoryState)

    def quiesce(self, x: Any, agree: Agree = alone) -> None:
        """Refuse in the middle of a step; drop gathered copies."""
        state = _state(x)
        if state.mid_step:
            where, cause = f"seat {state.seat}", "gradients of micro-step 1 of 2 are accumulated"
            raise Refused([Finding("mid-step", where, cause, "finish the step")])
        agree()
        state.release()

    def describe(self, x: Any) -> Described:
        """This seat's part."""
        return _state(x).described()

    def prepare(self, x: Any, keys: tuple[KeySpec, ...]) -> Described:
        """Make the absent states that the source holds, as zeros."""
        state = _state(x)
        held = {
            Key(name, spec.key.slot)
            for spec in keys
            if spec.presence == "present"
            for name in (spec.key.name, *spec.aliases)
        }
        state.made = state.absent & held
        state.before = state.scalars, state.aux
        state.absent -= state.made
        for row in state.rows:
            if row.key in state.made:
                state.view(row).zero_()
        return state.described()

    def finish(
        self,
        x: Any,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Rebuild derived copies, take scalars and aux items."""
        state = _state(x)
        agree()
        state.rebuild()
        state.scalars = {name: dict(own) for name, own in scalars.items()}
        state.aux = dict(aux)
        return tuple(Outcome(path, "exact") for path in sorted(aux))

    def abandon(self, x: Any) -> None:
        """Forget what `prepare` made, and what `finish` took."""
        state = _state(x)
        state.absent |= state.made
        state.made = set()
        if state.before is not None:
            state.scalars, state.aux = state.before
            state.before = None


def _state(x: Any) -> MemoryState:
    state = TrainState.of(x).model
    assert isinstance(state, MemoryState)
    return state
