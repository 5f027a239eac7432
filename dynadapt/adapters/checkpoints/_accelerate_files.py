"""The files of `Accelerator.save_state`, by name: which form a folder has, and the small files in it.

The names are those of accelerate/utils/constants.py and accelerate/checkpointing.py, 1.15. Small files are
carried as they are: most are objects that only Accelerate can make of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._deepspeed_files import tag_folder
from dynadapt.adapters.checkpoints._plain import Lifting, lowered, plain_part
from dynadapt.adapters.checkpoints._torch_file import read_torch
from dynadapt.adapters.checkpoints._torch_trees import scaler_state
from dynadapt.errors import Finding, Refused
from dynadapt.files import mapped
from dynadapt.protocols import AuxItem, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dynadapt.adapters.checkpoints._making import Making

__all__ = [
    "DEEPSPEED",
    "FULL",
    "OPTIMIZER",
    "SAFE",
    "SHARDED",
    "SHARDED_OPTIMIZER",
    "TORCH",
    "form_of",
    "read_small",
    "write_small",
]

DEEPSPEED = "pytorch_model"
SAFE = "model.safetensors"
TORCH = "pytorch_model.bin"
FULL = "pytorch_model_fsdp.bin"
SHARDED = "pytorch_model_fsdp_0"
OPTIMIZER = "optimizer.bin"
SHARDED_OPTIMIZER = "optimizer_0"
SCHEDULER = "scheduler.bin"
SCALER = "scaler.pt"

CARRIED = "user/accelerate/"
"""Aux items with the bytes of small files are called so, with the file's name."""

MOST = 16 << 20
"""Bytes of a file that is carried."""

_SMALL = re.compile(
    r"^(random_states_\d+\.pkl|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin"
    r"|custom_checkpoint_\d+\.pkl|scheduler_[1-9]\d*\.bin)$"
)
_RANDOM = re.compile(r"^random_states_(\d+)\.pkl$")
_MORE = re.compile(
    r"^(model_\d+\.safetensors|pytorch_model_\d+(\.bin)?|pytorch_model_fsdp_([1-9]\d*|\d+\.bin)"
    r"|optimizer_([1-9]\d*|\d+\.bin))$"
)
_BY_RANK = re.compile(r"^(pytorch_model_fsdp|optimizer)(_\d+)?_rank\d+\.bin$")


def form_of(path: Path) -> str | None:
    """`deepspeed`, `sharded`, `full` or `plain`, or `by rank` (not read); None: not of `save_state`.

    Accelerate's folder is told from others by its optimizer or by its states of random generators.
    """
    if not path.is_dir():
        return None
    if tag_folder(path / DEEPSPEED) == path / DEEPSPEED:
        return "deepspeed"
    if (path / SHARDED).is_dir():
        return "sharded"
    if (path / FULL).is_file():
        return "full"
    if any(_BY_RANK.match(p.name) for p in path.iterdir()):
        return "by rank"
    sure = (path / OPTIMIZER).is_file() or (path / "random_states_0.pkl").is_file()
    plain = sure and ((path / SAFE).is_file() or (path / TORCH).is_file())
    return "plain" if plain else None


def read_small(root: Path) -> list[AuxItem]:
    """Schedule, loss scale, and every small file as it is; raises `Refused` for several models."""
    names = sorted(p.name for p in root.iterdir())
    if more := [name for name in names if _MORE.match(name)]:
        cause = f"holds several models or optimizers ({more[0]}): one is read"
        fix = "save each with an Accelerator of its own"
        raise Refused([Finding("several-models", str(root), cause, fix)])
    items = []
    for name in (SCHEDULER, SCALER):
        if name in names:
            file = read_torch(str(root / name))
            items += _known(name, file.tree, file)
    for name in filter(_SMALL.match, names):
        data = mapped(str(root / name))
        if len(data) > MOST:
            items.append(AuxItem(f"opaque/{name}", f"{len(data):,} bytes"))
        else:
            items.append(AuxItem(f"{CARRIED}{name}", bytes(data)))
    return items


def _known(name: str, tree: Any, file: Any) -> list[AuxItem]:
    if not isinstance(tree, dict):
        raise Refused([Finding("bad-file", file.path, "holds no state dict")])
    state, left = plain_part(lowered(tree, file))
    if name == SCHEDULER:
        return [AuxItem("scheduler", {"class": "", "state": state, "left": left})]
    if type(state.get("scale")) not in (int, float):  # one that is switched off has an empty state
        return []
    value = {"class": "GradScaler", "scale": float(state["scale"]), "state": state}
    return [AuxItem("scaler", value)]


def write_small(
    made: Making, aux: Mapping[str, AuxItem], ranks: int | None, *, scaler: bool
) -> dict[str, Outcome]:
    """Write the schedule, the loss scale if the form has one, and what was carried, for so many ranks.

    Returns what became of the items that have a place here, by path.
    """
    found: dict[str, Outcome] = {}
    sources = {int(m[1]) for path in aux if (m := _RANDOM.match(path.removeprefix(CARRIED)))}
    if "scheduler" in aux:
        lifting = Lifting()
        tree = lifting.lifted(aux["scheduler"].value["state"])
        made.seal_torch(SCHEDULER, tree, {}, lifting.values)
        note = ""
        if ranks is not None and sources and len(sources) != ranks:
            note = f"Accelerate ticks it once a process: {len(sources)} a step before, {ranks} now"
        found["scheduler"] = Outcome("scheduler", "exact", note)
    if "scaler" in aux and scaler:
        state, same = scaler_state(aux["scaler"])
        made.seal_torch(SCALER, state, {})
        note = "" if same else "its scale, as a GradScaler's"
        found["scaler"] = Outcome("scaler", "exact" if same else "derived", note)
    for path, item in aux.items():
        name = path.removeprefix(CARRIED)
        if not path.startswith(CARRIED) or not _SMALL.match(name):
            continue
        rank = _RANDOM.match(name)
        if rank and ranks is not None and int(rank[1]) >= ranks:
            found[path] = Outcome(path, "dropped", f"there are {ranks} ranks")
            continue
        made.write(name, item.value)
        found[path] = Outcome(path, "exact", "the file as it was")
    if sources and ranks is not None and max(sources) + 1 < ranks:
        path = f"{CARRIED}random_states_{max(sources) + 1}.pkl"
        note = f"ranks from {max(sources) + 1} on keep the generators that they start with"
        found[path] = Outcome(path, "reseeded", note)
    return found
