"""A declared layout against what every rank of a real world holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynadapt.vps.box import Box
from dynadapt.vps.layout import Holder, RowLayout
from dynadapt.vps.model_shape import ModelShape, Named, State
from dynadapt.vps.regular import regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dynadapt.vps.layout import Row
    from dynadapt.vps.mesh_layout import MeshLayout
    from tests.declared._models import Tensors

#: What is compared: the authoritative copy. Moments lie where it does.
PARAM = (State("param", "float32"),)


def shape_of(tensors: Tensors) -> ModelShape:
    """A model as `declare` knows it."""
    names = {first: name for name, first in tensors.tied.items()}
    return ModelShape.of(
        Named(
            name,
            shape,
            trainable=name not in tensors.frozen,
            aliases=(names[name],) if name in names else (),
        )
        for name, shape in tensors.shapes.items()
    )


def assert_same(layout: MeshLayout, observed: Sequence[Iterable[Row]]) -> None:
    """Every rank holds the same boxes of the same keys, holders say so, and placements are found."""
    assert layout.endpoints == tuple(range(len(observed)))
    boxes = [sorted((row.key, row.box) for row in rows) for rows in observed]
    for rank, own in enumerate(boxes):
        declared = sorted((row.key, row.box) for row in layout.rows(rank))
        assert declared == own, f"rank {rank}: {_difference(declared, own)}"
    for spec in layout.keys:
        held = sorted(
            Holder(rank, box)
            for rank, own in enumerate(boxes)
            for key, box in own
            if key == spec.key
        )
        assert list(layout.holders(spec.key, Box.whole(spec.shape))) == held, spec.key
    found = regular(RowLayout(layout.keys, dict(enumerate(observed))), layout.axes)
    for rank, own in enumerate(boxes):
        assert sorted((row.key, row.box) for row in found.rows(rank)) == own


def _difference(declared: list[tuple[object, Box]], own: list[tuple[object, Box]]) -> str:
    more = [f"{key} {box}" for key, box in declared if (key, box) not in own]
    less = [f"{key} {box}" for key, box in own if (key, box) not in declared]
    return f"declared but not held: {more}; held but not declared: {less}"
