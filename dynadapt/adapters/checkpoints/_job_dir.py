"""What folders with a whole job's checkpoint have in common: Accelerate's and Trainer's are written alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dynadapt.adapters.checkpoints import _job_forms as forms
from dynadapt.adapters.checkpoints._format import Format
from dynadapt.adapters.checkpoints._making import Making
from dynadapt.protocols import Described, FileTarget, Outcome, alone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.protocols import Agree, AuxItem
    from dynadapt.vps.keys import KeySpec

__all__ = ["JobDir"]


class JobDir(Format):
    """Such a format, without its own `holds` and `read`; `names` are what its library calls its files."""

    names: forms.Names

    def prepare(self, x: FileTarget, keys: tuple[KeySpec, ...]) -> Described:
        """Lay out the files; raises `Refused` with everything that cannot be so written."""
        made = forms.written_as(x, keys, Making(Path(x.path), x.dry), self.names)
        x.made = made
        return made.described

    def finish(
        self,
        x: FileTarget,
        keys: tuple[KeySpec, ...],
        scalars: Mapping[str, Mapping[str, int | float]],
        aux: Mapping[str, AuxItem],
        agree: Agree = alone,
    ) -> tuple[Outcome, ...]:
        """Write everything that is not a tensor's bytes; says what became of the rest."""
        agree()
        made: forms.Whole | forms.Sharded | forms.InDeepSpeed = x.made
        return made.seal(scalars, aux)
