"""Plain torch models: one process, DistributedDataParallel, and DTensor parameters on any mesh.

FSDP2, tensor parallelism, `replicate()` and their combinations are all DTensor parameters. How the
five methods go about it:

- `quiesce` refuses while a gradient that is yet to be used holds a value, then frees
  what an eval forward left gathered.
- `describe` reads the local tensors by mesh arithmetic; a plain tensor is whole on every rank.
- `prepare` makes the optimizer state that a fresh optimizer lacks, and drops what the source lacks.
- `finish` sets steps, hyperparameters and counters; no copy of a weight is kept between steps.
- `abandon` takes back what `prepare` made and puts back what it dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynadapt.adapters.live import _fsdp2
from dynadapt.adapters.live._torch_adapter import TorchAdapter
from dynadapt.adapters.live._torch_view import View, check_supported

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dynadapt.protocols import TrainState

__all__ = ["TorchModuleAdapter"]


class TorchModuleAdapter(TorchAdapter):
    """Reads and writes a `TrainState` whose model is a torch module, however it is sharded.

    >>> import torch
    >>> from dynadapt.protocols import TrainState
    >>> model = torch.nn.Linear(2, 3)
    >>> [str(spec.key) for spec in TorchModuleAdapter().describe(TrainState(model)).specs]
    ['weight/param', 'bias/param']
    """

    name = "torch_module"

    def _check_step_boundary(
        self, model: torch.nn.Module, stepped: Callable[[torch.Tensor], bool]
    ) -> None:
        check_supported(model)
        _fsdp2.check_step_boundary(model, stepped)

    def _reshard(self, model: torch.nn.Module) -> None:
        _fsdp2.reshard(model)

    def _view(self, state: TrainState) -> View:
        return View(state)
