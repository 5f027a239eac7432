"""Pickles read as data: nothing that a file names is imported or called.

Every global becomes a `Global`, every object made from one an `Opaque` that remembers how it was made,
so that it can be shown, searched, and written again as it was. Tensors become `StoredTensor`. The
stdlib's own pure-Python unpickler does the parsing; its memo is a dict, so no index in a file makes it
allocate. The format: Python's `pickletools`, and `torch.serialization` for the persistent ids.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "STORAGES",
    "Global",
    "Opaque",
    "Ordered",
    "Size",
    "Storage",
    "StoredTensor",
    "is_flat",
    "read_pickle",
]

#: Typed storages by their class name in torch.
STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "IntStorage": "int32",
    "FloatStorage": "float32",
    "LongStorage": "int64",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}


class Storage(NamedTuple):
    """A storage that a pickle names: its dtype (bytes if untyped), record name and elements."""

    dtype: str
    name: str
    numel: int
    device: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a pickle: a strided view of a storage; offset and strides in elements.

    `parameter` says that it was an `nn.Parameter`, `requires_grad` what it was pickled with.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: Storage
    requires_grad: bool = False
    parameter: bool = False


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that a pickle names. Never imported."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        make = _KNOWN.get((self.module, self.name))
        return Opaque(self, args) if make is None else make(*args)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Opaque:
    """An object of a class that is not ours to make: how it was made, and what was put into it."""

    made_by: Global
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    new: bool = False
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, name: Any, value: Any) -> None:
        self.items[name] = value

    def append(self, value: Any) -> None:
        """What the unpickler calls for a list's elements."""
        self.elements.append(value)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute out of its state, as most classes pickle it: a dict, or (dict, slots)."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        for state in states:
            if isinstance(state, dict) and name in state:
                return state[name]
        return default

    def is_a(self, *names: str) -> bool:
        """Whether its class has one of these names, whatever the module."""
        return self.made_by.name in names

    def __repr__(self) -> str:
        return f"<{self.made_by}>"


def _tensor(
    storage: Any, offset: int, shape: Any, strides: Any, requires_grad: bool = False, *rest: Any
) -> StoredTensor:
    """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])`."""
    return _checked(storage, storage.dtype, offset, shape, strides, requires_grad)


def _tensor_v3(
    storage: Any,
    offset: int,
    shape: Any,
    strides: Any,
    requires_grad: bool,
    hooks: Any,
    dtype: Any,
    *rest: Any,
) -> StoredTensor:
    """`_rebuild_tensor_v3`: as v2, over an untyped storage, with a dtype of its own."""
    name = dtype.name if isinstance(dtype, Global) else str(dtype)
    return _checked(storage, name, offset, shape, strides, requires_grad)


def _checked(
    storage: Any, dtype: str, offset: Any, shape: Any, strides: Any, requires_grad: Any
) -> StoredTensor:
    numbers = [offset, *shape, *strides]
    if not isinstance(storage, Storage) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError("a tensor with a bad storage, offset, shape or stride")
    if len(shape) != len(strides):
        raise ValueError("a tensor with fewer strides than dims")
    return StoredTensor(dtype, tuple(shape), tuple(strides), offset, storage, bool(requires_grad))


def _parameter(data: Any, requires_grad: bool = True, hooks: Any = None, *state: Any) -> Any:
    """`_rebuild_parameter(data, requires_grad, hooks)`."""
    if not isinstance(data, StoredTensor):
        return Opaque(Global("torch._utils", "_rebuild_parameter"), (data, requires_grad, hooks))
    return StoredTensor(
        data.dtype, data.shape, data.strides, data.offset, data.storage, bool(requires_grad), True
    )


def _from_type(made_by: Any, kind: Any, args: Any, state: Any = None) -> Any:
    """`_rebuild_from_type_v2(func, type, args, state)`: a tensor with attributes of its own."""
    if isinstance(made_by, Global) and str(kind) in {
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
    }:
        return made_by(*args)
    return Opaque(Global("torch._tensor", "_rebuild_from_type_v2"), (made_by, kind, args, state))


def _encode(text: Any, encoding: Any = "utf-8") -> bytes:
    """Bytes in protocol 2 are text in latin-1."""
    if not isinstance(text, str) or encoding not in {"latin1", "latin-1", "utf-8"}:
        raise ValueError("bytes in a strange encoding")
    return text.encode(encoding)


def _set(values: Any = ()) -> set[Any]:
    return set(values)


class Ordered(dict):  # type: ignore[type-arg]
    """An `OrderedDict`, with the attributes that were set on it: a module's state dict has `_metadata`.

    >>> Ordered({"a": 1}) == {"a": 1}, Ordered({}, {"_metadata": {}}).attributes
    (True, {'_metadata': {}})
    """

    __slots__ = ("attributes",)

    def __init__(self, pairs: Any = (), attributes: dict[str, Any] | None = None) -> None:
        super().__init__(pairs)
        self.attributes = attributes or {}


class Size(tuple):  # type: ignore[type-arg]
    """`torch.Size`, so that it is written as one again."""

    __slots__ = ()


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch", "Size"): Size,
    ("collections", "OrderedDict"): Ordered,
    ("collections", "Counter"): Counter,
    ("_codecs", "encode"): _encode,
    ("builtins", "set"): _set,
    ("__builtin__", "set"): _set,
    ("builtins", "complex"): complex,
}


def _inner_class(made_by: Any) -> Any:
    """A class inside a class, which protocol 2 asks `getattr` for; anything else as it is."""
    if isinstance(made_by, Opaque) and made_by.made_by.name == "getattr" and len(made_by.args) == 2:
        outer, name = made_by.args
        if isinstance(outer, Global) and isinstance(name, str):
            return Global(outer.module, f"{outer.name}.{name}")
    return made_by


class _Reader(pickle._Unpickler):
    """The stdlib's parser with every door to the outside shut."""

    dispatch: ClassVar[dict[int, Callable[..., Any]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._size = len(data)

    def find_class(self, module: str, name: str) -> Any:
        return Global(str(module), str(name))

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, name, device, numel = pid
        dtype = STORAGES.get(storage.name) if isinstance(storage, Global) else None
        if kind != "storage" or dtype is None or type(numel) is not int or numel < 0:
            raise ValueError(f"a persistent id that is no storage: {str(pid)[:80]}")
        return Storage(dtype, str(name), numel, str(device))

    def _new(self) -> None:
        args = self.stack.pop()  # type: ignore[attr-defined]
        self._make(self.stack.pop(), args, {})  # type: ignore[attr-defined]

    def _new_ex(self) -> None:
        kwargs = self.stack.pop()  # type: ignore[attr-defined]
        args = self.stack.pop()  # type: ignore[attr-defined]
        self._make(self.stack.pop(), args, kwargs)  # type: ignore[attr-defined]

    def _make(self, made_by: Any, args: Any, kwargs: Any) -> None:
        made_by = _inner_class(made_by)
        if not isinstance(made_by, Global):
            raise pickle.UnpicklingError("an object of something that is no class")
        plain = _KNOWN.get((made_by.module, made_by.name))
        made = plain(*args) if plain else Opaque(made_by, tuple(args), dict(kwargs), new=True)
        self.stack.append(made)  # type: ignore[attr-defined]

    def _reduce(self) -> None:
        args = self.stack.pop()  # type: ignore[attr-defined]
        made_by = self.stack[-1]  # type: ignore[attr-defined]
        if not isinstance(made_by, Global):
            raise pickle.UnpicklingError("a call of something that is no global")
        self.stack[-1] = made_by(*args)  # type: ignore[attr-defined]

    def _bytearray8(self) -> None:
        size = int.from_bytes(self.read(8), "little")  # type: ignore[attr-defined]
        if size > self._size:
            raise pickle.UnpicklingError("more bytes declared than the pickle has")
        self.stack.append(bytearray(self.read(size)))  # type: ignore[attr-defined]

    def _build(self) -> None:
        state = self.stack.pop()  # type: ignore[attr-defined]
        made = self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(made, Opaque):
            made.state = state
        elif isinstance(made, Ordered) and isinstance(state, dict):
            made.attributes = state
        # Nothing else that is known has a state of its own.

    def _refused(self) -> None:
        raise pickle.UnpicklingError("an opcode that no checkpoint needs")

    dispatch |= {
        pickle.NEWOBJ[0]: _new,
        pickle.NEWOBJ_EX[0]: _new_ex,
        pickle.REDUCE[0]: _reduce,
        pickle.BUILD[0]: _build,
        pickle.BYTEARRAY8[0]: _bytearray8,
    }
    for _op in (
        *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.OBJ),
        *(pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    ):
        dispatch[_op[0]] = _refused


NESTED = 100
"""Containers inside one another: torch and its frameworks write less than twenty."""


def _prove_finite(value: Any, most: int) -> None:
    """Whoever walks through the value comes to an end: it is no deeper, and has no more parts.

    A pickle of some bytes can hold a list of itself, or thirty lists of two times the one before. What is
    inside an `Opaque` is looked at by itself, since nobody walks into one unasked.
    """
    sizes: dict[int, int] = {}  # by identity
    under_way: dict[int, int] = {}  # what is being counted, and in which `Opaque` it is
    stack: list[tuple[Any, int, int, bool]] = [(value, 0, 0, False)]
    while stack:
        node, depth, owner, counted = stack.pop()
        parts = _parts(node)
        at = id(node)
        if parts is None or (at in sizes and not counted):
            continue
        if counted:
            del under_way[at]
            sizes[at] = 1 + sum(sizes.get(id(part), 1) for part in parts)
            if isinstance(node, Opaque):
                sizes[at] = 1
            elif sizes[at] > most:
                raise ValueError(f"{sizes[at]:,} values, by way of lists that are shared")
        elif under_way.get(at) == owner and not isinstance(node, Opaque):
            raise ValueError("a value that holds itself")
        elif at not in under_way:
            if depth > NESTED:
                raise ValueError(f"values inside one another, more than {NESTED} deep")
            under_way[at] = owner
            stack.append((node, depth, owner, True))
            below = (0, at) if isinstance(node, Opaque) else (depth + 1, owner)
            stack += [(part, *below, False) for part in parts]


def _parts(node: Any) -> list[Any] | None:
    """What a container holds; None for anything else."""
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    if isinstance(node, list | tuple | set | frozenset):
        return [*node]
    if isinstance(node, Opaque):
        return [node.args, node.kwargs, node.state, node.items, node.elements]
    return None


_PLAIN = frozenset({StoredTensor, int, str, bool, type(None)})


def is_flat(tree: Any) -> bool:
    """Whether it is a tensor, or a dict of tensors and plain values: what small files hold, and many of them.

    >>> is_flat({"cat_dim": 0}), is_flat({"a": []})
    (True, False)
    """
    if type(tree) is not dict:
        return type(tree) is StoredTensor
    return all(type(k) is str and type(v) in _PLAIN for k, v in tree.items())


def read_pickle(data: bytes, where: str) -> Any:
    """The value of a pickle, as data. `where` names it in errors; raises `Refused` (`bad-pickle`).

    >>> read_pickle(pickle.dumps({"a": [1, 2.5, None]}), "x")
    {'a': [1, 2.5, None]}
    >>> read_pickle(pickle.dumps(io.StringIO), "x")
    Global(module='_io', name='StringIO')
    """
    try:
        value = _Reader(data).load()
        _prove_finite(value, 100 * len(data))
    except (MemoryError, RecursionError) as error:
        cause = "holds a pickle that asks for more than its size can be worth"
        raise Refused([Finding("bad-pickle", where, cause)]) from error
    except Exception as error:
        cause = f"holds no pickle that can be read: {type(error).__name__}: {str(error)[:120]}"
        fix = "it may be damaged: copy it again"
        raise Refused([Finding("bad-pickle", where, cause, fix)]) from error
    return value
