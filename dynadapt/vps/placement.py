"""How one tensor is laid over the axes of a mesh: the closed set of placements.

A key's placements are applied in the order they are listed, each to what the ones before left; an
axis that is not listed replicates.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Flat", "Pin", "Placement", "Replicate", "Shard"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every place of an axis holds the same."""

    axis: str

    @property
    def over(self) -> tuple[str, ...]:
        """The axis."""
        return (self.axis,)


@dataclass(frozen=True, slots=True)
class Shard:
    """Parts of a dim, one a place of an axis, cut as `torch.chunk` cuts: the last ones shorter or empty.

    Over several axes the first is the slowest, as if they were one.
    `multiple`: every part but the last is a multiple of this long (a head; a padded vocabulary).
    `blocks`: the dim is so many equal blocks side by side, each cut on its own (a fused gate and up).
    `copies`: so many neighbouring places share one part (fewer key-value heads than places).

    >>> Shard("tp", 0, multiple=64).part(1000, 4)
    256
    """

    axes: str | tuple[str, ...]
    dim: int
    multiple: int = 1
    blocks: int = 1
    copies: int = 1

    @property
    def over(self) -> tuple[str, ...]:
        """The axes, the first the slowest."""
        return _over(self.axes)

    def part(self, size: int, ways: int) -> int:
        """Length of a whole part of a dim (of one block of it) cut for `ways` places."""
        parts = max(ways // self.copies, 1)
        return max(-(-size // (parts * self.multiple)) * self.multiple, 1)


@dataclass(frozen=True, slots=True)
class Flat:
    """Equal spans of a flat buffer, one a place of an axis (or of several, the first the slowest).

    The tensor, or what placements before left of it, lies row-major at `offset` of the buffer; `part`
    is the length of one place's span, padding included. Without `part` the tensor is alone in its
    buffer: spans are as even as multiples of `multiple` allow.
    """

    axes: str | tuple[str, ...]
    multiple: int = 1
    part: int | None = None
    offset: int = 0

    @property
    def over(self) -> tuple[str, ...]:
        """The axes, the first the slowest."""
        return _over(self.axes)


@dataclass(frozen=True, slots=True)
class Pin:
    """One place of an axis holds the tensor: a pipeline stage, the owner of an expert.

    `also` are further places that hold it, ascending and after `index` (a tied embedding is on the
    first stage and on the last).
    """

    axis: str
    index: int
    also: tuple[int, ...] = ()

    @property
    def over(self) -> tuple[str, ...]:
        """The axis."""
        return (self.axis,)


Placement = Replicate | Shard | Flat | Pin


def _over(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes
