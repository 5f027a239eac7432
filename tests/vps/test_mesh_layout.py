"""Declared layouts against a brute force over all ranks."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynadapt.errors import Refused
from dynadapt.testing import strategies as more
from dynadapt.vps import cover
from dynadapt.vps.box import Box, linear_index
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import Layout
from dynadapt.vps.mesh_layout import Flat, MeshLayout, Pin, Placement, Shard

AXES = ("pp", "dp", "tp")


def held(
    shape: tuple[int, ...], axes: dict[str, int], own: tuple[Placement, ...], place: dict[str, int]
) -> set[int]:
    """Linear indices that one place holds, by cutting an array of indices with torch."""
    local = torch.arange(prod(shape)).reshape(shape)
    for placement in own:
        if isinstance(placement, Shard):
            ways, index = 1, 0
            for axis in placement.over:
                ways, index = ways * axes[axis], index * axes[axis] + place[axis]
            index //= placement.copies
            size = local.shape[placement.dim] // placement.blocks
            part = -(-size // (ways // placement.copies * placement.multiple)) * placement.multiple
            pieces = [
                block.narrow(
                    placement.dim,
                    min(index * part, size),
                    min(part, size - min(index * part, size)),
                )
                for block in local.split(max(size, 1), placement.dim)
            ]
            local = torch.cat(pieces, placement.dim)
        elif isinstance(placement, Flat):
            ways, index = 1, 0
            for axis in placement.over:
                ways, index = ways * axes[axis], index * axes[axis] + place[axis]
            part = -(-local.numel() // (ways * placement.multiple)) * placement.multiple
            if placement.part is not None:
                part = placement.part
            buffer = torch.full((max(ways * part, placement.offset + local.numel()),), -1)
            buffer[placement.offset : placement.offset + local.numel()] = local.flatten()
            local = buffer[index * part : (index + 1) * part]
            local = local[local >= 0]
        elif isinstance(placement, Pin) and place[placement.axis] not in {
            placement.index,
            *placement.also,
        }:
            return set()
    return set(local.flatten().tolist())


@given(st.data(), more.shapes(max_dims=4, max_volume=120), st.tuples(*[st.integers(1, 4)] * 3))
def test_rows_and_holders_are_what_cutting_gives(
    data: st.DataObject, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    axes = dict(zip(AXES, sizes, strict=True))
    own = data.draw(more.placements(shape, axes))
    spec = KeySpec(Key("w", "param"), shape, "float32")
    seats = [3 * i + 1 for i in range(prod(sizes))][::-1]
    mesh = MeshLayout(axes, [spec], {spec.key: own}, seats)
    assert isinstance(mesh, Layout)
    explicit = mesh.explicit()
    assert cover.prove(explicit) == cover.prove(mesh) == ()
    for seat, place in zip(seats, np.ndindex(*sizes), strict=True):
        found = [
            linear_index(x, shape)
            for row in mesh.rows(seat)
            for x in np.ndindex(*row.box.shape)
            for x in [tuple(a + b for a, b in zip(x, row.box.lo, strict=True))]
        ]
        assert len(found) == len(set(found))
        assert set(found) == held(shape, axes, own, dict(zip(AXES, place, strict=True)))
    box = data.draw(more.boxes(shape))
    assert mesh.holders(spec.key, box) == explicit.holders(spec.key, box)
    assert mesh.endpoints == explicit.endpoints


def test_a_layout_on_a_hundred_thousand_ranks_costs_its_own_rows() -> None:
    specs = [KeySpec(Key(f"w{i}", "param"), (1 << 16, 1 << 14), "bfloat16") for i in range(8)]
    own = (Shard("tp", 0), Flat("dp", 8))
    mesh = MeshLayout({"dp": 12_500, "tp": 8}, specs, {spec.key: own for spec in specs})
    assert len(mesh.rows(77_777)) <= 8 * 3
    box = mesh.rows(77_777)[0].box
    assert 77_777 in {holder.endpoint for holder in mesh.holders(specs[0].key, box)}


def test_equal_declarations_have_equal_digests() -> None:
    spec = KeySpec(Key("w", "param"), (8, 8), "float32")
    one = MeshLayout({"dp": 2}, [spec], {spec.key: (Shard("dp", 0),)})
    assert one.digest() == MeshLayout({"dp": 2}, [spec], {spec.key: [Shard("dp", 0)]}).digest()
    assert one.digest() != MeshLayout({"dp": 2}, [spec], {spec.key: (Shard("dp", 1),)}).digest()
    assert one.digest() != MeshLayout({"dp": 2}, [spec], {}, (1, 0)).digest()


def test_absent_keys_have_no_rows() -> None:
    spec = KeySpec(Key("w", "exp_avg"), (8,), "float32", presence="none")
    mesh = MeshLayout({"dp": 2}, [spec], {})
    assert mesh.rows(0) == () == mesh.holders(spec.key, Box((0,), (8,)))


def test_all_bad_placements_are_refused_together() -> None:
    specs = [KeySpec(Key(name, "param"), (4, 4), "float32") for name in "abcd"]
    placements = [
        (Shard("ep", 0),),
        (Shard("dp", 2),),
        (Flat("dp"), Shard("tp", 0)),
        (Shard("dp", 0), Shard("dp", 1)),
    ]
    with pytest.raises(Refused) as caught:
        MeshLayout(
            {"dp": 2, "tp": 2},
            specs,
            {spec.key: own for spec, own in zip(specs, placements, strict=True)},
            (0, 1, 2, 2),
        )
    assert [finding.where for finding in caught.value.findings] == [
        *(f"{name}/param" for name in "abcd"),
        "mesh",
    ]
