"""From texts and models to a `Picture`: what `dynadapt show` shows."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from dynadapt.elastic.outcome import human
from dynadapt.errors import Finding, Refused
from dynadapt.report.maps import Picture, tensor_maps
from dynadapt.report.sample import sample_model
from dynadapt.report.traffic import (
    Memory,
    Timeline,
    Traffic,
    memory_of,
    small_enough,
    traffic_of,
    traffic_of_plan,
)
from dynadapt.transport.plan import EvenHosts, Options
from dynadapt.vps.declare import declare
from dynadapt.vps.spec import LayoutSpec
from dynadapt.vps.tp_rules import TpRules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynadapt.vps.mesh_layout import MeshLayout
    from dynadapt.vps.model_shape import ModelShape

__all__ = ["picture_of", "picture_of_plan"]

_KINDS, _NAMED = 3, 6


def picture_of(
    specs: Sequence[str],
    model: ModelShape | None = None,
    rules: TpRules | None = None,
    *,
    tensor: str | None = None,
    links: str | None = None,
) -> Picture:
    """One layout, or a change from one to another, of a model; of a small one of its own without any.

    `tensor` is a name or a glob of names; without it, tensors that are placed differently are chosen.
    `links` names the cluster on whose links the change is timed.

    Raises `Refused` (reasons `bad-spec`, `not-declarable`, `no-tensor`, `too-large`) and `DynadaptError`
    (reason `unknown-cluster`).

    >>> picture_of(["zero3:dp=4", "ddp:dp=2,tp=2"]).traffic.moved
    2149632
    """
    if model is None:
        model, own = sample_model()
        rules = rules or own
    parsed = [LayoutSpec.parse(text) for text in specs]
    small_enough(max(spec.world for spec in parsed))
    layouts = [declare(spec, model, rules) for spec in parsed]
    titles = tuple(str(spec) for spec in parsed)
    names, notes = _chosen(layouts, tensor)
    timeline, traffic = None, None
    if len(layouts) == 2:
        before, after = layouts
        options = Options()
        if links is not None:
            from dynadapt.transport.simulate import simulate

            run = simulate(before, after, links)
            timeline = Timeline.of(run, f"schedule on {links}")
            traffic = Traffic.of(run)
            last = max(layout.endpoints[-1] for layout in layouts)
            options = Options(hosts=EvenHosts(run.cluster.seats_per_host, 1 + last))
        if traffic is None:
            traffic = traffic_of(before, after, options)
    held = f"{human(model.nbytes())} with AdamW's moments"
    about = f"model: {len(model)} tensors, {model.numel:,} elements, {held}"
    return Picture(
        titles,
        tuple(tensor_maps(layouts, name) for name in names),
        memory_of(layouts, titles),
        traffic,
        timeline,
        (about, *notes, *_uncut(parsed, model, rules or TpRules({}))),
    )


def picture_of_plan(plan: Mapping[str, Any], where: str = "plan") -> Picture:
    """The traffic of a plan that `PlanReport.to_json()` wrote.

    Raises `Refused` (reason `bad-plan`) for anything else.

    >>> picture_of_plan({"seats": []}).traffic.moved
    0
    """
    traffic = traffic_of_plan(plan, where)
    seats = tuple(int(label) for label in traffic.labels)
    columns = (traffic.matrix.sum(axis=0), traffic.matrix.sum(axis=1))
    memory = Memory(seats, ("received", "sent"), columns, "moved")
    minimum = plan.get("bytes_minimum")
    least = f"; at least {human(int(minimum))} had to" if isinstance(minimum, int) else ""
    note = f"{human(traffic.moved)} cross between ranks{least}"
    return Picture((where,), (), memory, traffic, None, (note,))


def _chosen(layouts: Sequence[MeshLayout], tensor: str | None) -> tuple[list[str], list[str]]:
    """Names of tensors, and what to say of those that are left out."""
    stacks = list(zip(*(layout.stacks for layout in layouts), strict=True))
    if tensor is None:
        placed: dict[str, tuple[int, str]] = {}
        for each in stacks:
            spec = each[0].specs[0][0]
            alike = repr([(stack.placements, len(spec.shape)) for stack in each])
            size = len(each[0]) * spec.numel
            placed[alike] = max(placed.get(alike, (-1, "")), (size, spec.key.name))
        names = [name for _, name in sorted(placed.values(), reverse=True)]
        more = len(stacks) - len(names[:_KINDS])
        other = f"{more} more kinds of tensors: choose with --tensor NAME or GLOB"
        return names[:_KINDS], [other] if more > 0 else []
    every = sorted((spec.order, spec.key.name) for own in stacks for spec in own[0].specs[0])
    fits = [name for _, name in every if fnmatchcase(name, tensor)]
    if not fits:
        near = difflib.get_close_matches(tensor, [name for _, name in every], 1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}?" if near else ""
        raise Refused([Finding("no-tensor", tensor, "fits no tensor of the model", hint)])
    more = len(fits) - _NAMED
    return fits[:_NAMED], [f"{more} more tensors fit {tensor}"] if more > 0 else []


def _uncut(specs: Sequence[LayoutSpec], model: ModelShape, rules: TpRules) -> list[str]:
    """Axes that the layouts have and no rule uses."""
    cuts = {
        cut.axis
        for family in model.families
        for cut in rules.cuts(family.name(0), len(family.shape))
    }
    if any(".experts.{}" in family.pattern for family in model.families):
        cuts.add("ep")
    asked = {axis for spec in specs for axis in ("tp", "ep") if spec.size(axis) > 1}
    return [
        f"no rule says what {axis} cuts of this model: everything is whole along it"
        for axis in sorted(asked - cuts)
    ]
