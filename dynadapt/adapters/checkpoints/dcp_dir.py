"""Torch distributed checkpoints (`torch.distributed.checkpoint`): `.metadata` and `__RANK_N.distcp`.

Read is what `dcp.save` writes of `get_state_dict` of FSDP2, FSDP1, DDP and plain models, or of any other
dict of tensors. The format does not say which tensors are tied and which are buffers: see `_dcp_read`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._dcp_metadata import metadata_files
from dynadapt.adapters.checkpoints._dcp_read import Reading
from dynadapt.adapters.checkpoints._format import Format
from dynadapt.protocols import FileTarget

if TYPE_CHECKING:
    from dynadapt.protocols import Described

__all__ = ["DcpDir"]


class DcpDir(Format):
    """Reads and writes a folder that `torch.distributed.checkpoint` saves to and loads from."""

    name = "dcp"

    @staticmethod
    def accepts(x: Any) -> bool:
        """A folder with `.metadata`, or with `.distcp` files and without it."""
        if isinstance(x, FileTarget):
            return x.format == "dcp"
        if not isinstance(x, str | Path) or not Path(x).is_dir():
            return False
        return bool(metadata_files(Path(x))) or any(Path(x).glob("*.distcp"))

    def read(self, path: Path) -> Described:
        """See `Format.describe`."""
        return Reading(path).described()
