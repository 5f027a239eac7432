"""From a layout's text form to a `MeshLayout`: what each kind does with the tensors of a model.

Everything is per family: placements once, pins and flat offsets as columns over its members.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dynadapt.errors import Finding, Refused
from dynadapt.vps._stages import owners_of, stages_of
from dynadapt.vps.flat import fsdp1_unit, zero3_part, zero_group
from dynadapt.vps.geometry import Flats, Geometry, mesh_strides
from dynadapt.vps.keys import itemsize
from dynadapt.vps.mesh_layout import MeshLayout, Stack
from dynadapt.vps.model_shape import ADAMW, State
from dynadapt.vps.placement import Flat, Pin, Shard
from dynadapt.vps.spec import LayoutSpec
from dynadapt.vps.tp_rules import TpRules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from dynadapt.vps.flat import FlatGroup
    from dynadapt.vps.model_shape import Family, ModelShape
    from dynadapt.vps.placement import Placement

__all__ = ["declare"]


def declare(
    spec: LayoutSpec | str,
    model: ModelShape,
    rules: TpRules | None = None,
    *,
    states: Sequence[State] = ADAMW,
    groups: Sequence[Sequence[str]] = (),
    units: Sequence[str] = (),
    endpoints: Sequence[int] | None = None,
) -> MeshLayout:
    """The layout that a spec gives the parameters and optimizer states of a model.

    `rules` say what `tp` and `ep` cut. `groups` are the optimizer's param groups as globs of names, the
    first that fits counts, what none fits is a last group; each is one flat of ZeRO-1 and 2. `units`
    are globs of the modules that FSDP1 wraps; a tensor belongs to the longest that it lies in, else to
    the root's.

    Raises `Refused` with every tensor that cannot be placed so, and the reason.

    >>> from dynadapt.vps.model_shape import ModelShape, Named
    >>> layout = declare("zero1:dp=2", ModelShape.of([Named("a", (3,)), Named("b", (5,))]))
    >>> [str(row.box) for row in layout.rows(1) if row.key.slot == "param"]
    ['[1:5]']
    """
    if isinstance(spec, str):
        spec = LayoutSpec.parse(spec)
    _check_options(spec)
    if "dtype" in spec.options:
        states = [State(state.slot, spec.options["dtype"]) for state in states]
    if "units" in spec.options:
        units = (*units, *spec.options["units"].split("+"))
    made = _Declared(spec, model, rules or TpRules({}), groups, units)
    stacks = [
        Stack(
            family.states(states),
            Geometry(spec.axes, family.shape, (*cutting.placements, *data)),
            (*cutting.placements, *data),
            cutting.pins,
            flats,
        )
        for family, cutting, (data, flats) in zip(
            model.families, made.cuttings, made.by_data(), strict=True
        )
    ]
    if not states and any(family.trainable for family in model.families):
        cause = "states is empty, and a trainable tensor has its values at the least"
        fix = 'pass states=(State("param"),) for the weights alone'
        made.findings.append(Finding("not-declarable", str(spec), cause, fix))
    if made.findings:
        raise Refused(made.findings)
    return MeshLayout.of_stacks(spec.axes, stacks, endpoints)


def _check_options(spec: LayoutSpec) -> None:
    """Raise for every option whose value means nothing, used or not."""
    findings: list[Finding] = []
    for name, check in (
        ("dtype", spec.dtype),
        ("compute", spec.dtype),
        ("round_robin", spec.flag),
        ("orig", spec.flag),
        ("pad_vocab", spec.number),
        ("sub_group_size", spec.number),
    ):
        try:
            if name in spec.options:
                check(name)
        except Refused as error:
            findings += error.findings
    stages = spec.options.get("stages", "1")
    if not all(
        part.isascii() and part.isdecimal() and len(part) < 10 for part in stages.split("-")
    ):
        cause = f"stages={stages} is not numbers of layers joined by -"
        findings.append(Finding("bad-spec", str(spec), cause, "e.g. stages=24-24-23-23"))
    if spec.options.get("groups", "1") not in {"1", "decay"}:
        cause = (
            f"groups={spec.options['groups']} is neither 1 nor decay; pass other groups as globs"
        )
        findings.append(Finding("bad-spec", str(spec), cause))
    if findings:
        raise Refused(findings)


class _Cutting(NamedTuple):
    """What pipeline, expert and tensor parallelism leave of a family, before the data axis.

    `numel` is what one place holds, padding included; `even` says that all places hold as much, in
    the same order; `owner` is the expert-parallel place of each member, -1 for what is no expert.
    """

    placements: tuple[Placement, ...]
    pins: NDArray[np.int64]
    stage: NDArray[np.int64]
    owner: NDArray[np.int64]
    numel: int
    padded: bool
    even: bool

    @property
    def blocks(self) -> bool:
        return any(isinstance(each, Shard) and each.blocks > 1 for each in self.placements)

    @property
    def expert(self) -> bool:
        over = (axis for each in self.placements for axis in each.over)
        return "ep" in over


_Data = tuple["tuple[Placement, ...]", "Flats | None"]


class _Declared:
    """One spec over one model; what is wrong collects in `findings`."""

    def __init__(
        self,
        spec: LayoutSpec,
        model: ModelShape,
        rules: TpRules,
        groups: Sequence[Sequence[str]],
        units: Sequence[str],
    ) -> None:
        self.spec, self.model, self.rules = spec, model, rules
        self.groups, self.units = groups, units
        self.findings: list[Finding] = []

    def by_data(self) -> Iterator[_Data]:
        """Per family what the kind does over the data axes."""
        kind = self.spec.kind
        if kind in {"zero1", "zero2"}:
            return self._in_groups()
        if kind == "fsdp1":
            return self._in_units()
        each = {"ddp": self._whole, "zero0": self._whole, "zero3": self._alone}.get(
            kind, self._by_rows
        )
        return (each(*pair) for pair in zip(self.model.families, self.cuttings, strict=True))

    @cached_property
    def cuttings(self) -> list[_Cutting]:
        """Pins by stage and expert, shards by the rules."""
        staged, findings = stages_of(self.model, self.spec)
        self.findings += findings
        return [
            self._cutting(family, *own)
            for family, own in zip(self.model.families, staged, strict=True)
        ]

    def _cutting(self, family: Family, stage: NDArray[np.int64], also: tuple[int, ...]) -> _Cutting:
        axes, strides = self.spec.axes, mesh_strides(self.spec.axes)
        placements: list[Placement] = []
        pins = np.zeros(len(family), np.int64)
        if "pp" in axes:
            placements.append(Pin("pp", int(stage[0]) if also else 0, also))
            pins += stage * strides["pp"]
        owner = owners_of(family, self.spec.size("ep"))
        listed = bool(owner.max(initial=-1) >= 0)
        if listed:
            placements.append(Pin("ep", 0))
            pins += owner * strides["ep"]
        local, even, padded = list(family.shape), True, False
        name = family.name(0)
        cuts = self.rules.cuts(name, len(family.shape))
        if not self._alike(family):
            self._find(family, "the rules, or the sizes of heads, differ among its like tensors")
        cut_dims: set[int] = set()
        cut_axes: set[str] = set()
        for cut in cuts:
            ways, size = axes.get(cut.axis, 1), local[cut.dim]
            if ways == 1 or (cut.axis == "ep" and listed):
                continue
            twice = cut.dim in cut_dims and (cut.blocks > 1 or not even or size % ways)
            if cut.axis in cut_axes or twice:
                self._find(family, f"its rule cuts dim {cut.dim} or axis {cut.axis} twice")
                continue
            cut_dims.add(cut.dim)
            cut_axes.add(cut.axis)
            if size % cut.blocks:
                self._find(family, f"dim {cut.dim} is not {cut.blocks} equal blocks")
                continue
            head = self._head(name) if cut.heads else 1
            if size % head or (size // head < ways and ways % (size // head)):
                self._find(family, f"{size / head:g} heads cannot be dealt to {ways} places")
                continue
            copies = max(ways // (size // head), 1) if head > 1 else 1
            multiple = self.spec.number("pad_vocab", 1) if cut.vocab else head
            shard = Shard(cut.axis, cut.dim, multiple, cut.blocks, copies)
            placements.append(shard)
            local[cut.dim] = shard.part(size // cut.blocks, ways) * cut.blocks
            full = local[cut.dim] * (ways // copies)
            # Padding of dim 0 lies at the end of a flattened tensor; of any other, all over it.
            vocab = cut.vocab and not cut.dim
            padded |= vocab and full != size
            even &= vocab or full == size
        return _Cutting(tuple(placements), pins, stage, owner, prod(local), padded, even)

    def _alike(self, family: Family) -> bool:
        """Whether the rules treat all members as the first; costs names only where a rule has a number."""
        rules = [*self.rules.styles, *self.model.heads]
        if not any(char.isdigit() for rule in rules for char in rule):
            return True
        ndim = len(family.shape)
        names = [family.name(member) for member in range(len(family))]
        return len({(self.rules.cuts(name, ndim), self._head(name)) for name in names}) <= 1

    def _head(self, name: str) -> int:
        return next((n for glob, n in self.model.heads.items() if fnmatchcase(name, glob)), 1)

    def _over(self, cutting: _Cutting) -> tuple[str, ...]:
        """Over which axes data parallelism runs: `ep` too, but for experts."""
        wanted = {"dp"} if cutting.expert else {"dp", "ep"}
        return tuple(axis for axis in self.spec.axes if axis in wanted)

    def _whole(self, family: Family, cutting: _Cutting) -> _Data:
        """DDP: nothing more is cut."""
        return (), None

    def _by_rows(self, family: Family, cutting: _Cutting) -> _Data:
        """`fully_shard`: dim 0 of what tensor parallelism left, as `torch.chunk`."""
        over = self._over(cutting)
        if not over:
            return (), None
        if not family.shape:
            self._find(family, "fully_shard cannot cut a tensor without dims")
            return (), None
        if any(isinstance(p, Shard) and p.blocks > 1 and not p.dim for p in cutting.placements):
            self._find(family, "dim 0 has blocks and would be cut twice")
            return (), None
        return (Shard(over, 0),), None

    def _alone(self, family: Family, cutting: _Cutting) -> _Data:
        """ZeRO-3: every tensor is a flat of its own."""
        over = self._over(cutting)
        if not over or not family.numel or not self._flattens(family, cutting, alone=True):
            return (), None
        if not cutting.padded:
            return (Flat(over),), None
        part = zero3_part(cutting.numel, prod(self.spec.axes[axis] for axis in over))
        count = len(family)
        return (Flat(over, part=1),), Flats(np.zeros(count, np.int64), np.full(count, part))

    def _in_groups(self) -> Iterator[_Data]:
        """ZeRO-1 and 2: the trainable tensors of one param group share a flat, a stage and owner."""
        rounds = self.spec.flag("round_robin")
        globs = self.groups
        if self.spec.options.get("groups") == "decay":  # the usual two: matrices, and all else
            sorts = [np.full(len(f), int(len(f.shape) < 2)) for f in self.model.families]
        else:
            sorts = [
                _numbered(f, lambda name: _group(name, globs), globs) for f in self.model.families
            ]
        for family, own in zip(self.model.families, sorts, strict=True):
            if not family.trainable:
                own[:] = -1
        return self._packed(sorts, lambda n, ways: zero_group(n, ways, round_robin=rounds))

    def _in_units(self) -> Iterator[_Data]:
        """FSDP1: the tensors of one wrapped module share a flat."""
        aligned = self.spec.flag("orig", default=True)
        size = itemsize(self.spec.dtype("compute", "float32"))
        known: dict[str, int] = {"": 0}

        def unit(name: str) -> int:
            return known.setdefault(_unit(name, self.units), len(known))

        sorts = [_numbered(family, unit, self.units) for family in self.model.families]
        return self._packed(
            sorts, lambda n, ways: fsdp1_unit(n, ways, itemsize=size, aligned=aligned)
        )

    def _packed(
        self,
        sorts: Sequence[NDArray[np.int64]],
        pack: Callable[[NDArray[np.int64], int], FlatGroup],
    ) -> Iterator[_Data]:
        """Tensors with the same sort, stage and owner lie in one flat, in the model's order.

        A negative sort is in none. Offsets are the same on all places, so every place must hold as much
        of a tensor as the others.
        """
        over = [self._over(cutting) for cutting in self.cuttings]
        flats: list[Flats | None] = [None] * len(sorts)
        for axes in sorted({own for own in over if own}):
            ways = prod(self.spec.axes[axis] for axis in axes)
            chosen = [
                i
                for i, own in enumerate(over)
                if own == axes
                and sorts[i].max() >= 0
                and self._flattens(self.model.families[i], self.cuttings[i])
            ]
            if not chosen:
                continue
            sizes = [len(self.model.families[i]) for i in chosen]
            kinds = np.stack(
                [
                    np.concatenate([sorts[i] for i in chosen]),
                    np.concatenate([self.cuttings[i].stage for i in chosen]),
                    np.concatenate([self.cuttings[i].owner for i in chosen]),
                ]
            )
            orders = np.concatenate([self.model.families[i].orders for i in chosen])
            numels = np.repeat([self.cuttings[i].numel for i in chosen], sizes)
            offsets, parts = np.zeros_like(numels), np.ones_like(numels)
            sequence = np.lexsort((orders, *kinds))
            steps = np.any(np.diff(kinds[:, sequence], axis=1), axis=0)
            for members in np.split(sequence, np.flatnonzero(steps) + 1):
                if kinds[0, members[0]] < 0:
                    continue
                group = pack(numels[members], ways)
                offsets[members], parts[members] = group.offsets, max(group.part, 1)
            ends = np.cumsum(sizes)
            for i, end, size in zip(chosen, ends, sizes, strict=True):
                flats[i] = Flats(offsets[end - size : end], parts[end - size : end])
        for axes, own in zip(over, flats, strict=True):
            yield ((Flat(axes, part=1),), own) if own is not None else ((), None)

    def _flattens(self, family: Family, cutting: _Cutting, alone: bool = False) -> bool:
        """Whether a family can lie in a flat buffer; a finding where not."""
        if cutting.blocks:
            cause = "a tensor of several blocks has no flat form here"
            fix = "list them as tensors of their own: --experts listed (experts= of model_shapes.read_model)"
            self._find(family, cause, fix)
        elif not alone and not cutting.even:
            self._find(family, "tensor parallelism cuts it unevenly: its flat offsets would differ")
        elif not alone and any(isinstance(p, Pin) and p.also for p in cutting.placements):
            self._find(family, "it is tied across stages, whose flat buffers differ")
        else:
            return True
        return False

    def _find(self, family: Family, cause: str, fix: str = "") -> None:
        fix = fix or "choose another kind or other sizes, or tp rules that leave it whole"
        where = f"{family.name(0)} {list(family.shape)}"
        self.findings.append(Finding("not-declarable", where, f"under {self.spec}: {cause}", fix))


def _numbered(
    family: Family, number: Callable[[str], int], globs: Sequence[object]
) -> NDArray[np.int64]:
    """A number per member by its name; without globs all are alike."""
    if not globs:
        return np.full(len(family), number(""))
    return np.array([number(family.name(member)) for member in range(len(family))])


def _group(name: str, groups: Sequence[Sequence[str]]) -> int:
    fits = (i for i, globs in enumerate(groups) if any(fnmatchcase(name, g) for g in globs))
    return next(fits, len(groups))


def _unit(name: str, globs: Sequence[str]) -> str:
    """The innermost module on the way to a tensor that a glob fits; the root is empty."""
    module = name.rpartition(".")[0]
    while module and not any(_fits(module, glob) for glob in globs):
        module = module.rpartition(".")[0]
    return module


def _fits(module: str, glob: str) -> bool:
    """Segment by segment: `layers.*` is every layer, not what is inside one."""
    path, wanted = module.split("."), glob.split(".")
    return len(path) == len(wanted) and all(map(fnmatchcase, path, wanted))
