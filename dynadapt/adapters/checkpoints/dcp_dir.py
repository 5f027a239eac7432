"""Torch distributed checkpoints (`torch.distributed.checkpoint`): `.metadata` and `__RANK_N.distcp`.

Read is what `dcp.save` writes of `get_state_dict` of FSDP2, FSDP1, DDP and plain models, or of any other
dict of tensors. The format does not say which tensors are tied and which are buffers: see `_dcp_read`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dynadapt.adapters.checkpoints._dcp_metadata import metadata_files
from dynadapt.adapters.checkpoints._dcp_read import Reading
from dynadapt.adapters.checkpoints._dcp_write import Writing
from dynadapt.adapters.checkpoints._format import Format
from dynadapt.adapters.checkpoints._making import Making
from dynadapt.protocols import Described, FileSource, FileTarget, alone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.protocols import Agree, AuxItem, Outcome
    from dynadapt.vps.keys import KeySpec

__all__ = ["DcpDir"]


class DcpDir(Format):
    """Reads and writes a folder that `torch.distributed.checkpoint` saves to and loads from."""

    name = "dcp"

    @staticmethod
    def holds(path: Path) -> bool:
        """A folder with `.metadata`, or with `.distcp` files and without it."""
        if not path.is_dir():
            return False
        return bool(metadata_files(path)) or any(path.glob("*.distcp"))

    def read(self, path: Path, said: FileSource) -> Described:
        """See `Format.describe`."""
        return Reading(path).described()

    def prepare(self, x: FileTarget, keys: tuple[KeySpec, ...]) -> Described:
        """Lay out the files of all ranks; raises `Refused` with everything that cannot be so written."""
        writing = Writing(x, keys)
        made = Making(Path(x.path), x.dry)
        rows = writing.into(made)
        x.made = (writing, made)
        return Described(tuple(writing.keys.values()), (), made.buffers, files=rows)

    def finish(
        self,
        x: FileTarget,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Write the frames of all chunks, steps, hyperparameters, the rest, and the metadata last."""
        agree()
        writing, made = x.made
        outcomes: tuple[Outcome, ...] = writing.seal(made, x.crcs, scalars, aux)
        return outcomes
