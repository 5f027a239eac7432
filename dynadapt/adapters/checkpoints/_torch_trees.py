"""State dicts of modules and optimizers in the making: laid out from keys alone, then made as trees.

The forms are those of `_torch_state`, with parameters numbered as `torch.optim.Optimizer.state_dict` does:
through all groups, in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._pickle import Ordered, StoredTensor
from dynadapt.adapters.checkpoints._repickle import tensor
from dynadapt.adapters.checkpoints._rows import Laid
from dynadapt.adapters.checkpoints._state_parts import Parts
from dynadapt.adapters.checkpoints._torch_groups import NAMES
from dynadapt.adapters.checkpoints._torch_state import BUFFERS, EXTRA_STATE, PLAIN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynadapt.adapters.checkpoints._plain import Lifting
    from dynadapt.protocols import AuxItem, FileTarget
    from dynadapt.vps.keys import Key, KeySpec

__all__ = ["EXTRA_PATH", "StateTrees"]

EXTRA_PATH = "user/extra state of "
"""Aux items of modules' extra states are called so, and go into the module's state dict."""


class StateTrees(Parts):
    """What files will hold as state dicts: the model's in `model`, the optimizer's in `optimizer`.

    Both may be one file. `optimizer` is None where only weights are wanted, `model` where others lay
    them out.
    """

    def __init__(
        self, x: FileTarget, keys: Sequence[KeySpec], model: str | None, optimizer: str | None
    ) -> None:
        self.laid = Laid()
        for path in filter(None, (model, optimizer)):
            self.laid.rows.setdefault(path, [])
            self.laid.storages.setdefault(path, {})
        self._tensors: dict[Key, StoredTensor] = {}
        super().__init__(x, keys, optimizer=optimizer is not None)
        if model is not None:
            for spec in (*self.weights, *self.buffers, *self.extras):
                self._lay(model, spec)
        if optimizer is not None:
            for spec in self.states:
                self._lay(optimizer, spec)

    def _lay(self, path: str, spec: KeySpec) -> None:
        if spec.presence == "none":
            self.laid.keys[spec.key] = spec
            return
        storage = str(len(self.laid.storages.get(path, ())))
        self.laid.whole(path, spec, storage)
        self._tensors[spec.key] = tensor(storage, spec.dtype, spec.shape)

    def model(self, aux: Mapping[str, AuxItem], lifting: Lifting) -> Ordered:
        """The module's state dict; the names of a tied tensor share it, as they do in the model."""
        found = Ordered()
        for spec in (*self.weights, *self.buffers):
            first = self.first.get(spec.key.name, spec.key.name)
            for name in sorted((spec.key.name, *spec.aliases), key=lambda n: n != first):
                found[name] = self._tensors[spec.key]
        for path, item in aux.items():
            if path.startswith(EXTRA_PATH):
                module = path.removeprefix(EXTRA_PATH)
                module = "" if module == "model" else f"{module}."
                found[f"{module}{EXTRA_STATE}"] = lifting.lifted(item.value)
        names = [name for spec in self.buffers for name in (spec.key.name, *spec.aliases)]
        found.attributes = {BUFFERS: names}
        return found

    def copies(self) -> dict[str, dict[str, StoredTensor]]:
        """The model's other copies by label, each as a state dict."""
        found: dict[str, dict[str, StoredTensor]] = {}
        for spec in self.extras:
            if spec.key in self._tensors:
                own = found.setdefault(spec.key.slot.removeprefix("extra:"), {})
                own[spec.key.name] = self._tensors[spec.key]
        return found

    def optimizer(
        self,
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        lifting: Lifting,
        *,
        by_name: bool = False,
    ) -> dict[str, Any]:
        """The optimizer's state dict, and beside it the names that its numbers stand for.

        With names in place of the numbers if `by_name`, as FSDP gathers it.
        """
        names = [name for own in self.groups for name in own]
        plain = set(aux[PLAIN].value) if PLAIN in aux else set()
        slots: dict[str, dict[str, StoredTensor]] = {}
        for spec in self.states:
            if spec.key in self._tensors:
                slots.setdefault(spec.key.name, {})[spec.key.slot] = self._tensors[spec.key]
        state: dict[int | str, dict[str, Any]] = {}
        for number, name in enumerate(names):
            id_ = self.first.get(name, name) if by_name else number
            entry: dict[str, Any] = {
                label: value if label in plain else lifting.number(value)
                for label, value in sorted(scalars.get(name, {}).items(), reverse=True)
            }
            if entry or name in slots:
                state[id_] = entry | slots.get(name, {})
        groups, at = [], 0
        for own, hyper in zip(self.groups, self.hypers(aux), strict=True):
            numbers = list(range(at, at + len(own)))
            members = [self.first.get(name, name) for name in own] if by_name else numbers
            groups.append({**hyper, "params": members})
            at += len(own)
        tree = {"state": state, "param_groups": groups}
        return tree if by_name else {**tree, NAMES: self.groups}
