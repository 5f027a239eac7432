"""A `Picture` as a figure file, drawn with matplotlib (the extra `report`)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dynadapt.elastic.outcome import human
from dynadapt.errors import DynadaptError, Refused
from dynadapt.files import unwritable
from dynadapt.report.maps import ranks_text
from dynadapt.report.terminal import PALETTE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from dynadapt.report.maps import DrawnTensor, Picture
    from dynadapt.report.traffic import Memory, Timeline, Traffic

__all__ = ["SUFFIXES", "draw", "write"]

#: The file formats, by suffix.
SUFFIXES = (".png", ".svg")

_WIDTH, _MAP, _CHART = 9.0, 2.0, 3.0
_INK, _FAINT, _BLUE, _ORANGE = "#333333", "#999999", "#5b8db8", "#e08e45"
_CELLS, _BARS, _LINES = 32, 16, 128
_STYLE = {
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "legend.fontsize": 8,
    "svg.hashsalt": "dynadapt",
    "text.color": _INK,
    "text.parse_math": False,  # a tensor may be called "$w"
    "xtick.color": _INK,
    "xtick.labelsize": 7,
    "xtick.major.size": 2,
    "ytick.color": _INK,
    "ytick.labelsize": 7,
    "ytick.major.size": 2,
}


def write(picture: Picture, path: Path) -> None:
    """Draw a picture into a file whose suffix says the format; equal pictures give equal files.

    Raises `DynadaptError`: `bad-argument` for another suffix or a folder that is not there,
    `unwritable-file` or `disk-full`, `not-installed` without matplotlib.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise DynadaptError(f"{path}: the suffix is none of {SUFFIXES}", reason="bad-argument")
    if not path.resolve().parent.is_dir():
        raise DynadaptError(f"{path.parent} is not a folder", reason="bad-argument")
    if path.is_dir():
        raise DynadaptError(f"{path} is a folder", reason="bad-argument")
    matplotlib = _matplotlib()
    with matplotlib.rc_context(_STYLE):
        svg = path.suffix.lower() == ".svg"
        metadata = {"Date": None, "Creator": None} if svg else {"Software": None}
        figure = draw(picture)
        try:
            figure.savefig(path, dpi=160, metadata=metadata)
        except OSError as error:
            raise Refused([unwritable(path, error)]) from error


def draw(picture: Picture) -> Any:
    """The picture as a matplotlib figure: a row a tensor, then traffic and memory, then the schedule.

    Raises `DynadaptError` (reason `not-installed`) without matplotlib.
    """
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        rows = _rows(picture)
        heights = [max(panel.height for panel in row) for row in rows] or [0.5]
        figure = Figure(figsize=(_WIDTH, sum(heights) + 0.4))
        figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08, hspace=0.04, wspace=0.04)
        title = picture.heading or "  →  ".join(picture.titles)
        figure.suptitle(title, fontsize=11, fontweight="bold")
        grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
        for at, row in enumerate(rows):
            for column, panel in enumerate(row):
                panel.paint(figure.add_subplot(grid[at, :] if panel.wide else grid[at, column]))
    return figure


class _Panel(NamedTuple):
    """One pair of axes: what paints it, its height in inches, whether it fills the width."""

    paint: Callable[[Any], None]
    height: float
    wide: bool = False


def _rows(picture: Picture) -> list[list[_Panel]]:
    """Before and after of a tensor beside one another; with one layout, any two panels."""
    rows: list[list[_Panel]] = []
    loose: list[_Panel] = []
    several = len(picture.titles) > 1
    for own in picture.maps:
        pair = [  # or more, where one tensor is compared in many layouts
            _Panel(partial(_map, own=each, title=title, named=not at), _MAP)
            for at, (each, title) in enumerate(zip(own, picture.titles, strict=True))
        ]
        if several:
            rows += [pair[at : at + 2] for at in range(0, len(pair), 2)]
        else:
            loose += pair
    if picture.traffic is not None:
        loose.append(_Panel(partial(_traffic, traffic=picture.traffic), _CHART))
    if picture.memory is not None:
        loose.append(_Panel(partial(_memory, memory=picture.memory), _CHART if several else _MAP))
    rows += [loose[at : at + 2] for at in range(0, len(loose), 2)]
    if picture.timeline is not None:
        rows.append([_Panel(partial(_timeline, timeline=picture.timeline), _MAP, True)])
    return rows


def _map(axes: Any, own: DrawnTensor, title: str, named: bool) -> None:
    """The regions to scale, each in the colour of its ranks, with white lines where ranks change."""
    from matplotlib.collections import LineCollection, PolyCollection

    rows, cols = own.size
    tones = dict(zip(own.sets, own.tones, strict=True))
    colors = _colors(own)
    faces = [colors[tones[ranks]] for ranks in own.holders]
    boxes = _boxes(own.lo[:, 1], own.lo[:, 0], own.hi[:, 1], own.hi[:, 0])
    axes.add_collection(PolyCollection(boxes, facecolors=faces, edgecolors="face", linewidths=0.2))
    width = min(0.8, 16 / len(own.sets)) if own.sets else 0.8  # thin pieces keep their colour
    axes.add_collection(LineCollection(_borders(own), colors="white", linewidths=width))
    sides = (own.hi - own.lo) / np.maximum(own.size, 1)
    for at, ranks in enumerate(own.holders):
        text = ranks_text(ranks, 3)
        size = 7.5 if sides[at, 0] > 0.1 else 5.5
        if sides[at, 1] > size * (0.0027 * len(text) + 0.0025) and sides[at, 0] > 0.055:
            row, column = (own.lo[at] + own.hi[at]) / 2
            axes.text(column, row, text, ha="center", va="center_baseline", fontsize=size)
    axes.set(xlim=(0, cols), ylim=(rows, 0), xlabel=own.labels[1], ylabel=own.labels[0])
    for axis, dim in ((axes.yaxis, 0), (axes.xaxis, 1)):
        edges = np.concatenate([own.lo[:, dim], own.hi[:, dim]])
        axis.set_ticks(_ticks(edges, own.size[dim], 0.14 if dim else 0.12))
    if rows == 1:
        axes.set_yticks([])
    note = f"  ({own.note})" if own.note else ""
    name = f"{own.name} {list(own.shape)}{note}" if named else ""
    axes.set_title(f"{name}\n{title}", linespacing=1.3)
    axes.spines[:].set_visible(False)


def _boxes(left: Any, top: Any, right: Any, bottom: Any) -> Any:
    """(boxes, 4, 2) corners for a `PolyCollection`."""
    corners = np.stack([left, top, right, bottom], axis=1)
    return corners[:, [[0, 1], [2, 1], [2, 3], [0, 3]]]


def _borders(own: DrawnTensor) -> list[list[tuple[int, int]]]:
    """The lines between cells that different ranks hold, none where there are too many cells."""
    cells = own.cells(_LINES, _LINES)
    if not cells.exact:
        return []
    found: list[list[tuple[int, int]]] = []
    for dim in range(2):  # lines along columns, then along rows
        across, along = (cells.row_edges, cells.col_edges)[:: 1 - 2 * dim]
        grid = cells.sets if not dim else cells.sets.T
        for at in range(1, len(grid)):
            runs = np.diff((grid[at - 1] != grid[at]).astype(int), prepend=0, append=0)
            ends = zip(np.flatnonzero(runs > 0), np.flatnonzero(runs < 0), strict=True)
            for a, b in ends:
                line = [(int(along[a]), int(across[at])), (int(along[b]), int(across[at]))]
                found.append([(y, x) for x, y in line] if dim else line)
    return found


def _traffic(axes: Any, traffic: Traffic) -> None:
    """Senders in rows; numbers in the cells while they fit, else a scale beside them."""
    own = traffic.grouped(_CELLS)
    count = len(own.labels)
    unit, scale = _unit(int(own.matrix.max(initial=0)))
    shares = own.matrix / scale
    most = float(shares.max(initial=0.0)) or 1.0
    shown = axes.pcolormesh(
        shares, cmap="Blues", vmin=0, vmax=most * 1.15, edgecolors="white", linewidth=0.6
    )
    groups = f" (groups of {own.per})" if own.per > 1 else ""
    axes.set(ylim=(count, 0), xlabel=f"to rank{groups}", ylabel="from rank", aspect="equal")
    step = max(-(-count // 8), 1)
    firsts = [label.partition("-")[0] for label in own.labels]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(np.arange(0, count, step) + 0.5, firsts[::step])
        axis.set_tick_params(length=0)
    if count <= 8:
        for row, column in np.argwhere(own.matrix).tolist():
            color = "white" if shares[row, column] > 0.6 * most else _INK
            text = f"{shares[row, column]:.3g}"
            middle = (column + 0.5, row + 0.5)
            axes.text(*middle, text, ha="center", va="center", color=color, fontsize=7)
    else:
        bar = axes.figure.colorbar(shown, ax=axes, shrink=0.9, label=unit)
        bar.outline.set_visible(False)
    axes.set_title(f"traffic in {unit}: {human(traffic.moved)} in all")
    axes.spines[:].set_visible(False)


def _memory(axes: Any, memory: Memory) -> None:
    """Bars for a few ranks, lines for many."""
    count, series = len(memory.seats), len(memory.columns)
    unit, scale = _unit(max((int(held.max(initial=0)) for held in memory.columns), default=0))
    for at, (title, held) in enumerate(zip(memory.titles, memory.columns, strict=True)):
        color = (_BLUE, _ORANGE)[at % 2]
        if count <= _BARS:
            width = 0.8 / series
            middles = np.arange(count) - 0.4 + width * (at + 0.5)
            axes.bar(middles, held / scale, width * 0.95, color=color, label=title)
        else:
            filled = at < series - 1  # a line over an area: both are seen where they are equal
            look = {"fill": filled, "alpha": 0.5 if filled else 1.0, "linewidth": 1.4}
            axes.stairs(held / scale, np.arange(count + 1) - 0.5, color=color, label=title, **look)
    step = 1 if count <= _BARS else -(-count // 8)
    axes.set_xticks(np.arange(0, count, step), memory.seats[::step])
    axes.set(xlabel="rank", ylabel=f"{memory.what} ({unit})")
    axes.set_ylim(bottom=0)
    axes.set_title(f"bytes {memory.what} by each rank", pad=20 if series > 1 else None)
    if series > 1:
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.2}
        axes.legend(ncols=2, frameon=False, handlelength=1.2, **place)
    axes.spines[["top", "right"]].set_visible(False)


def _timeline(axes: Any, timeline: Timeline) -> None:
    """A bar a chunk, from its first byte to its last; coloured by the busiest seat's bytes if known."""
    from matplotlib.collections import PolyCollection

    end = float(timeline.ends.max(initial=0.0)) or 1.0
    unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e3)) if end * s >= 1), ("µs", 1e6))
    number = np.arange(len(timeline.ends))
    starts, ends = timeline.starts * scale, timeline.ends * scale
    bars = PolyCollection(_boxes(starts, number - 0.4, ends, number + 0.4), linewidths=0)
    busiest = timeline.busiest
    if busiest is None:
        bars.set_facecolor(_BLUE)
    else:
        word, size = _unit(int(busiest.max(initial=0.0)))
        bars.set(array=busiest / size, cmap="Blues")
        bars.set_clim(0, float(busiest.max(initial=0.0)) / size * 1.1 or 1.0)
        bar = axes.figure.colorbar(bars, ax=axes, label=f"busiest rank ({word})")
        bar.outline.set_visible(False)
    axes.add_collection(bars)
    axes.set(xlim=(0, end * scale * 1.02), ylim=(max(len(number), 1) - 0.5, -0.5))
    axes.set(xlabel=f"time ({unit})", ylabel="chunk")
    axes.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    told = f"{timeline.title}: {timeline.seconds * scale:.3g} {unit}, {timeline.shown}"
    if timeline.bound is not None and len(number) == timeline.chunks:
        bound = timeline.bound * scale
        axes.axvline(bound, color=_ORANGE, linewidth=1, linestyle=(0, (4, 2)))
        told += f"; dashed: {bound:.3g} {unit}, the least that the busiest link needs"
    axes.set_title(told)
    axes.spines[["top", "right"]].set_visible(False)


def _colors(own: DrawnTensor) -> Any:
    """A colour per tone: the palette for a few, else one scale from first to last."""
    count = len(own.leaders)
    if count <= len(PALETTE):
        return PALETTE
    import matplotlib

    scale = matplotlib.colormaps["viridis"](np.linspace(0, 1, count))[:, :3]
    return 0.45 + 0.55 * scale  # light enough for dark letters


def _ticks(edges: NDArray[np.int64], size: int, gap: float) -> list[int]:
    """Edges that are not too near one another, and always both ends."""
    found = [0]
    for edge in np.unique(edges).tolist():
        if edge - found[-1] >= gap * size and (size - edge >= gap * size or edge == size):
            found.append(edge)
    return found if found[-1] == size else [*found, size]


def _unit(most: int) -> tuple[str, int]:
    """The unit in which an amount of bytes is from 1 to 1023, and its bytes."""
    power = 0
    while most >> 10 * (power + 1) and power < 4:
        power += 1
    return ("B", "KiB", "MiB", "GiB", "TiB")[power], 1 << 10 * power


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise DynadaptError(
            "figures are drawn with matplotlib: pip install 'dynadapt[report]'",
            reason="not-installed",
        ) from error
    return matplotlib
