"""The library's functions on checkpoints: `open`, `convert` and `diff`. Any one process calls them.

No framework is imported, no pickle is run, and nothing is loaded as a whole. The commands of the same names
are these functions; `load` and `save`, which join a checkpoint with a live job, are in `dynadapt.api`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dynadapt.elastic import arrangement, comparison, conversion, conversion_plan
from dynadapt.elastic.budget import Budget
from dynadapt.elastic.checkpoint import Checkpoint, open_checkpoint
from dynadapt.elastic.ranks import Ranks
from dynadapt.elastic.selection import Selection
from dynadapt.elastic.targets import file_options, proved, target_of
from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from dynadapt.elastic.comparison import Comparison
    from dynadapt.elastic.conversion_plan import ConversionPlan
    from dynadapt.elastic.conversion_report import ConversionReport
    from dynadapt.elastic.order_files import Order
    from dynadapt.protocols import FileSource, FileTarget
    from dynadapt.transport.plan import Narrow

    Path = str | os.PathLike[str]
    Model = Path | nn.Module

__all__ = ["Checkpoint", "convert", "diff", "open", "plan"]


def open(
    path: Path,
    *,
    order: Order = (),
    groups: Sequence[Sequence[str]] = (),
    model: Model | None = None,
) -> Checkpoint:
    """What a checkpoint of any known format holds: its layout over files, and its tensors on demand.

    No tensor's bytes are read until one is asked for. Where a torch optimizer numbers its parameters and the
    files do not name them, `order` does, the names of `named_parameters()`, or a `model`: a module, a
    Hugging Face folder or its config.json. `groups`, the names in each of the optimizer's groups, go before
    both. Where flats do not say what shapes they were made of, the model does, or `order` as a dict from
    names to shapes.

    Raises `DynadaptError` (`no-adapter`) for a format that nobody knows, `Refused` with everything that is
    wrong with the files.

    >>> import numpy, pathlib, tempfile, safetensors.numpy
    >>> at = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> safetensors.numpy.save_file({"w": numpy.arange(3, dtype="f4")}, at)
    >>> found = open(at)
    >>> found.format, found.problems(), list(found.tensors), found.tensors["w"].tolist()
    ('safetensors', (), ['w/param'], [0.0, 1.0, 2.0])
    """
    return _opened(path, order=order, groups=groups, model=model)


def _opened(
    x: Path | Checkpoint,
    *,
    order: Order = (),
    groups: Sequence[Sequence[str]] = (),
    model: Model | None = None,
    weights_only: bool = False,
) -> Checkpoint:
    if isinstance(x, Checkpoint):
        return x
    known = replace(arrangement.known_of(model, None, order), weights_only=weights_only)
    found = open_checkpoint(arrangement.source_of(x, order, groups, known))
    arrangement.check_names(order, found.own)
    return found


def convert(
    src: Path | Checkpoint,
    dst: Path,
    to: str | None = None,
    *,
    like: Path | Checkpoint | None = None,
    order: Order = (),
    groups: Sequence[Sequence[str]] = (),
    model: Model | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    strip_prefix: str = "",
    add_prefix: str = "",
    weights_only: bool = False,
    dtype: str | None = None,
    keep_dtype: Sequence[str] = (),
    max_shard_size: int | str | None = None,
    verify: bool = True,
    force: bool = False,
    resume: bool = False,
    threads: int = 2,
    max_memory: int | str | None = None,
    ranks: tuple[int, int] | None = None,
    timeout: float = 60.0,
    on_bytes: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write a checkpoint in another format or layout, in one pass, and prove it by its fingerprint.

    `to` is a format (`universal`, `safetensors`), a layout (`zero3:dp=4`), or both. `like` is a checkpoint
    whose format and layout are wanted (unless `to` says another), its order of parameters and its groups
    too. `order` lists the model's parameter names (`named_parameters()`), `groups` those of each of the
    optimizer's groups: flat layouts need an order, and safetensors or DCP do not say it;
    some sources need it, too (see `open`). `model` says the order as well. `include` and
    `exclude` are globs over names, `strip_prefix` and `add_prefix` change them. `dtype` is that of floats
    in safetensors, but for names that match `keep_dtype`; `max_shard_size` bounds such a file.
    `threads` work at a time; at large conversions on Linux as many forked processes instead, unless torch is
    loaded or `max_memory` is given. That bounds the anonymous memory that this takes over what the process
    holds: fewer threads and smaller pieces, or `max-memory` if it is too little. Both are bytes, or a text
    such as `"512MiB"` or `"5GB"` (`bad-argument` if it is no size). `on_bytes` is called with (bytes done,
    bytes in all), maybe from several threads.

    Several processes on one file system share the work if each makes the same call with `ranks`, its number
    and how many there are; all return the report of number 0. One that gives no sign of life for `timeout`
    seconds ends all (`rank-lost`), and `resume` can continue.

    `dst` gets its name when all of it is there and was read back; `src` is only read, and must have the check
    sums that torch put into its files (`certificate`): `verify=False` does without both. Raises `Refused`
    (`target-exists` unless `force`, `worker-lost` if a process that works for it is killed) and
    `DynadaptError`; then there is no `dst`, or the old one. After an interrupt (`KeyboardInterrupt`), or if a
    process is killed, a hidden folder beside `dst` has what was written; with `resume` the same call
    continues it, else it begins anew.

    >>> import numpy, pathlib, tempfile, safetensors.numpy
    >>> at = pathlib.Path(tempfile.mkdtemp())
    >>> safetensors.numpy.save_file({"w": numpy.ones(3, "f4")}, at / "model.safetensors")
    >>> report = convert(at / "model.safetensors", at / "half", "safetensors", dtype="bfloat16")
    >>> open(at / "half").keys[0].dtype, report.verified
    ('bfloat16', True)
    """
    budget = Budget.of(max_memory)
    like = None if like is None else _opened(like)
    known = arrangement.known_of(model, like, order)
    wanted, chosen = _wanted(
        dst,
        to,
        like=like,
        order=tuple(order) or known.order,
        groups=groups,
        selection=_selection(include, exclude, strip_prefix, add_prefix, weights_only),
        options=file_options(dtype, keep_dtype, max_shard_size),
    )
    return conversion.convert(
        _source(src, wanted, chosen, known, order),
        wanted,
        selection=chosen,
        narrow=_narrow(dtype),
        verify=verify,
        force=force,
        resume=resume,
        threads=threads,
        budget=budget,
        ranks=None if ranks is None or ranks[1] < 2 else Ranks(*ranks, timeout=timeout),
        on_bytes=on_bytes,
    )


def plan(
    src: Path | Checkpoint,
    to: str | None = None,
    *,
    like: Path | Checkpoint | None = None,
    order: Order = (),
    groups: Sequence[Sequence[str]] = (),
    model: Model | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    strip_prefix: str = "",
    add_prefix: str = "",
    weights_only: bool = False,
    dtype: str | None = None,
    keep_dtype: Sequence[str] = (),
    max_shard_size: int | str | None = None,
    verify: bool = True,
    threads: int = 2,
    max_memory: int | str | None = None,
) -> ConversionPlan:
    """What `convert` with the same arguments would do: bytes, files, memory, seconds. Writes nothing.

    Raises what `convert` would raise before it writes.

    >>> import numpy, pathlib, tempfile, safetensors.numpy
    >>> at = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> safetensors.numpy.save_file({"w": numpy.ones(3, "f4")}, at)
    >>> found = plan(at, "safetensors")
    >>> found.bytes_read, found.bytes_state, found.files
    (12, 12, 1)
    """
    budget = Budget.of(max_memory)
    like = None if like is None else _opened(like)
    known = arrangement.known_of(model, like, order)
    wanted, chosen = _wanted(
        "plan",
        to,
        like=like,
        order=tuple(order) or known.order,
        groups=groups,
        selection=_selection(include, exclude, strip_prefix, add_prefix, weights_only),
        options=file_options(dtype, keep_dtype, max_shard_size),
    )
    return conversion_plan.plan(
        _source(src, wanted, chosen, known, order),
        wanted,
        selection=chosen,
        narrow=_narrow(dtype),
        verify=verify,
        threads=threads,
        budget=budget,
    )


def _source(
    src: Path | Checkpoint,
    wanted: FileTarget,
    chosen: Selection,
    known: FileSource,
    order: Order,
) -> Checkpoint:
    """The source, whose names the target's order and groups are, before a prefix was taken off or put on.

    Raises `Refused` (`no-match`) for a name of the user's `order` that it does not have.
    """
    if isinstance(src, Checkpoint):
        found = src
    else:
        said = replace(known, weights_only=chosen.weights_only)
        names, own_groups = wanted.order, wanted.groups
        if chosen.strip_prefix or chosen.add_prefix:
            said = replace(said, order=(), tied=(), shapes=(), buffers=())
            names, own_groups = chosen.before(wanted.order), ()
        found = open_checkpoint(arrangement.source_of(src, names, own_groups, said))
    arrangement.check_names(order, found.own, chosen.before)
    return found


def _selection(
    include: Sequence[str],
    exclude: Sequence[str],
    strip_prefix: str = "",
    add_prefix: str = "",
    weights_only: bool = False,
) -> Selection:
    return Selection(tuple(include), tuple(exclude), strip_prefix, add_prefix, weights_only)


def _narrow(dtype: str | None) -> Narrow:
    """Who asks for a dtype asks for its rounding, too."""
    return "if-exact" if dtype is None else "allow"


def _wanted(
    dst: Path,
    to: str | None,
    *,
    like: Checkpoint | None,
    order: Sequence[str],
    groups: Sequence[Sequence[str]],
    selection: Selection,
    options: Mapping[str, Any],
) -> tuple[FileTarget, Selection]:
    """The target that arguments mean, and what of the source goes there."""
    known_order, known_groups = tuple(order), tuple(map(tuple, groups))
    frozen: tuple[str, ...] = ()
    if like is not None:
        its = arrangement.like(like)
        to = to or its.written
        frozen = () if known_groups else its.frozen
        known_order, known_groups = known_order or its.order, known_groups or its.groups
    if to is None:
        cause = "nothing says what is to be written"
        fix = "give --to SPEC (to=), e.g. safetensors or zero3:dp=4, or --like CHECKPOINT (like=)"
        raise Refused([Finding("bad-argument", "--to (to=)", cause, fix)])
    wanted = proved(target_of(os.fspath(dst), to, options))
    if wanted.format == "safetensors":
        selection = replace(selection, weights_only=True)
    return replace(wanted, order=known_order, groups=known_groups, frozen=frozen), selection


def diff(
    a: Path | Checkpoint,
    b: Path | Checkpoint,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    ulp: int = 0,
    order: Order = (),
    groups: Sequence[Sequence[str]] = (),
    model: Model | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    weights_only: bool = False,
    ignore_missing: bool = False,
    threads: int = 2,
    on_bytes: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints of any formats: masters, moments, steps, hyperparameters, counts.

    What is within `rtol` (relative to b's value), `atol`, or `ulp` steps of the coarser dtype counts as
    equal. `order`, `groups` and `model` are those of both, as in `open`. `ignore_missing` compares what both
    hold. The result has `same`, a `Difference` for every tensor (`tensors`), and by path what else differs
    (`aux`).

    >>> import numpy, pathlib, tempfile, safetensors.numpy
    >>> at = pathlib.Path(tempfile.mkdtemp())
    >>> for name in "ab":
    ...     safetensors.numpy.save_file({"w": numpy.full(3, ord(name), "f4")}, at / f"{name}.safetensors")
    >>> found = diff(at / "a.safetensors", at / "b.safetensors")
    >>> found.same, found.tensors[0].max_abs, diff(at / "a.safetensors", at / "b.safetensors", atol=1).same
    (False, 1.0, True)
    """
    chosen = _selection(include, exclude, weights_only=weights_only)

    def opened(x: Path | Checkpoint) -> Checkpoint:
        return _opened(x, order=order, groups=groups, model=model, weights_only=weights_only)

    return comparison.compare(
        opened(a),
        opened(b),
        selection=None if chosen == Selection() else chosen,
        tolerance=comparison.Tolerance(rtol, atol, ulp),
        ignore_missing=ignore_missing,
        threads=threads,
        on_bytes=on_bytes,
    )
