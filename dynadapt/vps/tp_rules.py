"""Which dim of which tensor tensor and expert parallelism cut: rules from names to styles.

The form is that of Hugging Face's `base_model_tp_plan`: a pattern of module or parameter names, `*`
for one segment, to a style. A style decides the dims of a module's weight, of a bias beside it, and of
a stack of experts `[experts, out, in]`. `A+B` is both (`packed_colwise+grouped_gemm`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dynadapt.errors import Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["STYLES", "Cut", "TpRules", "read_rules"]


class Cut(NamedTuple):
    """What a style does to a tensor: the dim, the blocks in it, over which axis.

    `vocab`: parts may be padded. `heads`: whole heads are dealt, and shared where there are too few.
    """

    dim: int
    blocks: int = 1
    axis: str = "tp"
    vocab: bool = False
    heads: bool = False


_COLUMN = ("colwise", "colwise_rep", "colwise_gather_output")
_ROW = ("rowwise", "rowwise_rep", "rowwise_split_input")
_WHOLE = (
    "replicate",
    "replicated_with_grad_allreduce",
    "sequence_parallel",
    "all_reduce",
    "moe_tp_experts",
    "moe_identity_expert",
    "ep_dispatch_experts",
    "ep_router",
    "local_params",
    "mla_kv_a_proj",
)

#: The styles that are understood. Beside Hugging Face's: `vocab` is a column cut whose parts may be
#: padded (`pad_vocab=`), `heads` one of whole attention heads, which neighbours share where `tp` exceeds
#: them; the sizes of heads come from the model.
STYLES = frozenset(
    (
        *_COLUMN,
        *_ROW,
        *_WHOLE,
        "packed_colwise",
        "packed_rowwise",
        "embedding_rowwise",
        "embedding_colwise",
        "grouped_gemm",
        "vocab",
        "heads",
    )
)


@dataclass(frozen=True)
class TpRules:
    """Patterns to styles. A pattern of the parameter beats one of its module, a later one an earlier.

    A name that no pattern fits stays whole. Raises `Refused` (reason `bad-tp-rule`) with every style
    that is not known.

    >>> rules = TpRules({"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"})
    >>> rules.cuts("model.layers.3.q_proj.weight", 2), rules.cuts("model.layers.3.o_proj.bias", 1)
    ((Cut(dim=0, blocks=1, axis='tp', vocab=False, heads=False),), ())
    """

    styles: Mapping[str, str]

    def __post_init__(self) -> None:
        known = ", ".join(sorted(STYLES))
        wrong = [
            Finding("bad-tp-rule", pattern, f"style {style!r} is unknown", f"known: {known}")
            for pattern, styles in self.styles.items()
            for style in styles.split("+")
            if style not in STYLES
        ]
        if wrong:
            raise Refused(wrong)

    def style(self, name: str) -> str:
        """The style of a parameter; `replicate` where no pattern fits."""
        for each in (name, name.rpartition(".")[0]):
            found = [s for p, s in self.styles.items() if each and _expression(p).search(each)]
            if found:
                return found[-1]
        return "replicate"

    def cuts(self, name: str, ndim: int) -> tuple[Cut, ...]:
        """Which dims of a tensor of `ndim` dims are cut, and how."""
        every = (_cut(style, ndim, name.endswith(".bias")) for style in self.style(name).split("+"))
        return tuple(cut for cut in every if cut is not None)

    def unused(self, names: Iterable[str]) -> tuple[str, ...]:
        """Patterns that fit none of the names, nor any module on the way to one."""
        every = set()
        for name in names:
            while name:
                every.add(name)
                name = name.rpartition(".")[0]
        return tuple(
            pattern
            for pattern in self.styles
            if not any(_expression(pattern).search(name) for name in every)
        )


def read_rules(path: Path) -> TpRules:
    """Rules from a JSON file: an object of patterns to styles.

    Raises `Refused` (reason `bad-tp-rule`) where it is anything else.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        fix = 'write an object like {"layers.*.q_proj": "colwise"}'
        raise Refused(
            [Finding("bad-tp-rule", str(path), f"cannot be read: {error}", fix)]
        ) from error
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        cause = "is not one object of patterns to styles"
        raise Refused([Finding("bad-tp-rule", str(path), cause)])
    return TpRules(found)


def _cut(style: str, ndim: int, bias: bool) -> Cut | None:
    if style in _WHOLE or not ndim or (bias and style in _ROW):
        return None
    if style == "grouped_gemm":
        return Cut(0, axis="ep")
    if style in {"embedding_rowwise", "vocab", "heads"}:
        return Cut(0, vocab=style == "vocab", heads=style == "heads")
    if style in {"embedding_colwise", *_ROW}:
        return Cut(ndim - 1)
    if style == "packed_rowwise":
        return None if ndim == 1 else Cut(ndim - 1, 2)
    packed = style == "packed_colwise" and ndim > 1
    return Cut(max(ndim - 2, 0), 2 if packed else 1)


@lru_cache(maxsize=4096)
def _expression(pattern: str) -> re.Pattern[str]:
    """A pattern fits whole segments, at the end of a name."""
    text = re.escape(pattern).replace(r"\*", "[^.]+")
    return re.compile(rf"(?:^|\.){text}$")
