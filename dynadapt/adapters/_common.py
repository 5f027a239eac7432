"""What live adapters share: buffers over torch storage, canonical names, optimizer groups, aux state.

Only this package's own adapters import it. Everything here is about plain torch objects; what is
special to a framework stays in that framework's file.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dynadapt.errors import Finding, Refused
from dynadapt.torch_dtypes import dtype_name
from dynadapt.vps.keys import Key, canonical_name
from dynadapt.vps.layout import Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dynadapt.vps.box import Box
    from dynadapt.vps.keys import KeySpec

__all__ = [
    "FACTORED",
    "BufferTable",
    "NamedTensor",
    "TensorBuffer",
    "decided_names",
    "fresh_state",
    "is_local",
    "named_buffers",
    "named_once",
    "named_parameters",
    "optimizer_slots",
    "slot_shapes",
    "unwrapped",
    "whole_only",
]


class TensorBuffer:
    """A `Buffer` over the whole storage of a tensor, seen as one dtype.

    >>> TensorBuffer(torch.zeros(3, 2)[1]).numel
    6
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._dtype = tensor.dtype
        self._device = tensor.device
        self._nbytes = self._storage.nbytes()

    def reach(self, tensor: torch.Tensor) -> None:
        """Make sure that `refill` brings back all of a tensor, also if the storage is freed by now."""
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (int(tensor.storage_offset()) + last + 1) * self._dtype.itemsize
        self._nbytes = max(self._nbytes, needed)

    @property
    def dtype(self) -> str:
        """Element type by name."""
        return dtype_name(self._dtype)

    @property
    def device(self) -> str:
        """Where the storage lies."""
        return str(self._device)

    @property
    def numel(self) -> int:
        """Elements in the whole storage."""
        return self._nbytes // self._dtype.itemsize

    def tensor(self) -> torch.Tensor:
        """A 1-D tensor over the storage, which must not be freed."""
        if self._storage.nbytes() < self._nbytes:  # set_ would silently make it whole again
            raise RuntimeError("the buffer's storage is freed; refill it first")
        flat = torch.empty(0, dtype=self._dtype, device=self._device)
        return flat.set_(self._storage, 0, (self.numel,), (1,))

    def free(self) -> None:
        """Give the storage's bytes back, where torch can; views of it stay valid objects.

        Memory that torch does not own (from NumPy, a mapped file) stays as it is.
        """
        if self._storage.resizable():
            self._storage.resize_(0)

    def refill(self) -> None:
        """Make the storage whole again if it was freed; the content is undefined then."""
        if self._storage.nbytes() < self._nbytes:
            self._storage.resize_(self._nbytes)


@dataclass
class BufferTable:
    """Collects rows and the distinct storages behind them while an adapter describes.

    >>> from dynadapt.vps.box import Box
    >>> table = BufferTable()
    >>> table.add(Key("w", "param"), Box((0,), (2,)), torch.zeros(4)[2:])
    >>> table.rows[0].offset, list(table.buffers)
    (2, ['w/param'])
    """

    rows: list[Row] = field(default_factory=list)
    buffers: dict[str, TensorBuffer] = field(default_factory=dict)
    _ids: dict[tuple[int, torch.dtype], str] = field(default_factory=dict)

    def add(self, key: Key, box: Box, tensor: torch.Tensor) -> None:
        """Add the row "this tensor holds this box of key"; `tensor.shape` must be `box.shape`.

        Any strides and storage offset are fine; nothing is copied. Empty boxes are skipped.
        """
        if tuple(tensor.shape) != box.shape:
            raise ValueError(f"{key} {box}: tensor of shape {tuple(tensor.shape)}")
        if tensor.is_conj() or tensor.is_neg():
            cause = "its storage holds the conjugate or the negative of its values"
            fix = "replace it by .resolve_conj().resolve_neg()"
            raise Refused([Finding("unsupported-tensor", str(key), cause, fix)])
        if not box.volume:
            return
        name = self._buffer_of(key, tensor)
        self.rows.append(Row(key, box, name, int(tensor.storage_offset()), tuple(tensor.stride())))

    def add_flat(self, key: Key, boxes: Iterable[Box], flat: torch.Tensor) -> None:
        """Add rows for boxes that lie one after another, row-major, in a contiguous 1-D tensor.

        The boxes of a lowered span (`Span.boxes`) are of this kind; `flat` must hold their elements.
        """
        at = int(flat.storage_offset())
        end = at + flat.numel()
        name = self._buffer_of(key, flat)
        for box in boxes:
            strides = [1] * box.ndim
            for dim in range(box.ndim - 2, -1, -1):
                strides[dim] = strides[dim + 1] * box.shape[dim + 1]
            if box.volume:
                self.rows.append(Row(key, box, name, at, tuple(strides)))
            at += box.volume
        if at > end:
            raise ValueError(
                f"{key}: boxes need {at - end} elements more than the flat tensor holds"
            )

    def _buffer_of(self, key: Key, tensor: torch.Tensor) -> str:
        ident = (tensor.untyped_storage()._cdata, tensor.dtype)
        name = self._ids.get(ident)
        if name is None:
            name = self._ids[ident] = str(key)
            self.buffers[name] = TensorBuffer(tensor)
        self.buffers[name].reach(tensor)
        return name


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """A parameter or buffer of a model under its canonical name, with the other names of a tie."""

    name: str
    aliases: tuple[str, ...]
    order: int
    tensor: torch.Tensor
    persistent: bool = True


def named_parameters(model: torch.nn.Module) -> tuple[NamedTensor, ...]:
    """All parameters once, in `named_parameters()` order, wrappers stripped, ties by identity.

    >>> [p.name for p in named_parameters(torch.nn.Linear(2, 3))]
    ['weight', 'bias']
    """
    return tuple(named_once(model.named_parameters(remove_duplicate=False)))


def named_buffers(model: torch.nn.Module) -> tuple[NamedTensor, ...]:
    """All buffers once, persistent or not, wrappers stripped, shared ones by identity.

    >>> [b.name for b in named_buffers(torch.nn.BatchNorm1d(2))]
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
    lost = frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    )
    return tuple(named_once(model.named_buffers(remove_duplicate=False), lost))


def named_once(
    named: Iterable[tuple[str, torch.Tensor]], lost: frozenset[str] = frozenset()
) -> Iterator[NamedTensor]:
    """Each tensor once, in order, under canonical names; `lost` are raw names that no checkpoint holds.

    >>> w = torch.zeros(1)
    >>> [(n.name, n.aliases) for n in named_once([("module.b", w), ("a", w)])]
    [('a', ('b',))]
    """
    groups: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    persistent: dict[int, bool] = {}
    every = list(named)
    owners: dict[str, set[int]] = {}
    for raw, tensor in every:
        owners.setdefault(canonical_name(raw), set()).add(id(tensor))
    for raw, tensor in every:
        ident = id(tensor)
        name = canonical_name(raw)  # unless a real submodule has a wrapper's name
        groups.setdefault(ident, []).append(name if len(owners[name]) == 1 else raw)
        tensors[ident] = tensor
        persistent[ident] = persistent.get(ident, False) or raw not in lost
    for order, (ident, names) in enumerate(groups.items()):
        first, *others = sorted(set(names))
        yield NamedTensor(first, tuple(others), order, tensors[ident], persistent[ident])


def is_local(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the user's patterns for tensors that differ by rank."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def unwrapped(optimizer: Any) -> Any:
    """The torch optimizer inside wrappers such as Accelerate's; None stays None.

    >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> unwrapped(sgd) is sgd
    True
    """
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer):
        return optimizer
    own = getattr(optimizer, "state", None)
    if own and own is not inner.state and dict(own) != dict(inner.state):
        kind = type(optimizer).__name__
        cause = "it wraps another optimizer and keeps state of its own, which would be lost"
        raise Refused([Finding("unknown-optimizer", kind, cause, "pass the inner optimizer")])
    return unwrapped(inner)


def decided_names(keys: Iterable[KeySpec]) -> Iterator[str]:
    """The parameters of which a source says what state they have, be it none: all names of each.

    Those in its optimizer, and frozen ones. A source without an optimizer says nothing.

    >>> from dynadapt.vps.keys import KeySpec
    >>> list(decided_names([KeySpec(Key("w", "param"), (2,), "float32")]))
    []
    """
    for spec in keys:
        of_optimizer = spec.kind == "state" and not spec.key.slot.startswith("extra:")
        if of_optimizer or (spec.key.slot == "param" and not spec.trainable):
            yield from (spec.key.name, *spec.aliases)


def slot_shapes(
    optimizer: Any, group: Mapping[str, Any], shape: tuple[int, ...]
) -> dict[str, tuple[int, ...]] | None:
    """The state tensors that an optimizer keeps for a parameter, with their shapes; None if unknown.

    >>> slot_shapes(torch.optim.Adafactor([torch.zeros(1)]), {}, (2, 3))
    {'row_var': (2, 1), 'col_var': (1, 3)}
    """
    slots = optimizer_slots(optimizer, group)
    if slots is None:
        return None
    if slots == FACTORED:
        if len(shape) < 2:
            return {"variance": shape}
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    return dict.fromkeys(slots, shape)


def whole_only(optimizer: Any, *, matrices: bool = True) -> list[Finding]:
    """Why an optimizer cannot have pieces of parameters, or `matrices` flattened; empty if it can.

    >>> whole_only(torch.optim.Adafactor([torch.zeros(1)]))[0].reason
    'unsupported-optimizer'
    """
    kind = type(optimizer).__name__
    torchs = type(optimizer).__module__.startswith("torch.")
    if not torchs or kind not in {"Adafactor", "Muon"} or (kind == "Muon" and not matrices):
        return []
    keeps = "keeps sums of rows and columns" if kind == "Adafactor" else "makes a matrix orthogonal"
    cause = (
        f"{kind} {keeps}, which a piece of a flat tensor has none of: it would step it otherwise"
    )
    fix = "use it with whole parameters (plain or DDP), or another optimizer"
    return [Finding("unsupported-optimizer", kind, cause, fix)]


def stepped_by(optimizer: Any, group: Mapping[str, Any]) -> Any:
    """What steps a group: in DeepSpeed's Muon another optimizer may step what is no matrix.

    >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> stepped_by(sgd, {}) is sgd
    True
    """
    if type(optimizer).__name__ != "MuonWithAuxAdam" or by_muon(optimizer, group):
        return optimizer
    return optimizer.aux_optimizer or optimizer


def by_muon(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's Muon steps a group as matrices.

    >>> by_muon(torch.optim.SGD([torch.zeros(1)], lr=0.1), {"use_muon": True})
    False
    """
    return type(optimizer).__name__ == "MuonWithAuxAdam" and bool(group["use_muon"])


#: Adafactor's slots: the first two of a tensor of two dims and more, the last one of any other.
FACTORED = ("row_var", "col_var", "variance")


def optimizer_slots(optimizer: Any, group: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The state tensors that an optimizer keeps for a group, shaped like the parameter or `FACTORED`.

    None for a class that is not known: its state can be read where it exists, but not made.

    >>> optimizer_slots(torch.optim.SGD([torch.zeros(1)], lr=0.1), {"momentum": 0.9})
    ('momentum_buffer',)
    """
    optimizer = stepped_by(optimizer, group)
    kind = type(optimizer).__name__
    if kind == "MuonWithAuxAdam":
        return ("momentum_buffer",) if by_muon(optimizer, group) else ("exp_avg", "exp_avg_sq")
    if kind in {"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "NAdam", "RAdam"}:
        more = ("max_exp_avg_sq",) if group.get("amsgrad") else ()
        return ("exp_avg", "exp_avg_sq", *more)
    if kind == "SGD":
        return ("momentum_buffer",) if group.get("momentum") else ()
    if kind == "Adagrad":
        return ("sum",)
    if kind == "Adamax":
        return ("exp_avg", "exp_inf")
    if kind == "Adadelta":
        return ("square_avg", "acc_delta")
    if kind == "RMSprop":
        momentum = ("momentum_buffer",) if group.get("momentum") else ()
        centered = ("grad_avg",) if group.get("centered") else ()
        return ("square_avg", *momentum, *centered)
    if kind == "DeepSpeedCPULion":
        return ("exp_avg", "exp_avg_sq")  # it makes the second one and never uses it
    if kind in {"Lion", "FusedLion"}:
        return ("exp_avg",)
    if kind == "Muon":
        return ("momentum_buffer",)
    if kind == "Adafactor" and type(optimizer).__module__.startswith("torch."):
        return FACTORED
    return None


def fresh_state(
    optimizer: Any, group: Mapping[str, Any], like: torch.Tensor
) -> dict[str, Any] | None:
    """The state that an optimizer would make for a tensor before its first step, or None if unknown.

    SGD alone has a first step that differs from one with a zero momentum buffer, and only with
    dampening; a state is made here for values of the source to land in.

    >>> fresh_state(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9), {"momentum": 0.9}, torch.ones(2))
    {'momentum_buffer': tensor([0., 0.])}
    """
    shapes = slot_shapes(optimizer, group, tuple(like.shape))
    if shapes is None:
        return None
    optimizer = stepped_by(optimizer, group)
    state: dict[str, Any] = {}
    if type(optimizer).__module__.startswith("torch."):
        if type(optimizer).__name__ not in {"SGD", "Muon"}:
            on_device = group.get("capturable") or group.get("fused")
            device = like.device if on_device else torch.device("cpu")
            wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
            dtype = torch.float64 if wide else torch.float32
            state["step"] = torch.zeros((), dtype=dtype, device=device)
        if type(optimizer).__name__ == "NAdam":
            state["mu_product"] = torch.ones((), dtype=dtype, device=device)
    elif by_muon(optimizer, group):
        pass  # DeepSpeed's Muon counts no steps, the Adam beside it does
    elif "Adam" in type(optimizer).__name__ or type(optimizer).__name__ in _COUNTING_LIONS:
        state["step"] = 0
    # DeepSpeed's host optimizers keep single-precision state for half-precision parameters.
    wider = torch.float32 if getattr(optimizer, "fp32_optimizer_states", False) else like.dtype
    if type(optimizer).__name__ == "SGD":  # its momentum begins as a copy of a gradient
        wider = getattr(like, "grad_dtype", None) or wider
    for slot, shape in shapes.items():
        if shape == tuple(like.shape):
            state[slot] = torch.zeros_like(like, dtype=wider, requires_grad=False)
        else:
            state[slot] = torch.zeros(shape, dtype=wider, device=like.device)
    return state


#: A user's Lion has no use for a count.
_COUNTING_LIONS = frozenset({"FusedLion", "DeepSpeedCPULion"})
