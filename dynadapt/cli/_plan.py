"""`dynadapt plan`: what a change of layout would move and take, for a model that nobody has to load."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from dynadapt.cli._arrange import Conversion, takes_conversion
from dynadapt.cli._listing import columns, print_facts, print_lines
from dynadapt.cli._options import JsonOption
from dynadapt.cli._output import print_json
from dynadapt.elastic.sizes import size_of
from dynadapt.errors import DynadaptError

if TYPE_CHECKING:
    from dynadapt.transport.simulate import Simulation
    from dynadapt.vps.mesh_layout import MeshLayout
    from dynadapt.vps.model_shape import ModelShape, State
    from dynadapt.vps.tp_rules import TpRules

__all__ = ["plan"]

OF_MODELS = {"source", "links", "budget", "tp_plan", "experts", "optimizer"}
"""Options of a plan without SRC."""

OF_CHECKPOINTS = {each.name for each in fields(Conversion)} - {"to", "model"}
"""Options of a plan of SRC."""


@takes_conversion
def plan(
    context: typer.Context,
    checkpoint: Annotated[
        Path | None,
        typer.Argument(metavar="[SRC]", help="A checkpoint: plan its conversion instead."),
    ] = None,
    *,
    wanted: Conversion,
    source: Annotated[
        str | None, typer.Option("--from", help="Layout now, e.g. zero3:dp=128.")
    ] = None,
    links: Annotated[
        str, typer.Option(help="h100, a800, flat-200g or ethernet-25g: hosts of 8, but for flat.")
    ] = "h100",
    budget: Annotated[str, typer.Option(help="Staging memory of one rank, e.g. 512MiB.")] = "1GiB",
    tp_plan: Annotated[
        Path | None, typer.Option(help="JSON of name patterns to styles; default: the model's own.")
    ] = None,
    experts: Annotated[
        str, typer.Option(help="stacked or listed: how the model keeps its experts.")
    ] = "stacked",
    optimizer: Annotated[
        str, typer.Option(help="adamw (fp32 masters and two moments), sgd (one), or none.")
    ] = "adamw",
    as_json: JsonOption = False,
) -> None:
    """Plan a change of layout and price it on a cluster's links; nothing is loaded or written.

    With SRC, a checkpoint, say what `convert SRC DST` with the same options would read, write and hold.
    Without it, every rank's plan is made up to 256 ranks, a sample's beyond. Times leave out what a
    framework does before and after the move.
    """
    from dynadapt.adapters.model_shapes import read_model
    from dynadapt.transport.simulate import simulate
    from dynadapt.vps.declare import declare
    from dynadapt.vps.tp_rules import read_rules

    _alone(context, checkpoint is not None)
    if checkpoint is not None:
        _of_checkpoint(checkpoint, wanted, as_json)
        return
    model, target = wanted.model, wanted.to
    if model is None or source is None or target is None:
        cause = "give SRC and --to, or --model, --from and --to"
        raise DynadaptError(cause, reason="bad-argument")
    if experts not in {"stacked", "listed"}:
        raise DynadaptError(f"--experts {experts}: give stacked or listed", reason="bad-argument")
    states = _states(optimizer)
    staging = _bytes(budget)
    shape, rules = read_model(model, experts=experts)  # type: ignore[arg-type]
    if tp_plan is not None:
        rules = read_rules(tp_plan)
    before, after = (declare(spec, shape, rules, states=states) for spec in (source, target))
    layouts = [before, after]
    console = Console()
    with Progress(transient=True, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("planning", total=None)
        found = simulate(
            before,
            after,
            links,
            budget=staging,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    facts: dict[str, Any] = {
        "model": model,
        "parameters": shape.numel,
        "tensors": len(shape),
        "state_bytes": shape.nbytes(states),
        "from": source,
        "to": target,
        "links": links,
        **found.to_json(),
        "families": _families(layouts, found, shape),
    }
    if as_json:
        print_json(facts)
        return
    _print(console, facts, _whole(shape, rules, layouts))


def _alone(context: typer.Context, of_checkpoint: bool) -> None:
    """Refuse what was given and would be of no effect."""
    of, why = (
        (OF_MODELS, "SRC is a checkpoint, which says its own layout, and no cluster is asked for")
        if of_checkpoint
        else (OF_CHECKPOINTS, "it is of a conversion, and there is no SRC")
    )
    for param in context.command.params:
        given = context.get_parameter_source(param.name or "")
        if param.name in of and given is not None and given.name != "DEFAULT":
            raise DynadaptError(f"{param.opts[0]}: {why}", reason="bad-argument")


def _of_checkpoint(source: Path, wanted: Conversion, as_json: bool) -> None:
    """A conversion that is not done."""
    from dynadapt import offline
    from dynadapt.elastic.outcome import human

    found = offline.plan(source, **wanted.arguments())
    if as_json:
        print_json(found.to_json())
        return
    what = f"{found.format}/{found.layout}" if found.layout else found.format
    facts = {
        "read": human(found.bytes_read),
        "of the source's state": human(found.bytes_state),
        "written": f"{human(found.bytes_written)}, copies and padding included",
        "files": f"{found.files}, of {human(found.largest_file)} at most",
        "peak memory": f"{human(found.peak_bytes)} beside the interpreter's",
        "seconds": f"about {found.seconds:.1f}, if the disk takes 1 GB/s",
        "left out": ", ".join(found.dropped[:5]) + (", ..." if found.dropped[5:] else ""),
    }
    print_facts(Console(), f"{source} -> {what}", facts)


def _states(optimizer: str) -> tuple[State, ...]:
    from dynadapt.vps.model_shape import ADAMW, State

    known = {
        "adamw": ADAMW,
        "sgd": (State("param", "float32"), State("momentum_buffer", "float32")),
        "none": (State("param"),),
    }
    if optimizer not in known:
        raise DynadaptError(
            f"--optimizer {optimizer}: give one of {', '.join(known)}", reason="bad-argument"
        )
    return known[optimizer]


def _bytes(text: str) -> int:
    """A size that can be a budget for staging."""
    size = size_of(text)
    if not 64 << 10 <= size < 1 << 50:
        raise DynadaptError(f"{text} is not from 64KiB to 1PiB of staging", reason="bad-argument")
    return size


def _families(
    layouts: list[MeshLayout], found: Simulation, shape: ModelShape
) -> list[dict[str, Any]]:
    """What the seat of the busiest link moves, by family of tensors."""
    from dynadapt.transport.factored import factored_plan
    from dynadapt.transport.plan import EvenHosts, Options
    from dynadapt.vps.model_shape import FamilySpecs

    seat = found.busiest[0]
    hosts = EvenHosts(found.cluster.seats_per_host, found.world)
    own = factored_plan(seat, layouts[0], layouts[1], Options(hosts=hosts))
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for way, blocks in (("in", own.receives), ("out", own.sends)):
        for block in blocks:
            specs = block.lane.states[0][0]
            assert isinstance(specs, FamilySpecs)
            family = specs.family
            fresh = {"shape": list(family.shape), "in": 0, "out": 0, "stays": 0, "boxes": 0}
            row = rows.setdefault((family.pattern, family.shape, family.dtype), fresh)
            stays = block.peer == seat
            row[way] += int(block.nbytes[~stays].sum())
            row["stays"] += int(block.nbytes[stays].sum())
            row["boxes"] += block.num_moves
    order = [(family.pattern, family.shape, family.dtype) for family in shape.families]
    return [{"family": at[0], **rows[at]} for at in order if at in rows]


def _whole(shape: ModelShape, rules: TpRules, layouts: list[MeshLayout]) -> str:
    """A word of warning where tensor parallelism is asked for and most of the model stays whole."""
    if all("tp" not in layout.axes for layout in layouts):
        return ""
    whole = sum(
        family.numel * len(family)
        for family in shape.families
        if not rules.cuts(family.name(0), len(family.shape))
    )
    share = whole / max(shape.numel, 1)
    return (
        f"{share:.0%} of the parameters have no tensor-parallel rule and stay whole over tp; "
        "--tp-plan gives rules"
        if share > 0.5
        else ""
    )


def _print(console: Console, facts: dict[str, Any], warning: str) -> None:
    from dynadapt.elastic.outcome import human

    busiest = facts["busiest"]
    planned = facts["planned_seats"]
    sampled = planned < facts["world"]
    of = f"{planned}: a sample, of which the figures below are" if sampled else "all"
    least = "" if sampled else ", the least possible"
    model = f"{facts['parameters'] / 1e9:.2f} B parameters in {facts['tensors']} tensors"
    rows = {
        "model": f"{model}, {human(facts['state_bytes'])} of state",
        "ranks": f"{facts['world']}; planned: {of}",
        "received by one rank": f"{human(facts['bytes_in_worst'])} at most{least}",
        "sent by one rank": f"{human(facts['bytes_out_worst'])} at most, "
        f"{facts['balance']:.2f}x the mean",
        "stays in its rank": f"{human(facts['resident_worst'])} at most",
        "busiest link": f"rank {busiest['seat']} {busiest['link']}: {human(busiest['bytes'])}",
        "chunks": f"{facts['chunks']}, {facts['messages_worst']} messages at most",
        "staging": f"{human(facts['staging'])} of {human(facts['budget'])}",
        "peak memory of a rank": f"{human(facts['peak_memory'])}, the source kept to the end",
        f"seconds on {facts['links']}": f"{facts['seconds']:.3f}; lower bound "
        f"{facts['lower_bound']:.3f}, {facts['ratio']:.2f}x",
    }
    print_facts(console, f"{facts['from']} -> {facts['to']}", rows)
    families = [("shape", "in", "out", "stays", "boxes", "tensors")]
    for row in facts["families"]:
        sizes = (human(row[way]) for way in ("in", "out", "stays"))
        shape = "x".join(map(str, row["shape"])) or "scalar"
        name = row["family"].replace("{}", "*")
        families.append((shape, *sizes, f"{row['boxes']:,}", name))
    print_lines(
        console, ["", f"what rank {busiest['seat']} moves", *columns(families, numbers=True)]
    )
    if warning:
        console.print(f"[yellow]note[/yellow] {warning}")
