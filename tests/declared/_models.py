"""Models that are nothing but named tensors: a layout depends on names, shapes and order alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from numpy.typing import NDArray
    from torch import nn


@dataclass(frozen=True)
class Tensors:
    """Shapes by dotted name, in the order of `named_parameters()`; some frozen, some tied.

    `tied` maps another name of a tensor to the one in `shapes`.
    """

    shapes: Mapping[str, tuple[int, ...]]
    frozen: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def trained(self) -> list[str]:
        """What an optimizer is given: neither frozen nor empty."""
        return [n for n, shape in self.shapes.items() if n not in self.frozen and prod(shape)]

    def module(
        self, values: Mapping[str, NDArray[Any]] | None = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        """The tensors as a tree of modules, with values."""
        import torch
        from torch import nn

        root = nn.Module()
        for name, shape in self.shapes.items():
            full = torch.zeros(shape) if values is None else torch.from_numpy(values[name]).clone()
            param = nn.Parameter(full.to(dtype or torch.float32))
            param.requires_grad = name not in self.frozen
            _place(root, name, param)
        for name, first in self.tied.items():
            _place(root, name, root.get_parameter(first))
        return root


def _place(root: nn.Module, name: str, param: nn.Parameter) -> None:
    from torch import nn

    module = root
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    module.register_parameter(leaf, param)


#: Odd sizes, a tensor of one element, an empty one, a frozen one, and one that is tied. No scalar:
#: neither DeepSpeed nor FSDP takes one.
ODD = Tensors(
    {
        "embed.weight": (11, 5),
        "norm.empty": (0, 3),
        "layers.0.weight": (7, 3),
        "layers.0.bias": (7,),
        "layers.1.cube": (3, 2, 5),
        "layers.1.frozen": (4, 3),
        "layers.1.one": (1,),
        "layers.2.weight": (2, 3),
        "head.bias": (11,),
    },
    frozen=("layers.1.frozen",),
    tied={"head.weight": "embed.weight"},
)

#: Fewer elements than most worlds have ranks.
TINY = Tensors({"a": (3,), "b": (1,), "c": (1, 2)})

#: Sizes that ranks divide, so that there is no padding at all.
EVEN = Tensors({"up.weight": (16, 8), "up.bias": (16,), "down.weight": (8, 16), "down.bias": (8,)})
