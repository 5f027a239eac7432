"""docs/matrix.json, what the last walk over all pairs found, and docs/matrix.md, drawn from it."""

from __future__ import annotations

import json
import string
from typing import TYPE_CHECKING, Any

from tests._ranks import ROOT
from tests.live.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.live._pairs import Pair

JSON, PAGE = ROOT / "docs/matrix.json", ROOT / "docs/matrix.md"
WORLD = 4
WORKS, ONE_GROUP, UNKNOWN = "o", "1", "?"

HEAD = f"""# Every live layout to every other

Written by `make matrix` from migrations on {WORLD} gloo ranks, with DeepSpeed and torch on the CPU; rows are
sources, columns targets. The job has AdamW, a tied weight, a frozen one and buffers. Before a hop both sides
ran an evaluation, which leaves gathered weights behind. Each hop was compared bit for bit by the frameworks'
own gathers, moved no byte more than the least possible, and had equal fingerprints on both sides. Then the
target took a training step, and so did a plain torch model and optimizer on the gathered tensors. The source
had other hyperparameters than any target is built with.
"""

LEGEND = {
    WORKS: "works, with two sets of hyperparameters",
    ONE_GROUP: "works where all parameters have the same hyperparameters: see below",
    UNKNOWN: "not walked yet: `make matrix PAIRS=missing`",
}

TAIL = """## What is refused whatever the pair

After a refusal the source trains on as if nothing had been tried. [refusals.md](refusals.md) has every
reason; these two are met between layouts that are each supported (`tests/live/test_matrix_refusals.py`).

- Two sets of hyperparameters into one flat parameter, as FSDP1 has it without `use_orig_params` (marked
  `1`): `hyper-conflict`. Wrap the target with `use_orig_params=True`, or give the source's the same.
- Frozen fp32 weights that 16 bits cannot hold, into a DeepSpeed engine that keeps them so (`-bf16` and
  `-fp16`): `narrowing`. `narrow="allow"` rounds them as DeepSpeed does when it is built. Weights that train
  have masters and lose nothing.

What DeepSpeed and torch do wrong themselves, so that the kinds here go around it, is shown by
`tests/live/test_framework_faults.py`.

"""


def pairs() -> list[Pair]:
    """All ordered pairs of kinds, each kind with itself as well."""
    names = [kind.name for kind in KINDS.values() if WORLD in kind.worlds]
    return [(one, two) for one in names for two in names]


def load() -> dict[Pair, str]:
    """The mark of each pair that is known: "o", "1", or a refusal as JSON text."""
    if not JSON.exists():
        return {}
    held = json.loads(JSON.read_text())
    names, notes = held["kinds"], held["refused"]
    return {
        (one, two): notes.get(mark, mark)
        for one, row in zip(names, held["rows"], strict=True)
        for two, mark in zip(names, row, strict=True)
        if mark != UNKNOWN
    }


def keep(marks: Mapping[Pair, str | None]) -> None:
    """Write both files for the kinds that there are now, with these marks; None is not known any more."""
    names = [kind.name for kind in KINDS.values() if WORLD in kind.worlds]
    held = {**load(), **marks}
    known = {pair: mark for pair in pairs() if (mark := held.get(pair)) is not None}
    texts = sorted({mark for mark in known.values() if len(mark) > 1})
    free = [letter for letter in string.ascii_letters if letter != WORKS]
    letters = dict(zip(texts, free, strict=False))
    rows = []
    for one in names:
        found = [known.get((one, two), UNKNOWN) for two in names]
        rows.append("".join(letters.get(mark, mark) for mark in found))
    refused = {letter: text for text, letter in letters.items()}
    now = {"kinds": names, "rows": rows, "refused": refused}
    JSON.write_text(json.dumps(now, indent=1) + "\n")
    PAGE.write_text(page(now))


def page(held: Mapping[str, Any]) -> str:
    """The page, from what the file holds."""
    names, rows, refused = held["kinds"], held["rows"], held["refused"]
    wide = max(map(len, names)) + 4
    numbers = [f"{number:2d}" for number in range(1, len(names) + 1)]
    heads = ["".join(number[digit] for number in numbers) for digit in (0, 1)]
    lines = [HEAD, "```text", *(" " * wide + head for head in heads)]
    for number, name, row in zip(numbers, names, rows, strict=True):
        lines.append(f"{number} {name.ljust(wide - 3)}{row}")
    lines += ["```", ""]
    counts = {mark: sum(row.count(mark) for row in rows) for mark in (*LEGEND, *refused)}
    for mark, meaning in LEGEND.items():
        if counts[mark]:
            lines.append(f"- `{mark}` {meaning} ({counts[mark]} pairs)")
    for mark, text in refused.items():
        found = json.loads(text)
        by = f"the framework, shown by `{found['test']}`" if found.get("test") else "name"
        told = f"{found['cause']}; {found['fix']}".removesuffix("; ")
        lines.append(
            f"- `{mark}` refused by {by}: `{found['reason']}`: {told} ({counts[mark]} pairs)"
        )
    lines += [
        "",
        TAIL.rstrip(),
        "",
        "## The kinds",
        "",
        "| | kind | what it is | ranks |",
        "| --- | --- | --- | --- |",
    ]
    for number, name in zip(numbers, names, strict=True):
        kind = KINDS[name]
        ranks = ", ".join(map(str, kind.worlds))
        lines.append(f"| {number.strip()} | `{name}` | {kind.about} | {ranks} |")
    return "\n".join(lines) + "\n"


if (
    __name__ == "__main__"
):  # drawn anew, without a walk: pairs of new kinds are shown as not walked yet
    keep({})
