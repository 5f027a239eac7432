"""Draws the pictures of the documentation: `python docs/pictures/make.py [FOLDER]`.

The same matplotlib writes the same bytes, so that a picture changes only when what it shows does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dynadapt.report.build import picture_of
from dynadapt.report.figures import write
from dynadapt.report.maps import Picture, tensor_maps
from dynadapt.report.sample import sample_model
from dynadapt.vps.declare import declare

TENSOR = "model.layers.0.mlp.down_proj.weight"
KINDS = (
    "ddp:dp=4",
    "ddp:dp=2,tp=2",
    "fsdp2:dp=4",
    "hsdp:rep=2,dp=2",
    "zero3:dp=6",
    "zero1:dp=4",
)


def kinds() -> Picture:
    """One tensor in six layouts."""
    model, rules = sample_model()
    layouts = [declare(spec, model, rules) for spec in KINDS]
    heading = "one tensor in six layouts: the ranks that hold each part"
    return Picture(KINDS, (tensor_maps(layouts, TENSOR),), heading=heading)


def change() -> Picture:
    """What a change of layout moves."""
    return picture_of(["zero3:dp=4", "ddp:dp=2,tp=2"], tensor="*.0.mlp.[ud]*_proj.weight")


def main(folder: Path) -> None:
    """Write both files."""
    write(kinds(), folder / "layouts.svg")
    write(change(), folder / "change.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
