"""The genetic algorithm of LPES (Wang et al., arXiv 2606.27705) as an ask/tell object.

It knows curves and scores, and no model. `ask` gives the individuals of the next generation that
were never seen before; `tell` takes what came of them:

    search = GeneticSearch(CurveSettings(), GeneticSettings(), layers=30, rng=np.random.default_rng(0))
    while generation := search.ask():
        search.tell([Outcome(score(individual.factors)) for individual in generation])
    print(search.ranking()[0], search.ended)

All chance comes from the one generator object: same seed and same scores, same individuals.

Where the paper gives no detail this is our choice: truncation selection (the best of all that were
scored are the parents, so the search is elitist), half of the children by crossover, and one rule for
how far a control point may move, which crossover and mutation share (`_move`). The uniform factors
in the first population are ours too; `uniform=()` leaves the identity alone there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lpes_bake.search.curve import ControlPoint, CurveSettings, decode, level_points
from lpes_bake.search.errors import InputError
from lpes_bake.search.optimizer import AskTell, Individual, Outcome

# Inside the search a control point is a pair of whole numbers, (layer, place in the grid), so that
# equality and bounds are exact.
Genes = list[tuple[int, int]]


@dataclass(frozen=True)
class GeneticSettings:
    """How the genetic algorithm searches. The whole costs at most population × generations evaluations."""

    population: int = field(
        default=32,
        metadata={
            "help": "New individuals scored in each generation, in the first one more where there are more uniform "
            "factors; each costs one evaluation."
        },
    )
    generations: int = field(default=20, metadata={"help": "Generations at most, the first included."})
    parents: float = field(
        default=0.25,
        metadata={"help": "How many of the best so far the next generation is bred from, as a share of population."},
    )
    crossover: float = field(
        default=0.5, metadata={"help": "Share of the children that have two parents; the others are mutated copies."}
    )
    mutation: float = field(
        default=0.5, metadata={"help": "Share of the children of two parents that are mutated as well."}
    )
    first_spread: float = field(
        default=0.2, metadata={"help": "Largest distance of the first population's factors from 1."}
    )
    max_step_x: float = field(
        default=0.2, metadata={"help": "Furthest that a mutation moves a control point along the depth, as a share."}
    )
    max_step_y: float = field(
        default=0.2, metadata={"help": "Largest change of a control point's factor in one crossover or mutation."}
    )
    max_jump_y: float = field(
        default=0.3, metadata={"help": "Largest difference of factor between neighbouring control points."}
    )
    tries: int = field(
        default=100, metadata={"help": "Draws for each new individual before a generation goes on without it."}
    )

    def __post_init__(self) -> None:
        for name, least in (("population", 2), ("generations", 1), ("tries", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("parents", "crossover", "mutation"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}; it is a share from 0 to 1")
        for name in ("first_spread", "max_step_x", "max_step_y", "max_jump_y"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; it must be positive")


class GeneticSearch(AskTell):
    """Searches for the curve with the highest score. Only what was scored to the end ranks and breeds.

    layers: decoder layers of the model. rng: the only source of chance; the search owns it.
    Raises InputError for settings that leave no room to move in.
    """

    def __init__(self, curve: CurveSettings, settings: GeneticSettings, layers: int, rng: np.random.Generator) -> None:
        if layers < 1:
            raise ValueError(f"layers is {layers}; a model has at least 1")
        super().__init__()
        for name in ("first_spread", "max_step_y", "max_jump_y"):
            # The tolerance lets 0.15 / 0.05 = 2.9999999999999996 be three steps.
            if getattr(settings, name) / curve.y_step < 1 - 1e-9:
                raise InputError(
                    f"{name} is {getattr(settings, name)}, less than the grid's step of {curve.y_step}: "
                    "no control point could ever move"
                )
        self.curve, self.settings, self.layers = curve, settings, layers
        self.parents = max(2, round(settings.parents * settings.population))
        self._rng = rng
        self._top = len(curve.grid) - 1
        self._step_x = max(1, round(min(settings.max_step_x, 1.0) * layers))
        self._step_y = self._steps(settings.max_step_y)
        self._jump_y = self._steps(settings.max_jump_y)
        self._seen: set[tuple[float, ...]] = set()
        # What was drawn once need not be decoded again to know that its factors were seen.
        self._drawn: set[tuple[tuple[int, int], ...]] = set()
        self._genes: dict[tuple[float, ...], Genes] = {}

    def _next(self) -> list[Individual]:
        if self.generation >= self.settings.generations:
            self.ended = f"all {self.settings.generations} generations are done"
            return []
        if self.generation > 0 and not self._scored:
            self.ended = "no individual could be scored, so there is none to breed from"
            return []
        asked = self._first_population() if self.generation == 0 else self._fill([], self._offspring())
        if not asked:
            self.ended = f"generation {self.generation + 1} found no new individual: the search is exhausted"
        return asked

    def _learn(self, asked: Sequence[Individual], outcomes: Sequence[Outcome]) -> None:
        """The scores are all that it needs."""

    def _steps(self, distance: float) -> int:
        """Whole steps of the grid in a distance of factors, at most the grid's own."""
        return int(min(distance / self.curve.y_step, self._top) + 1e-9)

    def _first_population(self) -> list[Individual]:
        """The identity, the uniform factors, and curves near the identity."""
        population: list[Individual] = []
        for place in self.curve.uniform_places:
            self._add([(x, place) for x in self._even_x()], population)
        return self._fill(population, self._near_identity)

    def _even_x(self) -> list[int]:
        return [int(point.x) for point in level_points(self.curve, self.layers, 1.0)]

    def _near_identity(self) -> Genes:
        """A random curve: every y within first_spread of 1, every x as far from its even place as a mutation goes."""
        one, spread = self.curve.grid_of_one, self._steps(self.settings.first_spread)
        low, high = max(0, one - spread), min(self._top, one + spread)
        even = self._even_x()
        steps = self._rng.integers(-self._step_x, self._step_x + 1, len(even))
        xs = np.sort(np.clip(even + steps, 0, self.layers - 1))
        ys = [int(self._rng.integers(low, high + 1))]
        while len(ys) < len(xs):
            ys.append(int(self._rng.integers(max(low, ys[-1] - self._jump_y), min(high, ys[-1] + self._jump_y) + 1)))
        return [(int(x), y) for x, y in zip(xs, ys, strict=True)]

    def _offspring(self) -> Callable[[], Genes]:
        """What draws a child of the best individuals so far."""
        parents = [self._genes[one.individual.factors] for one in self.ranking()[: self.parents]]

        def child() -> Genes:
            if len(parents) > 1 and self._rng.random() < self.settings.crossover:
                first, second = self._rng.choice(len(parents), 2, replace=False)
                genes = self._crossover(parents[first], parents[second])
                return self._mutate(genes) if self._rng.random() < self.settings.mutation else genes
            return self._mutate(parents[self._rng.integers(len(parents))])

        return child

    def _fill(self, population: list[Individual], draw: Callable[[], Genes]) -> list[Individual]:
        """Draw until the population is full; give up after a bounded number of draws."""
        for _ in range(self.settings.tries * self.settings.population):
            if len(population) >= self.settings.population:
                break
            self._add(draw(), population)
        return population

    def _add(self, genes: Genes, population: list[Individual]) -> None:
        """Add the individual, unless one with the same factors was seen before."""
        if tuple(genes) in self._drawn:
            return
        self._drawn.add(tuple(genes))
        points = tuple(ControlPoint(x, float(self.curve.grid[y])) for x, y in genes)
        factors = decode(points, self.layers)
        if factors in self._seen:
            return
        self._seen.add(factors)
        self._genes[factors] = genes
        population.append(Individual(factors, points))

    def _crossover(self, first: Genes, second: Genes) -> Genes:
        """The first parent, with some of its control points moved to where the second has them."""
        child = list(first)
        count = int(self._rng.integers(1, len(child)))
        for k in sorted(self._rng.choice(len(child), count, replace=False)):
            self._move(child, k, *second[k])
        return child

    def _mutate(self, parent: Genes) -> Genes:
        """Move one control point or more, on average one and a bit, by a bounded step in x and y."""
        child = list(parent)
        chosen = self._rng.random(len(child)) < 1 / len(child)
        chosen[self._rng.integers(len(child))] = True
        for k in np.flatnonzero(chosen):
            x, y = child[k]
            x += int(self._rng.integers(-self._step_x, self._step_x + 1))
            y += int(self._rng.integers(-self._step_y, self._step_y + 1))
            self._move(child, int(k), x, y)
        return child

    def _move(self, genes: Genes, k: int, x: int, y: int) -> None:
        """Move control point k towards (x, y), as far as it may go.

        x stays between its neighbours' x's, and in 0 … L−1. y moves by max_step_y at most, and stays
        within max_jump_y of its neighbours' y's and on the grid. The present place fulfils all this,
        so there is always somewhere to go.
        """
        neighbours = [genes[j] for j in (k - 1, k + 1) if 0 <= j < len(genes)]
        low_x = genes[k - 1][0] if k > 0 else 0
        high_x = genes[k + 1][0] if k + 1 < len(genes) else self.layers - 1
        now = genes[k][1]
        low_y = max(0, now - self._step_y, *(other - self._jump_y for _, other in neighbours))
        high_y = min(self._top, now + self._step_y, *(other + self._jump_y for _, other in neighbours))
        genes[k] = (min(max(x, low_x), high_x), min(max(y, low_y), high_y))
