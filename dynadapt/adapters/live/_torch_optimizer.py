"""The per-parameter state of a torch optimizer: read, made without a step, taken back, written.

A state is a dict of tensors shaped after the parameter (slots), of one-element entries (scalars) and
nothing else. States are made exactly as the optimizer's own first step would make them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from dynadapt.adapters._common import FACTORED, decided_names, fresh_state, optimizer_slots
from dynadapt.adapters._odd_tensors import odd_state
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dynadapt.vps.keys import KeySpec

__all__ = [
    "Member",
    "SourceStates",
    "StateMaker",
    "consolidated",
    "held_by",
    "read_state",
    "state_holder",
    "steps",
    "write_scalars",
]

Number = int | float

#: Entries with one element that are a number to their optimizer, whatever the parameter's shape.
_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})

#: Optimizers whose step fails without state, because they make it when they are built.
_EAGER = frozenset({"Adagrad"})


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of an optimizer: the canonical names of the tensors in it, itself, its group.

    Only a flat parameter has more than one name.
    """

    names: tuple[str, ...]
    parameter: torch.Tensor
    group: dict[str, Any]
    group_index: int


def state_holder(optimizer: Any) -> Any:
    """The optimizer that keeps the state: ZeroRedundancyOptimizer has one for its own part inside.

    Raises `Refused`: `unsupported-framework` for what is no torch optimizer, `unsupported-optimizer` for
    one that DDP steps during the backward.
    """
    if getattr(optimizer, "_overlap_with_ddp", False):
        cause = (
            "it steps within the backward, by a functional optimizer that has no state of this form"
        )
        fix = "build it without overlap_with_ddp"
        kind = f"{type(optimizer).__name__}(overlap_with_ddp=True)"
        raise Refused([Finding("unsupported-optimizer", kind, cause, fix)])
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        inner = getattr(optimizer, "optim", None)
        return inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    raise Refused(
        [
            Finding(
                "unsupported-framework",
                type(optimizer).__name__,
                "it is no torch.optim.Optimizer",
                "pass the torch optimizer inside it",
            )
        ]
    )


def consolidated(optimizer: Any) -> tuple[tuple[Any, str], ...]:
    """Where an optimizer keeps copies of all ranks' states, which a new state makes stale.

    ZeroRedundancyOptimizer's `consolidate_state_dict` leaves them for its next `state_dict`.
    """
    label = "_all_state_dicts"
    return ((optimizer, label),) if hasattr(optimizer, label) else ()


def steps(optimizer: Any) -> Callable[[torch.Tensor], bool]:
    """Whether an optimizer will use a parameter's gradient; without one, somebody may use any.

    What is outside its groups keeps the gradients of every backward, as `zero_grad` passes it by.
    """
    if optimizer is None:
        return lambda parameter: True
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return lambda parameter: id(parameter) in own


def held_by(holder: Any, members: Iterable[Member]) -> Iterator[Member]:
    """The members whose state the holder keeps on this rank."""
    groups = [] if holder is None else holder.param_groups
    own = {id(parameter) for group in groups for parameter in group["params"]}
    return (member for member in members if id(member.parameter) in own)


def read_state(optimizer: Any, member: Member) -> tuple[dict[str, torch.Tensor], dict[str, Number]]:
    """The tensors and the scalars of one parameter's state; both empty where there is none."""
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Number] = {}
    for label, value in (optimizer.state.get(member.parameter) or {}).items():
        if value is None:
            continue
        if finding := odd_state(member.names[0], label, value):
            raise Refused([finding])
        if isinstance(value, torch.Tensor) and not _is_scalar(label, value, member.parameter):
            tensors[label] = value
        elif not _is_real(value):
            continue  # an optimizer that was made under the meta device, and never stepped
        elif isinstance(value, torch.Tensor):
            scalars[label] = _number(label, _local(value).item())
        elif isinstance(value, int | float):
            scalars[label] = _number(label, value)
        else:
            raise Refused(
                [
                    Finding(
                        "unsupported-state",
                        f"{member.names[0]}/{label}",
                        f"the optimizer keeps a {type(value).__name__} there",
                        "only tensors and numbers can be moved",
                    )
                ]
            )
    return tensors, scalars


def _is_scalar(label: str, value: torch.Tensor, parameter: torch.Tensor) -> bool:
    if label in _SCALARS:
        return True
    if label in FACTORED:
        return False
    return value.numel() == 1 and value.shape != parameter.shape


def _number(label: str, value: Any) -> Number:
    """Steps are counted in whole numbers, whatever type their optimizer keeps them in."""
    if label == "step" and value == int(value):
        return int(value)
    return value if isinstance(value, int) else float(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _is_real(entry: Any) -> bool:
    """Whether a state's entry is a number or has memory."""
    return not (isinstance(entry, torch.Tensor) and _local(entry).is_meta)


class SourceStates:
    """What the source says of optimizer state, findable by every name of a tied parameter."""

    def __init__(self, keys: Iterable[KeySpec]) -> None:
        self.canonical: dict[str, str] = {}
        self._slots: dict[str, dict[str, str]] = {}
        self._decided: set[str] = set(decided_names(keys := tuple(keys)))
        for spec in keys:
            for name in (spec.key.name, *spec.aliases):
                self.canonical[name] = spec.key.name
            if spec.kind == "state" and not spec.key.slot.startswith("extra:"):
                self._slots.setdefault(spec.key.name, {})[spec.key.slot] = spec.presence

    def __bool__(self) -> bool:
        return bool(self._slots)

    def decides(self, *names: str) -> bool:
        """Whether the source says what state a parameter has, be it none."""
        return not self._decided.isdisjoint(names)

    def held(self, *names: str) -> dict[str, str]:
        """Slot -> presence of the slots that are there, be they zero; of several names the stronger."""
        found: dict[str, str] = {}
        for name in names:
            for slot, presence in self._slots.get(self.canonical.get(name, name), {}).items():
                if presence == "present" or (presence == "zero" and slot not in found):
                    found[slot] = presence
        return found


@dataclass
class StateMaker:
    """Gives a target optimizer the states that the source has, and can take them back."""

    optimizer: Any
    made_bytes: int = 0
    _before: dict[torch.Tensor, dict[str, Any] | None] = field(default_factory=dict)

    def findings(self, members: Iterable[Member], source: SourceStates) -> list[Finding]:
        """Why this optimizer cannot hold exactly the source's states; empty if it can."""
        return [finding for member in members for finding in self._problems(member, source)]

    def _problems(self, member: Member, source: SourceStates) -> list[Finding]:
        held = source.held(*member.names)
        if held.keys() & set(FACTORED) and isinstance(member.parameter, DTensor):
            cause = (
                "its factored state has no DTensor form: torch's own step fails on sharded tensors"
            )
            fix = "use it with whole parameters (plain or DDP), or another optimizer"
            kind = type(self.optimizer).__name__
            return [Finding("unsupported-optimizer", f"{member.names[0]} ({kind})", cause, fix)]
        states = read_state(self.optimizer, member)[0].items()
        own = [slot for slot, tensor in states if _is_real(tensor)]
        if optimizer_slots(self.optimizer, member.group) is not None or set(held) <= set(own):
            return []
        cause = "it has no state yet for what the source holds, and how it makes it is not known"
        fix = "take one step with the target first (its effect is overwritten)"
        return [Finding("unknown-optimizer", type(self.optimizer).__name__, cause, fix)]

    def make(self, members: Iterable[Member], source: SourceStates) -> None:
        """Make what is missing and drop what the source does not have; touches nothing else.

        A parameter whose state is no business of the source keeps it: else it was refused.
        """
        needed: dict[tuple[int, torch.Size], dict[str, Any]] = {}  # parameters mostly share shapes
        for member in members:
            if not source.decides(*member.names):
                continue
            held = source.held(*member.names)
            old: dict[str, Any] = self.optimizer.state.get(member.parameter) or {}
            if held:
                keep = {k: v for k, v in old.items() if held.get(k) != "zero" and _is_real(v)}
                at = (member.group_index, member.parameter.shape)
                if at not in needed:
                    like = torch.empty(member.parameter.shape, device="meta")
                    needed[at] = fresh_state(self.optimizer, member.group, like) or {}
                if needed[at].keys() - keep.keys():
                    self._replace(member.parameter, {**self._fresh(member), **keep})
            elif old and type(self.optimizer).__name__ in _EAGER:
                self._replace(member.parameter, self._fresh(member))
            elif old:
                self._replace(member.parameter, None)

    def _fresh(self, member: Member) -> dict[str, Any]:
        """A state as after the optimizer's own initialisation."""
        state = fresh_state(self.optimizer, member.group, member.parameter) or {}
        start = member.group.get("initial_accumulator_value", 0)
        if start and "sum" in state:
            _local(state["sum"]).fill_(start)
        return dict(state)

    def _replace(self, parameter: torch.Tensor, state: dict[str, Any] | None) -> None:
        states = self.optimizer.state
        old = states.get(parameter)
        self._before.setdefault(parameter, None if old is None else dict(old))
        if state is None:
            del states[parameter]
            return
        known = {id(value) for value in (old or {}).values()}
        self.made_bytes += sum(
            _local(value).nbytes
            for value in state.values()
            if isinstance(value, torch.Tensor) and id(value) not in known
        )
        states[parameter] = state

    def undo(self) -> None:
        """Put every state back that `make` replaced or dropped, and drop what it made."""
        for parameter, state in self._before.items():
            if state is None:
                self.optimizer.state.pop(parameter, None)
            else:
                self.optimizer.state[parameter] = state
        self._before.clear()
        self.made_bytes = 0


def write_scalars(
    optimizer: Any,
    members: Iterable[Member],
    source: SourceStates,
    scalars: Mapping[str, Mapping[str, Number]],
) -> tuple[Outcome, ...]:
    """Give each state its source's scalars, in the kind that this optimizer keeps them in.

    Raises `Refused` (`missing-key`) where a state needs one that the source does not have.
    """
    findings: list[Finding] = []
    written: set[str] = set()
    unused: set[str] = set()
    for member in members:
        given = _furthest(member, source, scalars)
        state: dict[str, Any] = optimizer.state.get(member.parameter) or {}
        own = [k for k in state if k in read_state(optimizer, member)[1]]
        unused |= given.keys() - own if state else set()
        if not source.held(*member.names):
            continue
        for label in own:
            if label not in given:
                cause = "the optimizer needs it, and the source does not hold it"
                findings.append(Finding("missing-key", f"{member.names[0]}/{label}", cause))
                continue
            state[label] = _as_kind(state[label], given[label])
            written.add(label)
    if findings:
        raise Refused(findings)
    exact = [Outcome(f"scalars/{label}", "exact") for label in sorted(written)]
    note = "the target's optimizer keeps no such number"
    return (*exact, *(Outcome(f"scalars/{x}", "dropped", note) for x in sorted(unused - written)))


def _furthest(
    member: Member, source: SourceStates, scalars: Mapping[str, Mapping[str, Number]]
) -> Mapping[str, Number]:
    """The source's scalars of a parameter; of several tensors, those of the one furthest on."""
    known = [scalars.get(source.canonical.get(name, name), {}) for name in member.names]
    return max(known, key=lambda entry: entry.get("step", 0))


def _as_kind(old: Any, value: Number) -> Any:
    if isinstance(old, torch.Tensor):
        with torch.no_grad():
            _local(old).fill_(value)
        return old
    return int(value) if isinstance(old, int) else float(value)
