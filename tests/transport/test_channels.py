"""Both channels pass the one scenario, between threads and between processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from dynadapt.errors import ChannelError, DynadaptError
from dynadapt.testing.channels import check_channel
from dynadapt.testing.seats import run_threads
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


def _gloo(rank: int, world_size: int) -> None:
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    seats = tuple(10 + 2 * i for i in range(world_size))
    seat = seats[rank]

    def factory(name: str, timeout: float) -> ProcessGroupChannel:
        own = dist.PrefixStore(f"channel-test/{name}", store)
        return ProcessGroupChannel(own, seat, seats, timeout=timeout)

    check_channel(factory, seat, seats)
    total = torch.ones(1)
    dist.all_reduce(total)  # the training group is untouched
    assert total.item() == world_size


def test_process_group_channel(ranks4: Pool) -> None:
    ranks4.run(_gloo)


def test_an_unknown_backend_is_refused() -> None:
    from torch.distributed import HashStore

    with pytest.raises(DynadaptError) as caught:
        ProcessGroupChannel(HashStore(), 0, (0,), backend="smoke")
    assert caught.value.reason == "unknown-backend"
