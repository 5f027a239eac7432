"""How much memory there is, and what a migration will need of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dynadapt.errors import Finding
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynadapt.protocols import Described
    from dynadapt.vps.keys import KeySpec

__all__ = ["available_bytes", "state_to_make", "too_little"]


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
    """Bytes that `prepare` will have to make on this seat, from its own rows.

    Optimizer state that is not there, and every buffer on the meta device.
    """
    present = {spec.key for spec in target.specs if spec.presence != "none"}
    held: dict[str, int] = {}
    dtypes = {spec.key.name: spec.dtype for spec in target.specs if spec.key.slot == "param"}
    for row in target.rows:
        if row.key.slot == "param":
            held[row.key.name] = held.get(row.key.name, 0) + row.box.volume
    ghosts = (buffer for buffer in target.buffers.values() if buffer.device == "meta")
    needed = sum(buffer.numel * itemsize(buffer.dtype) for buffer in ghosts)
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
