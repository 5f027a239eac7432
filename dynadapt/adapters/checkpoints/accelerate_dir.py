"""Folders of `Accelerator.save_state`: plain and DDP, DeepSpeed, FSDP sharded or in one file.

Accelerate has a form for each way to train. The model and its optimizer lie in them as in the formats that
the frameworks have; beside them are schedule, loss scale, random generators, samplers and the objects that
a script registered (see `_accelerate_files`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dynadapt.adapters.checkpoints import _job_forms as forms
from dynadapt.adapters.checkpoints._accelerate_files import NAMES, form_of, refuse_several
from dynadapt.adapters.checkpoints._deepspeed_open import described
from dynadapt.adapters.checkpoints._fsdp_read import read_ranks
from dynadapt.adapters.checkpoints._job_dir import JobDir
from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from pathlib import Path

    from dynadapt.protocols import Described, FileSource

__all__ = ["AccelerateDir"]


class AccelerateDir(JobDir):
    """Reads what `save_state` writes, writes what `load_state` reads."""

    name = "accelerate"
    names = NAMES

    @staticmethod
    def holds(path: Path) -> bool:
        """A folder with files of Accelerate's names."""
        return form_of(path) is not None

    def read(self, path: Path, said: FileSource) -> Described:
        """See `Format.describe`."""
        form = form_of(path)
        refuse_several(path)
        small = NAMES.read(path)
        if form == "deepspeed":
            own = described(path / NAMES.deepspeed, said)
            layout = own.written.partition("/")[2]
            own = replace(own, written=f"accelerate/{layout}" if layout else "")
        elif form == "sharded":
            own = forms.read_sharded(path, "accelerate")
        elif form == "full":
            written = "accelerate/fsdp1:dp=1"
            own = forms.read_whole(path, [forms.FULL], NAMES.optimizer, said, written)
        elif form == "plain":
            model = forms.SAFE if (path / forms.SAFE).is_file() else forms.TORCH
            own = forms.read_whole(path, [model], NAMES.optimizer, said, "accelerate")
        elif not (path / forms.SHARDED_OPTIMIZER).is_dir():
            own = read_ranks(path, said)
        else:
            cause = "has a model in a file of each rank and its optimizer in another form"
            fix = "save it with SHARDED_STATE_DICT or FULL_STATE_DICT"
            raise Refused([Finding("unsupported-format", str(path), cause, fix)])
        paths = {item.path for item in small}
        aux = (*(item for item in own.aux if item.path not in paths), *small)
        return replace(own, aux=aux)
