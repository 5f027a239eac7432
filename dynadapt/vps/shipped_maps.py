"""Tensor maps that ship with the package, by the name of what they are for."""

from __future__ import annotations

from dynadapt.vps.tensor_map import TensorMap, rename

__all__ = ["PEFT", "SHIPPED"]

PEFT = TensorMap(
    (
        rename(r"re:base_model\.model\.(.*)", r"\1", required=False),
        rename(r"re:(.*)\.base_layer\.(.*)", r"\1.\2", required=False),
        rename(r"re:(.*)\.modules_to_save\.[^.]+\.(.*)", r"\1.\2", required=False),
    )
)
"""A model of `peft` under the names of its base model.

`base_model.model.up.base_layer.weight` is `up.weight`, and a copy in `modules_to_save` takes the place of
the module that it is a copy of. Adapters keep their names: `up.lora_A.default.weight`; so do the frozen
originals that such copies stand in for: `head.original_module.weight`.
"""

SHIPPED = {"peft": PEFT}
"""Name -> map."""
