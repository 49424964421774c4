"""Pictures: factors by layer, and scores by gold position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for colour-blind readers; markers differ as well.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

Interval = tuple[float, float, float]


def curve_plot(
    factors: Sequence[float],
    path: Path,
    *,
    control_points: Sequence[tuple[float, float]] = (),
    title: str = "Layer-specific RoPE scaling",
) -> None:
    """Factor by layer as a PNG. control_points: (layer, factor) of the curve that the factors came from."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _axes(1)
    axis = axes[0]
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
    pairs: int | None = None,
    title: str = "",
) -> None:
    """Accuracy and log-probability by gold position as a PNG, one line a model.

    Both map a model's label to (mean, low, high) at each gold position. pairs: length of the context in
    pairs, named on the axis.
    """
    figure, axes = _axes(2)
    place = "gold position" if pairs is None else f"gold position (of {pairs})"
    for axis, by_label, name in (
        (axes[0], accuracy, "accuracy (exact match)"),
        (axes[1], logprob, "mean log-probability of the answer"),
    ):
        for i, (label, intervals) in enumerate(by_label.items()):
            mean, low, high = zip(*intervals, strict=True)
            colour = COLOURS[i % len(COLOURS)]
            axis.plot(positions, mean, color=colour, marker=MARKERS[i % len(MARKERS)], markersize=5, label=label)
            axis.fill_between(positions, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set(xlabel=place, ylabel=name)
        axis.set_xticks(list(positions))
    axes[0].set_ylim(-0.02, 1.02)
    axes[0].legend(frameon=False)
    if title:
        figure.suptitle(title)
    _save(figure, path)


def _axes(columns: int) -> tuple[Figure, list[Axes]]:
    # The figure is made without pyplot, so no display is looked for and no global state is left.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.0 + 5.0 * columns, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, column + 1) for column in range(columns)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    """Write beside the target and rename, so that a picture is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format="png", dpi=150)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
