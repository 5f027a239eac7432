"""What adapters, planner, executor and command line share: the ports and the values that cross them.

Nothing here imports a framework. An adapter's `x` is a `TrainState` for a live job and a path for
files; a bare DeepSpeed engine is wrapped by the API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from dynadapt.errors import Finding
    from dynadapt.vps.keys import KeySpec
    from dynadapt.vps.layout import Row
    from dynadapt.vps.spec import LayoutSpec

__all__ = [
    "PER_GROUP",
    "Adapter",
    "Agree",
    "AuxItem",
    "Buffer",
    "Channel",
    "Described",
    "FileSource",
    "FileTarget",
    "Outcome",
    "Posted",
    "TrainState",
    "Vote",
    "alone",
    "in_model",
    "models_of",
    "modules_of",
    "of_models",
    "parts_of",
    "watched",
]

#: Under these names schedulers keep one value a param group.
PER_GROUP = frozenset(
    {
        *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums"),
        *("max_momentums", "_initial_lrs", "eta_min_list"),
    }
)

AuxPolicy = Literal["replicated", "per-rank", "by-part"]
OutcomeKind = Literal["exact", "derived", "reseeded", "dropped", "kept"]


@runtime_checkable
class Buffer(Protocol):
    """A stretch of storage that rows point into.

    The owner of the bytes is the framework (or a file); the executor only asks for a 1-D view of it.
    """

    @property
    def dtype(self) -> str:
        """Element type, by torch's name without the prefix."""
        ...

    @property
    def device(self) -> str:
        """Where it lies: "cpu", "cuda:0"; known also while it is freed."""
        ...

    @property
    def numel(self) -> int:
        """Elements in the buffer."""
        ...

    def tensor(self) -> torch.Tensor:
        """The 1-D tensor over the framework's own storage; writing to it writes the state."""
        ...

    def free(self) -> None:
        """Give the bytes back; views stay valid objects, but may not be read until `refill`."""
        ...

    def refill(self) -> None:
        """Make the storage whole again, with undefined content, if it was freed. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class AuxItem:
    """One piece of state that is not a tensor of the model: hyperparameters, scheduler, counters.

    `value` is what `vps.wire.encode_value` can carry. `replicated` items must be equal on all ranks;
    those `by-part` (`param_groups` and `scheduler`, of a pipeline stage for instance) are about the
    parameters of a rank's own part of the model, and united over all ranks.
    Paths in use: `param_groups`, `scheduler`, `counters`, `scaler`, `behaviour`, `data`, `user/<name>`;
    those of one model of several begin with its name, `actor/param_groups`.
    """

    path: str
    value: Any
    policy: AuxPolicy = "replicated"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one aux item or key in the target, for the report."""

    path: str
    kind: OutcomeKind
    note: str = ""


@dataclass(frozen=True)
class Described:
    """One endpoint's own part of a state: its rows, the buffers behind them, scalars and aux.

    Holds strong references (`keep`) and stays readable after the engine, its groups and its globals
    are gone. `scalars` maps parameter name -> {label: number}, e.g. `{"w": {"step": 5}}`.
    `coordinate` is the rank's place in its own mesh by role (`dp`, `tp`, `pp`), `files` the paths
    behind file endpoints: endpoint number -> path (then `rows_of` holds their rows). `flat_step`: many
    parameters share one step; of several models, `flat_models` are those of which that holds. Of files,
    `written` is the text that asks for the same format and layout, `made_by` names the framework that
    wrote them and its version where they say, and `ordered` says whether the keys are in the model's order.
    `nameless`: nothing in the files themselves says which rank's or tensor's they are, or in what folder.
    `doubts` is what is wrong with what a user will not use. `called` are the names by which the framework
    has its tied parameters, where those of the specs are not.
    """

    specs: tuple[KeySpec, ...]
    rows: tuple[Row, ...]
    buffers: Mapping[str, Buffer]
    scalars: Mapping[str, Mapping[str, int | float]] = field(default_factory=dict)
    aux: tuple[AuxItem, ...] = ()
    coordinate: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[int, tuple[Row, ...]] = field(default_factory=dict)
    allocated: int = 0
    flat_step: bool = False
    flat_models: tuple[str, ...] = ()
    written: str = ""
    made_by: str = ""
    ordered: bool = True
    nameless: Literal["", "files", "folders"] = ""
    doubts: tuple[Finding, ...] = ()
    called: tuple[str, ...] = ()
    keep: tuple[Any, ...] = ()


@dataclass(eq=False)
class TrainState:
    """A live training state, as a user names it.

    `model` is a module, a wrapped module (DDP, FSDP2, DTensor parameters) or a DeepSpeed engine; of a
    pipeline it is what this rank has: a torch `PipelineStage`, a schedule, a stage's submodule, or a
    list of these. The rest is optional: `scheduler` an LR scheduler, `scaler` a GradScaler, `extra`
    label -> {parameter name: tensor} (an EMA), `samples` the data position in samples, `user` name ->
    object with `state_dict()` and `load_state_dict()`, `counters` name -> number, `local` name patterns
    (fnmatch) of tensors that differ by rank on purpose, `coordinate` role -> index overrides this rank's
    place in its meshes, `tied` groups of names that are one tensor though no memory ties them (an
    embedding on the first stage and the head on the last, kept equal by the training loop). A target's
    model may be on the meta device; `device` is where it then gets memory: by default its mesh's
    device, that of its other tensors, or this process's accelerator.

    Several models of one job are a dict, name -> module, engine or `TrainState`, with equal names on both
    sides: `TrainState({"actor": engine, "critic": TrainState(model, optimizer)})`. Each has a framework of
    its own. What belongs to one of them (optimizer, scheduler, `extra`...) is in its own `TrainState`, and
    its tensors are called `actor/...`; `samples`, `user`, `counters` and `coordinate` may be the whole
    job's. Random streams follow the coordinate, which is that of the first model by name.
    """

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    samples: int | None = None
    user: Mapping[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    local: tuple[str, ...] = ()
    coordinate: Mapping[str, int] = field(default_factory=dict)
    tied: Sequence[Sequence[str]] = ()
    device: Any = None

    @classmethod
    def of(cls, x: Any) -> TrainState:
        """`x` itself if it is a `TrainState`, else a state whose model is `x`.

        >>> sorted(TrainState.of({"actor": "a", "critic": "c"}).model)
        ['actor', 'critic']
        """
        return x if isinstance(x, TrainState) else cls(model=x)


@dataclass(frozen=True, slots=True)
class FileSource:
    """A checkpoint to be read, with what a user knows of its model and it may not say: a path otherwise.

    `order` lists all parameter names as the model has them, `groups` those of each of the optimizer's
    groups, in its order. Torch optimizers number their parameters: these say which number is whose. `tied`
    are the names of each tensor that has several, of which others' safetensors keep but one. `shapes` are
    those of whole parameters by name, where a checkpoint has parts of them and does not say of what.
    `buffers` are the names of a model's buffers, which state dicts do not tell from parameters.
    `weights_only`: nothing of the optimizer will be used, whose faults are then `Described.doubts`.

    >>> import os
    >>> os.fspath(FileSource("here", ("a", "b")))
    'here'
    """

    path: str
    order: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    buffers: tuple[str, ...] = ()
    weights_only: bool = False

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return self.path


@dataclass(eq=False)
class FileTarget:
    """A checkpoint to be written: a folder that is there and empty, its format and layout.

    `layout` is None for formats that have none. `order` lists all parameter names as the model has
    them, `groups` the optimizer's and `frozen` what none has, where the source does not say; `called` are
    the names by which the source's own framework has tied parameters. `options` are the format's own.
    `crcs` are CRC-32 sums by buffer of what was written, where whoever wrote it has taken them. Of a
    `dry` one the files are laid out and not made: for a plan, or because another process makes them.
    """

    path: str
    format: str
    layout: LayoutSpec | None = None
    order: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    frozen: tuple[str, ...] = ()
    called: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    crcs: dict[str, int] = field(default_factory=dict)
    dry: bool = False
    made: Any = None


def parts_of(model: Any) -> tuple[Any, ...]:
    """What a model is made of on this rank: the entries of a list, the stages of a schedule, or itself.

    Of several models, the parts of each, in the order of their names.

    >>> parts_of(["a", ["b"]]), parts_of("a"), parts_of({"y": "b", "x": TrainState("a")})
    (('a', 'b'), ('a',), ('a', 'b'))
    """
    if isinstance(model, dict):
        states = models_of(TrainState(model)).values()
        return tuple(part for each in states for part in parts_of(each.model))
    if isinstance(model, list | tuple):
        return tuple(part for each in model for part in parts_of(each))
    if type(model).__module__.startswith("torch.distributed.pipelining."):
        for stages in ("_stages", "_stage"):
            if hasattr(model, stages):
                return parts_of(getattr(model, stages))
    return (model,)


def modules_of(model: Any) -> tuple[Any, ...]:
    """The modules, or the engine, behind `parts_of`: of a pipeline stage its submodule."""
    return tuple(getattr(part, "submod", part) for part in parts_of(model))


def models_of(state: TrainState) -> dict[str, TrainState]:
    """The states of the models of a job by name, in the order of the names; of one model, `{"": state}`.

    >>> list(models_of(TrainState({"critic": "c", "actor": "a"}))), list(models_of(TrainState("a")))
    (['actor', 'critic'], [''])
    """
    if not isinstance(state.model, dict):
        return {"": state}
    named = sorted(state.model.items(), key=lambda item: str(item[0]))
    return {name: TrainState.of(each) for name, each in named}


def in_model(path: str) -> tuple[str, str]:
    """An aux path as what its model's names begin with (`""` for the only one), and the path in it.

    >>> in_model("actor/scaler"), in_model("scaler"), in_model("user/x")
    (('actor/', 'scaler'), ('', 'scaler'), ('', 'user/x'))
    """
    head, slash, rest = path.partition("/")
    return ("", path) if not slash or head == "user" else (f"{head}/", rest)


def of_models(aux: Mapping[str, AuxItem], path: str) -> dict[str, AuxItem]:
    """The items of a path in each model that has one, by what the model's names begin with.

    >>> of_models({"a/scaler": AuxItem("a/scaler", 1), "data": AuxItem("data", 2)}, "scaler")
    {'a/': AuxItem(path='a/scaler', value=1, policy='replicated')}
    """
    places = ((in_model(name), item) for name, item in aux.items())
    return {prefix: item for (prefix, own), item in places if own == path}


Agree = Callable[[], None]
"""A vote of all ranks: raises on every rank if any of them failed before it."""


def alone() -> None:
    """The vote of a rank that is on its own."""


@dataclass(frozen=True)
class Vote:
    """An `Agree` that also runs what a framework's own collective may hold up: see `watched`."""

    hold: Callable[[], None]
    watching: Callable[[Callable[[], None]], None]

    def __call__(self) -> None:
        self.hold()


def watched(agree: Agree, work: Callable[[], None]) -> None:
    """Do `work`, which communicates over a framework's own group, once all have agreed.

    In a migration it raises when another rank is gone, and does not wait for the group's time limit; the
    work may then still go on in a thread of its own.

    >>> watched(alone, lambda: print("gathered"))
    gathered
    """
    if isinstance(agree, Vote):
        agree.watching(work)
    else:
        work()


@runtime_checkable
class Adapter(Protocol):
    """How the state of one framework, or of one checkpoint format, is read and written.

    Five methods, called in this order, by all ranks of x's world. `x` is a `TrainState`; of files it is a
    path or a `FileSource` to be read, or a `FileTarget` to be written. A class that is found by an entry
    point, or given to `registry.register`, also has a static method `accepts(x) -> bool`:
    docs/write-an-adapter.md.
    """

    name: str

    def quiesce(self, x: Any, agree: Agree = alone) -> None:
        """Prove a step boundary, then `agree()`, then drop gathered copies.

        Raises `Refused` (reason `mid-step`) naming the micro-step otherwise, before any change. One
        rank may refuse alone: only after `agree` may anything be changed or communicated, else ranks
        differ in what they still have gathered and their next forward hangs.
        """
        ...

    def describe(self, x: Any) -> Described:
        """This rank's part of the state, after `quiesce`. No communication, no allocation, no change."""
        ...

    def prepare(self, x: Any, keys: tuple[KeySpec, ...]) -> Described:
        """Target only: make absent state real, shaped after the source's `keys`; then describe it.

        No communication, never by a fake step. Bytes made are in `allocated`. Of a target in files,
        every rank is asked to make the same files. Raises `Refused`.
        """
        ...

    def finish(
        self,
        x: Any,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Target only, after the bytes landed: rebuild derived copies, links, steps, caches, aux.

        May communicate on x's own groups, but only after one call of `agree()`, a vote that raises on
        every rank if any rank failed before it: so do all local work that can fail first, and no
        rank is left alone in a collective. Says what became of each aux item.
        """
        ...

    def abandon(self, x: Any) -> None:
        """Target only: undo `prepare`, leaving x as a target that was never touched or a fresh one."""
        ...


@runtime_checkable
class Posted(Protocol):
    """Transfers under way."""

    def wait(self, timeout: float) -> None:
        """Return when all have ended; raises `ChannelError` naming the peer, also on timeout."""
        ...


@runtime_checkable
class Channel(Protocol):
    """Moves bytes between seats. Between two seats, messages arrive in the order they were posted.

    A channel has its own connections: its failure must not harm a training group.
    """

    def post(
        self,
        receives: Sequence[tuple[int, torch.Tensor]],
        sends: Sequence[tuple[int, torch.Tensor]],
    ) -> Posted:
        """Start one batch of (peer seat, contiguous 1-D uint8 tensor); receives are posted first.

        The tensors belong to the channel until `wait` returns. Never blocks on a peer.
        """
        ...

    def close(self) -> None:
        """Every seat of the channel is done with it; give connections back."""
        ...

    def abort(self) -> None:
        """Break the channel, so that peers which wait on this seat fail at once."""
        ...
