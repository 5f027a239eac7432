"""The options that say how a target is laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["LikeOption", "ModelOption", "OrderOption", "ToOption", "arrangement_of", "said_of"]

ToOption = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="SPEC",
        help="A format, a layout, or both: safetensors, zero3:dp=4, dcp/fsdp2:dp=2.",
    ),
]
LikeOption = Annotated[
    Path | None,
    typer.Option(help="A checkpoint whose format, layout, order and groups are wanted."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(help="A Hugging Face folder or config.json, or a JSON listing: parameter order."),
]
OrderOption = Annotated[
    Path | None,
    typer.Option(help="Parameter names, a line each, groups apart by empty lines; or JSON."),
]


def arrangement_of(like: Path | None, model: str | None, order: Path | None) -> dict[str, Any]:
    """The arguments of `offline.convert` and `offline.plan` that these options mean."""
    return {"like": like, **said_of(model, order)}


def said_of(model: str | None, order: Path | None) -> dict[str, Any]:
    """The arguments of `offline.open` that these options mean."""
    from dynadapt.elastic.arrangement import order_in_file

    found: dict[str, Any] = {} if model is None else {"model": model}
    if order is not None:
        names, groups = order_in_file(order)
        found |= {"order": names, "groups": groups}
    return found
