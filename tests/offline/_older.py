"""DeepSpeed checkpoints as older versions wrote them, made from real ones of today's.

What each version wrote is read off its source: `_save_checkpoint`, `_save_zero_checkpoint` and
`_get_zero_param_shapes` of runtime/engine.py, and `state_dict` of runtime/zero/stage*.py, of the releases
that are named here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

#: Releases whose source was read, the newest first.
VERSIONS = ("0.8.3", "0.6.7", "0.5.10", "0.4.5", "0.3.16")


def aged(source: Path, target: Path, version: str, *, elastic: bool | None = None) -> Path:
    """A copy of a checkpoint's tag folder as a version would have written it.

    `elastic` is `elastic_checkpoint`, by default that version's default.
    """
    number = tuple(map(int, version.split(".")))
    elastic = number < (0, 5) if elastic is None else elastic
    (tag,) = [p for p in source.iterdir() if p.is_dir()]
    folder = target / tag.name
    folder.mkdir(parents=True)
    (target / "latest").write_text(tag.name)
    models = {p.name: _load(p) for p in sorted(tag.glob("*model_states.pt"))}
    optims = {p.name: _load(p) for p in sorted(tag.glob("*optim_states.pt"))}
    shapes = next(iter(models.values()))["param_shapes"]
    for tree in models.values():
        _age_model(tree, number, version)
    if number < (0, 6):
        for tree in optims.values():
            tree["param_shapes"] = shapes
            if number < (0, 5):
                tree["param_shapes"] = OrderedDict(i for own in shapes for i in own.items())
            if number < (0, 4):
                module = next(iter(models.values()))["module"]
                every = {n: s for own in shapes for n, s in own.items()}
                tree["param_shapes"] = OrderedDict((n, every[n]) for n in module if n in every)
    states = [tree["optimizer_state_dict"] for tree in optims.values()]
    if "single_partition_of_fp32_groups" in states[0]:
        _age_flats(states, number, elastic, shapes)
    for tree, state in zip(optims.values(), states, strict=True):
        for name in ("group_paddings", "param_alignment_paddings", "param_slice_mappings"):
            if number < (0, 7):
                state.pop(name, None)
        state.pop("param_alignment_paddings", None)
        if number < (0, 7) and "zero_stage" in state:
            state["zero_stage"] = int(getattr(state["zero_stage"], "value", state["zero_stage"]))
        if number < (0, 6):
            state.pop("clip_grad", None)
        state.pop("ds_version", None)
        tree["ds_version"] = version
        if number < (0, 4):
            del tree["ds_version"], tree["ds_config"]
    for name, tree in {**models, **optims}.items():
        torch.save(tree, folder / name)
    return target


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def _age_model(tree: dict[str, Any], number: tuple[int, ...], version: str) -> None:
    for alias, name in (tree.get("shared_params") or {}).items():
        tree["module"][alias] = tree["module"][name]  # torch.load parts empty placeholders
    for name in (
        *("frozen_param_shapes", "frozen_param_fragments", "shared_params"),
        *("checkpoint_parallel_dimensions", "random_ltd", "data_sampler"),
    ):
        tree.pop(name, None)
    tree["ds_version"] = version
    if number < (0, 6):
        del tree["param_shapes"]
    if number < (0, 4):
        del tree["buffer_names"], tree["ds_config"], tree["ds_version"]


def _age_flats(
    states: list[dict[str, Any]], number: tuple[int, ...], elastic: bool, shapes: Any
) -> None:
    """Before 0.5 flats were padded to the ranks alone; elastic: states by group, without padding."""
    ranks = len(states)
    for group, own in enumerate(shapes):
        total = sum(shape.numel() for shape in own.values())
        multiple = 1 if number < (0, 5) else 2
        part = -(-total // (multiple * ranks)) * multiple
        masters = [state["single_partition_of_fp32_groups"] for state in states]
        bases = [state["base_optimizer_state"]["state"].get(group, {}) for state in states]
        labels = [n for n, v in bases[0].items() if isinstance(v, torch.Tensor) and v.dim()]
        for holders in ((masters, group), *((bases, label) for label in labels)):
            _cut(*holders, total, part, elastic or holders[0] is masters)
        for base in bases:
            if "step" in base:
                base["step"] = int(base["step"])  # DeepSpeed's own Adams count so
    for state in states:
        if elastic:
            base = state["base_optimizer_state"]["state"]
            state["base_optimizer_state"] = [base.get(i, {}) for i in range(len(shapes))]


def _cut(holders: list[Any], place: Any, total: int, part: int, lean: bool) -> None:
    """One flat over all ranks, cut anew; the last rank's part without its padding, if `lean`."""
    whole = torch.cat([holder[place] for holder in holders])[:total]
    ranks = len(holders)
    padding = part * ranks - total
    whole = torch.cat([whole, whole.new_zeros(max(part * ranks - len(whole), 0))])
    for rank, holder in enumerate(holders):
        own = whole[rank * part : (rank + 1) * part]
        if lean and rank == ranks - 1:
            own = own[: part - padding] if padding else own
        holder[place] = own.clone()
