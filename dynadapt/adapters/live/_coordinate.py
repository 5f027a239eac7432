"""A rank's place in its own meshes, by role: `dp`, `tp`, `pp`, or an axis's own name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

__all__ = ["coordinate_of", "role_of"]

_ROLES = {
    "tp": ("tp", "tensor", "model"),
    "pp": ("pp", "pipe", "stage"),
    "dp": ("dp", "ddp", "shard", "repl", "data", "batch", "world"),
}


def role_of(axis: str) -> str:
    """The role of a mesh axis by its name; an axis of another role keeps its name.

    >>> role_of("dp_shard"), role_of("tensor_parallel"), role_of("ep")
    ('dp', 'tp', 'ep')
    """
    for role, words in _ROLES.items():
        if any(word in axis.lower() for word in words):
            return role
    return axis


def coordinate_of(
    tensors: Iterable[torch.Tensor],
    data_meshes: tuple[Any, ...] = (),
    known: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Role -> this rank's index, from the meshes of the DTensors; several `dp` axes are flattened.

    `data_meshes` are known to carry data, whatever their axes are called; `known` is of roles that no
    mesh tells. Without either the rank in the default group is `dp`, as for DistributedDataParallel.
    """
    meshes: list[Any] = [*data_meshes]
    for tensor in tensors:
        if isinstance(tensor, DTensor) and tensor.device_mesh not in meshes:
            meshes.append(tensor.device_mesh)
    if not meshes:
        ready = dist.is_available() and dist.is_initialized()
        return {"dp": dist.get_rank() if ready else 0, **(known or {})}
    # A part of a mesh knows the mesh it was cut from, which has the other axes too.
    roots: list[Any] = []  # equal meshes are made anew by every fully_shard() without a mesh
    for mesh in meshes:
        if mesh._get_root_mesh() not in roots:
            roots.append(mesh._get_root_mesh())
    data = {name for mesh in data_meshes for name in _axis_names(mesh, "dp")}
    found: dict[str, int] = {}
    for root in roots:
        own: dict[str, int] = {}
        unnamed = "dp" if root in data_meshes else "tp"
        for axis, index, size in _axes(root, unnamed):
            role = "dp" if axis in data else role_of(axis)
            own[role] = own.get(role, 0) * size + index
        found = {**own, **found}
    found = {**(known or {}), **found}
    found.setdefault("dp", dist.get_rank() // max(root.size() for root in roots))
    return found


def _axes(mesh: Any, unnamed: str) -> list[tuple[str, int, int]]:
    """Name, this rank's index and size of each axis of a mesh; nothing if the rank is not in it."""
    where = mesh.get_coordinate()
    if where is None:
        return []
    names = _axis_names(mesh, unnamed)
    return [(name, where[axis], mesh.size(axis)) for axis, name in enumerate(names)]


def _axis_names(mesh: Any, unnamed: str) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or (unnamed,) * mesh.ndim)
