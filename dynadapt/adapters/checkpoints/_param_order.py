"""Which parameter each entry of an optimizer's state dict is, where nothing but its place says so.

torch numbers the parameters of an optimizer through its groups, as they were given to it. What a file
does tell: the model's parameters in the model's order, the shape of an entry that has a state, sometimes
the entry's own copy of the parameter. Entries that are alike are taken to stand in the model's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["names_in_flats", "names_of_entries"]

Shape = tuple[int, ...]

FIX = (
    "give the optimizer named parameters (torch.optim keeps their names), or save with ZeRO stage 1; "
    "or give the names of each group, --order FILE with groups (groups=)"
)


def names_of_entries(
    groups: Sequence[Sequence[Shape | None]],
    params: Mapping[str, Shape],
    where: str,
    like: Callable[[int, str], bool] | None = None,
) -> list[list[str | None]]:
    """The name of each entry of each group; None for one that is not known and has no state.

    `groups` are the shapes of entries, None where no state tells it; `params` the model's parameters,
    in its order. `like(entry, name)` says whether the entry, by its number through all groups, has the
    values of a parameter. Raises `Refused` (`ambiguous-order`).

    >>> names_of_entries([[(2,), None], [(3,)]], {"a": (2,), "b": (3,), "c": (4,)}, "x")
    [['a', 'c'], ['b']]
    >>> names_of_entries([[None, (3,)]], {"a": (2,), "b": (3,)}, "x")
    [['a', 'b']]
    """
    flat = [(number, shape) for number, own in enumerate(groups) for shape in own]
    names = list(params)
    whole = len(groups) == 1 and len(flat) == len(names) and like is None
    if whole and all(e[1] in {None, params[n]} for e, n in zip(flat, names, strict=True)):
        return [[*names]]
    alike: dict[Shape, list[str]] = {}
    for name, shape in params.items():
        alike.setdefault(shape, []).append(name)
    entries_of: dict[Shape, list[int]] = {}
    unknown: list[int] = []
    for entry, (_, known) in enumerate(flat):
        if known is None:
            unknown.append(entry)
        else:
            entries_of.setdefault(known, []).append(entry)
    found: dict[int, str] = {}
    findings: list[Finding] = []
    for shape, entries in entries_of.items():
        group_of = {entry: flat[entry][0] for entry in entries}
        for some, own in _parts(group_of, alike.get(shape, []), like):
            one_group = len({group_of[entry] for entry in some}) == 1
            pairs = list(zip(some, own, strict=False))
            fits = like is None or all(like(*pair) for pair in pairs)
            if len(some) == len(own) and one_group and fits:
                found |= pairs
                continue
            cause = "the optimizer does not name its parameters, and " + (
                f"{len(some)} of its entries may each be one of "
                f"{', '.join(own[:4])}{', ...' if len(own) > 4 else ''}"
                if own
                else f"none of the model's fits its entry {some[0]} of {list(shape)}"
            )
            findings.append(Finding("ambiguous-order", where, cause, FIX))
    if findings:
        raise Refused(findings)
    taken = set(found.values())
    left = [name for name in names if name not in taken]
    if len(left) == len(unknown) and len({flat[entry][0] for entry in unknown}) == 1:
        found |= zip(unknown, left, strict=True)
    named = iter([found.get(entry) for entry in range(len(flat))])
    return [[next(named) for _ in own] for own in groups]


def _parts(
    entries: Mapping[int, int], names: Sequence[str], like: Callable[[int, str], bool] | None
) -> list[tuple[list[int], list[str]]]:
    """Entries (with their groups) and names of one shape, in parts with nothing in common, in order."""
    one_group = len(set(entries.values())) == 1
    as_they_stand = one_group and len(entries) == len(names)
    if like is None or (as_they_stand and all(map(like, entries, names))):
        return [([*entries], [*names])]
    part_of: dict[str, tuple[list[int], list[str]]] = {}
    parts: dict[int, tuple[list[int], list[str]]] = {}
    for entry in entries:
        fits = [name for name in names if like(entry, name)]
        own: tuple[list[int], list[str]] = ([entry], [])
        for part in {id(part_of[n]): part_of[n] for n in fits if n in part_of}.values():
            own = (own[0] + part[0], own[1] + part[1])
            del parts[id(part)]
        own = (own[0], list(dict.fromkeys(own[1] + fits)))
        parts[id(own)] = own
        part_of |= dict.fromkeys(own[1], own)
    place = {name: i for i, name in enumerate(names)}
    return [(sorted(some), sorted(own, key=place.__getitem__)) for some, own in parts.values()]


def names_in_flats(
    sizes: Sequence[int],
    params: Mapping[str, int],
    where: str,
    like: Callable[[int, int, str], bool],
) -> list[list[str]]:
    """The names of the parameters that lie in flats of so many elements, one after another.

    `params` are elements by name, in the model's order; `like(flat, at, name)` says whether the values
    from index `at` on are a parameter's. Raises `Refused` (`ambiguous-order`).

    >>> names_in_flats([3, 2], {"a": 2, "b": 2, "c": 1}, "x", lambda f, at, n: (f == 1) == (n == "b"))
    [['a', 'c'], ['b']]
    """
    names = list(params)
    free = dict.fromkeys(names)
    found: list[list[str]] = []
    for flat, size in enumerate(sizes):
        own = _filled(flat, size, [n for n in names if n in free], params, like)
        if own is None:
            cause = (
                f"no run of the model's parameters has the values of its flat {flat} of {size:,}"
            )
            raise Refused([Finding("ambiguous-order", where, cause, FIX)])
        for name in own:
            del free[name]
        found.append(own)
    return found


def _filled(
    flat: int,
    size: int,
    names: Sequence[str],
    params: Mapping[str, int],
    like: Callable[[int, int, str], bool],
) -> list[str] | None:
    """The first choice of names, in order, that fills a flat; tried with the earliest name first."""
    choice: list[int] = []
    at, start, left = 0, 0, 1000 + 100 * len(names)
    while at < size and left > 0:
        left -= 1
        for index in range(start, len(names)):
            numel = params[names[index]]
            if 0 < numel <= size - at and like(flat, at, names[index]):
                choice.append(index)
                at, start = at + numel, index + 1
                break
        else:
            if not choice:
                return None
            last = choice.pop()
            at, start = at - params[names[last]], last + 1
    return [names[index] for index in choice] if at == size else None
