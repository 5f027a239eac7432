"""What the nested dict that was saved as a distributed checkpoint is: a model, an optimizer, and the rest.

People save it under any names, `{"app": {"model": ..., "optim": ...}}`, or a model's state dict alone. An
optimizer is known by its form (`state` and `param_groups`, nested or flattened by
`flatten_optimizer_state_dict`), the model by the names that the optimizer trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._dcp_metadata import Entry
from dynadapt.errors import Finding, Refused
from dynadapt.vps.keys import canonical_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dynadapt.adapters.checkpoints._dcp_metadata import Names

__all__ = ["Optimizer", "Saved", "sorted_out"]

_MODEL = ("model", "module", "state_dict", "model_state_dict")

Value = Any
"""A leaf that is read: a number, a string, a list... (`Entry` of a tensor until then)."""


@dataclass
class Optimizer:
    """States by parameter and slot (tensors are `Entry`), and per group its names and the rest."""

    states: dict[str, dict[str, Value]] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Value]]] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """Every parameter that it has."""
        return {*self.states, *(name for names, _ in self.groups for name in names)}

    @property
    def is_numbered(self) -> bool:
        """Whether it has numbers in place of names, as `optimizer.state_dict()` has."""
        own = self.names
        return bool(own) and all(name.isdecimal() for name in own)

    def renamed(self, groups: Sequence[Sequence[str]]) -> Optimizer:
        """With these names in place of its groups' numbers."""
        name_of = {
            number: name
            for (numbers, _), names in zip(self.groups, groups, strict=True)
            for number, name in zip(numbers, names, strict=True)
        }
        return Optimizer(
            {name_of[n]: own for n, own in self.states.items() if n in name_of},
            [([name_of[n] for n in own], hyper) for own, hyper in self.groups],
        )


@dataclass
class Saved:
    """A model's tensors by name, copies of it by label, the optimizer, and what else was saved."""

    model: dict[str, Entry] = field(default_factory=dict)
    copies: dict[str, dict[str, Entry]] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    rest: dict[Names, Value] = field(default_factory=dict)


_Node = dict[Any, Any]


def sorted_out(entries: Mapping[str, Entry], value_of: Callable[[Entry], Any]) -> Saved:
    """Sort the entries; `value_of` reads one that is no tensor. Raises `Refused`."""
    tree: _Node = {}
    for entry in entries.values():
        _put(tree, entry, entry if entry.dtype else value_of(entry))
    optimizers: list[_Node] = []
    models: dict[Names, dict[str, Entry]] = {}
    saved = Saved()
    for names, node in _nodes(tree, ()):
        if _is_optimizer(node):
            optimizers.append(node)
            continue
        flat = {k: v for k, v in node.items() if _in_flat(k)}
        if flat and any(str(k).startswith("param_groups.") for k in flat):
            optimizers.append(flat)
            node = {k: v for k, v in node.items() if k not in flat}
        tensors = {canonical_name(str(k)): v for k, v in node.items() if isinstance(v, Entry)}
        if tensors:
            models[names] = tensors
        for key, value in node.items():
            if isinstance(value, _Leaf):
                saved.rest |= {(*names, key): dict(value)}
            elif not isinstance(value, Entry | dict):
                saved.rest |= {(*names, key): value}
    read = [_optimizer(node, models) for node in optimizers]
    chosen = _choose(models, read)
    if chosen is not None:
        saved.model = models.pop(chosen)
    for names, tensors in models.items():
        if saved.model and tensors.keys() <= saved.model.keys() and names:
            saved.copies[str(names[-1])] = tensors
        else:
            saved.rest |= {(*names, name): entry for name, entry in tensors.items()}
    if read:
        saved.optimizer = _united(read)
    return saved


def _put(tree: _Node, entry: Entry, value: Any) -> None:
    """Put a leaf where it was in the dict that was saved; lists are dicts of their indexes."""
    node = tree
    for part in entry.names[:-1]:
        below = node.setdefault(part, {})
        if not isinstance(below, dict) or isinstance(below, _Leaf):
            raise _bad(entry.name, "lies below another entry")
        node = below
    if entry.names[-1] in node:
        raise _bad(entry.name, "has the path of another entry")
    node[entry.names[-1]] = _Leaf(value) if isinstance(value, dict) else value


class _Leaf(dict):  # type: ignore[type-arg]
    """A dict that was saved as one object: not part of the tree."""


def _bad(name: str, cause: str) -> Refused:
    return Refused([Finding("bad-file", name, cause, "the metadata may be damaged")])


def _nodes(node: _Node, names: Names) -> Iterator[tuple[Names, _Node]]:
    """All dicts of the tree; of an optimizer nothing below."""
    yield names, node
    if _is_optimizer(node):
        return
    for key, value in node.items():
        if isinstance(value, dict) and not isinstance(value, _Leaf):
            yield from _nodes(value, (*names, key))


def _is_optimizer(node: _Node) -> bool:
    groups = node.get("param_groups")
    if isinstance(groups, list):
        return True
    return (
        isinstance(groups, dict)
        and bool(groups)
        and all(isinstance(k, int) and isinstance(v, dict) for k, v in groups.items())
    )


def _in_flat(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(("state.", "param_groups."))


def _optimizer(node: _Node, models: Mapping[Names, Mapping[str, Entry]]) -> Optimizer:
    if "param_groups" not in node:
        return _flattened(node, {name for own in models.values() for name in own})
    made = Optimizer()
    state = node.get("state")
    for name, own in (state if isinstance(state, dict) else {}).items():
        if not isinstance(own, dict):
            raise _bad(str(name), "its optimizer state is no dict")
        made.states[canonical_name(str(name))] = {str(k): v for k, v in own.items()}
    groups = node["param_groups"]
    for group in groups if isinstance(groups, list) else [groups[i] for i in sorted(groups)]:
        params = group.get("params") if isinstance(group, dict) else None
        if isinstance(params, dict):  # ids that are tensors: each an entry of its own
            params = list(params.values())
        if not isinstance(params, list | tuple):
            raise _bad("param_groups", "a group does not list its params")
        hyper = {str(k): v for k, v in group.items() if k != "params"}
        made.groups.append(([canonical_name(str(p)) for p in params], hyper))
    return made


def _flattened(node: _Node, known: set[str]) -> Optimizer:
    """`state.NAME.SLOT` and `param_groups.NAME.KEY`: groups are told by what their members have."""
    made = Optimizer()
    hyper: dict[str, dict[str, Any]] = {}
    for key, value in node.items():
        head, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        while canonical_name(name) not in known and "." in name:  # nested: Shampoo's
            name, _, inner = name.rpartition(".")
            last = f"{inner}.{last}"
        found = made.states if head == "state" else hyper
        found.setdefault(canonical_name(name), {})[last] = value
    for name, own in hyper.items():
        for names, other in made.groups:
            if own == other:
                names.append(name)
                break
        else:
            made.groups.append(([name], own))
    return made


def _choose(
    models: Mapping[Names, Mapping[str, Entry]], optimizers: list[Optimizer]
) -> Names | None:
    """Which dict of tensors is the model: it has what the optimizer trains, or its name, or most bytes."""
    if not models:
        return None

    def rank(names: Names) -> tuple[int, int, bool, int]:
        own = models[names]
        trained = max((len(o.names & own.keys()) for o in optimizers), default=0)
        last = str(names[-1]) if names else ""
        return trained, -_MODEL.index(last) if last in _MODEL else -9, not names, _size(own)

    best = max(models, key=rank)
    for optimizer in optimizers:
        mine = {n for n, own in models.items() if optimizer.names & own.keys()}
        if mine and best not in mine:
            cause = f"holds several models that are trained: {_told(best)} and {_told(min(mine))}"
            fix = "save each in a checkpoint of its own"
            raise Refused([Finding("unsupported-format", "the checkpoint", cause, fix)])
    return best


def _told(names: Names) -> str:
    return ".".join(map(str, names)) or "the root"


def _size(own: Mapping[str, Entry]) -> int:
    return sum(entry.nbytes for entry in own.values())


def _united(optimizers: list[Optimizer]) -> Optimizer:
    made = Optimizer()
    for each in optimizers:
        made.states |= each.states
        made.groups += each.groups
    return made
