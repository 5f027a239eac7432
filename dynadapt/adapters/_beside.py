"""Values kept with an object: they live and die with it, even where they refer to it."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

__all__ = ["Beside"]

T = TypeVar("T")


class _Value:
    """Stays behind when its object is copied or pickled: what it holds is about that object alone."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _Value:
        return _Value()

    def __reduce__(self) -> tuple[type[_Value], tuple[()]]:
        return _Value, ()


class Beside(Generic[T]):
    """A value per object, in the object's own `__dict__`.

    A `WeakKeyDictionary` would hold an object for ever whose value refers to it. This makes a cycle, which
    is collected.

    >>> class Engine: pass
    >>> engine, undo = Engine(), Beside("undo")
    >>> undo.put(engine, lambda: engine)
    >>> undo.take(engine)() is engine, undo.take(engine)
    (True, None)
    """

    def __init__(self, name: str) -> None:
        self._name = f"_dynadapt_{name}"

    def put(self, owner: Any, value: T) -> None:
        """Keep a value with an object, in place of the one it has."""
        vars(owner)[self._name] = _Value(value)

    def look(self, owner: Any) -> T | None:
        """The value of an object, None if it has none."""
        kept = vars(owner).get(self._name)
        return None if kept is None else kept.value

    def take(self, owner: Any) -> T | None:
        """The value of an object, which then has none."""
        value = self.look(owner)
        vars(owner).pop(self._name, None)
        return value
