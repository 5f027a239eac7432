"""What a seat will hold, promised before a byte moves: computed from the real buffers, refused if too much.

A promise counts bytes beyond what the seat held when the migration began, with both sides as they were.
Its phases follow one another, so its peak is the largest of them, not their sum:

- the source is parked: the host copies, less what their originals gave back;
- states that `prepare` made, with the scratch of the source's certificate;
- the same, with the staging of the move, and in `release` what is freed and made round by round;
- the same, with the scratch of the target's certificate.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from dynadapt.elastic.deferred import gives_back
from dynadapt.errors import Finding
from dynadapt.transport.executor import staging_needed
from dynadapt.transport.hashing import scratch_bytes
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.elastic.run import Run
    from dynadapt.protocols import Buffer

__all__ = ["Promise", "over_limit", "parking", "promised"]


@dataclass(frozen=True)
class Promise:
    """One seat's figures in bytes; `peak` is where its state lies, `host` the same on the host.

    On a CPU seat both are one pool, and equal. `made` are states that `prepare` makes, `parked` host
    copies of a parked source, `staging` the move's own memory, `scratch` that of a certificate.
    """

    peak: int
    host: int
    made: int
    parked: int
    staging: int
    scratch: int

    def to_json(self) -> dict[str, int]:
        """The figures by name."""
        return asdict(self)


def parking(buffers: Mapping[str, Buffer]) -> tuple[int, int, int]:
    """What parking does to the host: bytes copied, the most beyond before, and what stays beyond.

    On a CPU seat what is freed is host memory, too; of a CUDA seat nothing comes back to the host.
    """
    copied = most = beyond = 0
    for buffer in buffers.values():
        nbytes = buffer.numel * itemsize(buffer.dtype)
        copied += nbytes
        beyond += nbytes
        most = max(most, beyond)
        if buffer.device == "cpu" and gives_back(buffer):
            beyond -= nbytes
    return copied, most, beyond


def promised(run: Run) -> Promise:
    """This seat's promise, once its chunks are cut. No communication."""
    made = run.own_target.allocated if run.own_target is not None else 0
    device = run.device()
    own = [s for s in (run.own_source, run.own_target) if s is not None]
    scratch = max((scratch_bytes(side.specs) for side in own), default=0)
    source, target = run.source_storage(), run.target_storage()
    wire = device  # what `agree` settles on where all seats have a device of their own
    if run.release is not None:
        peak, staging = run.release.peak(run.matched, source, target, wire, made, scratch)
        return Promise(max(peak, 0), max(peak, 0), made, 0, staging, scratch)
    staging = staging_needed(run.chunk_list, run.matched, source, target, wire)
    copied, most, beyond = run.parking
    if device == "cpu":
        peak = max(most, beyond + made + max(staging, scratch))
        return Promise(peak, peak, made, copied, staging, scratch)
    return Promise(
        max(made + staging - copied, 0), max(most, beyond + scratch), made, copied, staging, scratch
    )


def over_limit(promises: Mapping[int, Mapping[str, int]], limit: int | None) -> list[Finding]:
    """A finding for each seat that would hold more than the user's `max_extra_bytes`."""
    found = []
    for seat, promise in sorted(promises.items()):
        most = max(promise["peak"], promise["host"])
        if limit is None or most <= limit:
            continue
        parts = ", ".join(
            f"{promise[name]:,} {what}"
            for name, what in (
                ("made", "of new optimizer state"),
                ("parked", "of host copies"),
                ("staging", "of staging"),
                ("scratch", "for certificates"),
            )
            if promise[name]
        )
        cause = f"it would hold {most:,} bytes more than now ({parts}), the limit is {limit:,}"
        fix = "raise max_extra_bytes, set a smaller budget, or let mode be 'release'"
        found.append(Finding("over-limit", f"seat {seat}", cause, fix))
    return found
