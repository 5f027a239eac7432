"""The tensors of a checkpoint as numpy arrays, each read when it is asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.errors import Finding, Refused
from dynadapt.files import raw_dtype
from dynadapt.transport.casts import cast
from dynadapt.transport.sources import Sources
from dynadapt.vps.box import Box, uncovered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dynadapt.vps.keys import KeySpec
    from dynadapt.vps.layout import RowLayout

__all__ = ["Tensors"]


class Tensors(Mapping[str, "NDArray[Any]"]):
    """Arrays by key: `"up.weight"` (the master), `"up.weight/exp_avg"`, a tied tensor by any name.

    An array is read-only, and lies over the file's map where one file holds the tensor in order. numpy
    has no bfloat16: such a tensor comes as float32, which is exact; float8 comes as its bits.
    """

    def __init__(self, layout: RowLayout, buffers: Mapping[str, Any]) -> None:
        self._sources = Sources(layout, buffers)
        held = [spec for spec in layout.keys if spec.presence != "none"]
        self._listed = tuple(str(spec.key) for spec in held)
        self._specs: dict[str, KeySpec] = {}
        for spec in held:
            for name in (spec.key.name, *spec.aliases):
                self._specs.setdefault(f"{name}/{spec.key.slot}", spec)
                if spec.key.slot in {"param", "buffer"}:
                    self._specs.setdefault(name, spec)

    def __iter__(self) -> Iterator[str]:
        """The keys, each once: `name/slot`."""
        return iter(self._listed)

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._listed)

    def __contains__(self, name: object) -> bool:
        """Whether there is such a tensor; nothing is read."""
        return str(name) in self._specs

    def spec(self, name: object) -> KeySpec:
        """Shape, dtype and kind of a tensor; raises `KeyError` with the nearest names."""
        found = self._specs.get(str(name))
        if found is None:
            near = difflib.get_close_matches(str(name), self._listed, 3)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise KeyError(f"no tensor is called {name}{hint}")
        return found

    def __getitem__(self, name: object) -> NDArray[Any]:
        """Read a tensor. Raises `KeyError`, `Refused` (`uncovered`, `truncated-file`)."""
        spec = self.spec(name)
        whole = Box.whole(spec.shape)
        if spec.presence == "zero" or not spec.numel:
            array = np.zeros(spec.shape, raw_dtype(spec.dtype))
        else:
            rows = self._sources.rows(spec.key, whole)
            gaps = uncovered((row.box for row in rows), whole)
            if gaps:
                cause = "no file of the checkpoint holds it"
                raise Refused([Finding("uncovered", f"{spec.key} {gap}", cause) for gap in gaps])
            array = self._sources.read(spec.key, whole)
        if spec.dtype == "bfloat16":
            array = cast(array, "bfloat16", "float32")
        array.flags.writeable = False
        return array
