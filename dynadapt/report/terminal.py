"""A `Picture` for the terminal: tables of at most 80 columns that read without colour too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dynadapt.elastic.outcome import human
from dynadapt.report.maps import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from dynadapt.report.maps import DrawnTensor, Picture
    from dynadapt.report.traffic import Memory, Timeline, Traffic

__all__ = ["PALETTE", "rendered"]

WIDTH = 80

#: One colour a set of ranks, light enough for dark letters; the same as in figures.
PALETTE = (
    "#8fb4d9",
    "#f4b183",
    "#a3cf9b",
    "#e6a1b0",
    "#c9b3e0",
    "#e8d27a",
    "#8ccfcb",
    "#c4b199",
)

_ROWS, _COLS = 16, 8
_SEATS = 8
_LEGEND = 6


def rendered(picture: Picture) -> RenderableType:
    """Everything of a picture, from top to bottom.

    >>> from rich.console import Console
    >>> from dynadapt.report.maps import Picture
    >>> Console().print(rendered(Picture(("zero3:dp=2",), notes=("nothing to show",))))
    zero3:dp=2
    <BLANKLINE>
    nothing to show
    """
    parts: list[RenderableType] = [Text(picture.heading or " -> ".join(picture.titles), "bold")]
    for own in picture.maps:
        parts += [Text(), *_tensor(own, picture.titles)]
    if picture.memory is not None:
        parts += [Text(), *_memory(picture.memory)]
    if picture.traffic is not None:
        parts += [Text(), *_traffic(picture.traffic)]
    if picture.timeline is not None:
        parts += [Text(), *_timeline(picture.timeline)]
    parts += [Text(), *map(Text, picture.notes)] if picture.notes else []
    return Group(*parts)


def _tensor(maps: Sequence[DrawnTensor], titles: Sequence[str]) -> Iterator[RenderableType]:
    first = maps[0]
    yield Text(f"{first.name}  {list(first.shape)}", "bold")
    side, down = first.labels[1] or "one element", first.labels[0]
    about = f"columns: {side}" + (f", rows: {down}" if down else "")
    yield Text(f"{about}{', ' + first.note if first.note else ''}; a cell names its rank", "dim")
    drawn = [_map(each, title) for each, title in zip(maps, titles, strict=True)]
    if sum(width for _, width in drawn) + 4 * (len(drawn) - 1) <= WIDTH:
        beside = Table.grid(padding=(0, 4, 0, 0))
        beside.add_row(*(table for table, _ in drawn))
        yield beside
    else:
        yield from (table for table, _ in drawn)


def _map(own: DrawnTensor, title: str) -> tuple[Group, int]:
    """One layout's map, with its replicas below, and its width in columns."""
    cells = own.cells(_ROWS, _COLS)
    names = [str(s[0]) if len(s) == 1 else f"{s[0]} x{len(s)}" for s in own.sets]
    heads = [f"{low}:" for low in cells.col_edges[:-1].tolist()]
    sides = [f"{low}:" for low in cells.row_edges[:-1].tolist()]
    wide = max(map(len, [*names, *heads, "0"]))
    front = max(map(len, sides), default=0)
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row("", *(Text(head.ljust(wide), "dim") for head in heads))
    for side, line in zip(sides, cells.sets.tolist(), strict=True):
        row = [
            Text("-".center(wide))
            if at < 0
            else Text(names[at].center(wide), f"black on {PALETTE[own.tones[at] % len(PALETTE)]}")
            for at in line
        ]
        table.add_row(Text(side.rjust(front), "dim"), *row)
    parts: list[RenderableType] = [Text(title, "italic"), table]
    replicas = [(n, s) for n, s in zip(names, own.sets, strict=True) if len(s) > 1]
    legend = [f"{name}: ranks {ranks_text(ranks)}" for name, ranks in replicas[:_LEGEND]]
    if len(replicas) > _LEGEND:
        legend.append(f"... and {len(replicas) - _LEGEND} more sets")
    if not cells.exact:
        legend.append("sampled: pieces are finer")
    parts += [Text(line, "dim") for line in legend]
    width = front + 1 + len(heads) * (wide + 1)
    return Group(*parts), max(width, len(title), *map(len, legend), 0)


def _memory(memory: Memory) -> Iterator[RenderableType]:
    """Bars of bytes held; neighbouring seats with the same bytes share a line."""
    yield Text(f"bytes {memory.what} by each rank", "bold")
    values = np.stack(memory.columns, axis=1)
    starts = [0, *(np.flatnonzero(np.any(np.diff(values, axis=0), axis=1)) + 1).tolist()]
    if len(starts) > 2 * _SEATS:
        starts = np.linspace(0, len(values), 2 * _SEATS + 1).astype(int)[:-1].tolist()
    ends = [*starts[1:], len(values)]
    room = (WIDTH - 10) // len(memory.columns) - 12
    most = max(int(values.max(initial=0)), 1)
    table = Table.grid(padding=(0, 1, 0, 0))
    heads = (Text(title, "italic", overflow="ellipsis", no_wrap=True) for title in memory.titles)
    table.add_row(Text("rank", "dim"), *(each for head in heads for each in (head, "")))
    for a, b in zip(starts, ends, strict=True):
        first, last = memory.seats[a], memory.seats[b - 1]
        name = str(first) if first == last else f"{first}-{last}"
        line: list[RenderableType] = [Text(name, "dim")]
        for own in values[a:b].max(axis=0).tolist():
            bar = "#" * max(round(own / most * room), own > 0)
            line += [Text(bar.ljust(room, "."), PALETTE[0]), Text(human(own).rjust(10))]
        table.add_row(*line)
    yield table


def _traffic(traffic: Traffic) -> Iterator[RenderableType]:
    """Senders in rows, receivers in columns, the darker the more."""
    yield Text(f"bytes from rank (row) to rank (column); {human(traffic.moved)} in all", "bold")
    grouped = traffic.grouped(_SEATS)
    between = grouped.matrix
    most = max(int(between.max(initial=0)), 1)
    table = Table.grid(padding=(0, 1, 0, 0))
    heads = [*grouped.labels, "sends"]
    table.add_row("", *(Text(head.rjust(7), "dim") for head in heads))
    for at, label in enumerate(grouped.labels):
        line = [
            Text(_short(amount).rjust(7), _shade(amount / most)) for amount in between[at].tolist()
        ]
        total = int(between[at].sum())
        table.add_row(Text(label, "dim"), *line, Text(_short(total).rjust(7)))
    received = between.sum(axis=0).tolist()
    table.add_row(Text("gets", "dim"), *(Text(_short(n).rjust(7)) for n in received))
    stays = grouped.stays.tolist()
    table.add_row(Text("stays", "dim"), *(Text(_short(n).rjust(7)) for n in stays))
    yield table


def _timeline(timeline: Timeline) -> Iterator[RenderableType]:
    """A line for each chunk, or for as many as fit, from its first byte to its last."""
    end = float(timeline.ends.max(initial=0.0))
    told = f"{timeline.title}: {_seconds(timeline.seconds)}, {timeline.shown}"
    if timeline.bound is not None:
        told += f", the busiest link needs {_seconds(timeline.bound)}"
    yield Text(told, "bold")
    if not end:
        return
    room = WIDTH - 16
    chosen = np.unique(np.linspace(0, len(timeline.ends) - 1, _ROWS).astype(int))
    for chunk in chosen.tolist():
        a = int(timeline.starts[chunk] / end * (room - 1))
        b = max(int(np.ceil(timeline.ends[chunk] / end * room)), a + 1)
        bar = " " * a + "#" * (b - a)
        yield Text.assemble(
            (f"{chunk:>5} ", "dim"),
            (bar.ljust(room), PALETTE[0]),
            f" {_seconds(timeline.ends[chunk])}",
        )


def _short(amount: int) -> str:
    """Bytes in at most six letters.

    >>> _short(0), _short(1536), _short(10 << 30)
    ('.', '1.5 Ki', '10 Gi')
    """
    if not amount:
        return "."
    value, units = float(amount), ["B", "Ki", "Mi", "Gi", "Ti", "Pi"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        del units[0]
    text = f"{value:.0f}" if value >= 9.95 or units[0] == "B" else f"{value:.1f}"
    return f"{text} {units[0]}"


def _seconds(value: float) -> str:
    """A time in at most seven letters.

    >>> _seconds(1.5), _seconds(0.0301), _seconds(2.5e-6)
    ('1.5 s', '30.1 ms', '2.5 us')
    """
    unit, scale = next(
        ((u, n) for u, n in (("s", 1.0), ("ms", 1e3)) if value * n >= 1), ("us", 1e6)
    )
    return f"{value * scale:.3g} {unit}"


def _shade(share: float) -> str:
    """From nothing to the darkest blue, with letters that stand out."""
    if not share:
        return "dim"
    light, dark = (222, 235, 247), (33, 102, 172)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(light, dark, strict=True))
    return f"{'white' if share > 0.55 else 'black'} on #{red:02x}{green:02x}{blue:02x}"
