"""A comparison as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynadapt.elastic.comparison import Comparison, Difference

__all__ = ["page_of"]

_STYLE = """
body { color: #1a1a1a }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
caption { text-align: left; font-weight: 600; padding: .5rem 0 }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .6rem; text-align: left; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
code { overflow-wrap: anywhere } .rounding { color: #7a5200 }
.different, .only-in-a, .only-in-b { color: #a40000 }
@media (prefers-color-scheme: dark) {
body { background: #161616; color: #e8e8e8 } th, td { border-color: #444 }
.different, .only-in-a, .only-in-b { color: #ff8a80 } .rounding { color: #ffcc66 } }
"""


def page_of(a: str, b: str, found: Comparison) -> str:
    """The page: the verdict, counts, every tensor that is not identical, and what else differs."""
    told = [d for d in found.tensors if d.verdict != "identical"]
    counts = {v: found.count(v) for v in ("identical", "rounding", "different")}
    counts["only in A"], counts["only in B"] = found.count("only-in-a"), found.count("only-in-b")
    verdict = "same" if found.same else "differ"
    heads = [
        "tensor",
        "verdict",
        "elements",
        "max abs",
        "max relative",
        "max ULP",
        "first",
        "where",
    ]
    tensors = _table("Tensors that are not identical", heads, map(_row, told)) if told else ""
    others = [
        f"<td><code>{escape(path)}</code></td><td>{escape(repr(x))}</td><td>{escape(repr(y))}</td>"
        for path, (x, y) in found.aux.items()
    ]
    rest = _table("Beside tensors", ["what", "in A", "in B"], others) if others else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>dynadapt diff: {verdict}</title>'
        f"<style>{_STYLE}</style><h1>{verdict}</h1>"
        f"<p>A: <code>{escape(a)}</code><br>B: <code>{escape(b)}</code></p>"
        f"<p>{', '.join(f'{n:,} {name}' for name, n in counts.items())}</p>{tensors}{rest}</html>\n"
    )


def _table(caption: str, heads: list[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><caption>{caption}</caption><tr>{head}</tr>{body}</table>"


def _row(d: Difference) -> str:
    where = [f"A: {d.places[0]}" if d.places[0] else "", f"B: {d.places[1]}" if d.places[1] else ""]
    if d.shapes[0] != d.shapes[1]:
        where.append(f"shapes {list(d.shapes[0])}, {list(d.shapes[1])}")
    if d.dtypes[0] != d.dtypes[1]:
        where.append(f"{d.dtypes[0]}, {d.dtypes[1]}")
    where.append(d.hint)
    numbers = ["", "", "", "", ""]
    if d.count:
        first = ", ".join(map(str, d.first)) if d.first is not None else ""
        values = f" ({d.values[0]:.9g}, {d.values[1]:.9g})" if d.first is not None else ""
        numbers = [
            f"{d.count:,} of {d.numel:,}",
            f"{d.max_abs:.3g}",
            f"{d.max_rel:.3g}",
            f"{d.max_ulp:,}",
            f"{first}{values}",
        ]
    cells = "".join(f'<td class="n">{escape(text)}</td>' for text in numbers)
    told = "<br>".join(escape(text) for text in where if text)
    return (
        f'<td><code>{escape(" = ".join(d.keys))}</code></td><td class="{d.verdict}">{d.verdict}</td>{cells}'
        f"<td>{told}</td>"
    )
