"""Files that each rank of an FSDP job wrote by itself, `pytorch_model_fsdp_rank0.bin` and so on: read only.

`LOCAL_STATE_DICT` and `SHARDED_STATE_DICT` of FSDP1, and state dicts of DTensors, saved with `torch.save`.
See `_fsdp_read`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynadapt.adapters.checkpoints._format import ReadOnly
from dynadapt.adapters.checkpoints._fsdp_read import rank_files, read_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from dynadapt.protocols import Described, FileSource

__all__ = ["FsdpFiles"]


class FsdpFiles(ReadOnly):
    """Reads a folder with a file, or several, of every rank."""

    name = "fsdp"
    instead = ("files of each rank", "write dcp/fsdp2:dp=N")

    @staticmethod
    def holds(path: Path) -> bool:
        """A folder with files whose names end in `rank0.bin`, `rank_0.pt` or the like."""
        return bool(rank_files(path))

    def read(self, path: Path, said: FileSource) -> Described:
        """See `Format.describe`."""
        return read_ranks(path, said)
