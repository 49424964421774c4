"""The optimizers by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lpes_bake.search.cma_es import CmaSearch
from lpes_bake.search.curve import CurveSettings
from lpes_bake.search.errors import InputError
from lpes_bake.search.genetic import GeneticSearch, GeneticSettings
from lpes_bake.search.gradient import GradientSearch, GradientSettings
from lpes_bake.search.hybrid import HybridSearch
from lpes_bake.search.optimizer import Optimizer
from lpes_bake.search.random_search import RandomSearch

OPTIMIZERS = ("genetic", "gradient", "hybrid", "cma-es", "random")


def make_optimizer(
    name: str,
    curve: CurveSettings,
    genetic: GeneticSettings,
    gradient: GradientSettings,
    layers: int,
    rng: np.random.Generator,
    start: Sequence[float] | None = None,
) -> Optimizer:
    """The optimizer of that name, one of OPTIMIZERS, for a model of so many decoder layers.

    genetic gives population and generations of all that score populations; rng is theirs alone from now
    on. start: (layers,) factors that a gradient may begin at. Raises InputError for an unknown name and for settings
    that cannot work.
    """
    if name == "genetic":
        return GeneticSearch(curve, genetic, layers, rng)
    if name == "random":
        return RandomSearch(curve, genetic, layers, rng)
    if name == "cma-es":
        return CmaSearch(curve, genetic, layers, rng)
    if name == "gradient":
        return GradientSearch(curve, gradient, layers, others=[] if start is None else [start])
    if name == "hybrid":
        warmup = replace(genetic, generations=min(genetic.generations, gradient.warmup))
        return HybridSearch(
            GeneticSearch(curve, warmup, layers, rng),
            lambda best: GradientSearch(curve, gradient, layers, start=best.factors),
        )
    raise InputError(f"there is no optimizer {name!r}; there are {', '.join(OPTIMIZERS)}")
