"""Where DeepSpeed's one compiled operator lives: in this environment, not in the user's shared cache.

torch keeps compiled extensions in one folder per user and Python version, with a lock file. Two
environments would rebuild each other's, and a process killed while it holds the lock leaves it behind,
after which every later engine waits for ever.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

__all__ = ["environment"]

STALE = 300.0
"""Seconds after which a lock cannot be a compilation's: that takes half a minute."""


def environment() -> dict[str, str]:
    """Variables for processes that use DeepSpeed on the CPU; takes stale locks away on the way.

    A `TORCH_EXTENSIONS_DIR` of the user's own is respected. `PATH` gets this environment's tools
    (ninja) first.
    """
    own = Path(sys.prefix, "torch_extensions")
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if folder is None and sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        folder = str(own)
    tools = str(Path(sys.executable).parent)
    found = {
        "PATH": os.pathsep.join([tools, os.environ.get("PATH", "")]),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    if folder is not None:
        found["TORCH_EXTENSIONS_DIR"] = folder
        for lock in Path(folder).glob("*/lock"):
            if time.time() - lock.stat().st_mtime > STALE:
                lock.unlink(missing_ok=True)
    return found
