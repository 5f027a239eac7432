"""Proof that a layout holds every element of every tensor: all gaps, not the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynadapt.errors import Finding
from dynadapt.vps.box import Box, uncovered

if TYPE_CHECKING:
    from dynadapt.vps.layout import Layout

__all__ = ["prove"]


def prove(layout: Layout) -> tuple[Finding, ...]:
    """All elements that no endpoint holds, a finding a key; empty for a whole layout.

    Derived and absent keys need no rows, nor do tensors without elements. Local keys are left out:
    no rank holds for another there.

    >>> from dynadapt.vps.keys import Key, KeySpec
    >>> from dynadapt.vps.layout import Row, RowLayout
    >>> spec = KeySpec(Key("w", "param"), (4,), "float32")
    >>> half = RowLayout([spec], {0: [Row(spec.key, Box((0,), (3,)), "b", 0, (1,))]})
    >>> print(prove(half)[0])
    w/param [3:4]: 1 of 4 elements are held by no endpoint [uncovered]
    """
    findings = []
    known: dict[tuple[frozenset[Box], Box], tuple[Box, ...]] = {}  # many tensors lie alike
    for spec in layout.keys:
        if not spec.moves or spec.local:
            continue
        whole = Box.whole(spec.shape)
        held = frozenset(holder.box for holder in layout.holders(spec.key, whole))
        if whole in held:
            continue
        gaps = known.get((held, whole))
        if gaps is None:
            gaps = known[held, whole] = uncovered(held, whole)
        if gaps:
            lost = sum(gap.volume for gap in gaps)
            findings.append(
                Finding(
                    "uncovered",
                    f"{spec.key} {gaps[0]}",
                    f"{lost} of {spec.numel} elements are held by no endpoint",
                )
            )
    return tuple(findings)
