"""DeepSpeed checkpoints as `engine.save_checkpoint` writes them, ZeRO stages 0, 1, 2 and 3.

What is read is described in `_deepspeed_files` (which files), `_deepspeed_geometry` (where parameters
lie), `_deepspeed_read` and `_deepspeed_read0` (which key each part of a file is).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dynadapt.adapters.checkpoints._deepspeed_files import outcomes_of, tag_folder
from dynadapt.adapters.checkpoints._deepspeed_open import described, writing_of
from dynadapt.adapters.checkpoints._format import Format
from dynadapt.adapters.checkpoints._making import Making
from dynadapt.errors import Finding, Refused
from dynadapt.protocols import Described, FileSource, FileTarget, Outcome, alone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.protocols import Agree, AuxItem
    from dynadapt.vps.keys import KeySpec

__all__ = ["DeepSpeedDir"]


class DeepSpeedDir(Format):
    """Reads a checkpoint folder (with its `latest`) or one of its tag folders."""

    name = "deepspeed"

    @staticmethod
    def holds(path: Path) -> bool:
        """A folder with files of DeepSpeed's names, or with a `latest` that leads to one."""
        return tag_folder(path) is not None

    def read(self, path: Path, said: FileSource) -> Described:
        """See `Format.describe`."""
        root = tag_folder(path)
        if root is None:
            raise Refused([Finding("bad-file", str(path), "is no DeepSpeed checkpoint")])
        return described(root, said)

    def prepare(self, x: FileTarget, keys: tuple[KeySpec, ...]) -> Described:
        """Lay out the files of all ranks; raises `Refused` with everything that cannot be so written."""
        writing = writing_of(x, keys)
        made = Making(Path(x.path), x.dry)
        rows = writing.laid.into(made)
        x.made = (writing, made)
        specs = tuple(writing.laid.keys.values())
        return Described(specs, (), made.buffers, files=rows, flat_step=True)

    def finish(
        self,
        x: FileTarget,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Write the trees: steps, hyperparameters, counters, and what of the rest has a place."""
        agree()
        writing, made = x.made
        shared = writing.seal(made, scalars, aux)
        outcomes = (*outcomes_of(aux, "a DeepSpeed checkpoint"), *shared)
        if "param_groups" not in aux:
            note = "the source has no hyperparameters: load this with load_optimizer_states=False"
            outcomes += (Outcome("param_groups", "dropped", note),)
        return outcomes
