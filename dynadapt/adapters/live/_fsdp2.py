"""What FSDP2 keeps beside its sharded parameters: gathered copies and gradients not yet reduced.

`replicate()` of `torch.distributed._composable.replicate_with_fsdp` is built on it and has the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from dynadapt.adapters.live._torch_aux import holds_value
from dynadapt.errors import Finding, Refused
from dynadapt.vps.keys import canonical_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

__all__ = [
    "check_step_boundary",
    "fsdp_meshes",
    "offloaded",
    "param_policies",
    "require_sharded",
    "reset",
    "reshard",
]

_ZERO_GRAD = "finish the step, then call optimizer.zero_grad()"


def _groups(model: torch.nn.Module) -> Iterator[tuple[FSDPModule, Any]]:
    """Every FSDP2 module with each of its parameter groups."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield module, group


def check_step_boundary(model: torch.nn.Module, stepped: Callable[[torch.Tensor], bool]) -> None:
    """Raise `Refused` (`mid-step`) with every gradient of what is `stepped` that holds a value; no change."""
    names = {id(module): canonical_name(f"{at}.") for at, module in model.named_modules()}
    findings: dict[str, Finding] = {}

    def check(name: str, gradient: torch.Tensor | None) -> None:
        if gradient is not None and name not in findings and holds_value(gradient):
            findings[name] = Finding("mid-step", name, "its gradient holds a value", _ZERO_GRAD)

    for name, parameter in model.named_parameters():
        if stepped(parameter):
            check(canonical_name(name), parameter.grad)
    for _, group in _groups(model):
        for held in group.fsdp_params:
            info = held._module_info
            name = f"{names.get(id(info.module), '')}{info.param_name}".removeprefix(".")
            if not stepped(held.sharded_param):
                continue
            check(name, held.sharded_param.grad)
            check(name, held.unsharded_accumulated_grad)
            unsharded = getattr(held, "_unsharded_param", None)
            check(name, None if unsharded is None else unsharded.grad)
        if getattr(group, "_partial_reduce_output", None) is not None:
            where = str(group._module_fqn or "the root module")
            cause = "a gradient is summed over shards and not yet over replicas"
            findings[where] = Finding("mid-step", where, cause, _ZERO_GRAD)
        if group._all_gather_result is not None:
            where = str(group._module_fqn or "the root module")
            findings[where] = Finding(
                "mid-step",
                where,
                "an unshard() has not been waited for",
                "call wait() on its handle",
            )
    if findings:
        raise Refused(findings.values())


def reshard(model: torch.nn.Module) -> None:
    """Drop gathered copies, so that the next forward reads the shards.

    The root keeps its gathered weights after a forward without backward, and would use them again.
    """
    for module, _ in _groups(model):
        module.reshard()


def require_sharded(model: torch.nn.Module) -> None:
    """Raise `Refused` (`not-quiesced`) where gathered weights stand in for the sharded ones."""
    findings = [
        Finding(
            "not-quiesced",
            str(group._module_fqn or "the root module"),
            "its gathered weights are in use",
            "call quiesce first",
        )
        for _, group in _groups(model)
        if not group.is_sharded
    ]
    if findings:
        raise Refused(findings)


def fsdp_meshes(model: torch.nn.Module) -> tuple[Any, ...]:
    """The meshes that FSDP2 shards or replicates over."""
    return tuple(group.mesh_info.mesh for _, group in _groups(model))


def param_policies(model: torch.nn.Module) -> dict[str, str]:
    """The compute and reduction dtypes that FSDP2 uses, where they differ from the parameters'.

    Several values are joined by a comma.
    """
    found: dict[str, set[str]] = {}
    for _, group in _groups(model):
        for entry in ("param_dtype", "reduce_dtype"):
            dtype = getattr(group.mp_policy, entry, None)
            if dtype is not None:
                found.setdefault(entry, set()).add(str(dtype).removeprefix("torch."))
    return {entry: ",".join(sorted(names)) for entry, names in sorted(found.items())}


def offloaded(model: torch.nn.Module) -> frozenset[int]:
    """The parameters that FSDP2 keeps in host memory, by `id`."""
    return frozenset(
        id(held.sharded_param)
        for _, group in _groups(model)
        for held in group.fsdp_params
        if held.offload_to_cpu
    )


def reset(model: torch.nn.Module) -> list[tuple[Any, dict[str, Any]]]:
    """Tell FSDP2 that its sharded parameters have new memory; it pads and pins them as it needs.

    Returns, of each of its records, the attributes that this has changed, as they were.
    """
    found = []
    for _, group in _groups(model):
        for held in group.fsdp_params:
            kept = ("_sharded_param_data", "_sharding_spec", "sharded_param")
            found.append((held, {name: vars(held)[name] for name in kept}))
            held.reset_sharded_param()
    return found
