"""Worlds of 1 to 8 ranks out of two warm pools: starting a pool costs more than all that runs in it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tests import _ranks

if TYPE_CHECKING:
    from collections.abc import Callable


def run(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Call `fn(rank, size, *args)` on `size` ranks; the results, by rank."""
    pool = _ranks.pool(4 if size <= 4 else 8)
    return pool.run(_within, size, fn, args, timeout=timeout)[:size]


def error_of(rank: int, world: int, fn: Callable[..., Any], *args: Any) -> str:
    """What a framework says no with: a run that fails would cost the pool."""
    try:
        fn(rank, world, *args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _within(rank: int, world: int, size: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Make the default group a smaller one, before any framework has seen it."""
    import torch
    import torch.distributed as dist

    # ZeRO-3 leaves its padding as it finds the memory, and what is freed there was full of marks.
    # With this, torch fills new memory with NaN.
    torch.use_deterministic_algorithms(True)
    _ranks.at_reset(lambda: torch.use_deterministic_algorithms(False))
    if size != world:
        dist.destroy_process_group()
        if rank >= size:
            return None
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        store = dist.PrefixStore("part", _ranks.store())
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=_ranks.GROUP_TIMEOUT
        )
        dist.barrier()
    return fn(rank, size, *args)
