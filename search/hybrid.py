"""Two optimizers one after the other: the second begins at the best that the first has found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lpes_bake.search.optimizer import Individual, Optimizer, Outcome, Scored


class HybridSearch:
    """The genetic search and then gradients, or any other two.

    then: the second optimizer, made from the first one's best individual.
    """

    def __init__(self, first: Optimizer, then: Callable[[Individual], Optimizer]) -> None:
        self._first, self._then = first, then
        self._second: Optimizer | None = None

    @property
    def _now(self) -> Optimizer:
        return self._second or self._first

    @property
    def generation(self) -> int:
        """See `Optimizer`."""
        return self._first.generation + (self._second.generation if self._second else 0)

    @property
    def ended(self) -> str | None:
        """Why the second has ended, or the first where it left nothing to go on from."""
        return self._now.ended

    @property
    def parents(self) -> int:
        """See `Optimizer`."""
        return self._now.parents

    @property
    def wants_gradient(self) -> bool:
        """See `Optimizer`."""
        return self._now.wants_gradient

    def ask(self) -> list[Individual]:
        """See `Optimizer`."""
        asked = self._now.ask()
        if asked or self._second is not None or not (ranking := self._first.ranking()):
            return asked
        self._second = self._then(ranking[0].individual)
        return self._second.ask()

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """See `Optimizer`."""
        self._now.tell(outcomes)

    def ranking(self) -> list[Scored]:
        """What both have scored, each factors once, best first."""
        scored = self._first.ranking() + (self._second.ranking() if self._second else [])
        once: dict[tuple[float, ...], Scored] = {}
        for one in scored:
            once.setdefault(one.individual.factors, one)
        return sorted(once.values(), key=lambda one: -one.score)
