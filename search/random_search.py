"""Random search: what every other optimizer must beat at the same cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lpes_bake.search.curve import CurveSettings
from lpes_bake.search.genetic import Genes, GeneticSearch, GeneticSettings


class RandomSearch(GeneticSearch):
    """Draws all its curves as the genetic search draws its first population, and learns nothing from scores."""

    def __init__(self, curve: CurveSettings, settings: GeneticSettings, layers: int, rng: np.random.Generator) -> None:
        super().__init__(curve, settings, layers, rng)
        self.parents = 1

    def _offspring(self) -> Callable[[], Genes]:
        return self._near_identity
