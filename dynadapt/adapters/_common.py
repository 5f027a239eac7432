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
from dynadapt.protocols import AuxItem, Outcome, TrainState
from dynadapt.vps.keys import Key, canonical_name
from dynadapt.vps.layout import Row
from dynadapt.vps.wire import encodable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dynadapt.vps.box import Box

__all__ = [
    "BufferTable",
    "NamedTensor",
    "TensorBuffer",
    "apply_data",
    "apply_groups",
    "apply_scheduler",
    "apply_user",
    "dtype_name",
    "fresh_state",
    "groups_item",
    "is_local",
    "named_buffers",
    "named_parameters",
    "optimizer_slots",
    "scheduler_item",
    "torch_dtype",
    "unwrapped",
    "user_items",
]

#: Group entries that say how an optimizer runs, or hold parameters: never carried to another one.
NOT_HYPER = frozenset(
    {
        "params",
        "param_names",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "maximize",
        "step",  # FusedAdam keeps a count here; a step is a scalar of each parameter
    }
)


def dtype_name(dtype: torch.dtype) -> str:
    """A torch dtype's name without the prefix.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name.

    >>> torch_dtype("int64")
    torch.int64
    """
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


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
        """Give the storage's bytes back; views of it stay valid objects."""
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
    return tuple(_grouped(model.named_parameters(remove_duplicate=False), frozenset()))


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
    return tuple(_grouped(model.named_buffers(remove_duplicate=False), lost))


def _grouped(
    named: Iterable[tuple[str, torch.Tensor]], lost: frozenset[str]
) -> Iterator[NamedTensor]:
    groups: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    persistent: dict[int, bool] = {}
    for raw, tensor in named:
        ident = id(tensor)
        groups.setdefault(ident, []).append(canonical_name(raw))
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
    return unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def optimizer_slots(optimizer: Any, group: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The state tensors, shaped like the parameter, that an optimizer keeps for a group.

    None for a class that is not known: its state can be read where it exists, but not made.

    >>> optimizer_slots(torch.optim.SGD([torch.zeros(1)], lr=0.1), {"momentum": 0.9})
    ('momentum_buffer',)
    """
    kind = type(optimizer).__name__
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
    slots = optimizer_slots(optimizer, group)
    if slots is None:
        return None
    state: dict[str, Any] = {}
    if type(optimizer).__module__.startswith("torch."):
        if type(optimizer).__name__ != "SGD":
            on_device = group.get("capturable") or group.get("fused")
            device = like.device if on_device else torch.device("cpu")
            wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
            dtype = torch.float64 if wide else torch.float32
            state["step"] = torch.zeros((), dtype=dtype, device=device)
        if type(optimizer).__name__ == "NAdam":
            state["mu_product"] = torch.ones((), dtype=dtype, device=device)
    elif "Adam" in type(optimizer).__name__ or "Lion" in type(optimizer).__name__:
        state["step"] = 0
    # DeepSpeed's host optimizers keep single-precision state for half-precision parameters.
    wider = torch.float32 if getattr(optimizer, "fp32_optimizer_states", False) else like.dtype
    for slot in slots:
        state[slot] = torch.zeros_like(like, dtype=wider, requires_grad=False)
    return state


def groups_item(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> AuxItem:
    """The `param_groups` aux item: per group, in order, its parameter names and hyperparameters.

    `names[i]` are the canonical names of group i (empty groups included).

    >>> groups_item([{"lr": 0.1, "params": []}], [["w"]]).value
    [{'names': ['w'], 'hyper': {'lr': 0.1}}]
    """
    value = [
        {
            "names": list(members),
            "hyper": {
                key: plain(entry)
                for key, entry in group.items()
                if key not in NOT_HYPER and encodable(plain(entry))
            },
        }
        for group, members in zip(groups, names, strict=True)
    ]
    return AuxItem("param_groups", value)


def plain(value: Any) -> Any:
    """A hyperparameter as plain Python: one-element tensors become numbers, also inside containers.

    >>> plain([torch.tensor(2.0), {"a": (1, torch.tensor([3]))}])
    [2.0, {'a': (1, 3)}]
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return value


def apply_groups(
    groups: Sequence[dict[str, Any]], names: Sequence[Sequence[str]], item: AuxItem | None
) -> tuple[Outcome, ...]:
    """Give each target group its members' source hyperparameters, in place, by parameter name.

    Raises `Refused` (`hyper-conflict`) where members of one target group differ in the source. Only
    entries that the target group has are written, so that an optimizer never meets a foreign one.
    """
    if item is None:
        return (Outcome("param_groups", "dropped", "the source has no optimizer"),)
    by_name = {name: group["hyper"] for group in item.value for name in group["names"]}
    empty = [group["hyper"] for group in item.value if not group["names"]]
    outcomes: list[Outcome] = []
    findings: list[Finding] = []
    for index, (group, members) in enumerate(zip(groups, names, strict=True)):
        known = [(name, by_name[name]) for name in members if name in by_name]
        if not known and not members and empty:
            known = [("", empty.pop(0))]
        if not known:
            outcomes.append(
                Outcome(f"param_groups[{index}]", "dropped", "no member is in a source group")
            )
            continue
        first_name, hyper = known[0]
        for name, other in known[1:]:
            if other != hyper:
                differing = sorted(k for k in {*hyper, *other} if hyper.get(k) != other.get(k))
                findings.append(
                    Finding(
                        "hyper-conflict",
                        f"param group {index}",
                        f"{first_name} and {name} differ in {', '.join(differing)} in the source",
                        "give the target optimizer the source's param groups",
                    )
                )
                break
        for key, value in hyper.items():
            if (key in group and key not in NOT_HYPER) or key == "initial_lr":
                _set_entry(group, key, value)
        outcomes.append(Outcome(f"param_groups[{index}]", "exact"))
    if findings:
        raise Refused(findings)
    return tuple(outcomes)


def _set_entry(group: dict[str, Any], key: str, value: Any) -> None:
    old = group.get(key)
    if isinstance(old, torch.Tensor):
        old.fill_(value)
    elif isinstance(old, tuple) and isinstance(value, list):
        group[key] = tuple(value)
    else:
        group[key] = value


def scheduler_item(scheduler: Any) -> AuxItem | None:
    """The `scheduler` aux item: class name and `state_dict()`, or None without a scheduler."""
    if scheduler is None:
        return None
    state = {k: plain(v) for k, v in scheduler.state_dict().items()}
    kept = {key: value for key, value in state.items() if encodable(value)}
    left = sorted(state.keys() - kept.keys())
    return AuxItem("scheduler", {"class": type(scheduler).__name__, "state": kept, "left": left})


def apply_scheduler(scheduler: Any, item: AuxItem | None) -> tuple[Outcome, ...]:
    """Load the source scheduler's state into a target scheduler of the same class."""
    if item is None and scheduler is None:
        return ()
    if item is None:
        return (Outcome("scheduler", "dropped", "the source has no scheduler"),)
    if scheduler is None:
        return (Outcome("scheduler", "dropped", "the target has no scheduler"),)
    if type(scheduler).__name__ != item.value["class"]:
        note = f"the source's is a {item.value['class']}, the target's a {type(scheduler).__name__}"
        return (Outcome("scheduler", "dropped", note),)
    own = scheduler.state_dict()
    state = {key: _like(own.get(key), value) for key, value in item.value["state"].items()}
    scheduler.load_state_dict({**own, **state})
    if left := item.value.get("left"):
        note = f"all but {', '.join(left)}, which the target keeps as it was built"
        return (Outcome("scheduler", "derived", note),)
    return (Outcome("scheduler", "exact"),)


def _like(own: Any, value: Any) -> Any:
    """A value in the container type of the target's: milestones are a Counter, not any dict."""
    if isinstance(value, dict | list) and isinstance(own, dict | list) and type(own) is not dict:
        return type(own)(value)
    return value


def user_items(
    user: Mapping[str, Any], samples: int | None, counters: Mapping[str, int]
) -> tuple[AuxItem, ...]:
    """Aux items of a `TrainState`'s own objects: `user/<name>`, `data`, `counters`."""
    items = [AuxItem(f"user/{n}", _lowered(obj.state_dict())) for n, obj in sorted(user.items())]
    bad = [item for item in items if not encodable(item.value)]
    if bad:
        raise Refused(
            Finding(
                "user-state",
                item.path,
                "its state_dict() holds more than numbers, text, bytes, lists, dicts and tensors",
                "return plain values from state_dict()",
            )
            for item in bad
        )
    if samples is not None:
        items.append(AuxItem("data", {"samples": samples}))
    if counters:
        items.append(AuxItem("counters", dict(counters)))
    return tuple(items)


def apply_user(user: Mapping[str, Any], aux: Mapping[str, AuxItem]) -> tuple[Outcome, ...]:
    """Give each of the target's user objects the source's state of the same name."""
    outcomes = []
    for name, obj in sorted(user.items()):
        item = aux.get(f"user/{name}")
        if item is None:
            outcomes.append(Outcome(f"user/{name}", "dropped", "the source has none of that name"))
        else:
            obj.load_state_dict(_lifted(item.value))
            outcomes.append(Outcome(f"user/{name}", "exact"))
    lost = [p for p in aux if p.startswith("user/") and p.removeprefix("user/") not in user]
    outcomes += [Outcome(path, "dropped", "the target has none of that name") for path in lost]
    return tuple(outcomes)


def apply_data(state: TrainState, item: AuxItem | None) -> tuple[Outcome, ...]:
    """Tell the target's `samples` where the data go on; setting up the loader is the user's."""
    if item is None:
        return ()
    state.samples = item.value["samples"]
    return (Outcome("data", "exact", f"go on at sample {state.samples}"),)


_TENSOR = "torch.Tensor"


def _lowered(value: Any) -> Any:
    """A user's state with every tensor as (mark, dtype, shape, bytes)."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        return {_TENSOR: [dtype_name(value.dtype), list(value.shape), flat.numpy().tobytes()]}
    if isinstance(value, dict):
        return {key: _lowered(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_lowered, value)) if type(value) in {list, tuple} else value
    return value


def _lifted(value: Any) -> Any:
    """The inverse of `_lowered`, on the CPU."""
    if isinstance(value, dict) and value.keys() == {_TENSOR}:
        name, shape, data = value[_TENSOR]
        empty = torch.empty(shape, dtype=torch_dtype(name))
        if data:
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return flat.view(empty.dtype).reshape(shape)
        return empty
    if isinstance(value, dict):
        return {key: _lifted(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_lifted, value))
    return value
