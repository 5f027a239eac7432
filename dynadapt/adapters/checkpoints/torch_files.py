"""Plain torch files: a model's state dict, alone or with the whole optimizer's and the rest of a job.

Read: one `torch.save` file, or a Hugging Face folder with `pytorch_model.bin`, single or in numbered files
with an index. Written: `checkpoint.pt`, a dict with `model`, `optimizer`, `scheduler` and the rest, or
`pytorch_model.bin` where there are only weights. `torch.load(weights_only=True)` takes both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynadapt.adapters._loss_scales import as_grad_scaler
from dynadapt.adapters.checkpoints._format import Format, homeless
from dynadapt.adapters.checkpoints._hf_index import broken_promises, weight_map
from dynadapt.adapters.checkpoints._making import Making
from dynadapt.adapters.checkpoints._pickle import Opaque, StoredTensor
from dynadapt.adapters.checkpoints._plain import Lifting, lowered, plain_part
from dynadapt.adapters.checkpoints._torch_file import read_torch
from dynadapt.adapters.checkpoints._torch_state import PLAIN, StateDicts
from dynadapt.adapters.checkpoints._torch_trees import EXTRA_PATH, StateTrees
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import AuxItem, Described, FileSource, FileTarget, Outcome, alone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.adapters.checkpoints._torch_file import TorchFile
    from dynadapt.protocols import Agree
    from dynadapt.vps.keys import KeySpec

__all__ = ["TorchFiles"]

FULL = "checkpoint.pt"
SINGLE = "pytorch_model.bin"
INDEX = f"{SINGLE}.index.json"
SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".tar"})

#: Under which names people save the parts of a job, the one that is written first.
MODEL = ("model", "state_dict", "model_state_dict", "module", "model_state")
OPTIMIZER = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states")
SCHEDULER = (
    *("scheduler", "lr_scheduler", "scheduler_state_dict"),
    *("lr_scheduler_state_dict", "lr_schedulers"),
)
SCALER = ("scaler", "grad_scaler", "scaler_state_dict")
SAMPLES = "samples"
_RESERVED = frozenset({*MODEL, *OPTIMIZER, *SCHEDULER, *SCALER, SAMPLES})


class TorchFiles(Format):
    """Reads a file, or a folder with files of known names; writes a folder with one file."""

    name = "torch"

    @staticmethod
    def holds(path: Path) -> bool:
        """A file with a usual ending, or a folder with `checkpoint.pt` or `pytorch_model.bin`."""
        return (path.suffix in SUFFIXES and path.is_file()) or bool(_files(path))

    def read(self, path: Path, said: FileSource) -> Described:
        """See `Format.describe`."""
        if path.is_file():
            return _read_one(str(path.parent), path.name, said)
        names = _files(path)
        if names in ([FULL], [SINGLE]):
            return _read_one(str(path), names[0], said)
        return _read_shards(path, names, said)

    def prepare(self, x: FileTarget, keys: tuple[KeySpec, ...]) -> Described:
        """Lay out the file; raises `Refused` with everything that cannot be so written."""
        whole = bool(x.groups) or any(spec.kind == "state" for spec in keys)
        path = FULL if whole else SINGLE
        trees = StateTrees(x, keys, path, path if whole else None)
        clash = sorted(_RESERVED & {s.key.slot.removeprefix("extra:") for s in trees.extras})
        if clash:
            cause = "has the name of another part of a torch file"
            raise Refused([Finding("bad-argument", f"extra:{name}", cause) for name in clash])
        made = Making(Path(x.path), x.dry)
        rows = trees.laid.into(made)
        x.made = (trees, made, path)
        return Described(tuple(trees.laid.keys.values()), (), made.buffers, files=rows)

    def finish(
        self,
        x: FileTarget,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Write the tree; says what of the rest a torch file cannot hold."""
        agree()
        trees, made, path = x.made
        lifting = Lifting()
        model = trees.model(aux, lifting)
        if path == SINGLE:
            made.seal_torch(path, model, x.crcs, lifting.values)
            return tuple(
                Outcome(path, "exact")
                if path.startswith(EXTRA_PATH)
                else homeless(item, "a file of weights")
                for path, item in aux.items()
            )
        tree: dict[str, Any] = {"model": model, "optimizer": trees.optimizer(scalars, aux, lifting)}
        rest, outcomes = _rest(aux, lifting)
        made.seal_torch(path, {**trees.copies(), **rest, **tree}, x.crcs, lifting.values)
        return outcomes


def _rest(
    aux: Mapping[str, AuxItem], lifting: Lifting
) -> tuple[dict[str, Any], tuple[Outcome, ...]]:
    """What stands beside model and optimizer, and what became of each item."""
    tree: dict[str, Any] = {}
    outcomes = []
    for path, item in aux.items():
        kind, note, name = "exact", "", path.removeprefix("user/")
        if path == "scheduler":
            tree["scheduler"] = lifting.lifted(item.value["state"])
            if left := item.value.get("left"):
                kind, note = "derived", f"all but {', '.join(left)}"
        elif path == "scaler":
            tree["scaler"], same = as_grad_scaler(item)
            if not same:
                kind, note = "derived", "its scale and count, as a GradScaler's"
        elif path == "counters":
            tree |= {n: v for n, v in item.value.items() if n not in _RESERVED}
        elif path == "data":
            tree[SAMPLES] = item.value["samples"]
        elif path.startswith("user/") and name not in _RESERVED and not path.startswith(EXTRA_PATH):
            tree[name] = lifting.lifted(item.value)
        elif path not in {"param_groups", "optimizer", PLAIN} and not path.startswith(EXTRA_PATH):
            outcomes.append(homeless(item, "a torch file"))
            continue
        outcomes.append(Outcome(path, kind, note))  # type: ignore[arg-type]
    if "param_groups" not in aux:
        note = "the source has none: set them after loading the optimizer"
        outcomes.append(Outcome("param_groups", "dropped", note))
    return tree, tuple(outcomes)


def _files(path: Path) -> list[str]:
    if (path / FULL).is_file():
        return [FULL]
    if (path / INDEX).is_file():
        return sorted(set(weight_map(path / INDEX).values()))
    return [SINGLE] if (path / SINGLE).is_file() else []


def _read_shards(root: Path, names: list[str], said: FileSource) -> Described:
    found = StateDicts(str(root), said)
    parts: list[tuple[TorchFile, dict[str, Any]]] = []
    for name in names:
        try:
            file = read_torch(str(root / name))
        except Refused as error:
            found.files.findings += error.findings
            continue
        if isinstance(file.tree, dict):
            parts.append((file, file.tree))
    every = {str(n): Path(file.path).name for file, tree in parts for n in tree}
    if not found.files.findings:
        found.files.findings += broken_promises(weight_map(root / INDEX), every)
    found.model(parts)
    return found.described("torch")


def _read_one(root: str, name: str, said: FileSource) -> Described:
    file = read_torch(str(Path(root) / name))
    found, tree = StateDicts(root, said), file.tree
    model = _model_of(tree, file.path)
    found.model([(file, model)])
    if model is tree:
        return found.described("torch")
    parts = {key: value for key, value in tree.items() if value is not model}
    optimizer = _first(parts, OPTIMIZER)
    if isinstance(optimizer, list) and len(optimizer) == 1:
        optimizer = optimizer[0]
    if isinstance(optimizer, dict) and optimizer:
        found.optimizer(file, optimizer)
    elif optimizer:
        cause = f"has its optimizer as a {type(optimizer).__name__}: one state dict is read"
        found.files.findings.append(Finding("unsupported-state", file.path, cause))
    _read_rest(found, file, parts)
    return found.described("torch")


def _read_rest(found: StateDicts, file: TorchFile, parts: dict[str, Any]) -> None:
    scheduler, scaler = _first(parts, SCHEDULER), _first(parts, SCALER)
    if isinstance(scheduler, list) and len(scheduler) == 1:
        scheduler = scheduler[0]
    if isinstance(scheduler, dict):
        kept, left = plain_part(lowered(scheduler, file))
        found.aux.append(AuxItem("scheduler", {"class": "", "state": kept, "left": left}))
    if isinstance(scaler, dict) and type(scaler.get("scale")) in (int, float):
        state, _ = plain_part(lowered(scaler, file))
        value = {"class": "GradScaler", "scale": float(scaler["scale"]), "state": state}
        found.aux.append(AuxItem("scaler", value))
    counters = {}
    for key, value in parts.items():
        label = str(key)
        if label == SAMPLES and type(value) is int:
            found.aux.append(AuxItem("data", {"samples": value}))
        elif label in _RESERVED or value is None:
            continue
        elif type(value) is int:
            counters[label] = value
        elif found.is_copy(value):
            found.extra(label, file, value)
        else:
            found.value(f"user/{label}", value, file)
    if counters:
        found.aux.append(AuxItem("counters", counters))
    found.aux.append(AuxItem("behaviour", {"framework": "torch"}))


def _first(parts: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((parts[name] for name in names if parts.get(name) is not None), None)


def _has_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(v, StoredTensor) for v in value.values())


def _model_of(tree: Any, path: str) -> Any:
    """The model's state dict in a file's tree, or the tree itself; raises `Refused` (`bad-file`)."""
    if isinstance(tree, dict):
        for name in MODEL:
            if _has_tensors(tree.get(name)):
                return tree[name]
        if _has_tensors(tree):
            return tree
    cause, fix = "holds no model's state dict", ""
    if isinstance(tree, Opaque):
        cause = f"holds a pickled {tree.made_by}, which is made only by running its code"
        fix = "save its state_dict() instead"
    elif isinstance(tree, dict) and "param_groups" in tree:
        cause = "holds an optimizer's state dict without the model's"
        fix = "name the folder that holds both"
    raise Refused([Finding("bad-file", path, cause, fix)])
