"""Trees of plain values, tensors and `Opaque` objects as a pickle that `torch.load` reads.

The stdlib's pure-Python pickler writes it, in protocol 2 as torch does; a `Global` is written by its
name, so that nothing has to be importable here.
"""

from __future__ import annotations

import io
import pickle
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from dynadapt.adapters.checkpoints._pickle import (
    STORAGES,
    Global,
    Opaque,
    Ordered,
    Size,
    Storage,
    StoredTensor,
    is_flat,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["tensor", "write_pickle"]

_CLASSES = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}
_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_ORDERED = Global("collections", "OrderedDict")
_SIZE = Global("torch", "Size")


def tensor(
    name: str, dtype: str, shape: tuple[int, ...], *, requires_grad: bool = False
) -> StoredTensor:
    """A contiguous tensor with a storage of its own, called `name` in its file.

    >>> tensor("0", "float32", (2, 3)).strides
    (3, 1)
    """
    from math import prod

    from dynadapt.vps.box import row_major_strides
    from dynadapt.vps.keys import itemsize

    numel = prod(shape)
    typed = dtype in _CLASSES
    storage = Storage(
        dtype if typed else "uint8", name, numel if typed else numel * itemsize(dtype), "cpu"
    )
    return StoredTensor(dtype, shape, row_major_strides(shape), 0, storage, requires_grad)


class _Writer(pickle._Pickler):
    """Writes our leaves as calls of the globals that torch knows."""

    dispatch: ClassVar[dict[type, Callable[..., Any]]] = dict(pickle._Pickler.dispatch)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self._globals: dict[Global, Global] = {}
        self._storages: dict[Storage, Storage] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Storage):
            return None
        kinds = {"uint8": "ByteStorage"} | _CLASSES
        return ("storage", Global("torch", kinds[obj.dtype]), obj.name, obj.device, obj.numel)

    def _global(self, obj: Global) -> None:
        one = self._globals.setdefault(obj, obj)  # equal globals are one to the memo
        found = self.memo.get(id(one))  # type: ignore[attr-defined]
        if found is not None:
            self.write(self.get(found[0]))  # type: ignore[attr-defined]
            return
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())  # type: ignore[attr-defined]
        self.memoize(one)  # type: ignore[attr-defined]

    def _call(self, made_by: Global, args: tuple[Any, ...], obj: Any) -> None:
        self.save(made_by)  # type: ignore[attr-defined]
        self.save(args)  # type: ignore[attr-defined]
        self.write(pickle.REDUCE)  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]

    def _tensor(self, obj: StoredTensor) -> None:
        one = self._storages.setdefault(obj.storage, obj.storage)
        hooks = Opaque(_ORDERED)
        args = (one, obj.offset, obj.shape, obj.strides, obj.requires_grad, hooks)
        made_by, plain = (_V2, args) if obj.dtype in _CLASSES else (_V3, args)
        if made_by is _V3:
            plain = (*args, Global("torch", obj.dtype))  # type: ignore[assignment]
        if not obj.parameter:
            self._call(made_by, plain, obj)
            return
        inner = Opaque(made_by, (*plain[:4], False, *plain[5:]))
        self._call(_PARAMETER, (inner, obj.requires_grad, hooks), obj)

    def _size(self, obj: Size) -> None:
        self._call(_SIZE, (tuple(obj),), obj)

    def _ordered(self, obj: Ordered) -> None:
        self._call(_ORDERED, (), obj)
        self._batch_setitems(obj.items())  # type: ignore[attr-defined]
        if obj.attributes:
            self.save(obj.attributes)  # type: ignore[attr-defined]
            self.write(pickle.BUILD)  # type: ignore[attr-defined]

    def _opaque(self, obj: Opaque) -> None:
        self.save(obj.made_by)  # type: ignore[attr-defined]
        if obj.kwargs:
            raise pickle.PicklingError(f"{obj.made_by} was made with keywords")
        self.save(obj.args)  # type: ignore[attr-defined]
        self.write(pickle.NEWOBJ if obj.new else pickle.REDUCE)  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]
        if obj.elements:
            self._batch_appends(obj.elements)  # type: ignore[attr-defined]
        if obj.items:
            self._batch_setitems(obj.items.items())  # type: ignore[attr-defined]
        if obj.state is not None:
            self.save(obj.state)  # type: ignore[attr-defined]
            self.write(pickle.BUILD)  # type: ignore[attr-defined]

    def save_reduce(self, func: Any, args: Any, *more: Any, obj: Any = None, **named: Any) -> None:
        """As pickle does, but no class of this package: who loads the file may not have it."""
        if type(obj).__module__.startswith("dynadapt."):
            raise pickle.PicklingError(f"a {type(obj).__name__} is no value of a checkpoint")
        super().save_reduce(func, args, *more, obj=obj, **named)  # type: ignore[misc]

    dispatch |= {
        Global: _global,
        StoredTensor: _tensor,
        Opaque: _opaque,
        Ordered: _ordered,
        Size: _size,
    }


def write_pickle(tree: Any) -> bytes:
    """The pickle of a tree.

    >>> from dynadapt.adapters.checkpoints._pickle import read_pickle
    >>> read_pickle(write_pickle({"a": Global("torch", "float32")}), "x")
    {'a': Global(module='torch', name='float32')}
    """
    if not is_flat(tree):
        return _pickled(tree)
    if not isinstance(tree, dict):
        return _pickled_flat(tree)
    return _pickled_flat(tuple(tree.items()), tuple(map(type, tree.values())))


def _pickled(tree: Any) -> bytes:
    out = io.BytesIO()
    _Writer(out).dump(tree)
    return out.getvalue()


@lru_cache(maxsize=1 << 10)
def _pickled_flat(tree: Any, kinds: tuple[type, ...] | None = None) -> bytes:
    """The same of a tensor, or of the items of a dict and their types (as 0 equals False): there are many."""
    return _pickled(tree if kinds is None else dict(tree))
