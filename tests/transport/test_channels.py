"""Both channels pass the one scenario, between threads and between processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from dynadapt.errors import ChannelError, DynadaptError
from dynadapt.testing.channels import check_channel
from dynadapt.testing.seats import run_threads
from dynadapt.transport.channels._same_host import CARD, OFF, Nonce, can_read, read_memory
from dynadapt.transport.channels.memory import MemoryChannel, MemoryHub
from dynadapt.transport.channels.process_group import ProcessGroupChannel

if TYPE_CHECKING:
    from tests._ranks import Pool


@pytest.mark.parametrize("count", [1, 2, 5])
def test_memory_channel(count: int) -> None:
    hubs: dict[str, MemoryHub] = {}
    seats = [3 * i for i in range(count)]

    def seat(me: int) -> None:
        check_channel(
            lambda name, timeout: MemoryChannel(hubs.setdefault(name, MemoryHub()), me), me, seats
        )

    run_threads([lambda me=me: seat(me) for me in seats])


def test_memory_channel_tells_a_wrong_length() -> None:
    hub = MemoryHub()

    def sends() -> None:
        posted = MemoryChannel(hub, 0).post([], [(1, torch.zeros(3, dtype=torch.uint8))])
        posted.wait(5)

    def receives() -> None:
        MemoryChannel(hub, 1).post([(0, torch.zeros(4, dtype=torch.uint8))], []).wait(5)

    with pytest.raises(ChannelError, match="3 bytes where 4"):
        run_threads([sends, receives])


def _gloo(rank: int, world_size: int, unread: tuple[int, ...]) -> None:
    """The scenario; the memory of some ranks is not to be read by others."""
    import torch.distributed as dist

    if rank in unread:
        os.environ[OFF] = "0"
    try:
        _gloo_scenario(rank, world_size, unread)
    finally:
        os.environ.pop(OFF, None)
    total = torch.ones(1)
    dist.all_reduce(total)  # the training group is untouched
    assert total.item() == world_size


def _gloo_scenario(rank: int, world_size: int, unread: tuple[int, ...]) -> None:
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    seats = tuple(10 + 2 * i for i in range(world_size))
    seat = seats[rank]

    def factory(name: str, timeout: float) -> ProcessGroupChannel:
        own = dist.PrefixStore(f"channel-test/{unread}/{name}", store)
        channel = ProcessGroupChannel(own, seat, seats, timeout=timeout)
        others = {10 + 2 * i for i in range(world_size) if i not in unread} - {seat}
        assert set(channel._readable) in ({*others} if rank not in unread else set(), set())
        assert set(channel._readable) == channel._readers
        return channel

    check_channel(factory, seat, seats)


@pytest.mark.parametrize("unread", [(), (2,)])
def test_process_group_channel(ranks4: Pool, unread: tuple[int, ...]) -> None:
    """Between ranks that read one another's memory, that do not, and both in one channel."""
    ranks4.run(_gloo, unread)


def _stretches(*arrays: np.ndarray) -> np.ndarray:
    return np.array([[array.ctypes.data, array.nbytes] for array in arrays], np.int64)


def test_memory_is_read_in_more_stretches_than_one_call_takes() -> None:
    there = [np.full(1 + i % 5, i % 251, np.uint8) for i in range(2500)]
    there[7] = there[2400] = np.empty(0, np.uint8)
    here = [np.zeros_like(array) for array in there]
    try:
        read_memory(os.getpid(), _stretches(*there), _stretches(*here))
    except OSError:
        pytest.skip("this system does not let processes read one another's memory")
    assert all(map(np.array_equal, here, there))


def test_memory_that_is_gone_is_an_error() -> None:
    """In the middle of what is read, too: nothing short passes for whole."""
    there, here = np.ones(8, np.uint8), np.zeros(16, np.uint8)
    places = np.array([[there.ctypes.data, 8], [8, 8]], np.int64)
    with pytest.raises(OSError, match=r"address|permitted|read|implemented"):
        read_memory(
            os.getpid(), places, np.array([[here.ctypes.data, 8], [here.ctypes.data + 8, 8]])
        )
    with pytest.raises(OSError, match=r"process|permitted|read|implemented"):
        read_memory(2**22 + 1, _stretches(there), _stretches(here[:8]))


def test_a_card_of_another_host_or_process_is_not_believed() -> None:
    nonce = Nonce()
    card = nonce.card()
    assert can_read(card) in {os.getpid(), 0}
    assert not can_read(card[:-1] + bytes([card[-1] ^ 1]))
    assert not can_read(bytes([card[0] ^ 1]) + card[1:])
    assert not can_read(bytes(CARD))


def test_an_unknown_backend_is_refused() -> None:
    from torch.distributed import HashStore

    with pytest.raises(DynadaptError) as caught:
        ProcessGroupChannel(HashStore(), 0, (0,), backend="smoke")
    assert caught.value.reason == "unknown-backend"
