"""Where each tensor lies in a flat buffer that a framework makes of many and cuts evenly.

The formulas follow DeepSpeed 0.19 and torch 2.13; each names the function that it repeats. They take
element counts in the order in which the framework flattens, and know no shape and no seat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["FlatGroup", "SubGroups", "fsdp1_unit", "zero3_groups", "zero3_part", "zero_group"]

_PADDED_BYTES = 16
"""Where tensors start at aligned addresses: torch's and DeepSpeed's number is the same."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatGroup:
    """Tensors laid into one flat buffer; rank `r` of the group holds `[r * part, (r + 1) * part)` of it.

    `offsets` is (tensors,) int64, elements from the start of the whole flat, in the order asked for;
    `part` counts one rank's elements, padding included. What no tensor covers is padding.

    >>> start, stop, at = zero_group([3, 4, 2], 2).spans([3, 4, 2], 1)
    >>> start.tolist(), stop.tolist(), at.tolist()
    ([3, 3, 0], [3, 4, 2], [0, 0, 1])
    """

    offsets: NDArray[np.int64]
    part: int

    def spans(
        self, numels: ArrayLike, rank: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """What rank `rank` holds: per tensor `start` and `stop` in its row-major order, and where.

        Three (tensors,) int64: elements `[start, stop)` of a tensor lie in the rank's own piece from
        index `at` on. A tensor that the rank has no part in has `start == stop` and `at` 0.
        """
        sizes = np.asarray(numels, np.int64)
        first = rank * self.part
        start = np.clip(first - self.offsets, 0, sizes)
        stop = np.clip(first + self.part - self.offsets, 0, sizes)
        at = np.where(start < stop, self.offsets + start - first, 0)
        return start, stop, at


@dataclass(frozen=True, slots=True, eq=False)
class SubGroups:
    """One ZeRO-3 optimizer group, cut into sub-groups; all ranks have the same offsets.

    Per tensor, (tensors,) int64: `index` of its sub-group (-1: in none, it has no elements),
    `offsets` in elements from the start of a rank's flat of that sub-group, `parts` of one rank in
    elements with padding. `sizes` is (sub-groups,) int64: the elements of one rank's flat.
    """

    index: NDArray[np.int64]
    offsets: NDArray[np.int64]
    parts: NDArray[np.int64]
    sizes: NDArray[np.int64]


def zero_group(
    numels: ArrayLike,
    ways: int,
    *,
    round_robin: bool = False,
    alignment: int = 2,
    between: int = 1,
) -> FlatGroup:
    """One param group of ZeRO-1 or ZeRO-2, and of `BF16_Optimizer`, on `ways` ranks.

    `numels` has the group's trainable tensors in the optimizer's order. `alignment` times `ways` is
    what the flat is padded to (`nccl_start_alignment_factor`, 2 in both optimizers), at its end only:
    a piece ends in the middle of a tensor, the last ranks may hold nothing but padding. `between`
    is the multiple that every tensor after the first starts at (`parameter_alignment`:
    `16 // gcd(16, itemsize)` of the *model's* dtype, else 1). `round_robin` is what
    `round_robin_gradients` does, for stage 1 too: the flat has tensors 0, ways, 2 * ways, ... first,
    then 1, ways + 1, ...; the cut stays even, so a tensor need not lie on "its" rank.

    Frozen tensors must be left out; those without elements are skipped here (DeepSpeed does not
    count them when it deals round-robin) and get offset 0. DeepSpeed drops param groups without
    tensors, so that later ones change their number; a group of frozen ones alone makes it fail, as
    does any tensor without dims.

    DeepSpeed: `DeepSpeedZeroOptimizer.__init__`, `_round_robin_reorder` and
    `flatten_dense_tensors_aligned` in runtime/zero/stage_1_and_2.py, `align_dense_tensors` in
    runtime/utils.py, `_setup_for_real_optimizer` in runtime/bf16_optimizer.py.

    >>> group = zero_group([5, 3, 4], 2, round_robin=True)
    >>> group.offsets.tolist(), group.part
    ([0, 9, 5], 6)
    """
    sizes = _sizes(numels, ways)
    kept = np.flatnonzero(sizes)
    if round_robin:
        # A stable sort by the rank that a tensor is dealt to.
        kept = kept[np.argsort(np.arange(kept.size) % ways, kind="stable")]
    offsets, total = _packed(sizes[kept], between)
    found = np.zeros(sizes.size, np.int64)
    found[kept] = offsets
    return FlatGroup(_fixed(found), -(-total // (alignment * ways)) * alignment)


@overload
def zero3_part(numel: int, ways: int) -> int: ...
@overload
def zero3_part(numel: NDArray[np.int64], ways: int) -> NDArray[np.int64]: ...
def zero3_part(numel: int | NDArray[np.int64], ways: int) -> int | NDArray[np.int64]:
    """Elements of one rank's piece of each ZeRO-3 parameter, padding included.

    Every parameter is cut alone, so a bias of 3 on 8 ranks is one element on each of the first
    three and padding on the others. No alignment beyond the ranks. The padding is whatever the
    memory held before, not zeros as in stages 1 and 2.

    DeepSpeed: `Init._partition_param` and `Init._aligned_size` in
    runtime/zero/partition_parameters.py.

    >>> zero3_part(10, 4), zero3_part(np.array([3, 8]), 8).tolist()
    (3, [1, 1])
    """
    return -(-numel // ways)


def zero3_groups(numels: ArrayLike, ways: int, sub_group_size: int | None = None) -> SubGroups:
    """One param group of ZeRO-3, cut into sub-groups of at least `sub_group_size` elements.

    `numels` has the group's trainable tensors in the optimizer's order. The size counts *one rank's*
    padded pieces, so a number of sub-groups depends on the ranks. A sub-group is closed by the tensor
    that reaches the size and is never cut inside one, so it is usually larger than asked.

    DeepSpeed: `_create_fp16_sub_groups` and `_create_fp16_partitions_with_defragmentation` in
    runtime/zero/stage3.py.

    >>> cut = zero3_groups([8, 4, 4, 2], 2, sub_group_size=5)
    >>> cut.index.tolist(), cut.offsets.tolist(), cut.sizes.tolist()
    ([0, 0, 1, 1], [0, 4, 0, 2], [6, 3])
    """
    sizes = _sizes(numels, ways)
    parts = zero3_part(sizes, ways)
    kept = np.flatnonzero(sizes)
    ends = np.cumsum(parts[kept])
    index = np.full(sizes.size, -1, np.int64)
    offsets = np.zeros(sizes.size, np.int64)
    flats: list[int] = []
    first, done = 0, 0
    while first < kept.size:
        last = kept.size - 1
        if sub_group_size is not None and sub_group_size < ends[-1]:
            # At least one tensor goes into a sub-group, however small the size.
            wanted = done + max(sub_group_size, 1)
            last = min(int(np.searchsorted(ends, wanted)), last)
        members = kept[first : last + 1]
        index[members] = len(flats)
        offsets[members] = ends[first : last + 1] - parts[members] - done
        flats.append(int(ends[last]) - done)
        first, done = last + 1, int(ends[last])
    return SubGroups(
        _fixed(index), _fixed(offsets), _fixed(parts), _fixed(np.array(flats, np.int64))
    )


def fsdp1_unit(numels: ArrayLike, ways: int, *, itemsize: int, aligned: bool) -> FlatGroup:
    """The flat parameter of one FSDP1 unit (a wrapped module), cut into `ways`.

    `numels` has the unit's own tensors, frozen ones too, in the order of `named_modules()` and each
    module's own parameters: parents before children, whatever the optimizer's order. A tied tensor
    counts once, in its first place; one that an inner unit flattened already does not count.
    `aligned` is `use_orig_params`: each tensor starts at a multiple of 16 bytes in the dtype that the
    forward uses, so `itemsize` is that of `MixedPrecision.param_dtype` (of the parameters if None),
    though the flat itself has the parameters' own dtype. `ways` is 1 for `NO_SHARD`, and one node's
    ranks for the hybrid strategies. Padding between tensors is filled with 42, that of a short piece
    with zeros.

    A piece is the longest part of `torch.chunk`, hence `ceil(total / ways)`: the last ranks may hold
    less, or only padding. With `aligned` the total was padded up to the ranks; the piece is the same.

    torch: `FlatParamHandle._init_flat_param_and_metadata`, `_get_unpadded_shard`,
    `_get_aligned_numel` in distributed/fsdp/_flat_param.py.

    >>> unit = fsdp1_unit([5, 3], 2, itemsize=4, aligned=True)
    >>> unit.offsets.tolist(), unit.part
    ([0, 8], 6)
    """
    sizes = _sizes(numels, ways)
    offsets, total = _packed(sizes, max(_PADDED_BYTES // itemsize, 1) if aligned else 1)
    return FlatGroup(_fixed(offsets), -(-total // ways))


def _packed(sizes: NDArray[np.int64], multiple: int) -> tuple[NDArray[np.int64], int]:
    """Tensors one after another, each from a multiple on; the offsets, and where the last ends."""
    starts = np.zeros(sizes.size, np.int64)
    np.cumsum((-(-sizes // multiple) * multiple)[:-1], out=starts[1:])
    return starts, int(starts[-1] + sizes[-1]) if sizes.size else 0


def _sizes(numels: ArrayLike, ways: int) -> NDArray[np.int64]:
    sizes = np.asarray(numels, np.int64)
    if sizes.ndim != 1 or ways < 1 or (sizes < 0).any():
        raise ValueError(f"needs a list of sizes >= 0 and ways >= 1, not {numels!r} and {ways}")
    return sizes


def _fixed(values: NDArray[np.int64]) -> NDArray[np.int64]:
    values.flags.writeable = False
    return values
