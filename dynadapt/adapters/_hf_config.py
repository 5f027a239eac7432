"""A Hugging Face config's model on the meta device: every shape, no weight."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynadapt.errors import DynadaptError, Finding, Refused

if TYPE_CHECKING:
    from torch import nn

__all__ = ["meta_model"]


def meta_model(config: Any, dtype: str | None) -> nn.Module:
    """Build the model of a config folder, a config file, its content, or a config object.

    The class is the one that `architectures` names, else the causal language model of this type, else
    its base model. Raises `Refused` (reasons `no-file`, `bad-json`, `unknown-model`, `bad-config`) and
    `DynadaptError` (reason `not-installed`).
    """
    where: str = "config"
    values: Any = config
    if isinstance(config, (str, Path)):
        where, values = _read(Path(config))
    try:
        import torch
        import transformers
        from transformers.initialization import no_init_weights
    except ImportError as error:
        raise DynadaptError(
            f"{where}: a model config is read with transformers ({error}): "
            "pip install 'dynadapt[transformers]', or list the tensors in a file",
            reason="not-installed",
        ) from error
    config_object = _config_object(values, where) if isinstance(values, dict) else values
    kind, build = _builder(transformers, config_object)
    try:
        own = getattr(torch, dtype) if dtype else config_object.dtype or torch.float32
        with torch.device("meta"), no_init_weights():
            model: Any = build(config_object, dtype=own)
    except Exception as error:  # whatever a model's own code says to its config
        cause = f"{kind} cannot be built from it: {_first_line(error)}"
        raise _refused("bad-config", where, cause, "mend the config") from error
    model.tie_weights()  # a part of the initialisation that was left out
    found: nn.Module = model
    return found


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    file = path / "config.json" if path.is_dir() else path
    where = str(file)
    try:
        found = json.loads(file.read_text())
    except OSError as error:
        fix = "name a folder with a config.json, or such a file"
        raise _refused("no-file", where, f"cannot be read: {error.strerror}", fix) from error
    except ValueError as error:
        raise _refused("bad-json", where, f"is not JSON: {error}", "mend the file") from error
    if not isinstance(found, dict):
        raise _refused("bad-config", where, "is not one object", "name a model's config.json")
    return where, found


def _config_object(values: dict[str, Any], where: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING_NAMES), 1)
        hint = (
            f"did you mean {near[0]!r}?" if near else "list the model's tensors in a file instead"
        )
        cause = f"transformers knows no model_type {kind!r}" if kind else "has no model_type"
        raise _refused("unknown-model", where, cause, hint)
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(values))
    except Exception as error:  # the config classes check their own fields
        raise _refused("bad-config", where, _first_line(error), "mend the config") from error


def _builder(transformers: Any, config: Any) -> tuple[str, Any]:
    for name in getattr(config, "architectures", None) or ():
        known = getattr(transformers, name, None)
        if known is not None and hasattr(known, "_from_config"):
            return name, known._from_config
    causal = transformers.AutoModelForCausalLM
    # An encoder (BERT) can be made to predict the next token, but is not meant so by default.
    decodes = getattr(config, "is_decoder", True) is not False
    if decodes and type(config) in causal._model_mapping:
        return f"{config.model_type} for causal language", causal.from_config
    return config.model_type, transformers.AutoModel.from_config


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return " ".join(text.split())[:300]


def _refused(reason: str, where: str, cause: str, fix: str) -> Refused:
    return Refused([Finding(reason, where, cause, fix)])
