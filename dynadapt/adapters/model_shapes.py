"""The shapes of a model, and what tensor parallelism cuts of it, from whatever describes it.

A Hugging Face config, a torch module, a `parallelize_module` plan or a plain list of tensors becomes a
`ModelShape` and `TpRules`. Weights are never loaded: a config's model is built on torch's meta device.
torch and transformers are imported when a function needs them; a listing needs neither.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dynadapt.adapters._hf_config import meta_model
from dynadapt.adapters._parallelize_plan import rules_of_parallelize_plan
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import FileSource
from dynadapt.vps.keys import ITEMSIZE, canonical_name
from dynadapt.vps.model_shape import ModelShape, Named
from dynadapt.vps.tp_rules import TpRules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

__all__ = [
    "ModelAndRules",
    "from_config",
    "from_listing",
    "of_module",
    "read_model",
    "rules_of_parallelize_plan",
    "said_of",
    "tp_rules",
]

Experts = Literal["stacked", "listed"]

#: How modules call the size of an attention head, and the projections whose dim 0 is made of heads.
_HEAD_SIZE = ("head_dim", "attention_head_size", "key_value_proj_dim")
_PROJECTIONS = frozenset(
    {"q_proj", "k_proj", "v_proj", "q", "k", "v", "query", "key", "value"},
)
_STACKED = re.compile(r"^(.*\bexperts)\.(gate_up_proj|up_proj|down_proj)$")


class ModelAndRules(NamedTuple):
    """A model's shapes, and the rules that its authors wrote for tensor and expert parallelism."""

    model: ModelShape
    rules: TpRules


def from_config(
    config: Path | str | Any, *, dtype: str | None = None, experts: Experts = "stacked"
) -> ModelShape:
    """The shapes of the model that a Hugging Face config describes.

    `config` is a folder with a `config.json`, such a file, or a config object. `dtype` overrides the
    config's own. `experts="listed"` names every expert of a stack `[experts, out, in]` by itself, as
    checkpoint files do: `experts.3.gate_proj.weight`, `.up_proj.weight`, `.down_proj.weight`.

    Raises `Refused` (reasons `no-file`, `bad-json`, `unknown-model`, `bad-config`) and `DynadaptError`
    (reason `not-installed`) where transformers is missing.

    >>> config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16,
    ...           "intermediate_size": 16, "num_hidden_layers": 3}
    >>> from_config(config).families[1].name(2)
    'model.layers.2.self_attn.q_proj.weight'
    """
    return _shape(meta_model(config, dtype), experts)


def tp_rules(config: Path | str | Any, *, experts: Experts = "stacked") -> TpRules:
    """The tensor- and expert-parallel plan that a Hugging Face model ships with, as rules.

    Raises as `from_config`. A model without a plan has no rules, so that nothing of it is cut.
    """
    return _rules(meta_model(config, None), experts)


def read_model(
    config: Path | str | Any, *, dtype: str | None = None, experts: Experts = "stacked"
) -> ModelAndRules:
    """`from_config` and `tp_rules` at once, or a listing without rules; the file says which it is.

    Raises as `from_config` and `from_listing`.
    """
    model = _read(config, dtype)
    if isinstance(model, ModelShape):
        return ModelAndRules(model, TpRules({}))
    return ModelAndRules(_shape(model, experts), _rules(model, experts))


def _read(config: Path | str | Any, dtype: str | None) -> ModelShape | nn.Module:
    """The shapes of a listing, or the model of a config without its weights."""
    if isinstance(config, (str, Path)) and Path(config).is_file():
        found = _read_json(Path(config))
        if isinstance(found, list) or (isinstance(found, dict) and "tensors" in found):
            return _listed(found, str(config), dtype)
    return meta_model(config, dtype)


def of_module(module: nn.Module, *, dtype: str | None = None) -> ModelShape:
    """The shapes of a torch module's parameters in their order, tied ones under their first name.

    Parameters that ZeRO-3 or DTensors cut have their whole shape. Names are without the segments that
    wrappers add.

    >>> from torch import nn
    >>> of_module(nn.Linear(3, 2)).families[0].shape
    (2, 3)
    """
    return ModelShape.of(_tensors(module, dtype), _heads(module))


def said_of(model: str | os.PathLike[str] | nn.Module) -> FileSource:
    """What a model says of its checkpoints, without its weights: order, ties, shapes, buffers; no path.

    `model` is a module, a Hugging Face folder or `config.json`, or a JSON listing. Experts that such a model
    stacks have the names of the stacks, as a job has them, and those of each, as files of weights do; a
    checkpoint has one or the other. Raises as `read_model`.

    >>> from torch import nn
    >>> said_of(nn.Linear(3, 2)).order
    ('weight', 'bias')
    """
    buffers: tuple[str, ...] = ()
    listed = None
    if isinstance(model, str | os.PathLike):
        found = _read(os.fspath(model), None)
        if isinstance(found, ModelShape):
            shape = found
        else:
            shape = _shape(found, "stacked")
            with suppress(Refused):  # experts that cannot be told apart are nowhere called so
                listed = _shape(found, "listed")
    else:
        shape = of_module(model)
        buffers = tuple(canonical_name(name) for name, _ in model.named_buffers())
    shapes = _named(shape) if listed is None else _merged(_named(shape), _named(listed))
    return FileSource(
        "",
        tuple(shapes),
        tied=tuple((f.name(0), *f.aliases) for f in shape.families if f.aliases),
        shapes=tuple(shapes.items()),
        buffers=buffers,
    )


def _named(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Shapes by name, in the model's order."""
    every = ((int(f.orders[i]), f.name(i), f.shape) for f in shape.families for i in range(len(f)))
    return {name: shape for _, name, shape in sorted(every)}


def _merged(
    a: dict[str, tuple[int, ...]], b: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """All of two that have their common names in one order; what only one has stays in its place."""
    found, left = {}, iter(b.items())
    for name, shape in a.items():
        if name in b:
            for other, its in left:
                found[other] = its
                if other == name:
                    break
        else:
            found[name] = shape
    return found | dict(left)


def from_listing(path: Path | str, *, dtype: str | None = None) -> ModelShape:
    """The shapes in a JSON file: `[{"name": "w", "shape": [4, 3]}, ...]` in the model's order.

    A tensor may also have a `dtype` (`"float32"` by default), `trainable` (true) and `aliases`, the
    other names of a tied tensor. The list may be the `tensors` of an object beside `heads`, from globs
    of names to how many rows of dim 0 belong together: `{"tensors": [...], "heads": {"*k_proj*": 128}}`.

    Raises `Refused` (reasons `no-file`, `bad-json`, `bad-listing`) with everything that is wrong.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     _ = file.write('[{"name": "w", "shape": [4, 3]}]')
    ...     file.flush()
    ...     from_listing(file.name).numel
    12
    """
    return _listed(_read_json(Path(path)), str(path), dtype)


def _shape(module: nn.Module, experts: Experts) -> ModelShape:
    tensors: Iterable[Named] = _tensors(module, None)
    if experts == "listed":
        tensors = _unstacked(list(tensors))
    return ModelShape.of(tensors, _heads(module))


def _tensors(module: nn.Module, dtype: str | None) -> Iterator[Named]:
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(canonical_name(name))
    for _, param in module.named_parameters():
        first, *others = names[id(param)]
        shape = tuple(getattr(param, "ds_shape", param.shape))  # ZeRO-3 empties what it cuts
        own = dtype or str(param.dtype).removeprefix("torch.")
        yield Named(first, shape, own, param.requires_grad, tuple(others))


def _heads(module: nn.Module) -> dict[str, int]:
    """Globs of attention projections -> head size, from the attention modules themselves."""
    found: dict[str, int] = {}
    for name, each in module.named_modules():
        size = next((s for n in _HEAD_SIZE if isinstance(s := getattr(each, n, None), int)), 1)
        for child, projection in each.named_children() if size > 1 else ():
            weight = getattr(projection, "weight", None)
            if child in _PROJECTIONS and weight is not None and not weight.shape[:1].numel() % size:
                path = canonical_name(f"{name}.{child}" if name else child)
                found[re.sub(r"(?<=\.)\d+(?=\.)", "*", path) + ".*"] = size
    return found


def _unstacked(tensors: list[Named]) -> Iterator[Named]:
    """Stacks of experts as one tensor an expert and projection, in the place of the first of a stack."""
    stacks: dict[str, dict[str, Named]] = {}
    for tensor in tensors:
        if found := _STACKED.match(tensor.name):
            stacks.setdefault(found[1], {})[found[2]] = tensor
    for tensor in tensors:
        found = _STACKED.match(tensor.name)
        if found is None:
            yield tensor
            continue
        yield from _experts(found[1], stacks.pop(found[1], {}))


def _experts(name: str, stack: dict[str, Named]) -> Iterator[Named]:
    if not stack:
        return  # another tensor of a stack that is listed already
    up, down = stack.get("gate_up_proj") or stack.get("up_proj"), stack.get("down_proj")
    gated = "gate_up_proj" in stack
    shapes = [tensor.shape for tensor in stack.values()]
    if up is None or down is None or any(len(shape) != 3 for shape in shapes):
        raise _refused("bad-config", name, f"its experts {shapes} are not stacks of up and down")
    count, rows, hidden = up.shape
    inner = down.shape[2]
    if down.shape != (count, hidden, inner) or rows != inner * (2 if gated else 1):
        cause = f"its experts {shapes} are not stored as [experts, out, in]"
        raise _refused("bad-config", name, cause, 'leave them as they are: experts="stacked"')
    for expert in range(count):
        for part in ("gate_proj", "up_proj") if gated else ("up_proj",):
            yield up._replace(name=f"{name}.{expert}.{part}.weight", shape=(inner, hidden))
        yield down._replace(name=f"{name}.{expert}.down_proj.weight", shape=(hidden, inner))


def _rules(model: nn.Module, experts: Experts) -> TpRules:
    """The plan of the model, of its class and of its parts, which transformers joins on the model."""
    styles: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    for pattern, style in (getattr(model, "_ep_plan", None) or {}).items():
        if style == "grouped_gemm":
            styles[pattern] = f"{styles[pattern]}+{style}" if pattern in styles else style
    if experts == "listed":
        for pattern in list(styles):
            if found := _STACKED.match(pattern):
                column, _, _ = styles.pop(pattern).removeprefix("packed_").partition("+")
                parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(found[2], (found[2],))
                if column != "grouped_gemm":
                    styles |= {f"{found[1]}.*.{part}": column for part in parts}
    return TpRules(styles)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise _refused("no-file", str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _refused("bad-json", str(path), f"is not JSON: {error}") from error


def _listed(found: Any, where: str, dtype: str | None) -> ModelShape:
    entries = found.get("tensors") if isinstance(found, dict) else found
    heads = found.get("heads", {}) if isinstance(found, dict) else {}
    if not isinstance(entries, list) or not entries:
        raise _refused("bad-listing", where, "is not a list of tensors")
    findings = [
        Finding(
            "bad-listing", f"{where}: tensor {number}", cause, 'e.g. {"name": "w", "shape": [4]}'
        )
        for number, entry in enumerate(entries)
        for cause in _wrong_with(entry)
    ]
    if not isinstance(heads, dict) or not all(type(n) is int and n > 0 for n in heads.values()):
        findings.append(Finding("bad-listing", where, "heads is not an object of globs to sizes"))
    if findings:
        raise Refused(findings)
    names = [entry["name"] for entry in entries]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise _refused("bad-listing", where, f"{', '.join(twice)}: named twice")
    return ModelShape.of(
        (
            Named(
                entry["name"],
                tuple(entry["shape"]),
                dtype or entry.get("dtype", "float32"),
                entry.get("trainable", True),
                tuple(entry.get("aliases", ())),
            )
            for entry in entries
        ),
        heads,
    )


def _wrong_with(entry: Any) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield "is no object"
        return
    known = {"name", "shape", "dtype", "trainable", "aliases"}
    if unknown := sorted(set(entry) - known):
        yield f"{', '.join(unknown)} is unknown; known: {', '.join(sorted(known))}"
    if not isinstance(entry.get("name"), str) or not entry["name"]:
        yield "name is not a text"
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        yield f"shape {shape} is not a list of sizes"
    if entry.get("dtype", "float32") not in ITEMSIZE:
        yield f"dtype {entry['dtype']!r} is unknown; known: {', '.join(ITEMSIZE)}"
    if not isinstance(entry.get("trainable", True), bool):
        yield "trainable is neither true nor false"
    aliases = entry.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(name, str) for name in aliases):
        yield "aliases is not a list of names"


def _refused(reason: str, where: str, cause: str, fix: str = "") -> Refused:
    return Refused([Finding(reason, where, cause, fix)])
