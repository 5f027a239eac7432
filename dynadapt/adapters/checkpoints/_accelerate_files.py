"""The files of `Accelerator.save_state`, by name: which form a folder has, and the small files in it.

The names are those of accelerate/utils/constants.py and accelerate/checkpointing.py, 1.15. Small files are
carried as they are: most are objects that only Accelerate can make of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dynadapt.adapters.checkpoints._deepspeed_files import tag_folder
from dynadapt.adapters.checkpoints._job_forms import FULL, OPTIMIZER, SAFE, SHARDED, TORCH, Names
from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NAMES", "form_of", "refuse_several"]

NAMES = Names(
    deepspeed="pytorch_model",
    optimizer=OPTIMIZER,
    scheduler="scheduler.bin",
    scaler="scaler.pt",
    small=re.compile(
        r"^(random_states_\d+\.pkl|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin"
        r"|custom_checkpoint_\d+\.pkl|scheduler_[1-9]\d*\.bin)$"
    ),
    random=re.compile(r"^random_states_(\d+)\.pkl$"),
    carried="user/accelerate/",
    ticks=True,
)
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
    if tag_folder(path / NAMES.deepspeed) == path / NAMES.deepspeed:
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


def refuse_several(root: Path) -> None:
    """Raises `Refused` (`several-models`) for the folder of several models."""
    if more := [p.name for p in sorted(root.iterdir()) if _MORE.match(p.name)]:
        cause = f"holds several models or optimizers ({more[0]}): one is read"
        fix = "save each with an Accelerator of its own"
        raise Refused([Finding("several-models", str(root), cause, fix)])
