"""The small files of a Hugging Face folder, which go with its weights: configs, tokenizer, code.

They come from the folder that is converted, or, of a live model, from the model, which has its configs alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from dynadapt.elastic.place import MANIFEST
from dynadapt.protocols import Outcome, TrainState, modules_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dynadapt.vps.keys import KeySpec

__all__ = ["bring_along", "said_by", "write_said"]

_ENDINGS = {
    *(".json", ".txt", ".model", ".jinja", ".md", ".yaml", ".yml", ".vocab"),
    *(".tiktoken", ".bpe", ".spm", ".py"),
}
_FOLDERS = ("additional_chat_templates",)
_MOST = 64 << 20

_MODEL, _ADAPTER = "model.safetensors", "adapter_model.safetensors"

_STATE = ("optimizer.*", "scheduler.*", "scaler.*", "rng_state*.pth")
"""What `transformers.Trainer` saves beside the weights."""


_LOADED = (
    *("model.safetensors", "model-*.safetensors"),
    *("pytorch_model.bin", "pytorch_model-*.bin"),
)
"""The files of weights that transformers finds in a folder."""

_SAY = ("dtype", "torch_dtype")
"""Under which names a config says the dtype of the weights."""

_FLOATS = {"bfloat16", "float16", "float32", "float64"}


def bring_along(
    source: Path, target: Path, keys: Iterable[KeySpec], *, dtype: str | None, whole: bool
) -> list[Outcome]:
    """Copy them, if the source is such a folder; what becomes of the rest that a trainer keeps there.

    The config says `dtype` then, if the weights were asked for in one, else that in which most of the `keys`
    are written where transformers finds them: it loads them as the config says, and would round masters.
    Files of the training state are told, unless `whole` says that the source's format has one of its own.
    An adapter's weights keep the name by which PEFT finds them.
    """
    if not any((source / name).is_file() for name in ("config.json", "adapter_config.json")):
        return []
    if not whole and (source / _ADAPTER).is_file() and os.listdir(target) == [_MODEL]:
        (target / _MODEL).rename(target / _ADAPTER)
    told = []
    for path in _small(source):
        if not (there := target / path.relative_to(source)).exists():
            there.parent.mkdir(exist_ok=True)
            if os.access(path, os.R_OK):
                shutil.copy2(path, there)
            else:
                told.append(Outcome(path.name, "dropped", "cannot be read"))
    told += _say_dtype(target, dtype, keys)
    if whole:
        return told
    left = [p.name for p in sorted(source.iterdir()) if any(fnmatchcase(p.name, g) for g in _STATE)]
    note = "lies beside the weights, and is not read: this format is weights alone"
    return [*told, *(Outcome(name, "dropped", note) for name in left)]


def said_by(live: Any) -> dict[str, str]:
    """The configs that a live Hugging Face model has, as `save_pretrained` writes them, by file.

    None of any other model, of one in several parts, and of one with PEFT's layers, whose names
    `from_pretrained` would not find, nor where a config holds what JSON has not.
    """
    parts = modules_of(TrainState.of(live).model) if live is not None else ()
    model = _speaker(parts[0]) if len(parts) == 1 else None
    if model is None or hasattr(model, "peft_config"):
        return {}
    try:
        config = json.loads(model.config.to_json_string())
        config["architectures"] = [type(model).__name__.removeprefix("FSDP")]  # as FSDP2 calls it
        found = {"config.json": json.dumps(config, indent=2, sort_keys=True) + "\n"}
        if _writes(generation := vars(model).get("generation_config")):
            found["generation_config.json"] = generation.to_json_string()
    except (TypeError, ValueError):
        return {}
    return found


def _speaker(model: Any) -> Any:
    """The module inside wrappers that has a config of its own; None where there is none."""
    while model is not None:
        model = (
            getattr(model, "__dict__", {}).get("_modules", {}).get("_orig_mod", model)
        )  # a compiled one's
        if _writes(
            getattr(model, "__dict__", {}).get("config")
        ):  # and not what a wrapper passes on
            return model
        model = getattr(model, "module", None)
    return None


def _writes(config: Any) -> bool:
    return callable(getattr(config, "to_json_string", None))


def write_said(
    said: Mapping[str, str], target: Path, keys: Iterable[KeySpec], dtype: str | None
) -> list[Outcome]:
    """Write what `said_by` found beside weights that transformers loads; see `bring_along` for the dtype."""
    if not said or not _is_loaded(target):
        return []
    for name, text in said.items():
        (target / name).write_text(text)
    return _say_dtype(target, dtype, keys)


def _small(source: Path) -> Iterator[Path]:
    inner = (source / name for name in _FOLDERS)
    for folder in (source, *(path for path in inner if path.is_dir())):
        for path in sorted(folder.iterdir()):
            ours = path.name == MANIFEST or path.name.endswith(".index.json")
            ours = ours or path.name.startswith("zero_to_")  # DeepSpeed's scripts for its own files
            wanted = path.suffix in _ENDINGS or path.name in {"LICENSE", "NOTICE"}
            if wanted and not ours and path.is_file() and path.stat().st_size <= _MOST:
                yield path


def _say_dtype(folder: Path, asked: str | None, keys: Iterable[KeySpec]) -> list[Outcome]:
    """Write the weights' dtype into the config, if it says one; told if nobody asked for another."""
    config, keys = folder / "config.json", tuple(keys)
    try:
        told = json.loads(config.read_text())
    except (OSError, ValueError):
        return []
    dtype = asked or (_most(keys) if _is_loaded(folder) else None)
    if not isinstance(told, dict) or dtype is None or (not asked and "quantization_config" in told):
        return []
    before = next((str(told[name]) for name in _SAY if name in told), "another")
    if not _says(told, dtype, keys):
        return []
    config.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    note = f"says {dtype}, as the weights are written, and said {before}"
    return [] if asked else [Outcome(config.name, "derived", note)]


def _says(told: dict[str, Any], dtype: str, keys: Sequence[KeySpec]) -> bool:
    """Change what a config says of a dtype, and the configs of parts in it; whether that was anything.

    Of a part (`vision_config`) it is that of most weights below a module that is called so (`vision_tower`);
    where none is (`text_config` is of the `language_model`), of all that no other part has.
    """
    names = [n for n in _SAY if n in told and told[n] != dtype and not isinstance(told[n], dict)]
    told |= dict.fromkeys(names, dtype)
    changed = bool(names)
    parts = {
        name.removesuffix("_config"): own
        for name, own in told.items()
        if name.endswith("_config") and name != "quantization_config" and isinstance(own, dict)
    }
    inner = {part: [s for s in keys if _below(s, part)] for part in parts}
    rest = [s for s in keys if not any(_below(s, part) for part in parts)]
    for part, own in parts.items():
        its = inner[part] or rest
        changed |= _says(own, _most(its) or dtype, its)
    return changed


def _below(spec: KeySpec, part: str) -> bool:
    return any(name.startswith(part) for name in spec.key.name.split("."))


def _is_loaded(folder: Path) -> bool:
    return any(fnmatchcase(name, glob) for name in os.listdir(folder) for glob in _LOADED)


def _most(keys: Iterable[KeySpec]) -> str | None:
    """The floating dtype of most elements of the weights."""
    sizes: Counter[str] = Counter()
    for spec in keys:
        if spec.kind == "parameter" and spec.key.slot == "param":
            sizes[spec.dtype] += spec.numel
    most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return most if most in _FLOATS else None
