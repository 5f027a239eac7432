"""What of two checkpoints differs beside their tensors: steps, hyperparameters, counts, the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynadapt.adapters._hyper import RUNS
from dynadapt.adapters._loss_scales import as_grad_scaler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dynadapt.protocols import AuxItem, Described

__all__ = ["aux_differences", "equal"]


def aux_differences(
    a: Described, b: Described, called: Mapping[str, str], ignore_missing: bool
) -> dict[str, tuple[Any, Any]]:
    """By path, the two values of what differs. `called` are the names that parameters of b have in a.

    With `ignore_missing` only what both have is compared.
    """
    found: dict[str, tuple[Any, Any]] = {}
    other = {called.get(name, name): values for name, values in b.scalars.items()}
    for name in sorted({*a.scalars, *other}):
        here, there = a.scalars.get(name, {}), other.get(name, {})
        for label in sorted({*here, *there}):
            x, y = here.get(label), there.get(label)
            first = {x, y} == {None, 0}  # of what has not been stepped yet
            if not equal(x, y) and not first and not (ignore_missing and None in (x, y)):
                found[f"{name}/{label}"] = (x, y)
    one, two = _flat_aux(a.aux, {}), _flat_aux(b.aux, called)
    scales = [item for own in (a.aux, b.aux) for item in own if item.path == "scaler"]
    if len({item.value["class"] for item in scales}) == 2:  # one scale as two classes keep it
        one["scaler"], two["scaler"] = (as_grad_scaler(item)[0] for item in scales)
    steps = {v["step"] for own in (a, b) for v in own.scalars.values() if "step" in v}
    for path in sorted({*one, *two}):
        x, y = one.get(path), two.get(path)
        missing = path not in one or path not in two
        # A format that counts steps, and one that leaves them to the optimizer.
        derived = path == "counters/global_steps" and {x, y} == {None, max(steps, default=None)}
        # Not every class has such an entry, and not every file says the class.
        absent = path == "optimizer" or (path.startswith("param_groups/") and not (x or y))
        told = not derived and not (missing and (ignore_missing or absent))
        if told and not equal(x, y):
            found |= dict(_unlike_entries(path, x, y))
    return found


def _unlike_entries(path: str, x: Any, y: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Of two dicts the entries that differ, by path; of anything else both values."""
    if not (isinstance(x, dict) and isinstance(y, dict)):
        yield path, (x, y)
        return
    for key in sorted({*x, *y}):
        if not equal(x.get(key), y.get(key)):
            yield from _unlike_entries(f"{path}/{key}", x.get(key), y.get(key))


def equal(x: Any, y: Any) -> bool:
    """Whether two values are the same; a NaN, which some optimizers start with, is like another.

    >>> nan = float("nan")
    >>> equal({"lr": [nan, 1]}, {"lr": [nan, 1.0]}), equal(nan, 1.0)
    (True, False)
    """
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(equal(x[key], y[key]) for key in x)
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(map(equal, x, y))
    return bool(x == y or (x != x and y != y))


def _flat_aux(items: tuple[AuxItem, ...], called: Mapping[str, str]) -> dict[str, Any]:
    """Hyperparameters by parameter, counts by name, the rest by path; how a job was configured is no state.

    A count is one wherever a format keeps it, and one that is zero is as good as none.
    """
    found: dict[str, Any] = {}
    for item in items:
        name = item.path.removeprefix("user/")
        if item.path == "behaviour":
            continue
        if item.path == "counters":
            found |= {f"counters/{n}": _plain(v) for n, v in item.value.items() if v != 0}
        elif name != item.path and type(item.value) is int:
            found |= {f"counters/{name}": item.value} if item.value else {}
        elif item.path == "param_groups":
            for group in item.value:
                hyper = {n: _plain(v) for n, v in group["hyper"].items() if n not in RUNS}
                for member in (called.get(n, n) for n in group["names"]):
                    found |= {f"param_groups/{member}/{n}": value for n, value in hyper.items()}
        else:
            found[item.path] = _plain(item.value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
