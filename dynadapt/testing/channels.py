"""One scenario that every channel passes. Each seat (a thread or a process) calls `check_channel`.

    def seat(session):
        check_channel(lambda name, timeout: MyChannel(name, ...), session.seat, session.seats)

The factory opens a fresh channel between all the seats; all of them open the same names in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from dynadapt.errors import ChannelError

if TYPE_CHECKING:
    from dynadapt.protocols import Channel

__all__ = ["ChannelFactory", "check_channel"]

ChannelFactory = Callable[[str, float], "Channel"]
"""`factory(name, timeout)`: this seat's end of the channel of that name."""

PATIENCE = 30.0
SIZES = (0, 1, 17, 4096, (64 << 10) - 1, 64 << 10, (1 << 20) + 3)
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
)


def check_channel(
    factory: ChannelFactory, seat: int, seats: Sequence[int], *, big: int = 17 << 20
) -> None:
    """Order, sizes, both directions at once, timeouts, aborts; raises `AssertionError`.

    `big` are the bytes that go each way between two seats at once: more than any socket buffer.
    """
    peers = [peer for peer in sorted(seats) if peer != seat]
    channel = factory("works", PATIENCE)
    _nothing(channel)
    _sizes(channel, seat, peers)
    _order(channel, seat, peers)
    _dtypes(channel, seat, peers)
    _both_ways(channel, seat, sorted(seats), big)
    _two_in_flight(channel, seat, peers)
    if peers:
        _silence(factory, seat, sorted(seats))
        _abort(factory, seat, sorted(seats))
        held = _abort_after_abort(factory, seat, sorted(seats))
        _sizes(channel, seat, peers)  # what broke those groups left this one alone
        del held
    channel.close()
    again = factory("again", PATIENCE)
    _sizes(again, seat, peers)
    again.close()


def _pattern(sender: int, receiver: int, number: int, nbytes: int) -> torch.Tensor:
    """Bytes that tell who sent what to whom."""
    start = (sender * 31 + receiver * 7 + number * 13) % 251
    return (torch.arange(nbytes, dtype=torch.int64).add_(start) % 251).to(torch.uint8)


def _exchange(channel: Channel, seat: int, peers: Sequence[int], sizes: Sequence[int]) -> None:
    """Messages of these sizes from everyone to everyone, checked."""
    receives = [(p, torch.full((n,), 255, dtype=torch.uint8)) for n in sizes for p in peers]
    sends = [(p, _pattern(seat, p, i, n)) for i, n in enumerate(sizes) for p in peers]
    channel.post(receives, sends).wait(PATIENCE)
    expected = [_pattern(p, seat, i, n) for i, n in enumerate(sizes) for p in peers]
    for (peer, has), should in zip(receives, expected, strict=True):
        assert torch.equal(has, should), f"seat {seat}: {has.numel()} bytes from seat {peer}"
    for i, (peer, sent) in enumerate(sends):
        same = torch.equal(sent, _pattern(seat, peer, i // len(peers), sent.numel()))
        assert same, f"seat {seat}: the channel changed what it sent to seat {peer}"


def _nothing(channel: Channel) -> None:
    channel.post([], []).wait(1.0)


def _sizes(channel: Channel, seat: int, peers: Sequence[int]) -> None:
    """Big, small and empty messages to many peers in one batch."""
    _exchange(channel, seat, peers, SIZES)


def _order(channel: Channel, seat: int, peers: Sequence[int]) -> None:
    """Equal sizes within a pair, so that only the order tells the messages apart."""
    _exchange(channel, seat, peers, (24,) * 20)
    for _ in range(10):
        _exchange(channel, seat, peers, (8,))


def _dtypes(channel: Channel, seat: int, peers: Sequence[int]) -> None:
    """Any tensor, as its bytes."""
    for dtype in DTYPES:
        values = torch.arange(40).remainder(2 if dtype == torch.bool else 8).to(dtype)
        into = {peer: torch.zeros_like(values) for peer in peers}
        receives = [(peer, tensor.view(torch.uint8)) for peer, tensor in into.items()]
        channel.post(receives, [(p, values.view(torch.uint8)) for p in peers]).wait(PATIENCE)
        for tensor in into.values():
            assert torch.equal(tensor.view(torch.uint8), values.view(torch.uint8)), dtype


def _both_ways(channel: Channel, seat: int, seats: Sequence[int], big: int) -> None:
    """Two seats send each other more than fits any buffer, at once."""
    if seat in seats[:2] and len(seats) > 1:
        _exchange(channel, seat, [peer for peer in seats[:2] if peer != seat], (big,))


def _two_in_flight(channel: Channel, seat: int, peers: Sequence[int]) -> None:
    """A batch is posted before the one before it is waited for; the sizes go down."""
    posted = []
    for number, nbytes in enumerate((100_000, 300, 70_000, 1)):
        into = [(p, torch.zeros(nbytes, dtype=torch.uint8)) for p in peers]
        out = [(p, _pattern(seat, p, number, nbytes)) for p in peers]
        posted.append((number, into, out, channel.post(into, out)))
    for number, into, _, batch in posted:
        batch.wait(PATIENCE)
        for peer, tensor in into:
            assert torch.equal(tensor, _pattern(peer, seat, number, tensor.numel()))


def _silence(factory: ChannelFactory, seat: int, seats: Sequence[int]) -> None:
    """The first seat waits for the last one, which never sends: the error names it, in time."""
    channel = factory("silence", 2.0)
    first, last = seats[0], seats[-1]
    if seat == first:
        began = time.monotonic()
        into = torch.zeros(8, dtype=torch.uint8)
        error = _fails(channel, [(last, into)], 0.4)
        assert error.peer == last, f"the error names seat {error.peer}, not {last}: {error}"
        assert time.monotonic() - began < 10
    else:
        time.sleep(0.8)
    channel.abort()


def _abort(factory: ChannelFactory, seat: int, seats: Sequence[int]) -> None:
    """The last seat gives up; all who wait for it fail long before their timeout."""
    channel = factory("abort", PATIENCE)
    last = seats[-1]
    if seat == last:
        time.sleep(0.2)
    else:
        began = time.monotonic()
        _fails(channel, [(last, torch.zeros(8, dtype=torch.uint8))], PATIENCE)
        assert time.monotonic() - began < PATIENCE / 3, "an abort must wake the others at once"
    channel.abort()


def _abort_after_abort(factory: ChannelFactory, seat: int, seats: Sequence[int]) -> object:
    """The first seat gives up, every other waits for the one before it only: each wakes the next.

    Returns what refers to a transfer and must not keep connections open.
    """
    channel = factory("aborts", PATIENCE)
    posted = None
    if seat == seats[0]:
        time.sleep(0.2)
    else:
        began = time.monotonic()
        before = seats[seats.index(seat) - 1]
        posted = channel.post([(before, torch.zeros(8, dtype=torch.uint8))], [])
        try:
            posted.wait(PATIENCE)
        except ChannelError:
            assert time.monotonic() - began < PATIENCE / 3, "whoever is woken must wake the others"
        else:
            raise AssertionError("a receive without a sender ended without an error")
    channel.abort()
    return posted


def _fails(
    channel: Channel, receives: Sequence[tuple[int, torch.Tensor]], timeout: float
) -> ChannelError:
    try:
        channel.post(receives, []).wait(timeout)
    except ChannelError as error:
        return error
    raise AssertionError("a receive without a sender ended without an error")
