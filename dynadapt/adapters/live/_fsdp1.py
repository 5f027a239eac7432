"""What FSDP1 keeps beside its shards: gathered copies, gradients, settings that change a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _free_storage

from dynadapt.adapters.live._fsdp1_parts import local_shard, named_parts, units
from dynadapt.adapters.live._torch_aux import holds_value
from dynadapt.errors import Finding, Refused
from dynadapt.vps.keys import canonical_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["check_step_boundary", "check_supported", "param_policies", "require_sharded", "reshard"]

#: The model's and not the optimizer's, which leaves out frozen tensors: under no_sync() these show their
#: stretch of the flat gradient, and as long as one does, FSDP1 adds to it what was there before.
_ZERO_GRAD = "finish the step, then call model.zero_grad()"

#: Where a forward finds gathered weights: in the dtype it computes in, and in the parameters' own.
_GATHERED = ("_full_param_padded", "_full_prec_full_param_padded")


def check_supported(model: torch.nn.Module) -> None:
    """Raise `Refused` for what is mixed with FSDP1 in a way that its flats do not tell."""
    findings = [
        Finding(
            "unsupported-parallel",
            name or "the root module",
            "fully_shard (FSDP2) is applied inside a model with FSDP1 units",
            "shard the whole model with one of them",
        )
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    ]
    findings += [
        Finding(
            "unsupported-parallel",
            name,
            "it is a DTensor beside or inside FSDP1 units (tensor parallelism)",
            "use fully_shard (FSDP2) with tensor parallelism",
        )
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
    ]
    for name, unit in units(model):
        flat = unit._handle.flat_param
        where = name or "the root module"
        if any(extension is not None for extension in flat._param_extensions):
            cause = "its tensors are shards of tensor parallelism themselves"
            fix = "use fully_shard (FSDP2) with tensor parallelism"
            findings.append(Finding("unsupported-parallel", where, cause, fix))
        own = flat._params or ()
        if any(hasattr(each, "_in_backward_optimizers") for each in own):
            cause = "_apply_optimizer_in_backward steps each tensor by an optimizer of its own"
            fix = "use one optimizer that is stepped after the backward"
            findings.append(Finding("unsupported-optimizer", where, cause, fix))
    findings += _cut_ties(model)
    if findings:
        raise Refused(findings)


def _cut_ties(model: torch.nn.Module) -> Iterator[Finding]:
    """Names of a tied tensor outside the unit that shards it: a forward finds the 1-D shard there.

    Only with `use_orig_params`; flat units cut a tie into two tensors, which they stay. Of `NO_SHARD`
    every name shows the whole tensor, always.
    """
    owners: dict[int, tuple[str, set[tuple[int, str]]]] = {}
    for path, unit in units(model):
        flat = unit._handle.flat_param
        if flat._params is None or not unit._handle.uses_sharded_strategy:
            continue
        places = {(id(module), attribute) for attribute, module, _ in flat._param_infos}
        places |= {(id(each[1]), each[0]) for each in flat._shared_param_infos}
        for parameter, name in zip(flat._params, flat._fqns, strict=True):
            whole = canonical_name(f"{path}.{name}" if path else name)
            owners[id(parameter)] = (whole, places)
    for path, module in model.named_modules():
        for attribute, shown in module._parameters.items():
            name, places = owners.get(id(shown), ("", set()))
            if name and (id(module), attribute) not in places:
                yield Finding(
                    "tie",
                    canonical_name(f"{path}.{attribute}" if path else attribute),
                    f"it is tied with {name}, which is sharded by a unit that it is no part of",
                    "wrap both in one unit, e.g. leave them to the root",
                )


def check_step_boundary(model: torch.nn.Module, stepped: Callable[[torch.Tensor], bool]) -> None:
    """Raise `Refused` (`mid-step`) with every gradient of what is `stepped` that holds a value; no change.

    Also where weights were replaced by tensors of other memory: FSDP1 copies those into its shards
    with the next forward, and dropping gathered weights would lose them.
    """
    findings: list[Finding] = []
    seen: set[int] = set()
    for named, part in named_parts(model):
        own = named.tensor if part is None else part.parameter
        if id(own) in seen:
            continue
        seen.add(id(own))
        if stepped(own) and own.grad is not None and holds_value(own.grad):
            flat = part is not None and part.flat
            cause = "the gradient of its flat parameter" if flat else "its gradient"
            findings.append(Finding("mid-step", named.name, f"{cause} holds a value", _ZERO_GRAD))
    for name, unit in units(model):
        where = name or "the root module"
        if unit._handle._training_state != HandleTrainingState.IDLE:
            state = unit._handle._training_state.name
            cause = f"it is in {state}: a pass or summon_full_params has not ended"
            findings.append(Finding("mid-step", where, cause, "migrate after it"))
        findings += _replaced(name, unit._handle)
    if findings:
        raise Refused(findings)


def _replaced(unit: str, handle: Any) -> Iterator[Finding]:
    flat = handle.flat_param
    shown = handle._skipped_use_sharded_views  # a forward's views stand in for the parameters
    if flat._params is None or shown or handle._training_state != HandleTrainingState.IDLE:
        return
    storage = flat.untyped_storage().data_ptr()
    every = zip(flat._params, flat._shard_param_infos, flat._param_infos, flat._fqns, strict=True)
    for parameter, info, (attribute, module, _), name in every:
        now = getattr(module, attribute, parameter)
        moved = now.numel() and now.untyped_storage().data_ptr() != storage
        if info.in_shard and (now is not parameter or moved):
            yield Finding(
                "mid-step",
                canonical_name(f"{unit}.{name}" if unit else name),
                "its data were replaced, and FSDP1 takes them over in the next forward only",
                "run a forward, or write in place with copy_()",
            )


def reshard(model: torch.nn.Module) -> None:
    """Show the shards again and free gathered weights, so that the next forward gathers anew.

    The root keeps its gathered weights after a forward, with `SHARD_GRAD_OP` every unit does, and the
    next forward would use them without a look at the shards. No communication.
    """
    for _, unit in units(model):
        handle = unit._handle
        flat = handle.flat_param
        if not hasattr(flat, "_local_shard"):  # no forward yet: nothing was ever gathered
            continue
        handle.reshard(handle.uses_sharded_strategy)
        handle.post_reshard()
        # `reshard` frees the copy of the dtype that is in use now; an evaluation in full precision
        # (FSDP_USE_FULL_PREC_IN_EVAL) left the other one.
        for gathered in _gathered(handle):
            if gathered.is_cuda:
                gathered.record_stream(torch.cuda.current_stream(gathered.device))
            _free_storage(gathered)
        handle._prefetched = False


def _gathered(handle: Any) -> list[torch.Tensor]:
    """The gathered copies that have memory."""
    found = [getattr(handle.flat_param, name, None) for name in _GATHERED]
    return [each for each in found if each is not None and each.untyped_storage().nbytes()]


def require_sharded(model: torch.nn.Module) -> None:
    """Raise `Refused` (`not-quiesced`) where a forward would not read the shards."""
    findings = [
        Finding(
            "not-quiesced",
            name or "the root module",
            "its gathered weights are in use",
            "call quiesce first",
        )
        for name, unit in units(model)
        if _gathered(unit._handle) or not _shows_shard(unit._handle)
    ]
    if findings:
        raise Refused(findings)


def _shows_shard(handle: Any) -> bool:
    shard = local_shard(handle)
    return bool(
        handle.flat_param.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
    )


def param_policies(model: torch.nn.Module) -> dict[str, str]:
    """The dtypes of `MixedPrecision`, where it sets them; several values are joined by a comma."""
    found: dict[str, set[str]] = {}
    for _, unit in units(model):
        for entry in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(unit.mixed_precision, entry, None)
            if dtype is not None:
                found.setdefault(entry, set()).add(str(dtype).removeprefix("torch."))
    return {entry: ",".join(sorted(names)) for entry, names in sorted(found.items())}
