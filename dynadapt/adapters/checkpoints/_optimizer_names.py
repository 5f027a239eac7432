"""Whose state is number 7? A torch optimizer numbers its parameters; their names are found again here.

Groups are nearly always filters over the model's parameters, so within each of them the numbers follow
the model's order. With the shapes of the states that leaves one way to deal the parameters to the
groups, or several: then nobody can tell, and nothing is guessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Shape", "dealt"]

Shape = tuple[int, ...]

MOST = 1 << 18
"""Partial ways that are looked at: more mean that shapes say next to nothing."""

_FIX = (
    "say the names: put param_names, a list of names for each group, beside 'state' and 'param_groups' "
    "of the optimizer's state dict and save it again, or give the model's order: "
    "--order FILE (order=) or --model CONFIG (model=)"
)


def dealt(
    groups: Sequence[Sequence[Shape | None]],
    params: Sequence[tuple[str, Shape]],
    where: str,
    *,
    ordered: bool = True,
) -> list[list[str]]:
    """The names of each group's members. A shape is None where there is no state to tell it.

    `params` are name and shape in the model's order; if not `ordered`, only shapes can tell. Raises
    `Refused`: `bad-file` where there is no way, `ambiguous-order` where there are several.

    >>> dealt([[(2, 2), None], [(2,)]], [("a", (2, 2)), ("b", (2,)), ("c", (2, 2))], "x")
    [['a', 'c'], ['b']]
    """
    count = sum(map(len, groups))
    if not count:
        return [[] for _ in groups]
    if count > len(params):
        cause = f"has {count} parameters in its groups, and the model has {len(params)}"
        raise Refused([Finding("bad-file", where, cause, "it is another model's optimizer")])
    if not ordered:
        return _by_shape(groups, params, where)
    layers = _ways(groups, params, where)
    final = tuple(map(len, groups))
    names: list[list[str]] = [[] for _ in groups]
    at = final
    for number in range(len(params) - 1, -1, -1):
        came = [
            (before, group)
            for before, group in _before(at, groups, params[number][1])
            if before in layers[number]
        ]
        if len(came) > 1:
            cause = f"cannot be told apart by order and shape, {params[number][0]} among them"
            raise Refused([Finding("ambiguous-order", where, f"its parameters {cause}", _FIX)])
        at, group = came[0]
        if group >= 0:
            names[group].append(params[number][0])
    return [own[::-1] for own in names]


Dealt = tuple[int, ...]
"""How many members of each group have been dealt."""


def _fits(shape: Shape, state: Shape | None) -> bool:
    return state is None or state == shape


def _before(
    at: Dealt, groups: Sequence[Sequence[Shape | None]], shape: Shape
) -> Iterator[tuple[Dealt, int]]:
    """What was dealt before a parameter of a shape led to `at`, and the group that took it, or -1."""
    yield at, -1
    for group, own in enumerate(groups):
        if at[group] and _fits(shape, own[at[group] - 1]):
            yield (*at[:group], at[group] - 1, *at[group + 1 :]), group


def _ways(
    groups: Sequence[Sequence[Shape | None]], params: Sequence[tuple[str, Shape]], where: str
) -> list[set[Dealt]]:
    """For each parameter, how many members of each group may have been dealt before it."""
    final = tuple(map(len, groups))
    left = len(params) - sum(final)
    layers: list[set[Dealt]] = [{(0,) * len(groups)}]
    looked = 0
    for number, (_, shape) in enumerate(params):
        found: set[Dealt] = set()
        for at in layers[-1]:
            if number + 1 - sum(at) <= left:
                found.add(at)
            for group, own in enumerate(groups):
                if at[group] < len(own) and _fits(shape, own[at[group]]):
                    found.add((*at[:group], at[group] + 1, *at[group + 1 :]))
        looked += len(found)
        if looked > MOST:
            cause = "its parameters have too few shapes to tell them apart"
            raise Refused([Finding("ambiguous-order", where, cause, _FIX)])
        layers.append(found)
    if final not in layers[-1]:
        cause = "has states of shapes that the model's parameters, in their order, do not have"
        raise Refused([Finding("bad-file", where, cause, "it is another model's optimizer")])
    return layers


def _by_shape(
    groups: Sequence[Sequence[Shape | None]], params: Sequence[tuple[str, Shape]], where: str
) -> list[list[str]]:
    """Without an order: a parameter is known if it alone has its shape."""
    owners: dict[Shape | None, list[str]] = {}
    for name, shape in params:
        owners.setdefault(shape, []).append(name)
    names: list[list[str]] = []
    for own in groups:
        names.append([])
        for state in own:
            found = owners.get(state, [])
            if len(found) != 1:
                told = "without a state" if state is None else f"of shape {list(state)}"
                cause = f"the weights are in no order, and a parameter {told} may be any of several"
                raise Refused([Finding("ambiguous-order", where, cause, _FIX)])
            names[-1].append(found[0])
    every = [name for own in names for name in own]
    if len(set(every)) < len(every):
        cause = "has more states of a shape than the model has parameters"
        raise Refused([Finding("bad-file", where, cause, "it is another model's optimizer")])
    return names
