"""How much memory there is, what a migration will need, and state parked in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dynadapt.errors import Finding
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from dynadapt.protocols import Buffer, Described
    from dynadapt.vps.keys import KeySpec

__all__ = ["Parked", "Woken", "available_bytes", "is_parked", "state_to_make", "too_little"]


def available_bytes(device: str = "cpu") -> int | None:
    """Bytes free on a device; for the host, what the kernel and a cgroup limit leave. None: unknown."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(n.split()[1]) * 1024 for n in lines if n.startswith("MemAvailable:")]
        most = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if most != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            limits.append(max(int(most) - used, 0))
    except OSError:
        pass
    return min(limits) if limits else None


def state_to_make(source: Sequence[KeySpec], target: Described) -> int:
    """Bytes of optimizer state that `prepare` will have to make on this seat, from its own rows."""
    present = {spec.key for spec in target.specs if spec.presence != "none"}
    held: dict[str, int] = {}
    dtypes = {spec.key.name: spec.dtype for spec in target.specs if spec.key.slot == "param"}
    for row in target.rows:
        if row.key.slot == "param":
            held[row.key.name] = held.get(row.key.name, 0) + row.box.volume
    needed = 0
    for spec in source:
        if spec.kind == "state" and spec.moves and spec.key not in present:
            name = spec.key.name
            needed += held.get(name, 0) * itemsize(dtypes.get(name, spec.dtype))
    return needed


def too_little(
    what: str, needed: Mapping[int, int], free: Mapping[int, int | None], hosts: Mapping[int, str]
) -> list[Finding]:
    """A finding per host whose seats together need more than it has."""
    findings = []
    for host in sorted(set(hosts.values())):
        seats = [seat for seat, name in hosts.items() if name == host and seat in needed]
        known = [free[s] for s in seats if free.get(s) is not None]
        total = sum(needed[s] for s in seats)
        least = min((n for n in known if n is not None), default=None)
        if least is not None and total > least:
            findings.append(
                Finding(
                    "out-of-memory",
                    f"host {host}",
                    f"{what} needs {total:,} bytes on seats {seats}, {least:,} are free",
                    "free memory, set a smaller budget, or park the source",
                )
            )
    return findings


class _HostCopy:
    """A parked buffer, as the executor reads it."""

    device = "cpu"

    def __init__(self, dtype: str, host: torch.Tensor) -> None:
        self.dtype, self._host = dtype, host

    @property
    def numel(self) -> int:
        return self._host.numel()

    def tensor(self) -> torch.Tensor:
        return self._host

    def free(self) -> None:
        """Never freed by the executor."""

    def refill(self) -> None:
        """Never freed, so nothing to do."""


_parked: WeakKeyDictionary[Any, tuple[Buffer, ...]] = WeakKeyDictionary()
"""Model or engine -> the buffers it was left without when its state had moved away."""


def is_parked(model: Any) -> bool:
    """Whether a model's state was parked and moved away, so that it holds nothing."""
    return model in _parked


class Woken:
    """A parked model that is to be a target: its storage is made whole, with undefined content.

    It counts as parked until `settle`; `undo` frees it again. Does nothing for a model that is not.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._buffers = _parked[model] if is_parked(model) else ()
        for buffer in self._buffers:
            buffer.refill()

    def settle(self) -> None:
        """A state has arrived: the model holds one again."""
        if self._buffers:
            _parked.pop(self._model, None)

    def undo(self) -> None:
        """No state has arrived: nothing may be read from it."""
        for buffer in self._buffers:
            buffer.free()


class Parked:
    """A source whose buffers were copied to host memory and freed on their device.

    `buffers` reads from the copies; `restore` puts everything back where it was, bit for bit. While it
    is parked, the model is known to `is_parked`.
    """

    def __init__(self, model: Any, buffers: Mapping[str, Buffer]) -> None:
        self._origin = dict(buffers)
        self._model = model
        self.buffers: dict[str, Buffer] = {}
        self.nbytes = 0

    def park(self) -> None:
        """Copy and free, buffer by buffer; if that fails half-way, `restore` undoes what was done."""
        _parked[self._model] = tuple(self._origin.values())
        for name, buffer in self._origin.items():
            host = buffer.tensor().to("cpu", copy=True)
            self.nbytes += host.numel() * host.element_size()
            self.buffers[name] = _HostCopy(buffer.dtype, host)
            buffer.free()

    def restore(self) -> None:
        """Refill every buffer that was parked and copy its content back."""
        for name, copy in self.buffers.items():
            self._origin[name].refill()
            self._origin[name].tensor().copy_(copy.tensor())
        _parked.pop(self._model, None)
