"""Whether the files of a DeepSpeed folder are of one save, each under the name that it was written under.

DeepSpeed looks at none of this when it loads: a rank takes what lies under its name. `torch.save` writes a
file's name into it, the optimizer states say of how many ranks they are, and all ranks are at one step.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._deepspeed_files import (
    Folder,
    model_states,
    number,
    optimizer_states,
    options_of,
)
from dynadapt.errors import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynadapt.adapters.checkpoints._torch_file import TorchFile

__all__ = ["mixed"]

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_?(optim|model)_states")
_COPY = "copy the whole checkpoint again"


def mixed(folder: Folder) -> list[Finding]:
    """Everything that shows that files are left over, renamed, or of different saves."""
    findings = [f for file in (*folder.optim, *folder.model) for f in _renamed(file)]
    return [*findings, *_too_many(folder), *_at_other_steps(folder)]


def _renamed(file: TorchFile) -> Iterator[Finding]:
    own, written = _RANK.search(Path(file.path).name), _RANK.search(file.root)
    if own and written and own.groups() != written.groups():
        cause = f"was written as {file.root}.pt: it is another rank's"
        yield Finding("mixed-files", file.path, cause, f"give it its name back, or {_COPY}")


def _too_many(folder: Folder) -> Iterator[Finding]:
    have = len(folder.optim)
    told = optimizer_states(folder.optim[0]).get("partition_count") if have else None
    counts = [n for n in (told if isinstance(told, list) else [told]) if type(n) is int]
    most = max(counts, default=have)
    if have > most:
        cause = f"the optimizer states are of {most} ranks, and there are files of {have}"
        fix = f"remove what another save has left there, from rank {most} on"
        yield Finding("mixed-files", str(folder.root), cause, fix)


def _at_other_steps(folder: Folder) -> Iterator[Finding]:
    """Files whose counts are not those of the first."""
    for what, files, counts in (
        ("steps", folder.optim, _optimizer_counts),
        ("counts", folder.model, _model_counts),
    ):
        first = counts(files[0]) if files else {}
        for file in files[1:]:
            own = counts(file)
            if any(own[name] != first[name] for name in own.keys() & first.keys()):
                cause = f"its {what} are {_told(own)}, those of {Path(files[0].path).name} {_told(first)}"
                yield Finding("mixed-files", file.path, f"{cause}: two saves are mixed", _COPY)


def _told(counts: dict[str, Any]) -> str:
    if len(set(counts.values())) == 1:
        return str(next(iter(counts.values())))
    return ", ".join(f"{name} {value}" for name, value in list(counts.items())[:5])


def _optimizer_counts(file: TorchFile) -> dict[str, Any]:
    states = optimizer_states(file)
    base = next(
        (states[n] for n in ("optimizer_state_dict", "base_optimizer_state") if n in states), None
    )
    inner = options_of(base, "state") if isinstance(base, dict) else {}
    found = {
        f"group {flat}": number(state["step"], file)
        for flat, state in inner.items()
        if isinstance(state, dict) and "step" in state
    }
    return {name: value for name, value in found.items() if value is not None}


def _model_counts(file: TorchFile) -> dict[str, Any]:
    tree = model_states(file)
    return {n: tree[n] for n in ("global_steps", "global_samples") if type(tree.get(n)) is int}
