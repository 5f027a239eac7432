"""The plan as data: what one seat sends, receives, copies and fills, and what that is in bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dynadapt.vps.box import linear_index
from dynadapt.vps.keys import itemsize, wire_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dynadapt.errors import Finding
    from dynadapt.vps.box import Box
    from dynadapt.vps.keys import Key, KeySpec

__all__ = ["SHIFTS", "EvenHosts", "Match", "Move", "Options", "Pair", "SeatPlan"]

SHIFTS = 17
"""Tensors take turns among replicas by their order modulo this: a prime, so that layers do not repeat it."""

Narrow = Literal["if-exact", "allow", "refuse"]


class EvenHosts(Mapping[int, str]):
    """Hosts of equally many seats in order: a mapping seat -> host that costs nothing to hold.

    >>> hosts = EvenHosts(8, 128)
    >>> hosts[9], len(hosts)
    ('host-1', 128)
    """

    def __init__(self, per_host: int, seats: int) -> None:
        self.per_host, self.seats = per_host, seats

    def __getitem__(self, seat: int) -> str:
        if not 0 <= seat < self.seats:
            raise KeyError(seat)
        return f"host-{seat // self.per_host}"

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.seats))

    def __len__(self) -> int:
        return self.seats

    def __repr__(self) -> str:
        return f"EvenHosts({self.per_host}, {self.seats})"

    def numbers(self, seats: NDArray[np.int64]) -> NDArray[np.int64]:
        """The host number of each seat, -1 for a seat without one."""
        known = (seats >= 0) & (seats < self.seats)
        return np.where(known, seats // self.per_host, -1)

    def around(self, seat: int) -> tuple[int, int]:
        """The first seat of a seat's host, and the first after it; both 0 for a seat without one."""
        if not 0 <= seat < self.seats:
            return 0, 0
        first = seat // self.per_host * self.per_host
        return first, min(first + self.per_host, self.seats)


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may decide about a plan; equal on every seat, part of the agreement.

    `budget` bounds the staging bytes of one seat. `hosts` maps seat -> host name (a replica on the
    same host is preferred). `first_only` are keys whose replicas differ and whose first holder counts.
    """

    budget: int = 256 << 20
    narrow: Narrow = "if-exact"
    allow: frozenset[str] = frozenset()
    hosts: Mapping[int, str] = field(default_factory=dict)
    workers: tuple[int, ...] = ()
    first_only: frozenset[Key] = frozenset()

    def digest(self) -> str:
        """Equal for equal options."""
        even = isinstance(self.hosts, EvenHosts)
        hosts = repr(self.hosts) if even else sorted(self.hosts.items())
        parts = (self.budget, self.narrow, sorted(self.allow), hosts)
        text = repr((*parts, self.workers, sorted(self.first_only)))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Pair:
    """A target key and the source key that serves it. `fill` says that zeros do."""

    source: KeySpec
    target: KeySpec
    fill: bool = False

    @property
    def wire(self) -> str:
        """The dtype that crosses the wire."""
        return wire_dtype(self.source.dtype, self.target.dtype)


@dataclass(frozen=True)
class Match:
    """How the keys of two layouts correspond: pairs by target key, in canonical order, and findings.

    `offset` of a pair is where its first element lies in the canonical order, in wire bytes. `notes` say
    what is made rather than moved, and `left` what stays behind, each by key and with the reason.
    `joined`: source keys that the target ties with another one's, each with the target key and not moved.
    """

    pairs: tuple[Pair, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    left: tuple[tuple[str, str], ...] = ()
    joined: tuple[tuple[KeySpec, KeySpec], ...] = ()

    @cached_property
    def by_target(self) -> dict[Key, Pair]:
        """Target key -> pair."""
        return {pair.target.key: pair for pair in self.pairs}

    @cached_property
    def by_source(self) -> dict[Key, tuple[Pair, ...]]:
        """Source key -> the pairs that it serves: several where the target does not tie its names."""
        found: dict[Key, tuple[Pair, ...]] = {}
        for pair in self.pairs:
            if not pair.fill:
                found[pair.source.key] = (*found.get(pair.source.key, ()), pair)
        return found

    @cached_property
    def offsets(self) -> dict[Key, int]:
        """Target key -> canonical position of its first element, in bytes."""
        found, at = {}, 0
        for pair in self.pairs:
            found[pair.target.key] = at
            at += 0 if pair.fill else pair.target.numel * itemsize(pair.wire)
        return found

    @cached_property
    def total(self) -> int:
        """Canonical length: wire bytes of all keys that move, once each."""
        return sum(p.target.numel * itemsize(p.wire) for p in self.pairs if not p.fill)


@dataclass(frozen=True, slots=True)
class Move:
    """One box of one target key, from one endpoint to another; `wire` is its dtype on the way."""

    key: Key
    box: Box
    source: int
    target: int
    wire: str

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.box.volume * itemsize(self.wire)

    @property
    def over_wire(self) -> bool:
        """Whether it crosses between two seats: a file's bytes are read or written by a seat."""
        return self.source != self.target and self.source >= 0 and self.target >= 0


@dataclass(frozen=True)
class SeatPlan:
    """All that one seat has part in, in canonical order (key, then row-major)."""

    seat: int
    moves: tuple[Move, ...]
    fills: tuple[tuple[int, Key, Box], ...]
    minimum: int
    findings: tuple[Finding, ...] = ()

    @cached_property
    def receives(self) -> tuple[Move, ...]:
        """Moves that come in over the wire."""
        return tuple(m for m in self.moves if m.over_wire and m.target == self.seat)

    @cached_property
    def sends(self) -> tuple[Move, ...]:
        """Moves that go out over the wire."""
        return tuple(m for m in self.moves if m.over_wire and m.source == self.seat)

    @cached_property
    def local(self) -> tuple[Move, ...]:
        """Moves inside this seat, or between it and files."""
        return tuple(m for m in self.moves if not m.over_wire)

    @property
    def bytes_in(self) -> int:
        """Wire bytes this seat receives."""
        return sum(move.nbytes for move in self.receives)

    @property
    def bytes_out(self) -> int:
        """Wire bytes this seat sends."""
        return sum(move.nbytes for move in self.sends)

    def pair_digests(self) -> dict[str, str]:
        """For each peer and direction (`"3>"` sent to, `"3<"` received from) a hash of the messages."""
        states: dict[str, Any] = {}
        for move in self.moves:
            if move.over_wire:
                out = move.source == self.seat
                name = f"{move.target}>" if out else f"{move.source}<"
                state = states.setdefault(name, hashlib.blake2b(digest_size=16))
                state.update(f"{move.key}|{move.box}|{move.wire};".encode())
        return {name: state.hexdigest() for name, state in states.items()}

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return {
            "seat": self.seat,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "minimum": self.minimum,
            "moves": [
                {
                    "key": str(m.key),
                    "lo": list(m.box.lo),
                    "hi": list(m.box.hi),
                    "source": m.source,
                    "target": m.target,
                    "dtype": m.wire,
                    "bytes": m.nbytes if m.over_wire else 0,
                }
                for m in self.moves
            ],
            "fills": [
                {"key": str(k), "lo": list(b.lo), "hi": list(b.hi), "target": e}
                for e, k, b in self.fills
            ],
        }


def canonical(move: Move, shapes: Mapping[Key, tuple[int, ...]]) -> tuple[Key, int, int, int]:
    """Sort key of the canonical order: key, row-major position of the first element, endpoints."""
    return (move.key, linear_index(move.box.lo, shapes[move.key]), move.source, move.target)
