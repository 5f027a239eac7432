"""Flows through links, in small steps: when the chunks of all seats are done.

Every seat walks its own chunks in order and has at most two of them posted; a transfer runs once both
of its ends have posted its chunk. Each link shares its bandwidth evenly among the transfers that run
over it, and what a transfer cannot use (its other end is slower) goes to the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Run", "run_chunks"]

ROUNDS = 4
"""How often spare bandwidth is handed on within one step."""


class Run(NamedTuple):
    """`end` and `start` (chunks,) seconds: when the first byte of a chunk left, when its last arrived."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    seconds: float


def run_chunks(
    amounts: NDArray[np.float32],
    near: NDArray[np.bool_],
    near_speed: float,
    far_speed: float,
    latency: float,
    step: float,
) -> Run:
    """Simulate `amounts` (chunks, seats, seats) bytes, from row to column, until all are done.

    `near` (seats, seats) tells which pairs share a host; speeds are bytes a second of a seat, one way;
    `latency` is seconds that each message takes of both of its ends; `step` is the shortest step in
    seconds, the error of each chunk's end.
    """
    count, seats, _ = amounts.shape
    overhead = (np.where(near, near_speed, far_speed) * latency).astype(np.float32)
    left = amounts + np.where(amounts > 0, overhead, np.float32(0))
    part = (left.sum(2) + left.sum(1)) > 0  # (chunks, seats): whether a seat has a part in a chunk
    # Per seat the number of its next chunk from any chunk on; `count` after the last.
    following = np.full((count + 2, seats), count)
    for chunk in range(count - 1, -1, -1):
        following[chunk] = np.where(part[chunk], chunk, following[chunk + 1])
    me = np.arange(seats)
    current = following[0].copy()
    after = following[np.minimum(current + 1, count), me]
    start, end = np.full(count, np.nan), np.full(count, np.nan)
    clock = 0.0
    empty = np.zeros((1, seats, seats), np.float32)
    left = np.concatenate([left, empty])
    while (current < count).any():
        flows = []
        for own in (current, after):
            both = (own[:, None] == current) | (own[:, None] == after)
            flows.append(np.where(both & (own < count)[:, None], left[own, me], 0))
        rates = _rates(flows[0], flows[1], near, near_speed, far_speed)
        with np.errstate(divide="ignore", invalid="ignore"):
            soonest = min(
                float(np.min(np.where(rate > 0, flow / rate, np.inf)))
                for flow, rate in zip(flows, rates, strict=True)
            )
        dt = max(soonest, step)
        for own, flow, rate in zip((current, after), flows, rates, strict=True):
            begun = np.unique(own[(rate > 0).any(1)])
            start[begun] = np.where(np.isnan(start[begun]), clock, start[begun])
            left[own, me] -= np.minimum(flow, rate * dt) * (flow > 0)
        clock += dt
        while True:
            open_ = np.minimum(current, count)
            done = (left[open_, me].max(1) <= 1) & (left[open_, :, me].max(1) <= 1)
            done &= current < count
            if not done.any():
                break
            for chunk in np.unique(current[done]):
                end[chunk] = clock
            current = np.where(done, after, current)
            after = np.where(done, following[np.minimum(after + 1, count), me], after)
    return Run(start, end, clock)


def _rates(
    first: NDArray[np.float32],
    second: NDArray[np.float32],
    near: NDArray[np.bool_],
    near_speed: float,
    far_speed: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Bytes a second of every flow: even shares of both ends' links, spare capacity handed on."""
    total = (np.zeros_like(first), np.zeros_like(second))
    for kind, speed in ((near, near_speed), (~near, far_speed)):
        runs = [(flow > 0) & kind for flow in (first, second)]
        out = np.full(len(near), speed, np.float32)
        into = np.full(len(near), speed, np.float32)
        for _ in range(ROUNDS):
            leaving = runs[0].sum(1) + runs[1].sum(1)
            coming = runs[0].sum(0) + runs[1].sum(0)
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.minimum((out / leaving)[:, None], into / coming)
            share = np.nan_to_num(share, posinf=0.0)
            for rate, run in zip(total, runs, strict=True):
                rate += share * run
            used = share * (runs[0].astype(np.int64) + runs[1])
            out, into = out - used.sum(1), into - used.sum(0)
            spare = (out > 0.01 * speed)[:, None] & (into > 0.01 * speed)
            runs = [run & spare for run in runs]
            if not any(run.any() for run in runs):
                break
    return total
