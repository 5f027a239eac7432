"""What a plan costs on a named link: the busiest seat's bytes over its bandwidth, plus its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.transport.plan import SeatPlan

__all__ = ["LINKS", "Link", "price"]


@dataclass(frozen=True, slots=True)
class Link:
    """What one seat can send and, at the same time, receive: bytes a second; seconds a message."""

    bytes_per_second: float
    seconds_per_message: float


#: Nominal per-seat bandwidths, one way. `gloo`: loopback of a small machine, shared by its ranks.
LINKS: Mapping[str, Link] = {
    "gloo": Link(0.9e9, 50e-6),
    "ethernet-25g": Link(3.1e9, 20e-6),
    "infiniband-200g": Link(25e9, 5e-6),
    "infiniband-400g": Link(50e9, 5e-6),
    "nvlink-h100": Link(450e9, 3e-6),
}


def price(plans: Mapping[int, SeatPlan], link: str) -> float:
    """Seconds that the busiest seat needs on a named link, both directions at once.

    >>> price({}, "gloo")
    0.0
    """
    speed = LINKS[link]
    return max(
        (
            max(plan.bytes_in, plan.bytes_out) / speed.bytes_per_second
            + max(len(plan.receives), len(plan.sends)) * speed.seconds_per_message
            for plan in plans.values()
        ),
        default=0.0,
    )
