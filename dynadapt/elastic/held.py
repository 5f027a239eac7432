"""What still points at a source whose state has moved: hooks, lists for clipping, schedulers, averages.

Looked for from where a user can name things: globals of the user's own modules, variables of the
functions that run now, and what these reach through containers, closures and the user's own objects.
Optimizers, schedulers and averages are found wherever they are. Frameworks' insides are not looked
into, so what a wrapper or an engine keeps for itself is never told of.
"""

from __future__ import annotations

import functools
import gc
import site
import sys
import sysconfig
import types
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding
from dynadapt.protocols import TrainState, models_of, modules_of, parts_of
from dynadapt.vps.keys import canonical_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["points_at_source", "unused_gradients"]

DEPTH = 5
"""Steps from a variable to a parameter."""

MOST = 100_000
WIDE = 10_000
"""Objects looked at, in all and in one container: a list of a million samples is not to cost a second."""

_LIBRARIES = tuple(
    {
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["platstdlib"],
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)


def points_at_source(source: Any, target: Any) -> list[Finding]:
    """Warnings (reason `points-at-source`), each with a name that a user knows and the way out.

    Costs one walk over the user's own variables and one look at the type of every tracked object.

    >>> import torch
    >>> points_at_source(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    []
    """
    search = _Search(TrainState.of(source), TrainState.of(target))
    search.walk()
    return [*search.hooks(), *search.containers(), *search.objects()]


def unused_gradients(source: Any) -> list[Finding]:
    """Warnings (reason `unused-gradient`): gradients of parameters that no optimizer was given.

    They are no open step, as nobody will take them, and they do not move. `optimizer.zero_grad()` passes
    them by, so that a loop which forgot a parameter shows here.

    >>> import torch
    >>> model = torch.nn.Linear(2, 2)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> sgd = torch.optim.SGD([model.weight], lr=0.1)
    >>> [finding.where for finding in unused_gradients(TrainState(model, sgd))]
    ['bias']
    """
    findings = []
    for prefix, state in models_of(TrainState.of(source)).items():
        groups = getattr(state.optimizer, "param_groups", None)
        own = {id(parameter) for group in groups or () for parameter in group["params"]}
        for model in modules_of(state.model) if groups is not None else ():
            for raw, parameter in model.named_parameters():
                if id(parameter) not in own and parameter.grad is not None:
                    name = canonical_name(raw)
                    findings.append(
                        Finding(
                            "unused-gradient",
                            f"{prefix}/{name}" if prefix else name,
                            "it keeps a gradient, and is in no param group",
                            "give it to an optimizer, freeze it, or call model.zero_grad()",
                        )
                    )
    return findings


class _Search:
    def __init__(self, source: TrainState, target: TrainState) -> None:
        self.source, self.target = models_of(source), models_of(target)
        olds, news = self.source.values(), self.target.values()
        self.models = {type(getattr(state.model, "module", state.model)) for state in olds}
        live = {id(parameter) for state in news for parameter in _parameters(state)}
        self.old = {id(parameter) for state in olds for parameter in _parameters(state)} - live
        self.skip = {id(x) for x in (source, target, source.model, target.model)}
        for state in (*olds, *news):
            own = [state.model, state.optimizer, state.scheduler, state.scaler]
            names = ("optimizer", "lr_scheduler", "optim")
            engines = [getattr(x, name, None) for x in own for name in names]
            self.skip.update(id(x) for x in (*own, *engines, state, state.extra))
            self.skip.update(id(part) for part in parts_of(state.model))
            self.skip.update(id(module) for module in _modules(state.model))
        self.met: dict[
            int, tuple[int, Any]
        ] = {}  # how an object is reached: its holder, and a step
        self.lists: list[tuple[str, str, int]] = []

    def walk(self) -> None:
        """From every variable of the user's, breadth first; names what is met."""
        queue: deque[tuple[Any, int]] = deque()
        for value, name in _roots():
            self._meet(queue, value, 0, name, 0)
        while queue and len(self.met) < MOST:
            value, depth = queue.popleft()
            count = 0
            for part, how in _parts(value):
                if id(part) in self.old:
                    count += 1
                elif depth < DEPTH:
                    self._meet(queue, part, id(value), how, depth + 1)
            if count:
                self.lists.append((_kind(value), self._name(value) or "", count))

    def _meet(
        self, queue: deque[tuple[Any, int]], value: Any, holder: int, how: Any, depth: int
    ) -> None:
        """Remember how a value is reached, and look into it later."""
        if id(value) not in self.met and not isinstance(value, _PLAIN):
            self.met[id(value)] = (holder, how)
            if id(value) not in self.skip:
                queue.append((value, depth))

    def _name(self, value: Any) -> str | None:
        """How a value is reached from a variable; None where it was not met."""
        if id(value) not in self.met:
            return None
        holder, how = self.met[id(value)]
        parts = [how]
        while holder:
            holder, how = self.met[holder]
            parts.append(how)
        return "".join(p if isinstance(p, str) else f"[{p[0]!r}]"[:40] for p in reversed(parts))

    def containers(self) -> Iterator[Finding]:
        """What holds parameters."""
        for kind, name, count in self.lists:
            many = f"{count} parameters" if count > 1 else "a parameter"
            yield Finding(
                "points-at-source",
                f"{kind} of {many} in {name}" if kind != "object" else f"{many} in {name}",
                "these are the source's, which do not train on",
                "make it again from the target's parameters",
            )

    def hooks(self) -> Iterator[Finding]:
        """Hooks of the user's on the source's modules and parameters that the target does not have."""
        for model, source in self.source.items():
            target = self.target.get(model)
            there = set() if target is None else {place for place, _ in _hooks(target.model)}
            for place, function in _hooks(source.model):
                if place not in there and not _is_framework(function):
                    kind, on = place[0], place[2] + (f" of {model!r}" if model else "")
                    yield Finding(
                        "points-at-source",
                        f"{kind} {place[1]} on {on}",
                        "it is called for the source only",
                        "register it on the target, too",
                    )

    def objects(self) -> Iterator[Finding]:
        """Optimizers, schedulers and averages over the source, wherever they are."""
        from torch.optim import Optimizer
        from torch.optim.lr_scheduler import LRScheduler
        from torch.optim.swa_utils import AveragedModel

        kinds = {k for base in (Optimizer, LRScheduler, AveragedModel) for k in _subclasses(base)}
        found = [x for x in gc.get_objects() if type(x) in kinds and id(x) not in self.skip]
        states = self.source.values()
        old = {id(x) for s in states for x in (s.optimizer, getattr(s.model, "optimizer", None))}
        for each in found:
            cause = fix = ""
            if isinstance(each, Optimizer):
                held = (p for group in each.param_groups for p in group["params"])
                if any(id(p) in self.old for p in held):
                    cause, fix = "it steps the source's parameters", "make it for the target's"
            elif isinstance(each, LRScheduler):
                if id(each.optimizer) in old - {id(None)}:
                    cause = "it schedules the source's optimizer"
                    fix = "pass the target's as TrainState(scheduler=...) and step that one"
            elif type(each.module) in self.models and not self._is_extra(each):
                cause = "it averages the source's parameters, and its average did not move"
                fix = "pass its tensors as TrainState(extra=...) and update it from the target"
            if cause:
                name = self._name(each)
                kind = f"{type(each).__module__}.{type(each).__qualname__}"
                where = f"{kind} ({name})" if name else kind
                yield Finding("points-at-source", where, cause, fix)

    def _is_extra(self, average: Any) -> bool:
        """Whether the user passed the average's tensors with the source."""
        extras = [each for state in self.source.values() for each in state.extra.values()]
        given = {id(t) for tensors in extras for t in tensors.values()}
        storages = {t.untyped_storage()._cdata for tensors in extras for t in tensors.values()}
        return any(
            id(p) in given or p.untyped_storage()._cdata in storages for p in average.parameters()
        )


_PLAIN = (str, bytes, int, float, complex, type(None), types.ModuleType, type)


def _modules(model: Any) -> Iterator[Any]:
    for part in modules_of(model):
        modules = getattr(part, "modules", None)
        yield from () if modules is None else modules()


def _parameters(state: TrainState) -> Iterator[Any]:
    for part in modules_of(state.model):
        parameters = getattr(part, "parameters", None)
        if parameters is not None:
            yield from parameters()
    groups = getattr(state.optimizer, "param_groups", None) or ()
    for group in groups:
        yield from group["params"]


def _is_users(module: str, file: str | None) -> bool:
    """Whether a module is neither a library's nor this package's."""
    if module == "__main__":
        return True
    if module.partition(".")[0] == "dynadapt" or file is None:
        return False
    return not file.startswith(_LIBRARIES) and not file.startswith("<")


@functools.lru_cache(maxsize=4096)
def _users_module(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and _is_users(name, getattr(module, "__file__", None))


def _roots() -> Iterator[tuple[Any, str]]:
    """The user's variables: of functions that run now, then globals; each with a name for people."""
    for frame in sys._current_frames().values():
        at: types.FrameType | None = frame
        while at is not None:
            name = str(at.f_globals.get("__name__", ""))
            optimized = bool(at.f_code.co_flags & 0x1)  # a function's, not a module's or a class's
            if optimized and _users_module(name):
                variables = at.f_locals
                for key, value in list(variables.items()):
                    yield value, f"local {key!r} of {at.f_code.co_name}()"
                if isinstance(variables, dict):
                    variables.clear()  # before Python 3.13 a frame would keep this copy, and hold on to it
            at = at.f_back
    for name, module in list(sys.modules.items()):
        if _users_module(name):
            for key, value in list(vars(module).items()):
                if not key.startswith("__"):
                    yield value, f"global {key!r} of module {name}"


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """What a value holds directly, and how it is reached (a text, or a key in a tuple).

    Nothing for frameworks' objects, and of a big container the first ones.
    """
    if isinstance(value, dict):
        yield from ((part, (key,)) for key, part in _first(dict.items(value)))
    elif isinstance(value, list | tuple | deque):
        yield from ((part, (i,)) for i, part in enumerate(_first(value)))
    elif isinstance(value, set | frozenset):
        yield from ((part, "{...}") for part in _first(value))
    elif isinstance(value, functools.partial):
        yield from ((part, " (an argument)") for part in (*value.args, *value.keywords.values()))
    elif isinstance(value, types.MethodType):
        yield value.__self__, ".__self__"
    elif isinstance(value, types.FunctionType):
        if _users_module(value.__module__ or ""):
            names = value.__code__.co_freevars
            for key, cell in zip(names, value.__closure__ or (), strict=False):
                try:
                    yield cell.cell_contents, f" (its closure's {key!r})"
                except ValueError:  # not filled yet
                    continue
            yield from ((part, " (a default)") for part in value.__defaults__ or ())
    elif _users_module(type(value).__module__):
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            yield from ((part, f".{key}") for key, part in list(own.items()))


def _first(values: Iterable[Any]) -> list[Any]:
    """The first ones; none of a container that another thread changes just then."""
    try:
        return list(islice(values, WIDE))
    except RuntimeError:
        return []


def _kind(value: Any) -> str:
    kinds: tuple[type, ...] = (dict, list, tuple, set, deque)
    return next((kind.__name__ for kind in kinds if isinstance(value, kind)), "object")


def _subclasses(base: type) -> Iterator[type]:
    yield base
    below: list[type] = base.__subclasses__()
    for each in below:
        yield from _subclasses(each)


_MODULE_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_TENSOR_HOOKS = {
    "_backward_hooks": "gradient hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}


def _hooks(model: Any) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Every hook, as (kind, function's name, place) and the function."""
    from dynadapt.vps.keys import canonical_name

    for part in modules_of(model):
        named = getattr(part, "named_modules", None)
        for raw, module in [] if named is None else named():
            path = canonical_name(f"{raw}.").rstrip(".") or "model"
            for attribute, kind in _MODULE_HOOKS.items():
                for function in (getattr(module, attribute, None) or {}).values():
                    yield (kind, _called(function), f"module {path!r}"), function
        for raw, parameter in [] if named is None else part.named_parameters():
            for attribute, kind in _TENSOR_HOOKS.items():
                for function in (getattr(parameter, attribute, None) or {}).values():
                    place = f"parameter {canonical_name(raw)!r}"
                    yield (kind, _called(function), place), function


def _inner(function: Any) -> Any:
    """The function behind partials and bound methods."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _called(function: Any) -> str:
    inner = _inner(function)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _is_framework(function: Any) -> bool:
    inner = _inner(function)
    module = getattr(inner, "__module__", None) or type(inner).__module__
    return not _users_module(module)
