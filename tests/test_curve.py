"""The Bézier curve: what its factors must be, against references that share no code with it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from lpes_bake.search.curve import (
    FACTOR_DECIMALS,
    CurveSettings,
    bernstein,
    bezier,
    decode,
    even_points,
    level_points,
)
from lpes_bake.search.errors import InputError

ROUNDING = 0.5 * 10**-FACTOR_DECIMALS + 1e-9


def power_coefficients(values: np.ndarray) -> np.ndarray:
    """The Bézier polynomial in powers of t, highest first: sum of v_k · C(n,k) · t^k · (1−t)^(n−k)."""
    n = len(values) - 1
    total = np.zeros(n + 1)
    for k, value in enumerate(values):
        term = np.array([value * math.comb(n, k)], dtype=float)
        for _ in range(k):
            term = np.polymul(term, [1, 0])
        for _ in range(n - k):
            term = np.polymul(term, [-1, 1])
        total = np.polyadd(total, term)
    return total


def reference(points: list[tuple[int, float]], h: int) -> float:
    """y at x = h by the roots of x(t) − h in powers of t."""
    xs, ys = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    if h <= xs[0]:
        return float(ys[0])
    if h >= xs[-1]:
        return float(ys[-1])
    roots = np.roots(np.trim_zeros(np.polysub(power_coefficients(xs), [h]), "f"))
    real = [root.real for root in roots if abs(root.imag) < 1e-6 and -1e-9 < root.real < 1 + 1e-9]
    assert real, (points, h)
    return float(np.polyval(power_coefficients(ys), min(max(real[0], 0.0), 1.0)))


def random_points(rng: np.random.Generator, count: int, layers: int) -> list[tuple[int, float]]:
    xs = np.sort(rng.integers(0, layers, count))
    ys = rng.choice(CurveSettings().grid, count)
    return [(int(x), float(y)) for x, y in zip(xs, ys, strict=True)]


def test_factors_equal_polynomial_roots_for_random_curves() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        layers = int(rng.integers(2, 41))
        points = random_points(rng, int(rng.integers(2, 7)), layers)
        if points[0][0] == points[-1][0]:
            continue
        expected = [reference(points, h) for h in range(layers)]
        assert decode(points, layers) == pytest.approx(expected, abs=ROUNDING + 1e-6), points


def test_factors_equal_a_dense_sampling_of_the_curve() -> None:
    rng = np.random.default_rng(1)
    t = np.linspace(0, 1, 200_001)
    for _ in range(20):
        points = random_points(rng, 4, 30)
        if points[0][0] == points[-1][0]:
            continue
        x, y = (sum(math.comb(3, k) * t**k * (1 - t) ** (3 - k) * points[k][axis] for k in range(4)) for axis in (0, 1))
        assert decode(points, 30) == pytest.approx(np.interp(np.arange(30), x, y), abs=2e-3)


def test_factors_stay_within_the_control_points_and_the_ends_are_exact() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        layers = int(rng.integers(1, 81))
        points = random_points(rng, int(rng.integers(2, 9)), layers)
        factors = decode(points, layers)
        ys = [y for _, y in points]
        assert len(factors) == layers
        assert min(ys) - 1e-9 <= min(factors) <= max(factors) <= max(ys) + 1e-9
        if points[0][0] < points[-1][0]:
            assert all(factors[h] == ys[0] for h in range(points[0][0] + 1))
            assert all(factors[h] == ys[-1] for h in range(points[-1][0], layers))


def test_rising_control_points_give_factors_that_never_fall() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        points = random_points(rng, 5, 24)
        ys = sorted(y for _, y in points)
        factors = decode([(x, y) for (x, _), y in zip(points, ys, strict=True)], 24)
        assert all(a <= b for a, b in itertools.pairwise(factors))


def test_two_control_points_are_a_straight_line() -> None:
    expected = [0.8, *np.interp(range(1, 9), [2, 7], [0.8, 1.3]), 1.3]
    assert decode([(2, 0.8), (7, 1.3)], 10) == pytest.approx(expected, abs=ROUNDING)


def test_evenly_spread_x_makes_y_the_bezier_polynomial_of_depth() -> None:
    # x(t) = 30·t then, so y is known in closed form: y(h) = Σ C(3,k) (h/30)^k (1−h/30)^(3−k) y_k.
    ys = [1.0, 0.6, 1.6, 1.2]
    t = np.arange(31) / 30
    expected = sum(math.comb(3, k) * t**k * (1 - t) ** (3 - k) * ys[k] for k in range(4))
    assert decode([(10 * k, y) for k, y in enumerate(ys)], 31) == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.parametrize(
    ("points", "layer", "factor"),
    [
        # A vertical tangent at the left end: x = 8·t³, so layer 1 is t = 1/2.
        ([(0, 1.0), (0, 1.0), (0, 1.0), (8, 1.8)], 1, 1.1),
        # … at the right end: 8·(1 − (1 − t)³), so layer 7 is t = 1/2.
        ([(0, 1.0), (8, 1.8), (8, 1.8), (8, 1.8)], 7, 1.7),
        # Three equal x in the middle: symmetric, so the middle layer is t = 1/2.
        ([(0, 1.0), (4, 1.0), (4, 1.0), (4, 2.0), (8, 2.0)], 4, 1 + 5 / 16),
        # All x equal: a vertical line, whose middle counts.
        ([(3, 0.5), (3, 0.5), (3, 1.5), (3, 1.5)], 3, 1.0),
    ],
)
def test_equal_x_and_vertical_tangents(points: list[tuple[int, float]], layer: int, factor: float) -> None:
    assert decode(points, 9)[layer] == pytest.approx(factor, abs=ROUNDING)


def test_all_x_equal_is_a_step() -> None:
    assert decode([(3, 0.5), (3, 0.9), (3, 1.5)], 6) == (0.5, 0.5, 0.5, 0.95, 1.5, 1.5)


@pytest.mark.parametrize("layers", [1, 2, 3, 30, 80])
@pytest.mark.parametrize("count", [2, 3, 6, 12])
def test_the_bernstein_matrix_gives_the_factors_of_evenly_spread_control_points(layers: int, count: int) -> None:
    rng = np.random.default_rng(4)
    matrix = bernstein(layers, count)
    assert matrix.shape == (layers, count)
    for _ in range(10):
        ys = rng.uniform(0.5, 2.0, count).round(FACTOR_DECIMALS)
        points = even_points(ys.tolist(), layers)
        assert (points[0].x, points[-1].x) == (0, layers - 1)
        assert [y for _, y in points] == ys.tolist()
        assert decode(points, layers) == pytest.approx(matrix @ ys, abs=ROUNDING + 1e-6)


def test_the_bernstein_matrix_of_three_points_on_five_layers_by_hand() -> None:
    # (1−t)², 2t(1−t), t² at t = 0, 1/4, 1/2, 3/4, 1.
    expected = [[16, 0, 0], [9, 6, 1], [4, 8, 4], [1, 6, 9], [0, 0, 16]]
    assert (bernstein(5, 3) * 16).tolist() == expected


@pytest.mark.parametrize("layers", [1, 2, 3, 30, 80])
@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_the_identity_gives_factors_of_exactly_one(layers: int, count: int) -> None:
    points = level_points(CurveSettings(control_points=count), layers, 1.0)
    assert len(points) == count
    assert (points[0].x, points[-1].x) == (0, layers - 1)
    assert decode(points, layers) == (1.0,) * layers


def test_a_level_curve_gives_its_very_factor() -> None:
    for y in CurveSettings().grid:
        assert set(decode([(1, y), (5, y), (6, y), (20, y)], 30)) == {float(y)}


def test_bezier_interpolates_its_ends_exactly() -> None:
    assert bezier([0.3, 5.0, -2.0, 0.7], np.array([0.0, 1.0])).tolist() == [0.3, 0.7]


def test_descending_x_is_refused() -> None:
    with pytest.raises(ValueError, match="must not descend"):
        decode([(5, 1.0), (3, 1.0)], 8)


def test_the_default_grid_is_the_documented_one() -> None:
    settings = CurveSettings()
    assert settings.grid.tolist() == [round(0.5 + 0.05 * i, 2) for i in range(31)]
    assert settings.grid[settings.grid_of_one] == 1.0
    assert settings.grid[settings.uniform_places].tolist() == [1.0, 0.8, 0.9, 0.95, 1.1, 1.25]


def test_uniform_factors_move_to_the_grid_and_those_beyond_it_are_left_out() -> None:
    settings = CurveSettings(y_low=0.8, y_high=1.2, y_step=0.1, uniform=(0.8, 1.02, 0.96, 1.19, 0.79, 1.21, 0.8))
    assert settings.grid[settings.uniform_places].tolist() == [1.0, 0.8, 1.2]


@pytest.mark.parametrize(
    "settings",
    [
        {"control_points": 1},
        {"control_points": 13},
        {"uniform": (0.9, 0.0)},
        {"uniform": (math.nan,)},
        {"y_step": 1e-300},
        {"y_low": 0.0},
        {"y_low": -0.5},
        {"y_low": 1.2},
        {"y_high": 0.9},
        {"y_high": math.inf},
        {"y_low": math.nan},
        {"y_step": 0.0},
        {"y_step": math.nan},
        {"y_low": 0.52},
        {"y_high": 1.93},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        CurveSettings(**settings)
    assert "\n" not in str(caught.value)
