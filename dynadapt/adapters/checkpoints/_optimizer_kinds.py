"""Which optimizer a param group belongs to, by its entries: state dicts do not name the class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["FACTORED", "SCALARS", "family_of", "family_of_slots", "family_told", "slots_of"]

#: Entries of a state that are a number to their optimizer, whatever the parameter's shape.
SCALARS = frozenset({"step", "mu_product", "eta", "mu"})

#: Adafactor's slots, which have not their parameter's shape.
FACTORED = frozenset({"row_var", "col_var", "variance"})

_BY_ENTRY = (
    ("ns_coefficients", "Muon"),
    ("beta2_decay", "Adafactor"),
    ("momentum_decay", "NAdam"),
    ("amsgrad", "Adam"),
    ("bias_correction", "Adam"),
    ("nesterov", "SGD"),
    ("centered", "RMSprop"),
    ("lr_decay", "Adagrad"),
    ("rho", "Adadelta"),
)


def family_of(group: Mapping[str, Any]) -> str | None:
    """The update rule whose entries these are, by torch's class; None if they are nobody's alone.

    >>> family_of({"lr": 0.1, "amsgrad": False}), family_of({"lr": 0.1})
    ('Adam', None)
    """
    for entry, family in _BY_ENTRY:
        if entry in group:
            return family
    if "betas" not in group:
        return None
    if "eps" not in group:
        return "Lion"
    return "RAdam" if "decoupled_weight_decay" in group else "Adamax"


def family_of_slots(slots: Iterable[str]) -> str | None:
    """The update rule that keeps these states, where a framework's own optimizers leave no other.

    >>> family_of_slots({"param", "exp_avg", "exp_avg_sq"}), family_of_slots({"param"})
    ('Adam', None)
    """
    states = frozenset(slots) - {"param", "compute", "buffer"}
    return {
        frozenset({"exp_avg", "exp_avg_sq"}): "Adam",
        frozenset({"momentum_buffer"}): "SGD",
        frozenset({"exp_avg"}): "Lion",
    }.get(states)


def family_told(groups: Iterable[Mapping[str, Any]], slots: Iterable[str]) -> str | None:
    """The update rule of groups that keep these states: of a class that nobody knows the states tell more.

    >>> family_told([{"betas": (0.9, 0.99), "eps": 1e-8, "correct_bias": True}], {"exp_avg", "exp_avg_sq"})
    'Adam'
    >>> family_told([{"betas": (0.9, 0.99), "momentum_decay": 4e-3}], {"exp_avg", "exp_avg_sq"})
    'NAdam'
    """
    states = frozenset(slot for slot in slots if not slot.startswith("extra:"))
    known = [(family, group) for group in groups if (family := family_of(group)) is not None]
    fits = [family for family, group in known if slots_of(group, (1, 1)).keys() == states]
    by_states = family_of_slots(states)
    return next(iter([*fits, *([by_states] if by_states else []), *(f for f, _ in known)]), None)


def slots_of(group: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The state tensors of a parameter that was trained in the group, with their shapes.

    Empty where the optimizer has none, or is not known.

    >>> slots_of({"momentum": 0.9, "nesterov": False}, (2,)), slots_of({"lr": 0.1}, (2,))
    ({'momentum_buffer': (2,)}, {})
    """
    family = family_of(group) or ""
    if family == "Adafactor" and len(shape) > 1:
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    momentum = ("momentum_buffer",) if group.get("momentum") else ()
    adam = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group.get("amsgrad") else ()))
    slots = {
        "Adam": adam,
        "NAdam": adam,
        "RAdam": adam,
        "RMSprop": ("square_avg", *momentum, *(("grad_avg",) if group.get("centered") else ())),
        "SGD": momentum,
        "Muon": ("momentum_buffer",),
        "Adafactor": ("variance",),
        "Adagrad": ("sum",),
        "Adadelta": ("square_avg", "acc_delta"),
        "Adamax": ("exp_avg", "exp_inf"),
        "Lion": ("exp_avg",),
    }
    return dict.fromkeys(slots.get(family, ()), shape)
