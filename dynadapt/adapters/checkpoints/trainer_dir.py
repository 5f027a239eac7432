"""Folders that transformers' Trainer saves: `checkpoint-500`, of a plain or DDP job, DeepSpeed or FSDP.

Their model and optimizer lie in them as in Accelerate's folders; a plain one has the optimizer's states by
number, and the model's order is that of its `config.json`. The small files (generators of each rank,
`trainer_state.json`) are carried as they are; Trainer resumes what is written.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints import _job_forms as forms
from dynadapt.adapters.checkpoints._deepspeed_files import tag_folder
from dynadapt.adapters.checkpoints._deepspeed_open import described
from dynadapt.adapters.checkpoints._format import in_order
from dynadapt.adapters.checkpoints._hf_index import weight_map
from dynadapt.adapters.checkpoints._job_dir import JobDir
from dynadapt.errors import DynadaptError, Finding, Refused
from dynadapt.protocols import AuxItem, Described, FileSource, FileTarget, Outcome, alone
from dynadapt.vps.wire import encodable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dynadapt.protocols import Agree
    from dynadapt.vps.keys import KeySpec

__all__ = ["TrainerDir"]

STATE = "trainer_state.json"
OPTIMIZER = "optimizer.pt"

NAMES = forms.Names(
    deepspeed="global_step",
    optimizer=OPTIMIZER,
    scheduler="scheduler.pt",
    scaler="scaler.pt",
    small=re.compile(r"^(rng_state(_\d+)?\.pth|trainer_state\.json)$"),
    random=re.compile(r"^rng_state_(\d+)\.pth$"),
    carried="user/trainer/",
    ticks=False,
)

MOST, MOST_LAYERS = 1 << 20, 2048
"""Bytes of a config, layers and experts, up to which it is used without being asked for."""

_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


class TrainerDir(JobDir):
    """Reads what `save_steps` writes, writes what `resume_from_checkpoint` reads."""

    name = "trainer"
    names = NAMES

    @staticmethod
    def holds(path: Path) -> bool:
        """A folder with `trainer_state.json` and an optimizer, or one of such folders."""
        return _folder(path) is not None

    def read(self, path: Path, said: FileSource) -> Described:
        """See `Format.describe`. Of several checkpoints in a folder the last one is read."""
        root = _folder(path)
        if root is None:
            raise Refused([Finding("bad-file", str(path), "is no checkpoint of a Trainer")])
        own = _read(root, _form_of(root), said)
        paths = {item.path for item in own.aux}
        # DeepSpeed has its own schedule.
        small = [item for item in NAMES.read(root) if item.path not in paths]
        items = [] if "counters" in paths else _counters(root)
        return replace(own, aux=(*own.aux, *items, *small))

    def finish(
        self,
        x: FileTarget,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Write everything that is not a tensor's bytes; says what became of the rest."""
        outcomes = super().finish(x, keys, scalars, aux, agree)
        if NAMES.carried + STATE not in aux:
            steps = [values["step"] for values in scalars.values() if "step" in values]
            counters = aux["counters"].value if "counters" in aux else {}
            step = counters.get("global_steps", int(max(steps, default=0)))
            x.made.made.write(STATE, json.dumps({"global_step": step}).encode())
            outcomes += (Outcome(NAMES.carried + STATE, "derived", "the step alone"),)
        if "scheduler" not in aux:
            note = f"without {NAMES.scheduler} Trainer does not load the optimizer, unless DeepSpeed does"
            outcomes += (Outcome("scheduler", "dropped", note),)
        return outcomes


def _folder(path: Path) -> Path | None:
    """The path, or the last checkpoint in it, if its own folder has no weights."""
    if not path.is_dir():
        return None
    if (path / STATE).is_file():
        return path if _form_of(path) is not None else None
    found = {int(m[1]): p for p in path.iterdir() if (m := _CHECKPOINT.match(p.name))}
    if not found or _models(path):
        return None
    last = found[max(found)]
    return last if (last / STATE).is_file() and _form_of(last) is not None else None


def _form_of(root: Path) -> str | None:
    """`deepspeed`, `sharded`, `full` or `plain`; None: weights alone, or nothing."""
    if tag_folder(root) is not None:
        return "deepspeed"
    if (root / forms.SHARDED).is_dir():
        return "sharded"
    if (root / forms.FULL).is_file():
        return "full"
    return "plain" if (root / OPTIMIZER).is_file() and _models(root) else None


def _models(root: Path) -> list[str]:
    """The files of the model's weights."""
    for single in (forms.SAFE, forms.TORCH):
        index = root / f"{single}.index.json"
        if index.is_file():
            return sorted(set(weight_map(index).values()))
        if (root / single).is_file():
            return [single]
    return []


def _read(root: Path, form: str | None, said: FileSource) -> Described:
    if form == "deepspeed":
        folder = tag_folder(root)
        assert folder is not None
        own = described(folder, said)
        layout = own.written.partition("/")[2]
        return replace(own, written=f"trainer/{layout}" if layout else "")
    if form == "sharded":
        return forms.read_sharded(root, "trainer")
    if form == "full":
        return forms.read_whole(root, [forms.FULL], forms.OPTIMIZER, said, "trainer/fsdp1:dp=1")
    try:
        return forms.read_whole(root, _models(root), OPTIMIZER, said, "trainer")
    except Refused as refused:
        if (
            refused.reason != "ambiguous-order"
            or said.order
            or not (root / "config.json").is_file()
        ):
            raise
        known = _known(root, refused)
        own = forms.read_whole(root, _models(root), OPTIMIZER, known, "trainer")
        return in_order(own, known.order)


def _known(root: Path, refused: Refused) -> FileSource:
    """What the model says that the folder's config describes; raises what there was without it."""
    from dynadapt.adapters.model_shapes import said_of

    try:
        _look_at(root / "config.json")
        return replace(said_of(str(root)), path=str(root))
    except DynadaptError as error:
        cause = f"its config.json could not say the order: {error}"[:300]
        raise Refused([*refused.findings, Finding("no-order", str(root), cause)]) from error


def _look_at(config: Path) -> None:
    """Raises `Refused` for a config that nobody should build a model of without being asked to."""
    try:
        found = json.loads(config.read_bytes()[:MOST])
    except (OSError, ValueError, RecursionError) as error:
        raise Refused([Finding("bad-json", str(config), f"is no JSON: {error!r}"[:200])]) from error
    inside = (
        [found, *(v for v in found.values() if isinstance(v, dict))] if type(found) is dict else []
    )
    for own in inside:
        for name, value in own.items():
            if ("layer" in name or "expert" in name) and type(value) is int and value > MOST_LAYERS:
                raise Refused([Finding("bad-config", str(config), f"has {value:,} {name}"[:200])])


def _counters(root: Path) -> list[AuxItem]:
    """Steps, as the Trainer counts them."""
    try:
        state: Any = json.loads((root / STATE).read_text())
        step = state["global_step"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        cause = f"does not say the step: {error!r}"[:200]
        raise Refused([Finding("bad-json", str(root / STATE), cause)]) from error
    return (
        [AuxItem("counters", {"global_steps": step})]
        if type(step) is int and encodable(step)
        else []
    )
