"""Which adapter reads an object: found by name, imported on first use, nothing loaded before.

Resolution, in order: (1) what `register` was given, (2) the entry points of group `dynadapt.adapters`,
sorted by name, (3) the built-ins, the most specific first: a third party's engine may be a module, which
a built-in would take. The first whose test accepts the object has it. No two may have one name.

What an adapter is, of a framework or of a checkpoint format, is `protocols.Adapter`; how one is written and
plugged in, docs/write-an-adapter.md.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dynadapt.errors import DynadaptError
from dynadapt.protocols import Adapter, FileTarget, TrainState, modules_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["GROUP", "Entry", "adapter_for", "entries", "format_names", "register"]

GROUP = "dynadapt.adapters"


@dataclass(frozen=True, slots=True)
class Entry:
    """One adapter that can be had: its name, where its class lives, what it needs."""

    name: str
    target: str
    requires: tuple[str, ...]
    accepts: Callable[[Any], bool] | None = None

    def load(self) -> Adapter:
        """Import and make the adapter; a missing framework is one sentence that says what to install."""
        module, _, attribute = self.target.partition(":")
        try:
            made = getattr(importlib.import_module(module), attribute)()
        except ImportError as error:
            raise DynadaptError(
                f"adapter {self.name!r} needs {', '.join(self.requires)}: {error}; {self._hint}",
                reason="not-installed",
            ) from error
        return cast("Adapter", made)

    @property
    def _hint(self) -> str:
        if not self.requires:
            return "repair the installation of dynadapt"
        if self.accepts is None:
            return f"repair the installation of {self.requires[-1]}"
        return f"install it with pip install 'dynadapt[{self.requires[-1]}]'"


def _class_names(x: Any) -> set[str]:
    return {f"{c.__module__}.{c.__qualname__}" for c in type(x).__mro__}


def _is_several(x: Any) -> bool:
    return isinstance(x, TrainState) and isinstance(x.model, dict)


def _is_deepspeed(x: Any) -> bool:
    return isinstance(x, TrainState) and any(
        name.startswith("deepspeed.runtime.") and name.endswith("Engine")
        for name in _class_names(x.model)
    )


def _is_module(x: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, TrainState):
        return False
    parts = modules_of(x.model)
    return bool(parts) and all(isinstance(part, torch.nn.Module) for part in parts)


def _has_fsdp1(x: Any) -> bool:
    # Without the class while another thread is about to import it: then nothing is one yet.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return (
        kind is not None
        and _is_module(x)
        and any(isinstance(each, kind) for part in modules_of(x.model) for each in part.modules())
    )


_BUILT_IN = (
    Entry("models", "dynadapt.adapters.live.models:ModelsAdapter", ("torch",), _is_several),
    Entry(
        "deepspeed_zero",
        "dynadapt.adapters.live.deepspeed_zero:DeepSpeedZeroAdapter",
        ("torch", "deepspeed"),
        _is_deepspeed,
    ),
    Entry("fsdp1", "dynadapt.adapters.live.fsdp1:Fsdp1Adapter", ("torch",), _has_fsdp1),
    Entry(
        "torch_module",
        "dynadapt.adapters.live.torch_module:TorchModuleAdapter",
        ("torch",),
        _is_module,
    ),
)


_FORMATS = (
    Entry("trainer", "dynadapt.adapters.checkpoints.trainer_dir:TrainerDir", ()),
    Entry("accelerate", "dynadapt.adapters.checkpoints.accelerate_dir:AccelerateDir", ()),
    Entry("universal", "dynadapt.adapters.checkpoints.universal_dir:UniversalDir", ()),
    Entry("deepspeed", "dynadapt.adapters.checkpoints.deepspeed_dir:DeepSpeedDir", ()),
    Entry("megatron", "dynadapt.adapters.checkpoints.megatron_dir:MegatronDir", ()),
    Entry("dcp", "dynadapt.adapters.checkpoints.dcp_dir:DcpDir", ()),
    Entry("safetensors", "dynadapt.adapters.checkpoints.safetensors_dir:SafetensorsDir", ()),
    Entry("fsdp", "dynadapt.adapters.checkpoints.fsdp_files:FsdpFiles", ()),
    Entry("torch", "dynadapt.adapters.checkpoints.torch_files:TorchFiles", ()),
)
"""Checkpoint formats, the most specific first. Their modules need no framework, so each is asked itself."""


_registered: dict[str, Adapter] = {}


def register(adapter: Adapter) -> None:
    """Make an adapter known to this process, for code that is not installed as a package.

    Its class has `accepts(x) -> bool` beside the methods of `protocols.Adapter`. Raises `DynadaptError`
    (`adapter-clash`) if the name is taken by a built-in or an entry point; registering a name again
    replaces it.
    """
    if any(entry.name == adapter.name for entry in entries()):
        raise DynadaptError(f"adapter name {adapter.name!r} is taken", reason="adapter-clash")
    _registered[adapter.name] = adapter


@cache
def _points() -> tuple[importlib.metadata.EntryPoint, ...]:
    """What is installed does not change while we run, and looking takes milliseconds."""
    return tuple(sorted(importlib.metadata.entry_points(group=GROUP), key=lambda p: p.name))


def entries() -> tuple[Entry, ...]:
    """All adapters, built-ins first; lists entry points without importing them."""
    found = [*_BUILT_IN, *_FORMATS]
    taken = {entry.name for entry in found}
    for point in _points():
        if point.name in taken:
            raise DynadaptError(
                f"entry point {point.name!r} of {point.value} clashes with another adapter",
                reason="adapter-clash",
            )
        taken.add(point.name)
        owner = point.dist.name if point.dist is not None else point.value.partition(":")[0]
        found.append(Entry(point.name, point.value, (owner,)))
    return tuple(found)


def format_names() -> tuple[str, ...]:
    """The names of the checkpoint formats, those of other packages too."""
    others = (each for each in _others([]) if _accepts(each, FileTarget("", each.name)))
    return (*(entry.name for entry in _FORMATS), *(each.name for each in others))


def _others(broken: list[str]) -> Iterator[Adapter]:
    """The adapters of others, each made when it is asked for; `broken` is told why one cannot be had."""
    yield from _registered.values()
    for entry in entries()[len(_BUILT_IN) + len(_FORMATS) :]:
        try:
            adapter = entry.load()
        except Exception as error:  # it must not keep the built-ins from their own objects
            known = isinstance(error, DynadaptError)
            broken.append(str(error) if known else f"adapter {entry.name!r}: {error!r}")
        else:
            yield adapter


def _accepts(adapter: Adapter, x: Any) -> bool:
    accepts = getattr(adapter, "accepts", None)
    return accepts is not None and bool(accepts(x))


def adapter_for(x: Any) -> Adapter:
    """The adapter that reads `x`; raises `DynadaptError` (`no-adapter`) naming what was tried.

    `x` is a `TrainState`, a path or `FileSource`, or a `FileTarget` by its `format`. The class of a third
    party's adapter has `accepts(x) -> bool`, a static method, beside the methods of `protocols.Adapter`.
    """
    broken: list[str] = []
    for adapter in _others(broken):
        if _accepts(adapter, x):
            return adapter
    if isinstance(x, FileTarget | str) or hasattr(x, "__fspath__"):
        for entry in _FORMATS:
            adapter = entry.load()
            if _accepts(adapter, x):
                return adapter
        raise DynadaptError("; ".join([_unknown_format(x), *broken]), reason="no-adapter")
    for entry in _BUILT_IN:
        if entry.accepts is not None and entry.accepts(x):
            return entry.load()
    kind = type(x.model if isinstance(x, TrainState) else x)
    raise DynadaptError(
        f"no adapter reads a {kind.__module__}.{kind.__qualname__}; known: "
        + ", ".join([*(entry.name for entry in entries()), *_registered])
        + "".join(f"; {each}" for each in broken),
        reason="no-adapter",
    )


def _unknown_format(x: Any) -> str:
    known = ", ".join(entry.name for entry in _FORMATS)
    if isinstance(x, FileTarget):
        return f"no checkpoint format is called {x.format!r}; known: {known}"
    if not Path(x).exists():
        return f"{x}: there is no such file or folder"
    return f"{x}: holds no checkpoint of a known format ({known}){_hint(Path(x))}"


def _hint(path: Path) -> str:
    """Folders inside that are checkpoints, and a `latest` that names none."""
    if not path.is_dir():
        return ""
    pointer, text = path / "latest", ""
    if pointer.is_file():
        tag = pointer.read_bytes()[:100].decode(errors="replace").strip()
        text = f"; its `latest` names {tag!r}, which is no folder in it"
    formats = [entry.load() for entry in _FORMATS]
    inside = sorted(p for p in path.iterdir() if p.is_dir())[:1000]
    found = [p.name for p in inside if any(_accepts(f, str(p)) for f in formats)]
    return f"{text}; give one of its folders: {', '.join(found[-5:])}" if found else text
