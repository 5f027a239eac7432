"""FullyShardedDataParallel in every strategy, with the original parameters and with flat ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.live import jobs
from tests.live.kinds._base import TorchJob, kind

if TYPE_CHECKING:
    from tests.live.kinds._base import Job, Recipe

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")


class Fsdp1Job(TorchJob):
    """Gathered by `summon_full_params` and `optim_state_dict`."""

    def tensors(self) -> jobs.Tensors:
        """FSDP1's gathers."""
        return jobs.fsdp1_tensors(self.model, self.optimizer, self.recipe.slots)


for _strategy in STRATEGIES:
    for _flat in (False, True):

        @kind(
            f"fsdp1-{_strategy}{'-flat' if _flat else ''}",
            worlds=(2, 4) if "HYBRID" in _strategy else (1, 2, 3, 4),
            one_group=_flat,
            about=f"FullyShardedDataParallel, use_orig_params={not _flat}",
        )
        def _fsdp1(
            model: jobs.Net, recipe: Recipe, strategy: str = _strategy, flat: bool = _flat
        ) -> Job:
            wrapped = jobs.fsdp1(model, strategy, orig_params=not flat)
            return Fsdp1Job(wrapped, recipe(wrapped), recipe)
