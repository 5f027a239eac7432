"""How much more memory this process held while something ran: what a promise is compared with.

On the host it is anonymous memory: the kernel's own high-water mark where the process grew past it, and
samples in between otherwise. On CUDA it is the peak of torch's allocator.
"""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

from dynadapt.elastic.budget import anonymous_bytes

__all__ = ["Meter", "current_device"]

_EVERY = 0.004


def _high_water() -> int:
    """The most that was resident at once, files included."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(n.split()[1]) << 10 for n in lines if n.startswith("VmHWM:")), 0)


def current_device() -> str:
    """The CUDA device that this process has in use, else "cpu"."""
    import torch

    in_use = torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return f"cuda:{torch.cuda.current_device()}" if in_use else "cpu"


class Meter:
    """Measures from when it is made until `stop`.

    >>> meter = Meter("cpu")
    >>> meter.stop() is None or meter.stop() >= 0
    True
    """

    def __init__(self, device: str) -> None:
        self._device = device if device.startswith("cuda") else ""
        self._start = self._most = 0
        if self._device:
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
            return
        first = anonymous_bytes()
        self._known = first is not None
        self._start = self._most = first or 0
        self._mark = _high_water()
        self._ended = threading.Event()
        if self._known:
            threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self._ended.wait(_EVERY):
            self._most = max(self._most, anonymous_bytes() or 0)

    def stop(self) -> int | None:
        """Bytes held at most beyond those held when it began; None where that cannot be told."""
        if self._device:
            import torch

            return max(torch.cuda.max_memory_allocated(self._device) - self._start, 0)
        if not self._known:
            return None
        self._ended.set()
        now = anonymous_bytes() or 0
        self._most = max(self._most, now)
        mark = _high_water()
        if mark > self._mark:  # exact, but for what files were mapped or dropped meanwhile
            fields = Path("/proc/self/statm").read_text().split()
            self._most = max(self._most, mark - int(fields[2]) * mmap.PAGESIZE)
        return self._most - self._start
