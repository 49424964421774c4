"""What must hold for the pictures: whole PNG files that show what they were given."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from matplotlib.image import imread
from numpy.typing import NDArray

from lpes_bake.plots import MARKS, convergence_plot, curve_plot, frontier_plot, position_plot


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_curve_plot_is_a_png_and_shows_control_points(tmp_path: Path) -> None:
    factors = [1.0, 1.1, 1.2, 1.1]
    curve_plot(factors, tmp_path / "plain.png")
    curve_plot(factors, tmp_path / "points.png", control_points=[(0, 1.0), (2, 1.3), (3, 1.1)])
    assert png_size(tmp_path / "plain.png")[0] > 600
    assert (tmp_path / "plain.png").read_bytes() != (tmp_path / "points.png").read_bytes()


def test_position_plot_holds_many_models_unknown_intervals_and_any_name(tmp_path: Path) -> None:
    # A dollar in a name starts no formula.
    accuracy = {f"model $\\{i}$": [(0.1 * i, 0.0, 0.1 * i + 0.1), (0.5, None, None)] for i in range(9)}
    logprob = {label: [(-1.0, -1.2, -0.8), (None, None, None)] for label in accuracy}
    position_plot(accuracy, logprob, [0, 15], tmp_path / "new" / "plot.png", unit="$\\x$", title="Nine $\\models$")
    width, height = png_size(tmp_path / "new" / "plot.png")
    assert width > 1.5 * height
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["plot.png"]


def test_position_plot_draws_paired_differences_below(tmp_path: Path) -> None:
    scores = {name: [(0.5, 0.4, 0.6), (0.2, 0.1, 0.3)] for name in ("base", "LPES")}
    gain = [(0.1, 0.05, 0.15), (0.0, -0.1, 0.1)]
    position_plot(scores, scores, [0, 50], tmp_path / "plain.png", unit="%")
    position_plot(scores, scores, [0, 50], tmp_path / "below.png", unit="%", difference=(gain, gain))
    (width, plain), (same, below) = png_size(tmp_path / "plain.png"), png_size(tmp_path / "below.png")
    assert width == same and below > 1.4 * plain


def test_other_finalists_are_drawn_behind_the_factors(tmp_path: Path) -> None:
    curve_plot([1.0, 1.1, 1.2], tmp_path / "alone.png")
    curve_plot([1.0, 1.1, 1.2], tmp_path / "among.png", others=[[1.0, 1.0, 1.0], [1.0, 1.2, 1.15]])
    assert (tmp_path / "alone.png").read_bytes() != (tmp_path / "among.png").read_bytes()


def pixels(path: Path) -> NDArray[np.float32]:
    image: NDArray[np.float32] = imread(path)
    assert image[..., :3].std() > 0.02
    return image


def test_one_disaster_does_not_squeeze_the_trials_that_matter(tmp_path: Path) -> None:
    dots = [(0.0, 0.0), (0.004, 0.05)]
    for name, more in (("calm", []), ("wild", [(7.0, -40.0)])):
        frontier_plot([*dots, *more], dots, tmp_path / f"{name}.png", max_damage=0.005)
    calm, wild = pixels(tmp_path / "calm.png"), pixels(tmp_path / "wild.png")
    # All the same but for the line at the bottom that says so.
    rows = int(0.7 * len(calm))
    assert (calm[:rows] == wild[:rows]).all() and (calm[rows:] != wild[rows:]).any()


def test_each_mark_is_seen(tmp_path: Path) -> None:
    pictures = []
    for kind in (None, *MARKS):
        marked = {} if kind is None else {kind: [(500.0, -0.45)]}
        convergence_plot([(1.0, -0.5), (900.0, -0.4)], tmp_path / "c.png", identity=-0.5, marked=marked)
        frontier_plot([(0.0, 0.0)], [(0.0, 0.0)], tmp_path / "f.png", marked={} if kind is None else {kind: [(0, 0)]})
        pictures.append((pixels(tmp_path / "c.png").tobytes(), pixels(tmp_path / "f.png").tobytes()))
    for column in zip(*pictures, strict=True):
        assert len({*column}) == len(MARKS) + 1


def test_a_search_of_one_trial_has_pictures(tmp_path: Path) -> None:
    convergence_plot([(0.0, 0.0)], tmp_path / "c.png", identity=0.0)
    convergence_plot([], tmp_path / "e.png", identity=-1.0)
    frontier_plot([], [], tmp_path / "f.png", names=[((0.0, 0.0), "$\\x$")])
    for name in "cef":
        pixels(tmp_path / f"{name}.png")
