"""Files that each rank of an FSDP job wrote by itself, `pytorch_model_fsdp_rank0.bin` and so on: read only.

`LOCAL_STATE_DICT` and `SHARDED_STATE_DICT` of FSDP1, and state dicts of DTensors, saved with `torch.save`.
See `_fsdp_read`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynadapt.adapters.checkpoints._format import Format
from dynadapt.adapters.checkpoints._fsdp_read import rank_files, read_ranks
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import alone

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dynadapt.protocols import Agree, AuxItem, Described, FileSource, FileTarget, Outcome
    from dynadapt.vps.keys import KeySpec

__all__ = ["FsdpFiles"]


class FsdpFiles(Format):
    """Reads a folder with a file, or several, of every rank."""

    name = "fsdp"

    @staticmethod
    def holds(path: Path) -> bool:
        """A folder with files whose names end in `rank0.bin`, `rank_0.pt` or the like."""
        return bool(rank_files(path))

    def read(self, path: Path, said: FileSource) -> Described:
        """See `Format.describe`."""
        return read_ranks(path, said)

    def prepare(self, x: FileTarget, keys: tuple[KeySpec, ...]) -> Described:
        """Raises `Refused`."""
        cause, fix = "files of each rank are read, not written", "write dcp/fsdp2:dp=N"
        raise Refused([Finding("unsupported-format", self.name, cause, fix)])

    def finish(
        self,
        x: FileTarget,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Never reached: `prepare` refuses."""
        agree()
        return ()
