"""The search space: a Bézier curve over layer depth, decoded to one factor a layer.

Wang et al., arXiv 2606.27705. C control points P_k = (x_k, y_k): x_k is a layer, y_k a factor from a
grid, and x_0 ≤ x_1 ≤ …, so that the curve's y is a function of its x. Layer h takes y(t) where
x(t) = h. Needs numpy only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lpes_bake.search.errors import InputError

# Factors are rounded to this many decimals: the files stay readable, curves that differ by less are
# one individual, and what was scored is to the last bit what ships.
FACTOR_DECIMALS = 4

# The uniform factors that every search tries first.
DEFAULT_UNIFORM = (0.8, 0.9, 0.95, 1.1, 1.25)

# A polynomial of higher degree follows noise.
MAX_CONTROL_POINTS = 12

# Factors on the grid: far more than anyone can search, few enough to hold.
MAX_GRID = 100_000

# x(t) = h is solved by splitting the interval that holds t, again and again: 32^10 = 2^50 parts in all.
PARTS, ROUNDS = 32, 10

FloatArray = np.ndarray[Any, np.dtype[np.float64]]


class ControlPoint(NamedTuple):
    """One control point: x is a place in the depth (0 … L−1), y a factor.

    In the genetic search x is a whole layer and y stands on the grid.
    """

    x: float
    y: float


Points = tuple[ControlPoint, ...]


@dataclass(frozen=True)
class CurveSettings:
    """How many control points, the grid of factors that they stand on, and the level curves to try first."""

    control_points: int = field(
        default=4, metadata={"help": f"Control points of the Bézier curve over layer depth, 2 to {MAX_CONTROL_POINTS}."}
    )
    y_low: float = field(default=0.5, metadata={"help": "Smallest factor of the grid."})
    y_high: float = field(default=2.0, metadata={"help": "Largest factor of the grid."})
    y_step: float = field(default=0.05, metadata={"help": "Step of the grid; 1 must lie on it."})
    uniform: tuple[float, ...] = field(
        default=DEFAULT_UNIFORM,
        metadata={
            "help": "Factors that are tried in all layers alike before anything else, each moved to the grid; "
            "those beyond its ends are left out."
        },
    )

    def __post_init__(self) -> None:
        if not 2 <= self.control_points <= MAX_CONTROL_POINTS:
            raise InputError(f"control_points is {self.control_points}; it must be from 2 to {MAX_CONTROL_POINTS}")
        if not (0 < self.y_low <= 1 <= self.y_high < np.inf and 0 < self.y_step < np.inf):
            raise InputError(
                f"the grid of factors from {self.y_low} to {self.y_high} in steps of {self.y_step} cannot work: "
                "it needs 0 < y_low ≤ 1 ≤ y_high and y_step > 0"
            )
        if (self.y_high - self.y_low) / self.y_step > MAX_GRID:
            raise InputError(f"y_step is {self.y_step}: the grid would have more than {MAX_GRID} factors")
        for end, distance in (("y_low", 1 - self.y_low), ("y_high", self.y_high - 1)):
            steps = distance / self.y_step
            if abs(steps - round(steps)) > 1e-6:
                raise InputError(
                    f"{end} {getattr(self, end)} is not a whole number of steps of {self.y_step} away from 1; "
                    "the grid must hold 1, the factor that changes nothing"
                )
        for value in self.uniform:
            if not 0 < value < np.inf:
                raise InputError(f"uniform holds {value}; a factor must be positive")

    @property
    def grid(self) -> FloatArray:
        """The factors that a control point may have, ascending."""
        below, above = round((1 - self.y_low) / self.y_step), round((self.y_high - 1) / self.y_step)
        # Rounded, so that 0.9 is 0.9 and not 0.8999999999999999 in every file.
        return np.round(1 + self.y_step * np.arange(-below, above + 1), 10)

    @property
    def grid_of_one(self) -> int:
        """The place of factor 1 in the grid."""
        return round((1 - self.y_low) / self.y_step)

    @property
    def uniform_places(self) -> list[int]:
        """The places in the grid of 1 and then of the uniform factors, each once."""
        inside = (value for value in self.uniform if self.y_low <= value <= self.y_high)
        places = (self.grid_of_one + round((value - 1) / self.y_step) for value in inside)
        return list(dict.fromkeys([self.grid_of_one, *places]))


def level_points(settings: CurveSettings, layers: int, y: float) -> Points:
    """A curve with the same y everywhere, its x's spread evenly over the layers. y = 1 changes nothing."""
    return tuple(ControlPoint(int(x), y) for x in np.linspace(0, layers - 1, settings.control_points).round())


def even_points(ys: Sequence[float], layers: int) -> Points:
    """Control points at even distances in depth, (C,) factors from the first layer's to the last layer's."""
    xs = np.linspace(0, layers - 1, len(ys)).round(6)
    return tuple(ControlPoint(float(x), float(y)) for x, y in zip(xs, ys, strict=True))


def bernstein(layers: int, control_points: int) -> FloatArray:
    """The (layers, C) matrix B for which B @ y are the factors of the curve through `even_points(y)`.

    At even distances x(t) = (L−1)·t, so layer h has t = h/(L−1), and B[h, k] is the Bernstein polynomial
    C(n, k) · t^k · (1−t)^(n−k), n = C−1. A single layer takes t = 1/2, as in `decode`.
    """
    t = np.linspace(0, 1, layers) if layers > 1 else np.array([0.5])
    n = control_points - 1
    return np.stack([math.comb(n, k) * t**k * (1 - t) ** (n - k) for k in range(control_points)], axis=1)


def bezier(coordinates: Sequence[float], t: FloatArray) -> FloatArray:
    """One coordinate of the curve at each t in [0, 1], by de Casteljau's algorithm.

    coordinates: (C,), t of any shape → the shape of t. Only averages are taken, so nothing leaves the
    range of the coordinates by more than rounding.
    """
    levels = [np.full(t.shape, float(coordinate)) for coordinate in coordinates]
    while len(levels) > 1:
        levels = [(1 - t) * left + t * right for left, right in itertools.pairwise(levels)]
    return levels[0]


def decode(points: Sequence[tuple[float, float]], layers: int) -> tuple[float, ...]:
    """The factor of each layer 0 … layers−1, rounded to FACTOR_DECIMALS.

    x(t) = h is solved by bracketing, which a monotone x can neither mislead nor slow down, be its
    tangent vertical or its points equal. Layers left of the first control point take its y, layers
    right of the last take the last one's (our choice). Where all x are equal the curve is a vertical
    line; the layer on it takes the middle, t = 1/2 (our choice).

    Raises ValueError for x's that descend and for no points at all.
    """
    if not points:
        raise ValueError("a curve needs at least one control point")
    xs, ys = (np.array(coordinates, dtype=np.float64) for coordinates in zip(*points, strict=True))
    if np.any(np.diff(xs) < 0):
        raise ValueError(f"the x's of a curve must not descend; got {xs.tolist()}")
    h = np.arange(layers)
    factors = np.where(h < xs[-1], ys[0], ys[-1])
    between = (xs[0] < h) & (h < xs[-1])
    t, width = np.zeros((np.count_nonzero(between), 1)), 1.0
    for _ in range(ROUNDS):
        width /= PARTS
        left = bezier(xs.tolist(), t + width * np.arange(1, PARTS)) < h[between, None]
        t += width * left.sum(axis=1, keepdims=True)
    factors[between] = bezier(ys.tolist(), t[:, 0] + width / 2)
    if xs[0] == xs[-1]:
        factors[h == xs[0]] = bezier(ys.tolist(), np.array([0.5]))
    return tuple(np.round(factors, FACTOR_DECIMALS).tolist())
