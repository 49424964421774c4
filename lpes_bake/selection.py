"""Choosing the winner: the best candidates of a search meet on contexts that none of them was searched on.

The best of many is partly the luckiest, so its score in the search flatters it. On the selection
contexts all finalists start anew. What costs more on short plain text than the user allows is not chosen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lpes_bake.comparison import number
from lpes_bake.search.curve import FACTOR_DECIMALS, ControlPoint, decode
from lpes_bake.search.ledger import Ledger
from lpes_bake.search.objective import FloatArray, Objective
from lpes_bake.search.optimizer import Individual, Scored
from lpes_bake.search.racing import Entrant
from lpes_bake.search.study import StudyStopped
from lpes_bake.search.units import TEXT, Result, Unit

# Contexts in one piece of work: as much as a kill can lose.
BLOCK = 16

# What is tried of a finalist that costs too much on short text, the largest first.
SHARES = (0.8, 0.6, 0.4)


@dataclass(frozen=True)
class Finalist:
    """One candidate. Scores are the objective's, without the price of drift, which stands beside them."""

    label: str
    individual: Individual
    search_score: float
    selection_score: float
    damage: float
    kl: float
    allowed: bool


@dataclass(frozen=True)
class Selection:
    """The finalists, the identity first, and the winner among them."""

    finalists: list[Finalist]
    winner: Finalist
    weights: tuple[float, ...]
    """What each selection task counts."""

    @property
    def identity(self) -> Finalist:
        """The one that changes nothing."""
        return self.finalists[0]

    def to_json(self) -> list[dict[str, Any]]:
        """A dict for each finalist."""
        return [
            {
                "label": one.label,
                "layer_rope_scaling": list(one.individual.factors),
                "search_score": number(one.search_score),
                "selection_score": number(one.selection_score),
                "damage": number(one.damage),
                "kl": number(one.kl),
                "allowed": one.allowed,
                "chosen": one is self.winner,
            }
            for one in self.finalists
        ]


def select(
    ledger: Ledger,
    objective: Objective,
    ranking: Sequence[Scored],
    complete: Mapping[tuple[float, ...], Entrant],
    tasks: Sequence[int],
    *,
    contexts: int,
    finalists: int,
) -> Selection:
    """Score the best of `ranking`, the identity and the best uniform factors on the selection contexts of `tasks`.

    Those that cost more on short text than the objective's `max_damage` are not scored; in their place comes the
    same, moved so far towards the identity (`milder`) that it costs no more, where one of SHARES does. Raises
    StudyStopped when the identity cannot be scored; others that cannot are not chosen.
    """
    chosen = choose(ranking, finalists)

    def text_of(individual: Individual) -> Result:
        return ledger.results([Unit("score", "selection", TEXT, 0, 0, individual.factors)])[0]

    base = text_of(chosen[0].individual)
    accuracy = objective.fitness == "accuracy"
    weights: tuple[float, ...] = ()
    scored: list[Finalist] = []

    def enter(individual: Individual, label: str, search_score: float) -> Finalist:
        """Measure one on short text, and where that allows it on the contexts."""
        nonlocal weights
        text = text_of(individual)
        error = error_in([base, text])
        damage, kl = (math.nan, math.nan) if error is not None else drift(text, base)
        allowed, score = bool(damage <= objective.max_damage), math.nan
        if allowed:
            parts = [
                part_results(ledger, "selection", task, contexts, individual.factors, accuracy=accuracy)
                for task in tasks
            ]
            error = error_in([*itertools.chain(*parts)])
            if error is None:
                values = [values_of(objective, results) for results in parts]
                weights = weights or objective.weights(values)
                score = objective.score(values, weights, 0.0)
        if error is not None and not scored:
            ledger.forget([individual.factors])
            raise StudyStopped(f"the model itself (all factors 1) cannot be scored on the selection contexts: {error}")
        finalist = Finalist(label, individual, search_score, score, damage, kl, allowed and error is None)
        scored.append(finalist)
        return finalist

    for place, one in enumerate(chosen):
        label = label_of(one.individual, place)
        first = enter(one.individual, label, one.score + complete[one.individual.factors].penalty)
        if first.damage > objective.max_damage:
            for share in SHARES:
                individual = milder(one.individual, share)
                text = text_of(individual)
                if text.error is None and drift(text, base)[0] <= objective.max_damage:
                    enter(individual, f"{label}, {100 * share:.0f} % of it", math.nan)
                    break
    # Equals go to the earlier one, and the identity is first.
    winner = max((one for one in scored if one.allowed), key=lambda one: one.selection_score)
    return Selection(scored, winner, weights)


def milder(individual: Individual, share: float) -> Individual:
    """The same at a share of its distance from the identity. Damage falls with the square of the distance, a gain
    with the distance itself: what is a little too dear is worth having at a part of its size."""
    factors = tuple(round(1 + share * (factor - 1), FACTOR_DECIMALS) for factor in individual.factors)
    if individual.points is None:
        return Individual(factors)
    # A Bézier curve is linear in its y's, so this is a curve again, and its factors are those but for rounding.
    points = tuple(ControlPoint(x, round(1 + share * (y - 1), FACTOR_DECIMALS)) for x, y in individual.points)
    return Individual(decode(points, len(factors)), points)


def choose(ranking: Sequence[Scored], count: int) -> list[Scored]:
    """The identity, and the best `count` others, the best uniform factors among them whatever their place."""
    identity = next(one for one in ranking if set(one.individual.factors) == {1.0})
    others = [one for one in ranking if one is not identity]
    uniform = [one for one in others if len(set(one.individual.factors)) == 1]
    best = others[:count]
    return [identity, *best, *[one for one in uniform[:1] if one not in best]]


def label_of(individual: Individual, number: int) -> str:
    """What to call a finalist."""
    factors = set(individual.factors)
    if len(factors) > 1:
        return f"candidate {number}"
    return "identity" if factors == {1.0} else f"uniform {factors.pop():g}"


def drift(text: Result, identity: Result) -> tuple[float, float]:
    """(damage, KL) on short plain text, in nats a token."""
    return float(np.mean(np.array(identity.logprob) - np.array(text.logprob))), float(np.mean(text.kl))


def part_results(
    ledger: Ledger, part: str, task: int, contexts: int, factors: tuple[float, ...], *, accuracy: bool
) -> list[Result]:
    """The results of one candidate on the first contexts of a part, block by block."""
    edges = [*range(0, contexts, BLOCK), contexts]
    return ledger.results(
        [
            Unit("score", part, task, start, stop, factors, accuracy=accuracy)
            for start, stop in itertools.pairwise(edges)
        ]
    )


def error_in(results: Sequence[Result]) -> str | None:
    """What went wrong first, if anything did."""
    return next((one.error for one in results if one.error is not None), None)


def values_of(objective: Objective, results: Sequence[Result]) -> FloatArray:
    """(contexts, positions): the objective's values of one candidate on one task, from its blocks."""
    return np.concatenate([objective.values(one) for one in results])
