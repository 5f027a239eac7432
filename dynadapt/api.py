"""The library's functions.

`describe`, `plan`, `migrate` and `fingerprint` are of live states: all ranks of a job call each. `x` is a
DeepSpeed engine, a module, or a `TrainState`. Without an explicit `session` the ranks of
torch.distributed's default group take part, or this process alone if there is none.

`declare` and `simulate` are of layouts that need not exist: any one process calls them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dynadapt.elastic import migration
from dynadapt.elastic.arrangement import known_of, source_of
from dynadapt.elastic.outcome import printed
from dynadapt.elastic.settings import DEFAULT_BUDGET, Settings
from dynadapt.elastic.state import fingerprint_of, side_of
from dynadapt.elastic.targets import file_options, target_of
from dynadapt.elastic.worlds import current_session
from dynadapt.errors import Refused
from dynadapt.protocols import FileSource, FileTarget, TrainState
from dynadapt.transport.control import Timeouts
from dynadapt.vps.box import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from torch import nn

    from dynadapt.elastic.order_files import Order
    from dynadapt.elastic.outcome import MigrationReport
    from dynadapt.elastic.plan_report import PlanReport
    from dynadapt.elastic.side import Side
    from dynadapt.elastic.worlds import Session
    from dynadapt.errors import Finding
    from dynadapt.transport.simulate import Cluster, Simulation
    from dynadapt.vps.mesh_layout import MeshLayout
    from dynadapt.vps.model_shape import ModelShape
    from dynadapt.vps.model_shape import State as Slot
    from dynadapt.vps.tensor_map import TensorMap
    from dynadapt.vps.tp_rules import TpRules

    Model = str | os.PathLike[str] | nn.Module

__all__ = ["declare", "describe", "fingerprint", "load", "migrate", "plan", "save", "simulate"]


def _state(x: Any) -> Any:
    plain = x is None or isinstance(x, str | tuple) or hasattr(x, "__fspath__")
    return x if plain else TrainState.of(x)


def _settings(**given: Any) -> Settings:
    timeout = given.pop("timeout", None)
    allow = given.pop("allow", ())
    allow = frozenset({allow} if isinstance(allow, str) else allow)
    budget = given.pop("budget", None)
    timeouts = Timeouts() if timeout is None else Timeouts(min(30.0, timeout), timeout)
    budget = DEFAULT_BUDGET if budget is None else budget
    return Settings(allow=allow, budget=budget, timeouts=timeouts, **given)


@dataclass(frozen=True)
class State:
    """A described state: its layout over all ranks, per-parameter scalars, and the rest by path."""

    side: Side

    @property
    def layout(self) -> Any:
        """The `RowLayout`: keys, and who holds which box of each."""
        return self.side.layout

    @property
    def scalars(self) -> Any:
        """Parameter name -> {"step": n}."""
        return self.side.scalars

    @property
    def aux(self) -> dict[str, Any]:
        """Hyperparameters, scheduler, counters and the rest, by path."""
        return {path: item.value for path, item in self.side.aux.items()}

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(title=f"state on {len(self.layout.endpoints)} seats")
        for column in ("key", "shape", "dtype", "kind", "presence", "holders"):
            table.add_column(column)
        for spec in self.layout.keys:
            boxes = self.layout.holders(spec.key, Box.whole(spec.shape)) if spec.numel else ()
            distinct = len({holder.box for holder in boxes})
            held = f"{distinct} boxes on {len({h.endpoint for h in boxes})} seats"
            kind = f"{spec.kind}, derived" if spec.derived else spec.kind
            shape = "x".join(map(str, spec.shape)) or "scalar"
            table.add_row(str(spec.key), shape, spec.dtype, kind, spec.presence, held)
        return table

    def __str__(self) -> str:
        return printed(self)


def describe(
    x: Any,
    *,
    order: Sequence[str] = (),
    groups: Sequence[Sequence[str]] = (),
    model: Model | None = None,
    tensor_map: TensorMap | None = None,
    timeout: float | None = None,
    session: Session | None = None,
) -> State:
    """Who holds what of a live state. All ranks call it; nothing moves, nothing is written.

    `tensor_map` gives its tensors other names and shapes, as for `migrate`. Gathered parameter copies that
    an evaluation left behind are dropped. Raises `MigrationAborted` (reason `mid-step`) in the middle of a
    step, `DynadaptError` (`no-adapter`) for an unknown object.

    >>> import torch
    >>> [str(spec.key) for spec in describe(torch.nn.Linear(2, 3)).layout.keys]
    ['bias/param', 'weight/param']
    """
    settings = _settings(timeout=timeout, source_map=tensor_map)
    side, _ = side_of(session or current_session(), _state(x), settings)
    return State(side)


def plan(
    a: Any,
    b: Any,
    *,
    budget: int | None = None,
    max_extra_bytes: int | None = None,
    mode: Literal["keep", "park", "release"] = "keep",
    narrow: Literal["if-exact", "allow", "refuse"] = "if-exact",
    on_drift: Literal["error", "warn", "take-first"] = "error",
    allow: Collection[str] = (),
    source_map: TensorMap | None = None,
    target_map: TensorMap | None = None,
    timeout: float | None = None,
    session: Session | None = None,
) -> PlanReport:
    """What `migrate(a, b)` would move, per tensor and seat, and its price. Both are left as they are.

    All ranks call it; the result is equal on all of them. Raises what `migrate` would raise.

    >>> import torch
    >>> a, b = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    >>> plan(a, b).bytes_moved
    0
    """
    settings = _settings(
        budget=budget,
        max_extra_bytes=max_extra_bytes,
        mode=mode,
        narrow=narrow,
        on_drift=on_drift,
        allow=allow,
        source_map=source_map,
        target_map=target_map,
        timeout=timeout,
    )
    return migration.plan(session or current_session(), _state(a), _state(b), settings)


def migrate(
    source: Any,
    target: Any,
    *,
    budget: int | None = None,
    max_extra_bytes: int | None = None,
    mode: Literal["keep", "park", "release"] = "keep",
    timeout: float | None = None,
    on_drift: Literal["error", "warn", "take-first"] = "error",
    allow: Collection[str] = (),
    narrow: Literal["if-exact", "allow", "refuse"] = "if-exact",
    source_map: TensorMap | None = None,
    target_map: TensorMap | None = None,
    on_phase: Callable[[str], None] | None = None,
    session: Session | None = None,
) -> MigrationReport:
    """Move the whole training state of `source` into `target`, all or nothing. All ranks call it.

    Call it at a step boundary, with both built: the target as its framework builds it, from the same
    model and optimizer classes; its values are overwritten. Pass None for a side that a rank has no
    part in. After it the target trains on.

    `mode` says what becomes of the source meanwhile. `"keep"`: it is only read. `"park"`: it is moved to
    host memory first. `"release"`: its memory is freed as its state is placed and proven in the target,
    so that the peak is near the larger of the two states; it holds nothing after success, as with
    `"park"`, and is moved back from the target after a failure. That takes every rank: with
    `"release"`, a rank that dies after memory was freed takes the source with it (`source-lost`).
    A source that holds nothing must not be read, nor saved: torch does not check it, and may end the
    process, or write an empty file. A migration into it makes it whole again.

    `budget`: staging bytes a seat may take (256 MiB). `max_extra_bytes`: refuse (`over-limit`) where a
    seat would hold more than so many bytes beyond what it holds now, staging included. `timeout`:
    seconds a phase may take (300); a rank that shows no life for 30 s, or `timeout` if less, counts as
    lost. `on_drift`: what to do where replicas of a parameter or a state differ: refuse (`"error"`), go
    on with the first holder's and warn (`"warn"`), or do so as a wanted outcome (`"take-first"`).
    `allow`: any of `"extra"` (leave source state behind), `"missing"` (keep the target's own), `"tie"`,
    `"step"`. `narrow`: whether floats may lose bits. `on_phase` is called with each phase's name as it
    begins.

    `source_map` and `target_map` are for models whose tensors have other names or shapes: each is a
    `TensorMap` from the names of its side to common ones, so one map serves both ways, whichever side
    has the foreign names. Steps, param groups and reports follow. A rule that matches nothing is an
    error with the nearest names.

    Raises `MigrationAborted`, the same on every rank, with the seat, the phase, the cause and all
    findings; the source is then as it was and may train on.

    >>> import torch
    >>> a, b = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    >>> report = migrate(a, b)
    >>> torch.equal(a.weight, b.weight), report.fingerprint_source == report.fingerprint_target
    (True, True)
    """
    settings = _settings(
        budget=budget,
        max_extra_bytes=max_extra_bytes,
        mode=mode,
        narrow=narrow,
        on_drift=on_drift,
        allow=allow,
        source_map=source_map,
        target_map=target_map,
        timeout=timeout,
    )
    here = session or current_session()
    return migration.migrate(here, _state(source), _state(target), settings, on_phase)


def load(
    live: Any,
    path: str | os.PathLike[str],
    *,
    order: Order = (),
    groups: Sequence[Sequence[str]] = (),
    model: Model | None = None,
    allow: Collection[str] = (),
    narrow: Literal["if-exact", "allow", "refuse"] = "if-exact",
    on_drift: Literal["error", "warn", "take-first"] = "error",
    source_map: TensorMap | None = None,
    target_map: TensorMap | None = None,
    timeout: float | None = None,
    on_phase: Callable[[str], None] | None = None,
    session: Session | None = None,
) -> MigrationReport:
    """Put a checkpoint of any format and any number of ranks into a live job. All ranks call it.

    `live` is a target as for `migrate`: a DeepSpeed engine, a module, or a `TrainState`, at a step boundary.
    Every rank reads from the files what its own pieces need, straight into the framework's storage; all
    ranks must see the same files (`files-differ`). Sums of the files and of the live state are compared
    before the commit, and those of the files with their manifest, if they have one. Random streams are
    left as they are.

    Where the files number an optimizer's parameters and do not name them, `order`, `groups` or `model` do, as
    for `dynadapt.open`. Weights alone go into a job with an optimizer by `allow={"missing"}`, which keeps its
    own state. The other arguments are those of `migrate`.

    Raises `MigrationAborted`, the same on every rank, with the seat, the phase and all findings. Until bytes
    move the job is as it was; after that it is a target that was half loaded, and is not to train on.

    >>> import pathlib, tempfile, safetensors.torch, torch
    >>> at = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> safetensors.torch.save_file({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, at)
    >>> model = torch.nn.Linear(3, 2)
    >>> load(model, at).bytes_read, model.weight.sum().item()
    (32, 6.0)
    """
    unfit: tuple[Finding, ...] = ()
    source: str | FileSource = os.fspath(path)
    try:
        source = source_of(path, order, groups, known_of(model, None, order))
    except Refused as error:  # told to all ranks, so that none of them waits for this one
        unfit = error.findings
    settings = _settings(
        narrow=narrow,
        on_drift=on_drift,
        allow=allow,
        source_map=source_map,
        target_map=target_map,
        timeout=timeout,
        unfit=unfit,
    )
    here = session or current_session()
    return migration.migrate(here, source, _state(live), settings, on_phase)


def save(
    live: Any,
    path: str | os.PathLike[str],
    to: str,
    *,
    order: Sequence[str] = (),
    groups: Sequence[Sequence[str]] = (),
    dtype: str | None = None,
    keep_dtype: Sequence[str] = (),
    max_shard_size: int | str | None = None,
    force: bool = False,
    allow: Collection[str] = (),
    on_drift: Literal["error", "warn", "take-first"] = "error",
    tensor_map: TensorMap | None = None,
    timeout: float | None = None,
    on_phase: Callable[[str], None] | None = None,
    session: Session | None = None,
) -> MigrationReport:
    """Write a live job as a checkpoint of any format and number of ranks. All ranks call it.

    `live` is a source as for `migrate`, at a step boundary; it is only read. `to` is a format
    (`universal`, `safetensors`), a layout (`zero3:dp=4`), or both; the layout need not be the job's own.
    Every rank writes the elements that it was chosen for, of those it holds, straight to their places in the
    files; all ranks must see one file system. Everything is read back and compared with the job, and the
    manifest has the job's fingerprint, before the folder gets its name.

    `order` and `groups` list parameter names where the order or the optimizer's groups are to be others.
    `dtype` is that of floats in safetensors, but for names that match `keep_dtype`; `max_shard_size` bounds
    such a file, in bytes or as `"5GB"`; a Hugging Face model's configs go with it. `force` replaces what is
    there. `tensor_map` gives other names and shapes. What the format has no place for is told in the
    report's outcomes. The other arguments are those of `migrate`.

    Raises `MigrationAborted`, the same on every rank, with the seat, the phase and all findings
    (`target-exists`, `disk-full`, `files-differ`...); then there is no such folder, or the old one.

    >>> import pathlib, tempfile, torch
    >>> at, model = pathlib.Path(tempfile.mkdtemp()) / "weights", torch.nn.Linear(3, 2)
    >>> report = save(model, at, "safetensors")
    >>> report.bytes_written, report.fingerprint_target == fingerprint(model)
    (32, True)
    """
    unfit: tuple[Finding, ...] = ()
    try:
        target = target_of(os.fspath(path), to, file_options(dtype, keep_dtype, max_shard_size))
    except Refused as error:  # told to all ranks, and not to this one alone
        target, unfit = FileTarget(os.fspath(path), to), error.findings
    target.order = tuple(order)
    target.groups = tuple(tuple(names) for names in groups)
    settings = _settings(
        narrow="if-exact" if dtype is None else "allow",
        on_drift=on_drift,
        allow=allow,
        source_map=tensor_map,
        timeout=timeout,
        force=force,
        unfit=unfit,
    )
    here = session or current_session()
    return migration.migrate(here, _state(live), target, settings, on_phase)


def fingerprint(
    x: Any,
    *,
    order: Order = (),
    groups: Sequence[Sequence[str]] = (),
    model: Model | None = None,
    tensor_map: TensorMap | None = None,
    timeout: float | None = None,
    session: Session | None = None,
) -> str:
    """One 128-bit number, in hex, of a whole training state, whatever its layout. All ranks call it.

    Covers parameters (the authoritative copy), optimizer tensors and persistent buffers, each with its
    name, dtype and shape; not step counts and hyperparameters. A `tensor_map` gives other names and shapes
    first: two states that a migration made equal by one have the same number by it. `order`, `groups` and
    `model` are those of `dynadapt.open`, for an `x` that is a path.

    >>> import torch
    >>> len(fingerprint(torch.nn.Linear(2, 3)))
    32
    """
    settings = _settings(timeout=timeout, source_map=tensor_map)
    if isinstance(x, str | os.PathLike):
        x = source_of(x, order, groups, known_of(model, None, order))
    return fingerprint_of(session or current_session(), _state(x), settings)


def declare(
    spec: str,
    model: ModelShape | nn.Module | str | Path,
    rules: TpRules | None = None,
    *,
    states: Sequence[Slot] | None = None,
    groups: Sequence[Sequence[str]] = (),
    units: Sequence[str] = (),
) -> MeshLayout:
    """Who would hold what of a model under a layout, e.g. `zero3:dp=8` or `ddp:dp=2,tp=2`.

    `model` is a module (on the meta device, too), a Hugging Face folder or config.json, a JSON listing of
    tensors, or a `ModelShape`. `rules` say what `tp` and `ep` cut; by default those of the model's own
    config. `states` are the slots of a trainable parameter, by default AdamW's with fp32 masters.
    `groups` are the optimizer's param groups and `units` FSDP1's wrapped modules, as globs.

    Raises `Refused` with everything that is wrong with the spec, or that cannot be placed so.

    >>> import torch
    >>> layout = declare("ddp:dp=2", torch.nn.Linear(3, 2))
    >>> [str(row.box) for row in layout.rows(1) if row.key == ("weight", "param")]
    ['[0:2,0:3]']
    """
    from dynadapt.vps.declare import declare as declared
    from dynadapt.vps.model_shape import ADAMW

    shape, own = _shape(model)
    slots = ADAMW if states is None else states
    rules = own if rules is None else rules
    return declared(spec, shape, rules, states=slots, groups=groups, units=units)


def simulate(
    source: str,
    target: str,
    model: ModelShape | nn.Module | str | Path,
    links: str | Cluster = "h100",
    *,
    rules: TpRules | None = None,
    states: Sequence[Slot] | None = None,
    budget: int = 1 << 30,
) -> Simulation:
    """Seconds, lower bound, busiest link and peak memory of a change between two layouts of a model.

    `links` names a cluster of `dynadapt.transport.simulate.CLUSTERS`; `budget` is the staging bytes of one
    rank. The rest is as for `declare`. Raises `Refused` as `declare`, and `DynadaptError` (reason
    `unknown-cluster`).

    >>> import torch
    >>> simulate("ddp:dp=4", "zero3:dp=4", torch.nn.Linear(3, 2)).seconds
    0.0
    """
    from dynadapt.transport import simulate as simulator

    shape, own = _shape(model)
    rules = own if rules is None else rules
    layouts = [declare(spec, shape, rules, states=states) for spec in (source, target)]
    return simulator.simulate(layouts[0], layouts[1], links, budget=budget)


def _shape(model: ModelShape | nn.Module | str | Path) -> tuple[ModelShape, TpRules]:
    from dynadapt.adapters import model_shapes
    from dynadapt.vps.model_shape import ModelShape
    from dynadapt.vps.tp_rules import TpRules

    if isinstance(model, ModelShape):
        return model, TpRules({})
    if isinstance(model, str | os.PathLike):
        found = model_shapes.read_model(model)
        return found.model, found.rules
    return model_shapes.of_module(model), TpRules({})
