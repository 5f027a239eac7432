"""The small files of a Hugging Face folder, which go with its weights: configs, tokenizer, code."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from dynadapt.elastic.place import MANIFEST
from dynadapt.protocols import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from dynadapt.vps.keys import KeySpec

__all__ = ["bring_along"]

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
    config = folder / "config.json"
    try:
        told = json.loads(config.read_text())
    except (OSError, ValueError):
        return []
    names = [n for n in ("dtype", "torch_dtype") if isinstance(told, dict) and n in told]
    dtype = asked or _of_weights(folder, keys)
    if not names or dtype is None or (not asked and "quantization_config" in told):
        return []
    before = told[names[0]]
    if all(told[name] == dtype for name in names):
        return []
    told |= dict.fromkeys(names, dtype)
    config.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    note = f"says {dtype}, as the weights are written, and said {before}"
    return [] if asked else [Outcome(config.name, "derived", note)]


def _of_weights(folder: Path, keys: Iterable[KeySpec]) -> str | None:
    """The floating dtype of most elements, where the folder is one that transformers loads."""
    if not any(fnmatchcase(name, glob) for name in os.listdir(folder) for glob in _LOADED):
        return None
    sizes: Counter[str] = Counter()
    for spec in keys:
        if spec.kind == "parameter" and spec.key.slot == "param":
            sizes[spec.dtype] += spec.numel
    most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return most if most in _FLOATS else None
