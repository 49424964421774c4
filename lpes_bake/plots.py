"""Pictures: factors by layer, scores by gold position, convergence, and gain against damage.

Sized for a paper's page: letters stay readable when a figure is set to the width of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for colour-blind readers; markers differ as well.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

# What stands out among the trials looks the same in every picture.
MARKS: dict[str, dict[str, Any]] = {
    "identity": {"marker": "D", "s": 42, "color": COLOURS[0]},
    "uniform factors": {"marker": "^", "s": 48, "color": COLOURS[5]},
    "finalists": {"marker": "o", "s": 60, "facecolors": "none", "edgecolors": COLOURS[1], "linewidths": 1.6},
    "winner": {"marker": "*", "s": 190, "color": COLOURS[2], "edgecolors": "white", "linewidths": 0.6},
}
DOTS: dict[str, Any] = {"marker": "o", "s": 14, "color": "#8C8C8C", "alpha": 0.6, "linewidths": 0}
# The axis of tokens is logarithmic where they grow by more than this.
LOG_FROM = 30
DPI = 300

Interval = Sequence[float | None]
Point = tuple[float, float]


def curve_plot(
    factors: Sequence[float],
    path: Path,
    *,
    control_points: Sequence[tuple[float, float]] = (),
    others: Sequence[Sequence[float]] = (),
    title: str = "Layer-specific RoPE scaling",
) -> None:
    """Factor by layer as a PNG.

    control_points: (layer, factor) of the curve that the factors came from. others: factors of other
    finalists of a search, drawn behind.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = _axes(1)
    axis = axes[0]
    for i, other in enumerate(others):
        axis.plot(
            range(len(other)), other, color="#B8B8B8", linewidth=1, label="" if i else "other finalists", zorder=1
        )
    axis.axhline(1.0, color="#999999", linewidth=1, linestyle="--", label="base model", zorder=1)
    axis.plot(range(len(factors)), factors, color=COLOURS[1], marker="o", markersize=4, label="factor", zorder=2)
    if control_points:
        xs, ys = zip(*control_points, strict=True)
        axis.plot(
            xs, ys, color=COLOURS[2], marker="s", markersize=7, linestyle=":", fillstyle="none", label="control points"
        )
    axis.set(xlabel="layer", ylabel="factor", title=title)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False)
    _save(figure, path)


def position_plot(
    accuracy: Mapping[str, Sequence[Interval]],
    logprob: Mapping[str, Sequence[Interval]],
    positions: Sequence[int],
    path: Path,
    *,
    difference: tuple[Sequence[Interval], Sequence[Interval]] | None = None,
    unit: str = "place",
    title: str = "",
) -> None:
    """Accuracy and log-probability by gold position as a PNG, one line a model.

    Both map a model's label to (mean, low, high) at each gold position, None where not known. difference: paired
    differences in accuracy and in log-probability, drawn below. unit: of the positions, "place", "%" or another word.
    """
    # More names than these would hide the lines.
    many = len(accuracy) > 3
    figure, axes = _axes(2, rows=1 if difference is None else 2, wide=many)
    name = {"place": "gold position", "%": "gold position (% of the prompt's depth)"}.get(
        unit, f"gold position ({unit})"
    )
    for axis, by_label, metric in (
        (axes[0], accuracy, "accuracy"),
        (axes[1], logprob, "mean log-probability of the answer"),
    ):
        for i, (label, intervals) in enumerate(by_label.items()):
            mean, low, high = np.array(intervals, dtype=np.float64).T
            colour = COLOURS[i % len(COLOURS)]
            axis.plot(positions, mean, color=colour, marker=MARKERS[i % len(MARKERS)], markersize=5, label=label)
            axis.fill_between(positions, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set(ylabel=metric)
    axes[0].set_ylim(-0.02, 1.02)
    if many:
        legend = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    else:
        legend = axes[0].legend(frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # labels are names of models, in which a dollar is a dollar
    for axis, intervals in zip(axes[2:], difference or (), strict=True):
        mean, low, high = np.array(intervals, dtype=np.float64).T
        axis.axhline(0.0, color="#999999", linewidth=1, linestyle="--", zorder=1)
        axis.vlines(positions, low, high, color=COLOURS[1], linewidth=2)
        axis.plot(positions, mean, color=COLOURS[1], marker=MARKERS[1], markersize=5, linestyle="")
        axis.set(ylabel="paired difference")
    for axis in axes:
        axis.set_xticks(list(positions))
    for axis in axes[-2:]:
        axis.set_xlabel(name, parse_math=False)
    if title:
        figure.suptitle(title, parse_math=False)
    _save(figure, path)


def convergence_plot(
    best: Sequence[Point],
    path: Path,
    *,
    identity: float,
    marked: Mapping[str, Sequence[Point]] | None = None,
    score: str = "score",
) -> None:
    """Best score against tokens processed as a PNG. Points are (tokens, score), in the order of the search.

    marked: a key of MARKS → its points. score: name of the axis.
    """
    from matplotlib.ticker import EngFormatter

    figure, (axis,) = _axes(1, wide=True)
    axis.axhline(identity, color="#999999", linewidth=1, linestyle="--", zorder=1)
    axis.step(*_columns(best), where="post", color=COLOURS[1], linewidth=1.8, label="best so far", zorder=3)
    _mark(axis, marked or {})
    tokens = [x for x, _ in best if x > 0]
    if max(tokens, default=1.0) > LOG_FROM * min(tokens, default=1.0):
        axis.set_xscale("log")
    axis.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axis.set(xlabel="tokens processed", ylabel=score)
    figure.legend(loc="outside right upper", frameon=False)
    _save(figure, path)


def frontier_plot(
    trials: Sequence[Point],
    front: Sequence[Point],
    path: Path,
    *,
    marked: Mapping[str, Sequence[Point]] | None = None,
    names: Sequence[tuple[Point, str]] = (),
    max_damage: float | None = None,
    gain: str = "gain over the identity",
) -> None:
    """Gain against damage as a PNG. Points are (damage in nats a token, gain).

    front: those that no trial beats in both, by rising damage. marked: a key of MARKS → its points.
    names: short texts beside points. max_damage: what the winner was allowed. gain: name of the axis.
    """
    from matplotlib.ticker import MaxNLocator

    figure, (axis,) = _axes(1, wide=True)
    axis.axhline(0.0, color="#999999", linewidth=1, linestyle="--", zorder=1)
    axis.scatter(*_columns(trials), **DOTS, label="complete trials", zorder=2)
    seen = [(0.0, 0.0), *front, *(marked or {}).get("finalists", []), *(marked or {}).get("winner", [])]
    limits = [] if max_damage is None else [max_damage]
    (left, right), (low, high) = (
        (min(values), max(values)) for values in ([x for x, _ in seen] + limits, [y for _, y in seen])
    )
    width, height = (right - left) or 1e-3, (high - low) or 1e-3
    # Uniform factors far from 1 may cost a thousand times as much: the frame holds what a choice is made from.
    frame = (left - 0.15 * width, right + 0.35 * width), (low - 0.3 * height, high + 0.15 * height)
    if front:
        xs, ys = _columns([*front, (frame[0][1], front[-1][1])])
        axis.step(xs, ys, where="post", color=COLOURS[3], linewidth=1.6, label="frontier", zorder=3)
    if max_damage is not None:
        axis.axvline(max_damage, color=COLOURS[4], linewidth=1.4, linestyle=":", label="damage allowed", zorder=1)
    _mark(axis, marked or {})
    for point, name in names:
        axis.annotate(
            name,
            point,
            xytext=(6, 4),
            textcoords="offset points",
            fontsize=8,
            annotation_clip=True,
            parse_math=False,
            zorder=5,
        )
    axis.set(xlim=frame[0], ylim=frame[1])
    outside = sum(not (frame[0][0] <= x <= frame[0][1] and frame[1][0] <= y <= frame[1][1]) for x, y in trials)
    if outside:
        note = f"{outside} of {len(trials)} trials lie outside the frame"
        axis.text(0.99, 0.02, note, transform=axis.transAxes, ha="right", fontsize=8, color="#666666")
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.set(xlabel="damage on short text (nats a token; left is better)", ylabel=gain)
    figure.legend(loc="outside right upper", frameon=False)
    _save(figure, path)


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """The xs and the ys."""
    return [x for x, _ in points], [y for _, y in points]


def _mark(axis: Axes, marked: Mapping[str, Sequence[Point]]) -> None:
    """Points that stand out, each kind with its sign."""
    for kind, style in MARKS.items():
        if points := marked.get(kind):
            axis.scatter(*_columns(points), **style, label=kind, zorder=4)


def _axes(columns: int, *, rows: int = 1, wide: bool = False) -> tuple[Figure, list[Axes]]:
    """Axes row by row; a second row is lower. wide: room for a legend beside the axes."""
    # The figure is made without pyplot, so no display is looked for and no global state is left.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (1.2 + 3.8 * columns + 1.8 * wide, 3.4 + 2.0 * (rows - 1))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, columns, height_ratios=[3.4, 2.0][:rows])
    axes = [figure.add_subplot(grid[row, column]) for row in range(rows) for column in range(columns)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    """Write beside the target and rename, so that a picture is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format="png", dpi=DPI)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
