"""Plans in columns against the planner that looks up every row, and against every element by itself."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynadapt.testing import strategies as more
from dynadapt.transport.match import match
from dynadapt.transport.plan import EvenHosts, Options
from dynadapt.transport.planner import plan_for
from dynadapt.vps.mesh_layout import MeshLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.vps.keys import Key, KeySpec
    from dynadapt.vps.placement import Placement


@st.composite
def meshes(draw: st.DrawFn, specs: tuple[KeySpec, ...], among: int = 12) -> MeshLayout:
    """A declared layout of these keys on some of the seats."""
    names = draw(st.permutations(["pp", "dp", "tp"]))
    sizes = draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)))
    axes = dict(zip(names, sizes, strict=True))
    own: dict[Key, tuple[Placement, ...]] = {}
    for spec in specs:
        if own and draw(st.booleans()):  # many tensors are placed alike
            known = draw(st.sampled_from(list(own)))
            same = next(s for s in specs if s.key == known)
            if same.shape == spec.shape:
                own[spec.key] = own[known]
                continue
        own[spec.key] = draw(more.placements(spec.shape, axes))
    count = prod(sizes)
    first = draw(st.integers(0, 3))
    step = draw(st.sampled_from([1, 1, 2]))
    seats = tuple(first + step * number for number in range(count))
    return MeshLayout(axes, specs, own, seats if draw(st.booleans()) else None)


@st.composite
def changes(draw: st.DrawFn) -> tuple[MeshLayout, MeshLayout, Options]:
    specs = draw(more.key_sets(max_tensors=4, max_volume=300))
    source, target = draw(meshes(specs)), draw(meshes(specs))
    per = draw(st.integers(1, 5))
    hosts: Mapping[int, str] = draw(
        st.sampled_from([{}, EvenHosts(per, 40), {s: f"h{s % per}" for s in range(0, 40, 2)}])
    )
    return source, target, Options(hosts=hosts)


def _same_as_by_rows(source: MeshLayout, target: MeshLayout, options: Options) -> None:
    matched = match(source.keys, target.keys, options)
    rows = source.explicit(), target.explicit()
    for seat in sorted({*source.endpoints, *target.endpoints}):
        ours = plan_for(seat, source, target, matched, options)
        theirs = plan_for(seat, *rows, matched, options)
        assert ours.moves == theirs.moves
        assert ours.fills == theirs.fills
        assert ours.minimum == theirs.minimum
        assert bool(ours.findings) == bool(theirs.findings)
        assert ours.bytes_in == ours.minimum or ours.findings


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes())
def test_the_moves_are_those_of_the_planner_by_rows(
    change: tuple[MeshLayout, MeshLayout, Options],
) -> None:
    _same_as_by_rows(*change)
