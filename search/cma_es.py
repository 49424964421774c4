"""CMA-ES (Hansen, arXiv 1604.00772) over a curve's factors, with the cmaes package.

A comparison for the genetic search: the control points stand at even distances in depth, and the
logarithms of their y's are what is searched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lpes_bake.search.curve import FACTOR_DECIMALS, CurveSettings, FloatArray, decode, even_points
from lpes_bake.search.errors import InputError
from lpes_bake.search.genetic import GeneticSettings
from lpes_bake.search.optimizer import AskTell, Individual, Outcome, uniform_population

# The first standard deviation, of log y: one tenth up or down, as far as factors near the identity go.
SIGMA = 0.1

# Below it the package's update of the covariance divides by 0.
LEAST_POPULATION = 4


class CmaSearch(AskTell):
    """Scores the uniform factors, then `generations − 1` populations around the best of them.

    layers: decoder layers of the model. settings: population and generations; the rest is the genetic
    search's. Raises InputError when cmaes is not installed or the population too small for it.
    """

    def __init__(self, curve: CurveSettings, settings: GeneticSettings, layers: int, rng: np.random.Generator) -> None:
        try:
            from cmaes import CMA  # type: ignore[import-untyped]
        except ImportError:
            raise InputError("CMA-ES needs the cmaes package: pip install lpes-bake[cma]") from None
        if settings.population < LEAST_POPULATION:
            raise InputError(f"population is {settings.population}; CMA-ES needs at least {LEAST_POPULATION}")
        super().__init__()
        self.curve, self.settings, self.layers = curve, settings, layers
        # The package gives a positive weight to the better half.
        self.parents = settings.population // 2
        self._make: Any = CMA
        self._seed = int(rng.integers(2**31))
        self._cma: Any = None
        self._sampled: list[FloatArray] = []

    def _next(self) -> list[Individual]:
        if self.generation == 0:
            return uniform_population(self.curve, self.layers)
        if self.generation >= self.settings.generations:
            self.ended = f"all {self.settings.generations} generations are done"
        elif not self._scored:
            self.ended = "no individual could be scored, so there is none to start from"
        elif self._cma.should_stop():
            self.ended = f"CMA-ES has converged after {self.generation} generations"
        if self.ended is not None:
            return []
        self._sampled = [self._cma.ask() for _ in range(self.settings.population)]
        return [self._individual(log_y) for log_y in self._sampled]

    def _learn(self, asked: Sequence[Individual], outcomes: Sequence[Outcome]) -> None:
        if self.generation == 1:
            self._start()
            return
        # Only ranks count: what failed has an infinite loss and is the worst. Where all failed there is no best.
        if any(outcome.value > -math.inf for outcome in outcomes):
            losses = [-outcome.value for outcome in outcomes]
            self._cma.tell(list(zip(self._sampled, losses, strict=True)))

    def _start(self) -> None:
        """Begin at the best uniform factor."""
        if not self._scored:
            return
        low, high = math.log(self.curve.y_low), math.log(self.curve.y_high)
        start = math.log(self.ranking()[0].individual.factors[0])
        points = self.curve.control_points
        self._cma = self._make(
            mean=np.full(points, min(max(start, low), high)),
            sigma=SIGMA,
            bounds=np.tile([low, high], (points, 1)),
            seed=self._seed,
            population_size=self.settings.population,
        )

    def _individual(self, log_y: FloatArray) -> Individual:
        points = even_points(np.exp(log_y).round(FACTOR_DECIMALS).tolist(), self.layers)
        return Individual(decode(points, self.layers), points)
