"""What must hold for the pictures: whole PNG files that show what they were given."""

from __future__ import annotations

import math
import struct
from pathlib import Path

from lpes_bake.plots import curve_plot, position_plot


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


def test_position_plot_holds_many_models_and_unknown_intervals(tmp_path: Path) -> None:
    nan = math.nan
    accuracy = {f"model {i}": [(0.1 * i, 0.0, 0.1 * i + 0.1), (0.5, nan, nan)] for i in range(9)}
    logprob = {label: [(-1.0, -1.2, -0.8), (nan, nan, nan)] for label in accuracy}
    position_plot(accuracy, logprob, [0, 15], tmp_path / "new" / "plot.png", pairs=16, title="Nine models")
    width, height = png_size(tmp_path / "new" / "plot.png")
    assert width > 1.5 * height
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["plot.png"]
