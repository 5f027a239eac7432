"""How tensor parallelism cut the parameters of a DeepSpeed checkpoint, of which each part has its own.

AutoTP of DeepSpeed 0.19 writes an affine map of every parameter into `universal_checkpoint_info`. Others
write patterns there, which say along which dim parts are put together: these are the rules of DeepSpeed's
`ds_to_universal`. Where neither is there, whole shapes tell it, which the user has from the model.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dynadapt.adapters._cut import Cut, UnknownCutError, along, cut_of_map
from dynadapt.adapters.checkpoints._deepspeed_files import options_of
from dynadapt.errors import Finding
from dynadapt.vps.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dynadapt.adapters.checkpoints._deepspeed_geometry import Shapes

__all__ = ["cuts_of"]

Locals = list[tuple[int, ...]]
"""The shape of a parameter on each rank."""

MAP_VERSION = 1

_FUSED = re.compile(
    r"(query_key_value|qkv|c_attn|W_pack|gate_up|in_proj|dense_h_to_4h)", re.IGNORECASE
)
"""Names of layers that are several ones, whose parts mostly are not simply put one after another."""

_TAME = re.compile(r"^\^?(?:\\[^0-9A-Za-z]|\\d\+?|\.[*+]?|[\w/-]|\[[\w^-]+\][*+]?)*\$?$")
"""Patterns that take no time to look for: a checkpoint is not trusted to have no others."""

_FIX = (
    "for whole shapes give --model CONFIG (model=), or by --like (like=) a checkpoint of the model"
)


def cuts_of(
    info: Mapping[str, Any], locals_of: Mapping[str, Locals], shapes: Shapes
) -> tuple[dict[str, list[Cut]], list[Finding]]:
    """The cut of each parameter on each rank, and those that cannot be told.

    `info` is the `universal_checkpoint_info`, `shapes` are the whole shapes that the user knows.
    """
    rules = _Rules(info, shapes)
    found: dict[str, list[Cut]] = {}
    findings: list[Finding] = []
    for name, own in locals_of.items():
        try:
            found[name] = rules.cuts(name, own)
        except UnknownCutError as unknown:
            cause = f"tensor parallelism cut it in a way that is not known: {unknown}"
            findings.append(Finding("unsupported-parallel", name, cause, _FIX))
    return found, findings


class _Rules:
    """What `universal_checkpoint_info` says, and the whole shapes."""

    def __init__(self, info: Mapping[str, Any], shapes: Shapes) -> None:
        self.info, self.shapes = info, shapes
        affine = options_of(info, "affine_map")
        self.map_version = affine.get("version", MAP_VERSION)
        self.maps = options_of(affine, "params")
        self.plain = {_plain(pattern): pattern for pattern in map(str, self.maps)}

    def cuts(self, name: str, own: Locals) -> list[Cut]:
        """The cut on each rank; raises `UnknownCutError`."""
        if self.maps and self.map_version != MAP_VERSION:
            raise UnknownCutError(f"its map is of version {self.map_version}")
        unsupported = options_of(self.info, "autotp_unsupported_parameter_patterns")
        if (pattern := _matching(unsupported, name)) is not None:
            raise UnknownCutError(str(unsupported[pattern]))
        pattern = self.plain.get(name) or _matching(self.maps, name)
        if pattern is not None:
            return [cut_of_map(self.maps[pattern], rank, shape) for rank, shape in enumerate(own)]
        if self.info:
            return self._by_patterns(name, own)
        return self._by_shape(name, own)

    def _by_patterns(self, name: str, own: Locals) -> list[Cut]:
        whole = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
        if any(self._listed(kind, name) for kind in whole):
            return _replicas(own)
        for entry in _list(self.info.get("parameter_with_sub_params")):
            pattern = _matching(_list(entry.get("patterns")), name)
            if pattern is not None:
                return self._sub_params(pattern, entry, own)
        if self._listed("parameter_with_2_sub_params_cat_dim_0", name):
            return _even(own, 0, 2)
        row = self._listed("parameter_with_row_parallelism_patterns", name)
        stop = None
        if self._listed("vocabulary_parameter_patterns", name):
            stop = int(self.info["original_vocab_size"])
        return _together(own, 1 if row and len(own[0]) > 1 else 0, stop)

    def _sub_params(self, pattern: str, entry: Mapping[str, Any], own: Locals) -> list[Cut]:
        dim = int(entry["partition_dim"])
        told = options_of(self.info, "sub_param_shard_widths").get(pattern)
        if told is not None:
            widths = [tuple(int(n) for n in each) for each in told]
            if any(len(each) != len(own) for each in widths):
                raise UnknownCutError(f"{len(own)} ranks do not have widths {widths}")
            return _by_widths(own, dim, widths)
        sizes = entry["shape"][dim]
        if isinstance(sizes, int):
            return _even(own, dim, sizes)
        if any(int(size) % len(own) for size in sizes):
            raise UnknownCutError(f"{len(own)} ranks do not share {list(sizes)} evenly")
        return _by_widths(own, dim, [(int(size) // len(own),) * len(own) for size in sizes])

    def _by_shape(self, name: str, own: Locals) -> list[Cut]:
        shape = self.shapes.get(name)
        if shape is None:
            raise UnknownCutError("the checkpoint does not say it")
        if all(each == shape for each in own):
            return _replicas(own)
        fits = [dim for dim in range(len(shape)) if _sums_to(own, dim, shape)]
        if len(fits) != 1:
            raise UnknownCutError(
                f"parts {sorted(set(own))} do not make up {list(shape)} in one way"
            )
        if _FUSED.search(name):
            raise UnknownCutError("its name is that of several layers in one, which are cut each")
        return _together(own, fits[0])

    def _listed(self, kind: str, name: str) -> bool:
        return _matching(_list(self.info.get(kind)), name) is not None


def _replicas(own: Locals) -> list[Cut]:
    if len(set(own)) > 1:
        raise UnknownCutError(f"it is to be whole on all ranks, and has shapes {sorted(set(own))}")
    return [Cut(shape, shape, ((Box.whole(shape), Box.whole(shape)),)) for shape in own]


def _sums_to(own: Locals, dim: int, shape: tuple[int, ...]) -> bool:
    beside = (*shape[:dim], *shape[dim + 1 :])
    return sum(each[dim] for each in own if len(each) == len(shape)) == shape[dim] and all(
        len(each) == len(shape) and (*each[:dim], *each[dim + 1 :]) == beside for each in own
    )


def _together(own: Locals, dim: int, stop: int | None = None) -> list[Cut]:
    """Parts one after another."""
    return _by_widths(own, dim, [tuple(each[dim] for each in own)], stop)


def _even(own: Locals, dim: int, count: int) -> list[Cut]:
    """So many parameters in one, each cut alike."""
    if count < 1 or any(each[dim] % count for each in own):
        raise UnknownCutError(f"its parts do not have {count} equal shares")
    return _by_widths(own, dim, [tuple(each[dim] // count for each in own)] * count)


def _by_widths(
    own: Locals, dim: int, widths: Sequence[tuple[int, ...]], stop: int | None = None
) -> list[Cut]:
    first = own[0]
    if not 0 <= dim < len(first):
        raise UnknownCutError(f"it has no dim {dim}")
    shape = (*first[:dim], sum(map(sum, widths)), *first[dim + 1 :])
    cuts = [along(shape, widths, dim, rank, stop) for rank in range(len(own))]
    wrong = [(cut.local, each) for cut, each in zip(cuts, own, strict=True) if cut.local != each]
    if wrong:
        raise UnknownCutError(
            f"a rank should hold {list(wrong[0][0])}, and has {list(wrong[0][1])}"
        )
    return cuts


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _matching(patterns: Iterable[Any], name: str) -> str | None:
    """The first pattern that a name matches, as `re.match` does."""
    return next((each for each in _tame(patterns) if re.match(each, name)), None)


def _tame(patterns: Iterable[Any]) -> Iterator[str]:
    for pattern in patterns:
        text = str(pattern)
        if len(text) > 300 or text.count("*") + text.count("+") > 4 or not _TAME.match(text):
            raise UnknownCutError(f"the pattern {text[:80]!r} is not of a kind that is read")
        yield text


def _plain(pattern: str) -> str:
    """The name that an escaped pattern of AutoTP is of."""
    return re.sub(r"\\(.)", r"\1", pattern.removeprefix("^").removesuffix("$"))
