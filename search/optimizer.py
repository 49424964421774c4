"""What an optimizer of factors is: the records it takes and gives, and the turns of ask and tell.

The optimizers know factors and scores, and no model; they need numpy only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lpes_bake.search.curve import CurveSettings, Points, decode, level_points


@dataclass(frozen=True)
class Individual:
    """One factor a layer, and the control points of the curve that decodes to them, where there is one."""

    factors: tuple[float, ...]
    points: Points | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of an individual. Higher scores are better; None, NaN and ±inf mean that it failed.

    complete: whether all examples were seen; where not, the score is an estimate, good enough to rank
    the hopeless and never the best. gradient: (layers,), d score / d factor; where it was asked for.
    """

    score: float | None
    complete: bool = True
    gradient: tuple[float, ...] | None = None

    @property
    def value(self) -> float:
        """The score, or −inf where it failed."""
        return self.score if self.score is not None and math.isfinite(self.score) else -math.inf


@dataclass(frozen=True)
class Scored:
    """An individual and its score on all examples."""

    individual: Individual
    score: float


class Optimizer(Protocol):
    """Asks for outcomes until it has ended:

        while asked := optimizer.ask():
            optimizer.tell([outcome(individual) for individual in asked])
        best = optimizer.ranking()[0]

    The first individual ever asked is the identity. All chance comes from one generator object: the same
    seed and the same outcomes give the same individuals.
    """

    @property
    def generation(self) -> int:
        """How many times it has asked."""

    @property
    def ended(self) -> str | None:
        """Why nothing more will be asked; None before an `ask` has come back empty."""

    @property
    def parents(self) -> int:
        """How many of the best decide what is asked next: what cannot be among them need not be scored to the end."""

    @property
    def wants_gradient(self) -> bool:
        """Whether what was asked last wants a gradient on a few examples, and not a score on all."""

    def ask(self) -> list[Individual]:
        """The individuals of the next generation; an empty list when the search has `ended`."""

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """What came of the individuals last asked, in their order."""

    def ranking(self) -> list[Scored]:
        """All that were scored on all examples, best first, equals in the order of their scoring."""


class AskTell(ABC):
    """An `Optimizer` but for what to ask and what to learn: it keeps the turns and the scores."""

    parents = 1
    wants_gradient = False

    def __init__(self) -> None:
        self.generation = 0
        self.ended: str | None = None
        self._asked: list[Individual] | None = None
        # By factors: what was scored twice counts once, as it was scored first.
        self._scored: dict[tuple[float, ...], Scored] = {}

    def ask(self) -> list[Individual]:
        """See `Optimizer`. Raises RuntimeError when the last generation was not told yet."""
        if self._asked is not None:
            raise RuntimeError("tell the outcomes of the last generation before asking for the next one")
        asked = self._next() if self.ended is None else []
        if asked:
            self._asked = asked
            self.generation += 1
        return list(asked)

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """See `Optimizer`. Raises RuntimeError when nothing was asked, ValueError for a wrong number."""
        if self._asked is None:
            raise RuntimeError("ask before telling")
        asked = self._asked
        if len(outcomes) != len(asked):
            raise ValueError(f"{len(asked)} individuals were asked, but {len(outcomes)} outcomes were told")
        self._asked = None
        if not self.wants_gradient:
            for individual, outcome in zip(asked, outcomes, strict=True):
                if outcome.complete and outcome.value > -math.inf:
                    self._scored.setdefault(individual.factors, Scored(individual, outcome.value))
        self._learn(asked, outcomes)

    def ranking(self) -> list[Scored]:
        """See `Optimizer`."""
        return sorted(self._scored.values(), key=lambda one: -one.score)

    @abstractmethod
    def _next(self) -> list[Individual]:
        """What to ask next; an empty list once it has set `ended`."""

    @abstractmethod
    def _learn(self, asked: Sequence[Individual], outcomes: Sequence[Outcome]) -> None:
        """Take in what came of the individuals; the scores are kept already."""


def uniform_population(curve: CurveSettings, layers: int) -> list[Individual]:
    """The identity, then the uniform factors of the settings as level curves: where every search begins."""
    population = []
    for place in curve.uniform_places:
        points = level_points(curve, layers, float(curve.grid[place]))
        population.append(Individual(decode(points, layers), points))
    return population
