"""Every live kind: a job in one layout of one framework, behind one face.

To add kinds, put a module into this folder. It is found by being there:

    @kind("hsdp", worlds=(4,))
    def _hsdp(model: Net, recipe: Recipe) -> Job:
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        return TorchJob(model, recipe(model), recipe)

That is all: the suite then moves plain -> kind -> plain, the nightly walk moves it from and to every other
kind, and docs/matrix.md has a row and a column for it. `model` is a fresh `jobs.Net`; make the optimizer
by `recipe(model)` after it is wrapped (or from `recipe.groups(model)`, `recipe.cls`, `recipe.defaults`).
`TorchJob` and `EngineJob` step and gather what torch and DeepSpeed gather; for anything else write a
subclass of `Job` with `step`, `evaluate` and `tensors`. What differs from other kinds is said in `Kind`'s
fields: `worlds`, `dtype`, `one_group`. A job whose tensors have other names sets `tensor_map`.

All ranks make the same calls.
"""

from __future__ import annotations

import importlib
import pkgutil

from tests.live.kinds._base import (
    KINDS,
    RECIPES,
    EngineJob,
    Job,
    Kind,
    Recipe,
    TorchJob,
    build,
    hidden,
    kind,
)

__all__ = [
    "KINDS",
    "RECIPES",
    "EngineJob",
    "Job",
    "Kind",
    "Recipe",
    "TorchJob",
    "build",
    "hidden",
    "kind",
]

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
