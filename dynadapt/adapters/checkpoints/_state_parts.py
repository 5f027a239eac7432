"""What a training state's keys are to a torch module and its optimizer: parameters, buffers, groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._names import as_asked, first_names, natural
from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynadapt.protocols import AuxItem, FileTarget
    from dynadapt.vps.keys import KeySpec

__all__ = ["Parts"]


class Parts:
    """Keys sorted in the model's order: `weights`, `buffers`, optimizer `states`, `extras` (an EMA).

    `groups` are the canonical names of each group's members; none where no optimizer is wanted. `first`
    is the name that torch has for one, of a tied parameter the first of the model's, where it is known.
    Raises `Refused` (`groups`) for states of what is in no group.
    """

    def __init__(self, x: FileTarget, keys: Sequence[KeySpec], *, optimizer: bool) -> None:
        place = {name: i for i, name in enumerate(x.order)}
        held = [
            as_asked(spec, x.options)
            for spec in keys
            if spec.kind in {"parameter", "buffer"} and spec.key.slot != "compute"
        ]
        held.sort(key=lambda s: (place.get(s.key.name, len(place)), s.order, natural(s.key.name)))
        self.weights = [spec for spec in held if spec.kind == "parameter"]
        self.buffers = [spec for spec in held if spec.kind == "buffer"]
        states = [spec for spec in keys if spec.kind == "state"]
        self.extras = [spec for spec in states if spec.key.slot.startswith("extra:")]
        self.states = [spec for spec in states if not spec.key.slot.startswith("extra:")]
        self._by_any = {n: s.key.name for s in self.weights for n in (s.key.name, *s.aliases)}
        self.first = first_names(x, self.weights)
        self.groups = self._grouped(x) if optimizer else []
        if findings := self._homeless():
            raise Refused(findings)

    def _homeless(self) -> list[Finding]:
        """States of what is in no group: `state_dict` has no number for them."""
        members = {name for own in self.groups for name in own}
        lost = sorted(
            {s.key.name for s in self.states if s.presence != "none"} - members
            if self.groups
            else ()
        )
        cause = "has optimizer states and is in no param group"
        return [Finding("groups", name, cause, "list every one in a group") for name in lost]

    def _grouped(self, x: FileTarget) -> list[list[str]]:
        """As the target says, else as the source has them."""
        if x.groups:
            return [
                [self._by_any[name] for name in own if name in self._by_any] for own in x.groups
            ]
        trained = [spec for spec in self.weights if spec.trainable]
        numbers = sorted({spec.group for spec in trained})
        return [[s.key.name for s in trained if s.group == number] for number in numbers]

    def hypers(self, aux: Mapping[str, AuxItem]) -> list[dict[str, Any]]:
        """The hyperparameters of each group: of its first member's, or of the empty group's in its place."""
        told = aux["param_groups"].value if "param_groups" in aux else []
        by_name = {
            self._by_any.get(name, name): group["hyper"]
            for group in told
            for name in group["names"]
        }
        found = []
        for index, own in enumerate(self.groups):
            hyper = next((by_name[name] for name in own if name in by_name), None)
            if hyper is None and not own and len(told) == len(self.groups):
                hyper = told[index]["hyper"]
            found.append(dict(hyper or {}))
        return found
