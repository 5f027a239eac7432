"""The options that say which conversion is meant: declared once, for the commands that do it or plan it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from dynadapt.cli._options import Globs, WeightsOption, WorkersOption

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Conversion", "ModelOption", "OrderOption", "said_of", "takes_conversion"]

ModelOption = Annotated[
    str | None,
    typer.Option(help="A Hugging Face folder or config.json, or a JSON listing: parameter order."),
]
OrderOption = Annotated[
    Path | None,
    typer.Option(
        help="Parameter names, a line each, maybe with a shape, groups apart by empty lines; or JSON."
    ),
]


@dataclass(frozen=True)
class Conversion:
    """All that changes what is written, or what that takes. Each field is an option."""

    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="SPEC",
            help="A format, a layout, or both: safetensors, zero3:dp=4, dcp/fsdp2:dp=2.",
        ),
    ] = None
    like: Annotated[
        Path | None,
        typer.Option(help="A checkpoint whose format, layout, order and groups are wanted."),
    ] = None
    model: ModelOption = None
    order: OrderOption = None
    include: Globs = None
    exclude: Globs = None
    strip_prefix: Annotated[str, typer.Option(help="Taken off every name that has it.")] = ""
    add_prefix: Annotated[str, typer.Option(help="Put before every name.")] = ""
    weights_only: WeightsOption = False
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights that are written, e.g. bf16; not of ZeRO's masters."),
    ] = None
    keep_dtype: Annotated[
        list[str] | None, typer.Option(help="Globs of names that --dtype leaves alone.")
    ] = None
    max_shard_size: Annotated[str, typer.Option(help="Of a safetensors file.")] = "5GB"
    workers: WorkersOption = 2
    max_memory: Annotated[
        str | None, typer.Option(help="Beside what the interpreter holds, e.g. 256MiB.")
    ] = None
    verify: Annotated[
        bool, typer.Option(help="Compare with the source's check sums; read all back.")
    ] = True

    def arguments(self) -> dict[str, Any]:
        """The arguments of `offline.convert` and `offline.plan` that these options mean."""
        return {
            "to": self.to,
            "like": self.like,
            **said_of(self.model, self.order),
            "include": self.include or (),
            "exclude": self.exclude or (),
            "strip_prefix": self.strip_prefix,
            "add_prefix": self.add_prefix,
            "weights_only": self.weights_only,
            "dtype": self.dtype,
            "keep_dtype": self.keep_dtype or (),
            "max_shard_size": self.max_shard_size,
            "threads": self.workers,
            "max_memory": self.max_memory,
            "verify": self.verify,
        }


def takes_conversion(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `wanted` is given as the options of `Conversion`, in its place."""
    hints = get_type_hints(Conversion, include_extras=True)
    own = get_type_hints(command, include_extras=True)
    options = [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]
        )
        for f in fields(Conversion)
    ]
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(command).parameters.values():
        taken = each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own[each.name])
        parameters += options if each.name == "wanted" else [taken]

    @wraps(command)
    def spread(**given: Any) -> None:
        wanted = Conversion(**{option.name: given.pop(option.name) for option in options})
        command(wanted=wanted, **given)

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {each.name: each.annotation for each in parameters}
    return spread


def said_of(model: str | None, order: Path | None) -> dict[str, Any]:
    """The arguments of `offline.open` that these options mean."""
    from dynadapt.elastic.order_files import order_in_file

    found: dict[str, Any] = {} if model is None else {"model": model}
    if order is not None:
        names, groups = order_in_file(order)
        found |= {"order": names, "groups": groups}
    return found
