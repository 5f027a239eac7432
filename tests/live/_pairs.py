"""Ordered pairs of kinds, strung into walks: every hop's target is the next hop's source."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Pair = tuple[str, str]


def trails(pairs: Iterable[Pair]) -> list[list[str]]:
    """Walks that together make each of the pairs once: one, if they can be strung into a circuit.

    >>> trails([("a", "b"), ("b", "a"), ("a", "a")])
    [['a', 'b', 'a', 'a']]
    >>> trails([("a", "b"), ("c", "b")])
    [['a', 'b'], ['c', 'b']]
    """
    out: dict[str, list[str]] = {}
    excess: dict[str, int] = {}
    for a, b in pairs:
        out.setdefault(a, []).append(b)
        out.setdefault(b, [])
        excess[a] = excess.get(a, 0) + 1
        excess[b] = excess.get(b, 0) - 1
    for targets in out.values():
        targets.reverse()
    # What has more ways out than in begins a walk, which is left alone; then only circuits remain.
    found = [_trail(k, out, spliced=False) for k in out for _ in range(excess[k])]
    return found + [_trail(k, out) for k in out if out[k]]


def _trail(start: str, out: dict[str, list[str]], *, spliced: bool = True) -> list[str]:
    """A walk from `start` until no way is left, and the circuits that it came by; uses up `out`."""
    stack, done = [start], []
    while stack:
        if out[stack[-1]] and (spliced or not done):
            stack.append(out[stack[-1]].pop())
        else:
            done.append(stack.pop())
    return done[::-1]


def cut(walks: Iterable[Sequence[str]], hops: int) -> list[tuple[str, ...]]:
    """The walks in pieces of at most that many hops; a piece begins where the one before it ends.

    >>> cut(["abcd"], 2)
    [('a', 'b', 'c'), ('c', 'd')]
    """
    return [tuple(w[at : at + hops + 1]) for w in walks for at in range(0, len(w) - 1, hops)]


def rings(kinds: Sequence[str], strides: Sequence[int]) -> list[Pair]:
    """From each kind to the one `stride` places on, around: each is as often a source as a target.

    >>> rings("abc", [1])
    [('a', 'b'), ('b', 'c'), ('c', 'a')]
    """
    n = len(kinds)
    return [(kinds[i], kinds[(i + by) % n]) for by in strides for i in range(n)]
